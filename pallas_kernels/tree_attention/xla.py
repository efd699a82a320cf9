"""Tree attention left to XLA: rotate, write, and attend over what is written."""

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.linear.reference import pad_one_row
from pallas_kernels.tree_attention.blocked import attend_chunk, attend_in_blocks, attend_tree
from pallas_kernels.tree_attention.reference import attend_chunk as reference_chunk
from pallas_kernels.tree_attention.reference import attend_tree as reference_tree
from pallas_kernels.tree_attention.reference import slot_mask

LANES = 128  # numbers side by side in a tile of a TPU's memory
MOST_SCORES = 20 << 20  # bytes of a tree's scores that a TPU keeps at a time; 17 rows at 8,192 slots are one block


def tree_attention(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, active_rows, write_only,
    softcap=None, sinks=None,
):  # fmt: skip
    """The operation, with the contract of `api.tree_attention`."""
    query, key, value = write_rotated(qkv, cos, sin, key, value, length, offset)
    if write_only:
        return query, key, value
    platform, (T, K, G, H) = registry.current().platform, query.shape
    on_cpu = platform == "cpu"
    if platform == "tpu" and T == 1 and (G == 1 or K == 1 and H < LANES) and window_mask is not None:
        # As `linear_on_tpu`: one row would not go through the matrix unit. One narrow KV head would be a plain matrix,
        # for which XLA copies the cache into another layout; two rows keep their side.
        query, position, window_mask = (pad_one_row(x, 8 if G == 1 else 2) for x in (query, position, window_mask))
    if window_mask is None:
        chunk = attend_chunk if on_cpu else reference_chunk
        return chunk(query, key, value, length, sliding_window, softcap, sinks), key, value
    used = None if offset is None else offset + T

    def attend(_, query, position, mask):
        if platform == "tpu":
            seen = slot_mask(key.shape[1], length, mask, position, sliding_window)
            blocks = -(-4 * T * K * G * key.shape[1] // MOST_SCORES)
            return attend_in_blocks(query, key, value, seen, softcap, sinks, max(8, -(-T // blocks)))
        tree = attend_tree if on_cpu else reference_tree
        return tree(query, key, value, length, mask, position, sliding_window, used, softcap, sinks)

    out = map_active_rows(attend, active_rows, query, position, window_mask)
    # Not moved into the products: see above.
    return (out if out.shape[0] == T else jax.lax.optimization_barrier(out)[:T]), key, value


def write_rotated(qkv, cos, sin, key, value, length, offset):  # -> [T, K, G, H], the cache
    """Rotated queries, and the cache with the rows written."""
    slot = length if offset is None else length + offset
    key = _write_rows(key, rotate(qkv[:, :, -2], cos, sin), slot)
    # A masked slot is multiplied by zero, and 0 * NaN is NaN. One broken row must not reach the others through the
    # cache. It may be a padding token of a damaged model, or an abandoned sequence in reused buffers.
    new_value = qkv[:, :, -1].astype(value.dtype)
    value = _write_rows(value, jnp.where(jnp.isfinite(new_value), new_value, 0), slot)
    return rotate(qkv[:, :, :-2], cos, sin), key, value


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:  # [T, ..., H], [T, H/2] x2 -> [T, ..., H]
    """Rotate pairs (i, i + H/2) of each head by the angle of its row's position."""
    shape = (x.shape[0], *[1] * (x.ndim - 2), cos.shape[-1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _write_rows(cached: jax.Array, rows: jax.Array, slot: jax.Array) -> jax.Array:
    """Write keys or values `[T, K, H]` into a cache layer `[K, S, H]`, from `slot` on."""
    start = (jnp.int32(0), slot, jnp.int32(0))
    return jax.lax.dynamic_update_slice(cached, rows.transpose(1, 0, 2).astype(cached.dtype), start)
