"""The decoder: rows in, hidden states and a longer cache out. Written for one shard of a tensor-parallel mesh.

Every function runs inside `jax.shard_map` over the mesh axis "tensor" and sees its own heads, MLP columns and
vocabulary rows. A layer needs two all-reduces, the embedding one; logits stay vocabulary-parallel.
"""

import functools

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.mesh.plan import TENSOR_AXIS
from jaxspec.models.attention import attention
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
    x, cache = _run_layers(params, cfg, token, position, cache, window_mask)
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
    _, written = _run_layers(params, cfg, token, position, cache, None)
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


def _run_layers(params, cfg, token, position, cache, window_mask):
    """All layers; without a window mask the rows are a causal chunk, of which only the cache is wanted."""
    with jax.named_scope("embed"):
        x = embed(params, token)
    rope = rope_tables(cfg.rope, cfg.head_dim, position)
    keys, values = [], []
    for index, layer in enumerate(params["layers"]):
        cache_only = window_mask is None and index == cfg.num_layers - 1
        x, key, value = _run_layer(
            layer, x, rope, cache.key[index], cache.value[index], cache.length, position, window_mask,
            cfg=cfg, window=cfg.window(index), cache_only=cache_only,
        )  # fmt: skip
        keys.append(key)
        values.append(value)
    return x, cache.replace(key=tuple(keys), value=tuple(values))


# Jitted so that equal layers are traced once: tracing thirty of them took a second per program.
@functools.partial(jax.jit, static_argnames=("cfg", "window", "cache_only"))
def _run_layer(
    layer: Params, x, rope, key, value, slot, position, window_mask, *, cfg: ModelConfig, window, cache_only
):
    def attend(query, key, value):
        if window_mask is None:
            return causal_attention(query, key, value, slot, window)
        return tree_attention(query, key, value, slot, window_mask, position, window)

    with jax.named_scope("attention"):
        normed = rms_norm(x, layer["attn_norm"], cfg.norm_eps)
        update, key, value = attention(layer, cfg, normed, rope, key, value, slot, None if cache_only else attend)
        if update is None:
            return x, key, value
        x = x + _all_reduce(update)
    with jax.named_scope("mlp"):
        x = x + _all_reduce(swiglu(layer, rms_norm(x, layer["mlp_norm"], cfg.norm_eps)))
    return x, key, value


def _all_reduce(x: jax.Array) -> jax.Array:
    return x if jax.lax.axis_size(TENSOR_AXIS) == 1 else jax.lax.psum(x, TENSOR_AXIS)
