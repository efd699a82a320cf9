"""`mosaic.linear_sum` by XLA: sums that crossed in the weight's type, added in the order of the devices."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.linear.reference import linear


def linear_sum(
    x: jax.Array, weight: jax.Array, axis: str
) -> jax.Array:  # [T, I], [O, I] -> [T, O] in the weight's type
    """The sum over devices of rows times a weight; float32 sums, rounded where they cross."""
    crossed = jax.lax.all_gather(linear(x, weight).astype(weight.dtype), axis).astype(jnp.float32)
    return functools.reduce(jnp.add, [crossed[device] for device in range(crossed.shape[0])]).astype(weight.dtype)
