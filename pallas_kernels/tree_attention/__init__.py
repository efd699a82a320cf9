"""Attention of a few rows over a committed prefix and a tree window."""

from pallas_kernels.tree_attention.api import tree_attention

__all__ = ["tree_attention"]
