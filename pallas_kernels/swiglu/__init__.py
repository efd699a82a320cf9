"""Gate and up projection of a SwiGLU block with the activation between them."""

from pallas_kernels.swiglu.api import swiglu

__all__ = ["swiglu"]
