"""The decoder: rows in, hidden states and a longer cache out. Written for one shard of a tensor-parallel mesh.

Every function runs inside `jax.shard_map` over the mesh axis "tensor" and sees its own heads, MLP columns and
vocabulary rows. A layer needs two all-reduces, the embedding one; logits stay vocabulary-parallel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.models.config import TENSOR_AXIS, ModelConfig, rope_frequencies
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import Params
from jaxspec.models.quantization import PARTS
from pallas_kernels import registry
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.linear import as_matrix, linear, take_rows
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope_tables
from pallas_kernels.swiglu import norm_swiglu
from pallas_kernels.tree_attention import tree_attention


@struct.dataclass
class Window:
    """The tree window as a pass sees it: `mask` bool [T, W], `position` int32 [W]; see `forward`."""

    mask: jax.Array
    position: jax.Array
    offset: jax.Array | None
    active_rows: jax.Array | None

    def cut(self, row_position: jax.Array, sliding: int) -> "Window":
        """Hide positions outside a sliding window of `sliding` positions."""
        return dataclasses.replace(self, mask=self.mask & (row_position[:, None] - self.position[None, :] < sliding))


def forward(
    params: Params,
    cfg: ModelConfig,
    token: jax.Array,  # int32 [T]
    position: jax.Array,  # int32 [T]
    cache: KVCache,
    window_mask: jax.Array,  # bool [T, W]
    window_position: jax.Array | None = None,  # int32 [W]
    offset: jax.Array | None = None,  # int32 []
    active_rows: jax.Array | None = None,  # int32 []
    units: LayerSet | jax.Array | None = None,  # bool [L, 2] or [L, 2, T]
) -> tuple[jax.Array, KVCache]:
    """Run T rows that attend to the prefix and to the window slots that `window_mask` marks.

    Args:
      params: of this shard.
      token, position: of the rows; positions are logical.
      cache: row t is written at slot `cache.length + offset + t`; the caller commits what it keeps.
      window_mask: row t sees window slot j (its tree ancestors and itself).
      window_position: logical position of each window slot, for sliding windows; None where the slots are the rows.
      offset: window slot of the first row; None is 0.
      active_rows: rows that matter, at least 1; the others come out arbitrary but finite, at little cost. None for all.
      units: attention and MLP blocks that run; None for all. A `LayerSet` is part of the program. As data, [L, 2] says
        for the whole pass which ones run: the device branches, and does not compute the others (an accelerator's host
        waits for every branch). [L, 2, T] says it for each row: everything is computed, so that one pass serves rows
        with different sets. The window slots of attention blocks that did not run are stale.

    Returns:
      Hidden states `[T, D]` float32 after the final norm, and the cache with the rows written.
    """
    window = Window(window_mask, position if window_position is None else window_position, offset, active_rows)
    x, cache = _run_layers(params, cfg, token, position, cache, window, units)
    with jax.named_scope("final_norm"):
        return rms_norm(x, params["final_norm"], cfg.norm_eps), cache


def prefill(params: Params, cfg: ModelConfig, token: jax.Array, count: jax.Array, cache: KVCache) -> KVCache:
    """Commit the first `count` (int32 []) of T consecutive tokens, `token` int32 [T].

    Rows from `count` on are padding: they write after the prefix, where the next pass overwrites them. No hidden
    state is returned, so the last layer only computes keys and values.
    """
    position = cache.length + jnp.arange(token.shape[0], dtype=jnp.int32)
    _, written = _run_layers(params, cfg, token, position, cache, None, None)
    return written.replace(length=cache.length + count)


def vocab_logits(params: Params, hidden: jax.Array, active_rows: jax.Array | None = None) -> jax.Array:
    """Logits of this shard's vocabulary rows, [T, D] -> [T, V / shards] float32; the caller masks padded rows.

    For `active_rows` see `forward`.
    """
    with jax.named_scope("head"):
        head = params["head"] if "head" in params else params["embed"]
        head = as_matrix(head, head.shape[0])
        return map_active_rows(lambda active_rows, rows: linear(rows, head, active_rows), active_rows, hidden)


def embed(params: Params, token: jax.Array) -> jax.Array:  # int32 [T] -> [T, D] float32
    """Look tokens up in a vocabulary-parallel table."""
    table = params["embed"]
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return take_rows(table, token)
    local = token - jax.lax.axis_index(TENSOR_AXIS) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = take_rows(table, jnp.clip(local, 0, table.shape[0] - 1))
    return jax.lax.psum(jnp.where(mine[:, None], rows, 0.0), TENSOR_AXIS)


def _run_layers(params, cfg, token, position, cache, window, units):
    """All layers; without a window the rows are a causal chunk, of which only the cache is wanted."""
    with jax.named_scope("embed"):
        x = embed(params, token)
        if cfg.embed_scale != 1:
            x = x * cfg.embed_scale
    rope = rope_tables(position, jnp.asarray(rope_frequencies(cfg.rope, cfg.head_dim)))
    cut = {None: window}
    if window is not None:
        cut |= {w: window.cut(position, w) for w in {cfg.window(i) for i in range(cfg.num_layers)} - {None}}
    keys, values = list(cache.key), list(cache.value)
    slot_of = {index: place for place, index in enumerate(cfg.attention_layers)}
    for index, layer in enumerate(params["layers"]):
        sliding, place = cfg.window(index), slot_of.get(index)
        key, value = (None, None) if place is None else (keys[place], values[place])
        x, key, value = _run_layer(
            layer, x, rope, key, value, cache.length, position,
            None if window is None else cut[sliding],
            units[index] if isinstance(units, jax.Array) else None,
            runs=(units.attention[index], units.mlp[index]) if isinstance(units, LayerSet) else cfg.layer_units(index),
            cfg=cfg, sliding=sliding, cache_only=window is None and index == cfg.num_layers - 1,
            kernels=registry.current(),
        )  # fmt: skip
        if place is not None:
            keys[place], values[place] = key, value
    return x, cache.replace(key=tuple(keys), value=tuple(values))


# Jitted so that equal layers are traced once: tracing thirty of them took a second per program. `kernels` is what the
# operations ask the registry for: it is an argument so that no trace is used for another choice.
@functools.partial(jax.jit, static_argnames=("runs", "cfg", "sliding", "cache_only", "kernels"))
def _run_layer(
    layer: Params, x, rope, key, value, length, position, window, units,
    *, runs: tuple[bool, bool], cfg: ModelConfig, sliding, cache_only, kernels,
):  # fmt: skip
    active_rows = None if window is None else window.active_rows

    def project_rows(active_rows, x):
        return project(layer, cfg, rms_norm(x, layer["attn_norm"], cfg.norm_eps), active_rows)

    def attend(x, key, value):
        with jax.named_scope("attention"):
            qkv = map_active_rows(project_rows, active_rows, x)
            cos, sin = rope
            tree = (None, None, None) if window is None else (window.mask, position, window.offset)
            return tree_attention(
                qkv, cos, sin, key, value, length, *tree,
                sliding_window=sliding, active_rows=active_rows, write_only=cache_only,
            )  # fmt: skip

    def add_attention(active_rows, x, heads):
        return x + _all_reduce(project_out(layer, heads, active_rows))

    def add_mlp(active_rows, x):
        with jax.named_scope("mlp"):
            return x + _all_reduce(feed_forward(layer, cfg, x, active_rows))

    def attention_unit(x, key, value):
        heads, key, value = attend(x, key, value)
        return map_active_rows(add_attention, active_rows, x, heads), key, value

    def mlp_unit(x):
        return (map_active_rows(add_mlp, active_rows, x),)

    if units is not None and units.ndim == 1:
        x, key, value = _run_if(units[0], attention_unit, x, key, value)
        (x,) = _run_if(units[1], mlp_unit, x)
        return x, key, value
    if units is not None:
        added, key, value = attention_unit(x, key, value)
        x = jnp.where(units[0][:, None], added, x)
        return jnp.where(units[1][:, None], mlp_unit(x)[0], x), key, value
    if all(runs):
        heads, key, value = attend(x, key, value)
        if cache_only:
            return x, key, value
        finish = lambda active_rows, x, heads: add_mlp(active_rows, add_attention(active_rows, x, heads))  # noqa: E731
        return map_active_rows(finish, active_rows, x, heads), key, value
    if runs[0]:
        x, key, value = attention_unit(x, key, value)
    if runs[1]:
        (x,) = mlp_unit(x)
    return x, key, value


def _run_if(condition: jax.Array, function: Callable[..., tuple], *carry: jax.Array) -> tuple:
    """The function's result if `condition`, else `carry` as it is."""
    # A loop of at most one turn: a conditional would copy the cache.
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.bool_(False), *function(*c[1:])), (condition, *carry))[1:]


