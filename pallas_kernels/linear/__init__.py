"""Linear layer of few rows against a large weight."""

from pallas_kernels.linear.api import linear

__all__ = ["linear"]
