"""Cosines and sines of rotary positions."""

from pallas_kernels.rope.api import rope_tables

__all__ = ["rope_tables"]
