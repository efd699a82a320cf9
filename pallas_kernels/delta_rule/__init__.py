"""The gated delta rule over the rows of a tree, the fold of its state, and the short convolution before it."""

from pallas_kernels.delta_rule.api import DeltaRows, KeptRows, delta_fold, delta_rule, short_conv

__all__ = ["DeltaRows", "KeptRows", "delta_fold", "delta_rule", "short_conv"]
