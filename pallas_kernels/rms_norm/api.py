"""RMS normalisation."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native, registry
from pallas_kernels.exact_rows import MOST_ROWS, map_tiles


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:  # [..., D], [D] -> [..., D] float32
    """Scale each row to a mean square of one, then multiply by `scale`, in float32.

    Raises:
      ValueError: `scale` is not as wide as a row.
    """
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm needs [..., D] and [D], got {x.shape} and {scale.shape}")
    if registry.current().exact and x.ndim > 1 and x.shape[0] <= MOST_ROWS:
        return map_tiles(lambda rows: reference(rows, scale, eps), x)
    if not registry.current().native:
        return reference(x, scale, eps)
    x = x.astype(jnp.float32)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return native.call("rms_norm", out, x, scale.astype(jnp.float32), epsilon=np.float32(eps))


def reference(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:  # [..., D], [D] -> [..., D] float32
    """`rms_norm` left to XLA."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale
