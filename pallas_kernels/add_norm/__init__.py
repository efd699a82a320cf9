"""The sum of a residual stream and what a block adds to it, and the norm after it."""

from pallas_kernels.add_norm.api import add_norm, fuses

__all__ = ["add_norm", "fuses"]
