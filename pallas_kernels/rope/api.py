"""Cosines and sines of rotary positions."""

import jax
import jax.numpy as jnp

from pallas_kernels import native, registry


def rope_tables(position: jax.Array, frequency: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles position times frequency, each float32 `[T, H / 2]`.

    Args:
      position: int32 `[T]`.
      frequency: float32 `[H / 2]`, radians per position.

    Raises:
      ValueError: the shapes or dtypes are others.
    """
    for name, array, dtype in (("position", position, jnp.int32), ("frequency", frequency, jnp.float32)):
        if array.ndim != 1 or array.dtype != dtype:
            raise ValueError(f"{name} must be {dtype.__name__} with one dimension, got {array.dtype} {array.shape}")
    if not registry.current().native:
        angle = position.astype(jnp.float32)[:, None] * frequency[None, :]
        return jnp.cos(angle), jnp.sin(angle)
    table = jax.ShapeDtypeStruct((position.shape[0], frequency.shape[0]), jnp.float32)
    return native.call("rope_tables", (table, table), position, frequency)
