"""The native library of CPU operations: its shared C++ headers, its loading, and calls from JAX."""

from pallas_kernels.native.library import REINSTALL, call, pack, row_count

__all__ = ["REINSTALL", "call", "pack", "row_count"]
