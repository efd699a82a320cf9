"""The gate and up projections of a SwiGLU block, their activation, and the norm before them."""

from pallas_kernels.swiglu.api import geglu, norm_swiglu, swiglu

__all__ = ["geglu", "norm_swiglu", "swiglu"]
