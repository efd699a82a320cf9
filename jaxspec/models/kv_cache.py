"""KV cache: the committed prefix in order, then the tree window.

Slots `[0, length)` hold the committed prefix; slots `[length, length + W)` are the window that a pass writes.
Everything after them is garbage that masks hide. Arrays are zeros when new: uninitialised memory may hold NaN, and
`0 * NaN` would leak through a masked product.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.recurrent import RecurrentRows, begins_alike, block_start, commit_window, rows_shapes
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
      recurrent: per recurrent layer its rows, see `jaxspec/models/recurrent.py`.
    """

    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]
    length: jax.Array
    recurrent: tuple[RecurrentRows, ...] = ()

    @property
    def slots(self) -> int:
        """S: capacity in tokens, window included."""
        return self.key[0].shape[1]


def init_cache(
    cfg: ModelConfig, kv_heads: int | tuple[int, ...], slots: int, dtype: jnp.dtype, recurrent_heads: int = 0
) -> KVCache:
    """An empty cache of a shard with `slots` slots and `kv_heads` heads, one number for each kind of them.

    `recurrent_heads` are the shard's key heads of recurrent layers; 0 for all.
    """
    kinds = (kv_heads,) if isinstance(kv_heads, int) else kv_heads
    sizes = (cfg.cache_heads(kind, index) for kind in kinds for index in cfg.attention_layers)
    shapes = [(heads, slots, width) for heads, width in sizes]
    key, value = (tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(2))
    return KVCache(key, value, jnp.int32(0), init_recurrent(cfg, recurrent_heads))


def init_recurrent(cfg: ModelConfig, heads: int) -> tuple[RecurrentRows, ...]:
    """The rows of the recurrent layers of an empty cache, of so many key heads; 0 for all."""
    if cfg.recurrent is None:
        return ()
    shapes = rows_shapes(cfg.recurrent, heads or cfg.recurrent.key_heads)
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    return (zeros,) * len(cfg.recurrent_layers)


def rewind_cache(cache: KVCache, length: jax.Array) -> KVCache:
    """A cache of a longer text, cut to its first `length` tokens, of which `can_rewind` is true."""
    if not cache.recurrent or cache.recurrent[0].state is None:
        return dataclasses.replace(cache, length=length)
    # Before the first rows of a text there is no state.
    fresh = block_start(length) == 0
    layers = tuple(dataclasses.replace(layer, state=jnp.where(fresh, 0.0, layer.state)) for layer in cache.recurrent)
    return dataclasses.replace(cache, length=length, recurrent=layers)


def can_rewind(cfg: ModelConfig, length: int, kept: int) -> bool:
    """Whether a cache of `length` tokens still has what continues its first `kept` ones; for 0 there is no need."""
    return cfg.recurrent is None or kept == 0 or begins_alike(length, kept)


def commit_rows(cache: KVCache, count: jax.Array) -> KVCache:
    """Make the first `count` window rows part of the prefix; for a chain nothing moves."""
    rows = cache.recurrent
    if rows:
        with jax.named_scope("cache/fold"):
            rows = commit_window(rows, cache.length, count, registry.current().takes_cpu_forms)
    return dataclasses.replace(cache, length=cache.length + count, recurrent=rows)


def commit_path(cache: KVCache, slots: jax.Array, count: jax.Array, window: int) -> KVCache:
    """Make a path through the tree window part of the prefix; keys carry their rotary positions, so rows just move.

    Args:
      cache: its window holds the path's rows at scattered slots.
      slots: int32 `[P]`, window slots in order of depth; those from `count` on are arbitrary.
      count: int32 [], rows to commit.
      window: window slots that rows may be in: the tree's.
    """
    return commit_rows(permute_window(cache, slots, window, count), count)


def permute_window(cache: KVCache, slots: jax.Array, window: int, count: jax.Array | None = None) -> KVCache:
    """Put window slots `slots` `[P]` at the first P places of the window; a slot may appear twice, the rest is lost.

    The first `count` (int32 []) of `slots` (int32) matter; None for all. They are less than `window`. Nothing moves
    where they are in place already.
    """
    places = jnp.arange(slots.shape[0])
    matters = True if count is None else places < count
    source = cache.length + jnp.clip(slots, 0, cache.slots - 1 - cache.length)

    def move_all(carry: tuple) -> tuple:
        key, value = carry[1:3]
        moved = move_rows((*key, *value), source, cache.length, window)
        return jnp.bool_(False), moved[: len(key)], moved[len(key) :], move_recurrent(carry[3])

    def move_recurrent(layers: tuple[RecurrentRows, ...]) -> tuple[RecurrentRows, ...]:
        rows, tree = jax.tree.flatten([layer.rows() for layer in layers])
        if not rows:
            return ()
        start = cache.length - block_start(cache.length)
        moved = move_rows(tuple(rows), start + jnp.clip(slots, 0, rows[0].shape[1] - 1 - start), start, window)
        return tuple(map(RecurrentRows.with_rows, layers, jax.tree.unflatten(tree, moved)))

    with jax.named_scope("cache/permute"):
        displaced = (matters & (slots != places)).any()
        carry = (displaced, cache.key, cache.value, cache.recurrent)
        if registry.current().takes_cpu_forms:
            # A loop of at most one turn: a conditional would copy the caches.
            _, key, value, rows = jax.lax.while_loop(lambda carry: carry[0], move_all, carry)
        else:
            # Moving a few rows costs less than a branch.
            _, key, value, rows = move_all(carry)
        return dataclasses.replace(cache, key=key, value=value, recurrent=rows)
