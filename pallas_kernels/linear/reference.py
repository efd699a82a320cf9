"""Linear layer as one matrix product, left to XLA."""

import jax
import jax.numpy as jnp

from pallas_kernels.linear.blocks import Blocks, Weight, dequantise

# Float32 means float32: no TF32 on GPUs.
PRECISION = jax.lax.Precision.HIGHEST


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:  # [T, I], [O, I] -> [T, O] float32
    """Same contract as `api.linear`, of a weight in numbers; every row is computed."""
    x = x.astype(weight.dtype)
    return jnp.einsum("ti,oi->to", x, weight, precision=PRECISION, preferred_element_type=jnp.float32)


def as_numbers(weight: Weight) -> jax.Array:
    """A weight in blocks as the float32 numbers that they stand for, any other as it is."""
    return dequantise(weight) if isinstance(weight, Blocks) else weight
