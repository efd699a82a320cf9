"""KV cache: the committed prefix in order, then the tree window.

Slots `[0, length)` hold the committed prefix; slots `[length, length + W)` are the window that a pass writes.
Everything after them is garbage that masks hide. Arrays are zeros when new: uninitialised memory may hold NaN, and
`0 * NaN` would leak through a masked product.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.pytree import pytree
from pallas_kernels import registry
from pallas_kernels.move_rows import move_rows


@pytree
class KVCache:
    """Keys and values of one sequence.

    Attributes:
      key: per layer that has attention `[K, S, H]`, rotary positions applied; `value` likewise. Where a device has KV
        heads of two kinds (`jaxspec/models/heads.py`), all layers of the first kind, then all of the second.
      length: int32 scalar, committed tokens.
    """

    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def slots(self) -> int:
        """S: capacity in tokens, window included."""
        return self.key[0].shape[1]


def init_cache(cfg: ModelConfig, kv_heads: int | tuple[int, ...], slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of a shard with `slots` slots and `kv_heads` heads, one number for each kind of them."""
    kinds = (kv_heads,) if isinstance(kv_heads, int) else kv_heads
    shapes = [(heads, slots, cfg.head_dim) for heads in kinds for _ in cfg.attention_layers]
    key, value = (tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(2))
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

    def move_all(carry: tuple) -> tuple:
        key, value = carry[1:]
        moved = move_rows((*key, *value), source, cache.length)
        return jnp.bool_(False), moved[: len(key)], moved[len(key) :]

    with jax.named_scope("cache/permute"):
        displaced = (matters & (slots != places)).any()
        carry = (displaced, cache.key, cache.value)
        if registry.current().takes_cpu_forms:
            # A loop of at most one turn: a conditional would copy the caches.
            _, key, value = jax.lax.while_loop(lambda carry: carry[0], move_all, carry)
        else:
            # Moving a few rows costs less than a branch.
            _, key, value = move_all(carry)
        return dataclasses.replace(cache, key=key, value=value)
