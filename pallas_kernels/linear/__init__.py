"""The linear layer, and single rows of a weight."""

from pallas_kernels.linear.api import linear, linear_parts, row_dtype, take_rows
from pallas_kernels.linear.blocks import Blocks, Weight, as_matrix

__all__ = ["Blocks", "Weight", "as_matrix", "linear", "linear_parts", "row_dtype", "take_rows"]
