"""KV cache: the committed prefix in order, then the tree window.

Slots `[0, length)` hold the committed prefix; slots `[length, length + W)` are the window that a pass writes.
Everything after them is garbage that masks hide. Arrays are zeros when new: uninitialised memory may hold NaN, and
`0 * NaN` would leak through a masked product.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.models.config import ModelConfig
from pallas_kernels import registry


@struct.dataclass
class KVCache:
    """Keys and values of one sequence.

    Attributes:
      key: per layer that has attention `[K, S, H]`, rotary positions applied; `value` likewise.
      length: int32 scalar, committed tokens.
    """

    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def slots(self) -> int:
        """S: capacity in tokens, window included."""
        return self.key[0].shape[1]


def init_cache(cfg: ModelConfig, kv_heads: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache with `kv_heads` heads (padded to the mesh) and `slots` slots."""
    shape = (kv_heads, slots, cfg.head_dim)
    key, value = (tuple(jnp.zeros(shape, dtype) for _ in cfg.attention_layers) for _ in range(2))
    return KVCache(key, value, jnp.int32(0))


def commit_rows(cache: KVCache, count: jax.Array) -> KVCache:
    """Make the first `count` window rows part of the prefix; for a chain nothing moves."""
    return dataclasses.replace(cache, length=cache.length + count)


def commit_path(cache: KVCache, slots: jax.Array, count: jax.Array) -> KVCache:
    """Make a path through the tree window part of the prefix; keys carry their rotary positions, so rows just move.

    Args:
      cache: its window holds the path's rows at scattered slots.
      slots: int32 `[P]`, window slots in order of depth; those from `count` on are arbitrary.
      count: int32 [], rows to commit.
    """
    return commit_rows(permute_window(cache, slots, count), count)


def permute_window(cache: KVCache, slots: jax.Array, count: jax.Array | None = None) -> KVCache:
    """Put window slots `slots` `[P]` at the first P places of the window; a slot may appear twice, the rest is lost.

    The first `count` (int32 []) of `slots` (int32) matter; None for all. Nothing moves where they are in place already.
    """
    places = jnp.arange(slots.shape[0])
    matters = True if count is None else places < count
    source = cache.length + jnp.clip(slots, 0, cache.slots - 1 - cache.length)

    def move(layer: jax.Array) -> jax.Array:
        # Read before anything is written: fused with the write, the two would need a copy of the whole layer.
        rows = jax.lax.optimization_barrier(jnp.take(layer, source, axis=1, mode="clip"))  # [K, P, H]
        return jax.lax.dynamic_update_slice(layer, rows, (0, cache.length, 0))

    def move_all(carry: tuple) -> tuple:
        return jnp.bool_(False), *(tuple(map(move, layers)) for layers in carry[1:])

    with jax.named_scope("cache/permute"):
        displaced = (matters & (slots != places)).any()
        carry = (displaced, cache.key, cache.value)
        if registry.current().platform == "cpu":
            # A loop of at most one turn: a conditional would copy the caches.
            _, key, value = jax.lax.while_loop(lambda carry: carry[0], move_all, carry)
        else:
            # The host waits for every branch on an accelerator's data; moving a few rows costs less.
            _, key, value = move_all(carry)
        return dataclasses.replace(cache, key=key, value=value)
