"""Tree attention left to XLA: rotate, write, and attend over what is written."""

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.tree_attention import blocked, reference


def tree_attention(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, active_rows, write_only
):
    """Same contract as `api.tree_attention`."""
    query, new_key, new_value = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    slot = length if offset is None else length + offset
    key = _write_rows(key, rotate(new_key, cos, sin), slot)
    # A masked slot still meets a product with zero, and 0 * NaN is NaN: one broken row (a padding token of a damaged
    # model, an abandoned sequence in reused buffers) must not reach the others through the cache.
    new_value = new_value.astype(value.dtype)
    value = _write_rows(value, jnp.where(jnp.isfinite(new_value), new_value, 0), slot)
    if write_only:
        return query, key, value
    implementation = blocked if registry.current().platform == "cpu" else reference
    query = rotate(query, cos, sin)
    if window_mask is None:
        return implementation.attend_chunk(query, key, value, length, sliding_window), key, value
    used = None if offset is None else offset + query.shape[0]

    def attend(_, query, position, mask):
        return implementation.attend_tree(query, key, value, length, mask, position, sliding_window, used)

    return map_active_rows(attend, active_rows, query, position, window_mask), key, value


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:  # [T, ..., H], [T, H/2] x2 -> [T, ..., H]
    """Rotate pairs (i, i + H/2) of each head by the angle of its row's position."""
    shape = (x.shape[0], *[1] * (x.ndim - 2), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _write_rows(cached: jax.Array, rows: jax.Array, slot: jax.Array) -> jax.Array:
    """Write keys or values `[T, K, H]` into a cache layer `[K, S, H]` at `slot` and on."""
    start = (jnp.int32(0), slot, jnp.int32(0))
    return jax.lax.dynamic_update_slice(cached, rows.transpose(1, 0, 2).astype(cached.dtype), start)
