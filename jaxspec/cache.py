"""KV cache: the committed prefix in order, then the tree window.

Slots `[0, length)` hold the committed prefix; slots `[length, length + W)` are the window that a pass writes.
Whatever lies behind is garbage that masks hide. Arrays are zeros when new: uninitialised memory may hold NaN, and
`0 * NaN` would leak through a masked product.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.models.config import ModelConfig


@struct.dataclass
class KVCache:
    """Keys and values of one sequence.

    Attributes:
      key: per layer `[K, S, H]`, rotary positions applied.
      value: per layer `[K, S, H]`.
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

    def zeros() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(cfg.num_layers))

    return KVCache(zeros(), zeros(), jnp.int32(0))


def commit_rows(cache: KVCache, count: jax.Array) -> KVCache:
    """Make the first `count` window rows part of the prefix; for a chain nothing moves."""
    return dataclasses.replace(cache, length=cache.length + count)
