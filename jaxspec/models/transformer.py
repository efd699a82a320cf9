"""The decoder: rows in, hidden states and a longer cache out. Written for one shard of a tensor-parallel mesh.

Every function runs inside `jax.shard_map` over the mesh axis "tensor" and sees its own heads, MLP columns and
vocabulary rows. A layer needs two all-reduces, the embedding one; logits stay vocabulary-parallel.
"""

import functools

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.mesh.plan import TENSOR_AXIS
from jaxspec.models.attention import Attend, attention
from jaxspec.models.config import ModelConfig
from jaxspec.models.mlp import swiglu
from jaxspec.models.norm import rms_norm
from jaxspec.models.params import Params
from jaxspec.models.rope import rope_tables
from pallas_kernels.linear import linear
from pallas_kernels.tree_attention import causal_attention, tree_attention


def forward(
    params: Params,
    cfg: ModelConfig,
    token: jax.Array,  # int32 [T]
    position: jax.Array,  # int32 [T]
    cache: KVCache,
    window_mask: jax.Array,  # bool [T, W], W = T
) -> tuple[jax.Array, KVCache]:
    """Run T rows that attend to the prefix and, among themselves, as `window_mask` says.

    Row t is written at slot `cache.length + t`; the caller commits what it keeps.

    Returns:
      Hidden states `[T, D]` float32 after the final norm, and the cache with the rows written.
    """

    def attend(query, key, value, window):
        return tree_attention(query, key, value, cache.length, window_mask, position, window)

    x, cache = _run_layers(params, cfg, token, position, cache, attend)
    with jax.named_scope("final_norm"):
        return rms_norm(x, params["final_norm"], cfg.norm_eps), cache


def prefill(
    params: Params,
    cfg: ModelConfig,
    token: jax.Array,  # int32 [T]
    count: jax.Array,  # int32 []
    cache: KVCache,
) -> KVCache:
    """Commit the first `count` of T consecutive tokens.

    Rows from `count` on are padding: they write behind the prefix, where the next pass overwrites them. No hidden
    state is returned, so the last layer only computes keys and values.
    """
    position = cache.length + jnp.arange(token.shape[0], dtype=jnp.int32)

    def attend(query, key, value, window):
        return causal_attention(query, key, value, cache.length, window)

    _, written = _run_layers(params, cfg, token, position, cache, attend, cache_only=True)
    return written.replace(length=cache.length + count)


def vocab_logits(params: Params, hidden: jax.Array) -> jax.Array:  # [T, D] -> [T, V / shards] float32
    """Logits of this shard's vocabulary rows; padded rows are the caller's to mask."""
    with jax.named_scope("head"):
        return linear(hidden, params["head"] if "head" in params else params["embed"])


def embed(params: Params, token: jax.Array) -> jax.Array:  # int32 [T] -> [T, D] float32
    """Look tokens up in a vocabulary-parallel table."""
    table = params["embed"]
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return table[token].astype(jnp.float32)
    local = token - jax.lax.axis_index(TENSOR_AXIS) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)].astype(jnp.float32)
    return jax.lax.psum(jnp.where(mine[:, None], rows, 0.0), TENSOR_AXIS)


def _run_layers(params, cfg, token, position, cache, attend, cache_only=False):
    with jax.named_scope("embed"):
        x = embed(params, token)
    rope = rope_tables(cfg.rope, cfg.head_dim, position)
    keys, values = [], []
    for index, layer in enumerate(params["layers"]):
        attend_layer = functools.partial(attend, window=cfg.window(index))
        last = cache_only and index == cfg.num_layers - 1
        x, key, value = _run_layer(
            layer, cfg, x, rope, cache.key[index], cache.value[index], cache.length, None if last else attend_layer
        )
        keys.append(key)
        values.append(value)
    return x, cache.replace(key=tuple(keys), value=tuple(values))


def _run_layer(layer: Params, cfg: ModelConfig, x, rope, key, value, slot, attend: Attend | None):
    with jax.named_scope("attention"):
        normed = rms_norm(x, layer["attn_norm"], cfg.norm_eps)
        update, key, value = attention(layer, cfg, normed, rope, key, value, slot, attend)
        if update is None:
            return x, key, value
        x = x + _all_reduce(update)
    with jax.named_scope("mlp"):
        x = x + _all_reduce(swiglu(layer, rms_norm(x, layer["mlp_norm"], cfg.norm_eps)))
    return x, key, value


def _all_reduce(x: jax.Array) -> jax.Array:
    return x if jax.lax.axis_size(TENSOR_AXIS) == 1 else jax.lax.psum(x, TENSOR_AXIS)
