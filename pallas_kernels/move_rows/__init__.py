"""Rows of caches, moved to the places after the prefix."""

from pallas_kernels.move_rows.api import move_rows

__all__ = ["move_rows"]
