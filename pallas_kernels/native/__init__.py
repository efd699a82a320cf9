"""The native library of CPU operations: its shared C++ headers, how it is loaded, and how it is called."""

from pallas_kernels.native.library import call, row_count

__all__ = ["call", "row_count"]