def _all_reduce(x: jax.Array) -> jax.Array:
    return x if jax.lax.axis_size(TENSOR_AXIS) == 1 else jax.lax.psum(x, TENSOR_AXIS)


def project(layer: Params, cfg: ModelConfig, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:
    """Queries, key and value of each KV head of this shard, before rotation: [T, D] -> [T, K, G + 2, H] float32."""
    qkv = multiply_heads(layer["qkv"], x, active_rows)
    if "qkv_bias" in layer:
        qkv = qkv + layer["qkv_bias"]
    if cfg.qk_norm:
        query = rms_norm(qkv[:, :, :-2], layer["q_norm"], cfg.norm_eps)
        key = rms_norm(qkv[:, :, -2:-1], layer["k_norm"], cfg.norm_eps)
        qkv = jnp.concatenate([query, key, qkv[:, :, -1:]], axis=2)
    return qkv


def project_out(layer: Params, heads: jax.Array, active_rows: jax.Array | None) -> jax.Array:  # [T, K, G, H] -> [T, D]
    """Output projection of this shard's heads; a partial sum over shards."""
    return linear(heads.reshape(heads.shape[0], -1), as_matrix(layer["out"], layer["out"].shape[0]), active_rows)


def multiply_heads(weight: Any, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:  # [T, D] -> [T, K, n, H]
    """Rows times `[K, n, H, D]`, or times the parts of one that are kept in different types."""
    if isinstance(weight, dict):
        return jnp.concatenate([multiply_heads(weight[part], x, active_rows) for part in PARTS], axis=2)
    K, n, H = weight.shape[:3]
    return linear(x, as_matrix(weight, K * n * H), active_rows).reshape(x.shape[0], K, n, H)


def feed_forward(layer: Params, cfg: ModelConfig, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:
    """Norm and SwiGLU with the MLP columns of this shard, [T, D] -> [T, D] float32; a partial sum over shards."""
    gate_up = as_matrix(layer["gate_up"], 2 * layer["gate_up"].shape[1])
    hidden = norm_swiglu(x, layer["mlp_norm"], gate_up, cfg.norm_eps, active_rows)  # [T, F]
    return linear(hidden, as_matrix(layer["down"], layer["down"].shape[0]), active_rows)
