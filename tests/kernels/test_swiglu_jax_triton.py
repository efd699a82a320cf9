"""SwiGLU through jax-triton, compiled for Hopper where it is installed. CI does not install it: Triton takes 640 MB."""

import jax
import jax.numpy as jnp
import pytest
from lowering import lower_for_cuda

from pallas_kernels import registry
from pallas_kernels.swiglu import norm_swiglu


@pytest.mark.parametrize(
    ("rows", "inputs", "columns", "dtype", "normed"),
    [(1, 4096, 14336, jnp.bfloat16, True), (64, 8192, 3584, jnp.float32, False), (3, 100, 83, jnp.float32, True)],
)
def test_compiles_for_hopper(rows, inputs, columns, dtype, normed):
    """Triton's compiler needs no GPU, only JAX's CUDA plugin: it comes to PTX here."""
    pytest.importorskip("jax_triton", exc_type=ImportError)
    from pallas_kernels.swiglu import jax_triton

    kernels = registry.Kernels("jax-triton", "gpu", implementations=(("swiglu", "jax_triton"),), capability=(9, 0))

    def call(x, scale, weight):
        with registry.using(kernels):
            return norm_swiglu(x, scale, weight, 1e-5) if normed else jax_triton.swiglu(x, weight)

    shape = jax.ShapeDtypeStruct
    x, scale = shape((rows, inputs), jnp.float32), shape((inputs,), jnp.float32)
    text = lower_for_cuda(call, x, scale, shape((2 * columns, inputs), dtype))
    assert text.count("custom_call @triton_kernel_call") == 1
