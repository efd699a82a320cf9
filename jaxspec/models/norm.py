"""RMS normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:  # [..., D], [D] -> [..., D] float32
    """Scale each row to unit mean square, then by `scale`; float32 inside."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale
