"""The largest numbers of rows."""

from pallas_kernels.row_top.api import MAX_COUNT, row_top

__all__ = ["MAX_COUNT", "row_top"]
