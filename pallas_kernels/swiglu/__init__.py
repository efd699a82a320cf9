"""Gate and up projection of a SwiGLU block with the activation between them and the norm before them."""

from pallas_kernels.swiglu.api import norm_swiglu, swiglu

__all__ = ["norm_swiglu", "swiglu"]
