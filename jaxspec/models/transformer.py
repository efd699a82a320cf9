"""The decoder: rows in, hidden states and a longer cache out. Written for one shard of a tensor-parallel mesh.

Every function runs inside `jax.shard_map` over the mesh axis "tensor" and sees its own heads, MLP columns and
vocabulary rows. A layer needs two all-reduces, the embedding one; logits stay vocabulary-parallel.

This file exceeds 400 lines because one layer serves all families, resident and streamed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.features import NORMED, keys_state
from jaxspec.models.heads import head_layout, split_slots
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.mixture import Routed, mix_beside, mix_routed_rows, mix_rows, route_rows
from jaxspec.models.params import Params
from jaxspec.models.quantization import PARTS
from jaxspec.models.recurrent import refuse_window
from jaxspec.models.recurrent_layer import mix_rows_in_time
from jaxspec.models.rope import RopeConfig, rope_frequencies
from jaxspec.pytree import pytree
from pallas_kernels import registry
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.add_norm import add_norm
from pallas_kernels.add_norm import fuses as fuses_norm
from pallas_kernels.linear import Weight, as_matrix, linear, row_dtype, take_rows
from pallas_kernels.linear_sum import add_parts, all_reduce, linear_sum, linear_sum_parts
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope_tables
from pallas_kernels.swiglu import geglu, norm_swiglu, swiglu
from pallas_kernels.tree_attention import tree_attention


@pytree
class Window:
    """The tree window as a pass sees it: `mask` bool [T, W], `position` int32 [W]; see `forward`.

    Layers with a sliding window have `sliding_mask`, where it is another one. Their windows end at the rows' positions,
    or at those of `seen_from`, int32 [T].
    """

    mask: jax.Array
    position: jax.Array
    offset: jax.Array | None
    active_rows: jax.Array | None
    sliding_mask: jax.Array | None = None
    seen_from: jax.Array | None = None

    def cut(self, row_position: jax.Array, sliding: int) -> "Window":
        """Hide positions outside a sliding window of `sliding` positions."""
        mask = self.mask if self.sliding_mask is None else self.sliding_mask
        return dataclasses.replace(self, mask=mask & (row_position[:, None] - self.position[None, :] < sliding))


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
    x, cache, _ = run_layers(params, cfg, token, position, cache, window, units)
    return finish_rows(params, cfg, x), cache


def forward_with_states(
    params: Params, cfg: ModelConfig, token: jax.Array, position: jax.Array, cache: KVCache, window_mask: jax.Array,
    layers: tuple[int, ...], active_rows: jax.Array | None = None, window_position: jax.Array | None = None,
    offset: jax.Array | None = None,
) -> tuple[jax.Array, KVCache, jax.Array | None]:  # fmt: skip
    """`forward`, and the rows' hidden states of some `layers` beside each other, float32 [T, n * D]; None for none.

    State i is the residual stream that enters layer i, before its norm; `NORMED` is what leaves the final norm, and a
    `keys_state` what the layer has written to its cache.
    """
    window = Window(window_mask, position if window_position is None else window_position, offset, active_rows)
    x, cache, states = run_layers(params, cfg, token, position, cache, window, None, layers=layers)
    hidden = finish_rows(params, cfg, x)
    return hidden, cache, join_states(states, hidden, layers)


def prefill_with_states(
    params: Params, cfg: ModelConfig, token: jax.Array, count: jax.Array, cache: KVCache, layers: tuple[int, ...]
) -> tuple[KVCache, jax.Array | None]:
    """Commit the first `count` (int32 []) of T consecutive tokens, `token` int32 [T].

    Rows from `count` on are padding: they write after the prefix, where the next pass overwrites them. The second
    result is that of `forward_with_states`; unless it takes a state after the last layer, that layer only computes keys
    and values.
    """
    position = cache.length + jnp.arange(token.shape[0], dtype=jnp.int32)
    x, written, states = run_layers(
        params, cfg, token, position, cache, None, None, layers=layers, active_rows=chunk_rows(count), count=count
    )
    # Only a state after the last layer takes all of it.
    hidden = finish_rows(params, cfg, x) if NORMED in layers else x
    return dataclasses.replace(written, length=cache.length + count), join_states(states, hidden, layers)


def chunk_rows(count: jax.Array) -> jax.Array | None:
    """Active rows of a chunk with `count` tokens: native kernels compute no padding, others all rows at once."""
    return jnp.maximum(count, 1) if registry.current().native else None


def join_states(states: dict[int, jax.Array], hidden: jax.Array, layers: tuple[int, ...]) -> jax.Array | None:
    """Hidden states `[T, D]` of a pass beside each other, in the order of `layers`; `hidden` is that of `NORMED`."""
    if not layers:
        return None
    return jnp.concatenate([hidden if layer == NORMED else states[layer] for layer in layers], axis=1)


def prefill(params: Params, cfg: ModelConfig, token: jax.Array, count: jax.Array, cache: KVCache) -> KVCache:
    """`prefill_with_states` without any."""
    return prefill_with_states(params, cfg, token, count, cache, ())[0]


def vocab_logits(
    params: Params, cfg: ModelConfig, hidden: jax.Array, active_rows: jax.Array | None = None
) -> jax.Array:
    """Logits of this shard's vocabulary rows, [T, D] -> [T, V / shards] float32; the caller masks padded rows.

    For `active_rows` see `forward`.
    """
    with jax.named_scope("head"):
        head = params["head"] if "head" in params else params["embed"]
        head = as_matrix(head, head.shape[0])
        logits = map_active_rows(lambda active_rows, rows: linear(rows, head, active_rows), active_rows, hidden)
        if cfg.logit_scale != 1:
            logits = logits * cfg.logit_scale
        return logits if cfg.logit_softcap is None else jnp.tanh(logits / cfg.logit_softcap) * cfg.logit_softcap


def embed(params: Params, token: jax.Array) -> jax.Array:  # int32 [T] -> [T, D] float32
    """Look tokens up in the embedding."""
    return look_up(params["embed"], token)


def look_up(table: Any, token: jax.Array) -> jax.Array:  # [V / shards, n], int32 [T] -> [T, n] float32
    """Look tokens up in a vocabulary-parallel table."""
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return take_rows(table, token)
    local = token - jax.lax.axis_index(TENSOR_AXIS) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    rows = take_rows(table, jnp.clip(local, 0, table.shape[0] - 1))
    return jax.lax.psum(jnp.where(mine[:, None], rows, 0.0), TENSOR_AXIS)


@pytree
class Frame:
    """Arrays that all layers of a pass of T rows share; see `forward`. Without a window the rows are a causal chunk."""

    ropes: tuple[tuple[jax.Array, jax.Array], ...]  # tables, one for each of `rope_settings`
    position: jax.Array  # int32 [T]
    length: jax.Array  # int32 [], of the cache
    window: Window | None
    live: jax.Array | None = None  # int32 [], rows whose experts are needed; None for all of the window's active rows
    own: jax.Array | None = None  # float32 [T, L, P], inputs of each layer, see `LayerKinds`


def begin_rows(
    params: Params, cfg: ModelConfig, token: jax.Array, position: jax.Array, length: jax.Array, window: Window | None,
    live: jax.Array | None = None,
) -> tuple[jax.Array, Frame]:  # fmt: skip
    """The first step of a pass that runs layer by layer: embedded rows, float32 [T, D], and what all layers share."""
    with jax.named_scope("embed"):
        x = embed(params, token)
        if cfg.embed_scale != 1:
            x = x * cfg.embed_scale
        own = None if "inputs_embed" not in params else make_own_inputs(params, cfg, token, x)
    ropes = tuple(make_tables(rope, width, position) for rope, width in rope_settings(cfg))
    return x, Frame(ropes, position, length, window, live, own)


def make_own_inputs(params: Params, cfg: ModelConfig, token: jax.Array, x: jax.Array) -> jax.Array:
    """Each layer's own inputs of embedded rows `x` [T, D]: of their tokens, and of what they are; [T, L, P] float32."""
    assert cfg.kinds is not None  # whose weights these are
    shape = token.shape[0], cfg.num_layers, cfg.kinds.inputs_dim
    made = linear(x, as_matrix(params["inputs_proj"], shape[1] * shape[2]), None) * cfg.embed_dim**-0.5
    made = rms_norm(made.reshape(shape), params["inputs_norm"], cfg.norm_eps)
    looked_up = look_up(params["inputs_embed"], token).reshape(shape) * cfg.kinds.inputs_dim**0.5
    return (made + looked_up) * 2**-0.5


def layer_rope(cfg: ModelConfig, layer: int) -> tuple[RopeConfig, int]:
    """The rotary settings of one layer, and the width of its heads."""
    return cfg.layer_rope(layer), cfg.layer_heads(layer)[1]


def rope_settings(cfg: ModelConfig) -> tuple[tuple[RopeConfig, int], ...]:
    """Those of all layers, each once."""
    return tuple(dict.fromkeys(layer_rope(cfg, index) for index in range(cfg.num_layers)))


def run_one_layer(
    layer: Params, cfg: ModelConfig, index: int, x: jax.Array, frame: Frame, key: tuple[jax.Array, ...],
    value: tuple[jax.Array, ...], *, route_only: bool = False,
) -> tuple[Any, tuple[jax.Array, ...], tuple[jax.Array, ...]]:  # fmt: skip
    """Layer `index` of a pass that runs layer by layer.

    `key` and `value` are the layer's arrays of the cache, one for each kind of KV head; they come back written. With
    `route_only` the layer ends where its router has chosen experts, whose weights are not needed: the first result is
    a `Routed` for `mix_one_layer`.
    """
    window, sliding = frame.window, cfg.window(index)
    if window is not None and sliding is not None:
        window = window.cut(frame.position, sliding)
    out, added, key, value, _ = _run_layer(
        layer, x, None, frame.ropes[rope_settings(cfg).index(layer_rope(cfg, index))], key, value, frame.length,
        frame.position, window, None, runs=cfg.layer_units(index), cfg=cfg, experts=cfg.layer_experts(index),
        sliding=sliding, cache_only=False, route_only=route_only, kernels=registry.current(),
    )  # fmt: skip
    if isinstance(out, Routed):
        live = frame.live if window is None or frame.live is not None else window.active_rows
        return out if live is None else out.keep_first(live), key, value
    return add_parts(out, added), key, value


def mix_one_layer(
    layer: Params, cfg: ModelConfig, index: int, routed: Routed, frame: Frame, places: jax.Array
) -> jax.Array:
    """The rest of layer `index` after `run_one_layer` with `route_only`: the rows' experts; float32 [T, D].

    `gate_up` and `down` of `layer` hold the weights of expert i at `places[i]` (int32 [E]), at least those of the
    experts that were chosen.
    """
    experts = cfg.layer_experts(index)
    assert experts is not None  # the layer has a router

    def mix(active_rows: jax.Array | None, routed: Routed) -> jax.Array:
        with jax.named_scope("mlp"):
            mixed = mix_routed_rows(layer, experts, routed, places, active_rows)
            mixed = all_reduce(mixed, layer["down"], TENSOR_AXIS)
            return routed.x + finish_block(layer, cfg, "mlp_post_norm", mixed)

    active_rows = None if frame.window is None else frame.window.active_rows
    leaves, tree = jax.tree.flatten(routed)
    return map_active_rows(lambda active, *rows: mix(active, jax.tree.unflatten(tree, rows)), active_rows, *leaves)


def hold_layouts(params: Params, token: jax.Array) -> tuple[Params, jax.Array]:
    """The same, as they are in memory: else XLA changes layouts of weights before a loop, and keeps the copies."""
    return jax.lax.optimization_barrier((params, token))


def finish_rows(params: Params, cfg: ModelConfig, x: jax.Array) -> jax.Array:  # [T, D] -> [T, D]
    """The last step of a pass: the final norm."""
    with jax.named_scope("final_norm"):
        return rms_norm(x, params["final_norm"], cfg.norm_eps)


def run_layers(
    params: Params, cfg: ModelConfig, token: jax.Array, position: jax.Array, cache: KVCache, window: Window | None,
    units: LayerSet | jax.Array | None, *, layers: tuple[int, ...] = (),
    enter: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]] | None = None,
    active_rows: jax.Array | None = None, keys_only: bool = False, count: jax.Array | None = None,
) -> tuple[jax.Array, KVCache, dict[int, jax.Array]]:  # fmt: skip
    """All layers; without a window the rows are a causal chunk, of which only the cache is wanted.

    `active_rows` are those of such a chunk; a window has its own. `count` (int32 []) is the number of its tokens that
    the caller commits, and that recurrent layers take.
    `layers` are those of `forward_with_states`; the last result has their states, but that of `NORMED`. `enter` makes
    the residual stream from the embedded tokens, and what the first layer's attention projects in its place, or None.
    With `keys_only` every layer projects that, as it is, and writes its keys and values; nothing else is computed.
    """
    if registry.current().platform == "tpu":
        params, token = hold_layouts(params, token)
    x, frame = begin_rows(params, cfg, token, position, cache.length, window)
    x, joined = (x, None) if enter is None else enter(x)
    position = position if window is None or window.seen_from is None else window.seen_from
    wants_end = cfg.num_layers in layers or NORMED in layers
    states: dict[int, jax.Array] = {}
    ropes = dict(zip(rope_settings(cfg), frame.ropes, strict=True))
    cut: dict[int | None, Window | None] = {None: window}
    if window is not None:
        windows = {cfg.window(index) for index in range(cfg.num_layers)}
        cut |= {sliding: window.cut(position, sliding) for sliding in windows if sliding is not None}
    keys, values, recurrent = list(cache.key), list(cache.value), list(cache.recurrent)
    with_cache = len(cfg.attention_layers)
    # Of each layer, its arrays of the cache: one for each kind of KV head.
    slot_of = {index: slice(place, None, with_cache) for place, index in enumerate(cfg.attention_layers)}
    sharing = [index for index in range(cfg.num_layers) if cfg.shares_keys(index)]
    slot_of |= {index: slot_of[cfg.keys_of(index)] for index in sharing}
    lenders = set() if cfg.keys_are_lent else {cfg.keys_of(index) for index in sharing}
    lent: dict[int, jax.Array] = {}
    if cfg.keys_are_lent:  # the cache holds them; rows have none
        shapes = {index: keys[place][0].shape for index, place in slot_of.items()}
        lent = {index: jnp.zeros((token.shape[0], heads, 2, H)) for index, (heads, _, H) in shapes.items()}
    place_of = {index: place for place, index in enumerate(cfg.recurrent_layers)}
    if cfg.recurrent is not None:
        refuse_window(cfg.recurrent, 0 if window is None else window.mask.shape[1])
    # Of a chunk, layers after the last one with keys of its own are not wanted.
    last = max(cfg.attention_layers) if sharing and window is None and not layers else cfg.num_layers - 1
    added = None
    for index, layer in enumerate(params["layers"][: last + 1]):
        if index in layers:
            x, added = add_parts(x, added), None
            states[index] = x
        sliding, place = cfg.window(index), slot_of.get(index)
        key, value = ((), ()) if place is None else (tuple(keys[place]), tuple(values[place]))
        if index in place_of:
            key = (recurrent[place_of[index]],)
        x, added, key, value, rows = _run_layer(
            layer, x, added, ropes[layer_rope(cfg, index)], key, value, cache.length, position,
            None if window is None else cut[sliding],
            units[index] if isinstance(units, jax.Array) else None, joined if index == 0 or keys_only else None,
            active_rows, count, None if frame.own is None else frame.own[:, index],
            lent[cfg.keys_of(index)] if cfg.shares_keys(index) else None, recurrent=cfg.is_recurrent(index),
            runs=(units.attention[index], units.mlp[index]) if isinstance(units, LayerSet) else cfg.layer_units(index),
            cfg=cfg, experts=cfg.layer_experts(index), sliding=sliding,
            cache_only=keys_only or (window is None and index == last and not wants_end),
            kernels=registry.current(), lends=index in lenders,
        )  # fmt: skip
        if index in lenders:
            lent[index] = rows
        if place is not None:
            keys[place], values[place] = key, value
        if index in place_of:
            (recurrent[place_of[index]],) = key
        if keys_state(index) in layers:
            start = cache.length if window is None or window.offset is None else cache.length + window.offset
            states[keys_state(index)] = collect_keys(key[0], value[0], start, token.shape[0])
    x = add_parts(x, added)
    states |= {cfg.num_layers: x} if cfg.num_layers in layers else {}
    cache = dataclasses.replace(cache, key=tuple(keys), value=tuple(values), recurrent=tuple(recurrent))
    return x, cache, states


def collect_keys(key: jax.Array, value: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """Keys and values of all heads in slots from `start` on, float32 [rows, K * 2 * H], of a shard's [K', S, H]."""
    both = jnp.stack([jax.lax.dynamic_slice_in_dim(each, start, rows, 1) for each in (key, value)])
    own = both.transpose(2, 1, 0, 3).astype(jnp.float32)
    return jax.lax.all_gather(own, TENSOR_AXIS, axis=1, tiled=True).reshape(rows, -1)


def store_keys(cfg: ModelConfig, states: jax.Array, cache: KVCache) -> KVCache:
    """Write what `collect_keys` gave of several layers, side by side in `states`, after the prefix of another cache."""
    keys, values = list(cache.key), list(cache.value)
    for place, index in enumerate(cfg.attention_layers):
        K, H = cfg.layer_heads(index)
        own, states = states[:, : K * 2 * H].reshape(-1, K, 2, H), states[:, K * 2 * H :]
        here = keys[place].shape[0]
        own = jax.lax.dynamic_slice_in_dim(own, jax.lax.axis_index(TENSOR_AXIS) * here, here, 1).transpose(2, 1, 0, 3)
        for arrays, rows in ((keys, own[0]), (values, own[1])):
            arrays[place] = jax.lax.dynamic_update_slice_in_dim(
                arrays[place], rows.astype(arrays[place].dtype), cache.length, 1
            )
    return dataclasses.replace(cache, key=tuple(keys), value=tuple(values))


# Jitted so that equal layers are traced once: tracing thirty of them took a second per program. `kernels` is what the
# operations ask the registry for: it is an argument so that no trace is used for another choice.
@functools.partial(
    jax.jit,
    static_argnames=(
        "runs",
        "cfg",
        "experts",
        "sliding",
        "cache_only",
        "route_only",
        "kernels",
        "recurrent",
        "lends",
    ),
)
def _run_layer(
    layer: Params, x, added, rope, key, value, length, position, window, units, joined=None, active_rows=None,
    count=None, own=None, lent=None, *, runs: tuple[bool, bool], cfg: ModelConfig, experts: ExpertsConfig | None,
    sliding, cache_only, kernels, route_only=False, recurrent=False, lends=False,
):  # fmt: skip
    """One layer: the residual stream `x` and parts that it lacks yet, [P, T, D] or None, before and after; the cache.

    `own` are the rows' inputs of this layer alone, [T, P], `lent` the keys and values that it shares, [T, K, 2, H]. The
    last result are those that it `lends`, or None.

    Only a kernel that adds and normalises at once is given parts, and leaves its own to the next layer.
    """
    active_rows = active_rows if window is None else window.active_rows
    whole = all(runs) and units is None and joined is None and not cache_only and not recurrent
    fused = whole and experts is None and _takes_parts(layer, cfg, x)
    if fused and added is not None:
        x, joined = add_norm(x, added, layer["attn_norm"], cfg.norm_eps, _input_dtype(layer["qkv"]), active_rows)
    else:
        x = add_parts(x, added)

    to_lend: list[jax.Array] = []

    def project_rows(active_rows, x):
        # What is joined to a token's state is normed already.
        normed = norm_input(layer, cfg, "attn_norm", x) if joined is None else x
        return project(layer, cfg, normed if joined is not None else convolve(layer, "attn", normed), active_rows)

    def gate_rows(active_rows, x):
        rows = norm_input(layer, cfg, "attn_norm", x) if joined is None else x
        return multiply_heads(layer["attn_gate"], rows, active_rows)

    def attend_each(qkv, key, value, sinks):
        cos, sin = rope
        tree = (None, None, None) if window is None else (window.mask, position, window.offset)
        return tree_attention(
            qkv, cos, sin, key, value, length, *tree,
            sliding_window=sliding, active_rows=active_rows, write_only=cache_only, softcap=cfg.attention_softcap,
            sinks=sinks,
            dtype=row_dtype(layer["out"]),
        )  # fmt: skip

    def attend(x, key, value):
        if recurrent:
            with jax.named_scope("recurrent"):
                heads, rows = mix_rows_in_time(
                    layer,
                    cfg,
                    norm_input(layer, cfg, "attn_norm", x),
                    key[0],
                    length,
                    position,
                    window,
                    active_rows,
                    count,
                )
                return heads, (rows,), value
        with jax.named_scope("attention"):
            qkv = map_active_rows(project_rows, active_rows, x if joined is None else joined)
            if cfg.kinds is not None:
                kinds = (norm_kind(layer, cfg, qkv, lent),)
            else:
                kinds = split_slots(qkv, cfg.group)
            if cfg.wide_qk_norm:
                kinds = norm_all_heads(layer, cfg, kinds)
            elif "q_norm" in layer and cfg.kinds is None:
                kinds = tuple(norm_heads(layer, cfg, qkv) for qkv in kinds)
            if cfg.query_scale != 1:
                kinds = tuple(scale_queries(qkv, cfg.query_scale) for qkv in kinds)
            if cfg.query_growth:
                factor = query_factors(cfg, position)
                kinds = tuple(scale_queries(qkv, factor) for qkv in kinds)
            done = [attend_each(*kind) for kind in zip(kinds, key, value, split_sinks(layer, kinds), strict=True)]
            heads = jnp.concatenate([kind.reshape(kind.shape[0], -1, kind.shape[-1]) for kind, _, _ in done], axis=1)
            to_lend.extend(kind[:, :, -2:] for kind in kinds[:1] if lends)
            if "attn_gate" in layer:
                gate = map_active_rows(gate_rows, active_rows, x if joined is None else joined)
                heads = heads * jax.nn.sigmoid(gate.reshape(heads.shape))
            return heads, tuple(k for _, k, _ in done), tuple(v for _, _, v in done)

    def add_attention(active_rows, x, heads):
        result = project_out(layer, heads, active_rows, linear_over_devices)
        if "out_bias" in layer:
            result = result + layer["out_bias"]
        if "attn_conv" in layer:
            result = convolve(layer, "attn", norm_input(layer, cfg, "attn_norm", x), result)
        return x + finish_block(layer, cfg, "attn_post_norm", result)

    def add_mlp(active_rows, x):
        with jax.named_scope("mlp"):
            if experts is None:
                result = feed_forward(layer, cfg, x, active_rows, linear_over_devices)
            elif experts.beside:
                result = mix_beside(layer, experts, x, cfg.norm_eps, active_rows)
            else:
                result = mix_rows(layer, experts, norm_input(layer, cfg, "mlp_norm", x), active_rows)
                result = all_reduce(result, layer["down"], TENSOR_AXIS)
            if "mlp_conv" in layer:
                result = convolve(layer, "mlp", norm_input(layer, cfg, "mlp_norm", x), result)
            return x + finish_block(layer, cfg, "mlp_post_norm", result)

    def route(active_rows, x):
        with jax.named_scope("mlp"):
            assert experts is not None  # only a mixture has a router
            return route_rows(layer, experts, x, norm_input(layer, cfg, "mlp_norm", x), active_rows)

    def attention_unit(x, key, value):
        heads, key, value = attend(x, key, value)
        return map_active_rows(add_attention, active_rows, x, heads), key, value

    def mlp_unit(x):
        return (map_active_rows(add_mlp, active_rows, x),)

    if units is not None and units.ndim == 1:
        x, key, value = _run_if(units[0], attention_unit, x, key, value)
        (x,) = _run_if(units[1], mlp_unit, x)
        return x, None, key, value, None
    if units is not None:
        attended, key, value = attention_unit(x, key, value)
        x = jnp.where(units[0][:, None], attended, x)
        return jnp.where(units[1][:, None], mlp_unit(x)[0], x), None, key, value, None
    if all(runs):
        heads, key, value = attend(x, key, value)
        lending = to_lend[0] if lends else None
        if cache_only:
            return x, None, key, value, lending
        if fused:
            return *_finish_in_parts(layer, cfg, x, heads, active_rows), key, value, lending
        end = route if route_only else add_mlp
        finish = lambda active_rows, x, heads: end(active_rows, add_attention(active_rows, x, heads))  # noqa: E731
        x = map_active_rows(finish, active_rows, x, heads)
        return (x if cfg.kinds is None else finish_kind(layer, cfg, x, own, active_rows)), None, key, value, lending
    if runs[0]:
        x, key, value = attention_unit(x, key, value)
    if runs[1]:
        (x,) = mlp_unit(x)
    return x, None, key, value, None


def _takes_parts(layer: Params, cfg: ModelConfig, x: jax.Array) -> bool:
    """Whether both norms of a layer come right after sums of the residual stream, and a kernel does that at once."""
    between = ("attn_post_norm", "mlp_post_norm", "out_bias", "gate_up_order", "attn_conv")
    norms = "attn_norm" in layer and "mlp_norm" in layer and not any(leaf in layer for leaf in between)
    plain = cfg.activation == "silu" and cfg.residual_scale == 1
    return norms and plain and fuses_norm(x, layer["mlp_norm"])


def _finish_in_parts(
    layer: Params, cfg: ModelConfig, x: jax.Array, heads: jax.Array, active_rows: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The rest of a layer after attention: the residual stream without the MLP's result, and that in parts."""
    heads = _order(layer, "out", heads.reshape(heads.shape[0], -1))
    parts = linear_sum_parts(heads, as_matrix(layer["out"], layer["out"].shape[0]), TENSOR_AXIS, active_rows)
    x, normed = add_norm(x, parts, layer["mlp_norm"], cfg.norm_eps, row_dtype(layer["gate_up"]), active_rows)
    with jax.named_scope("mlp"):
        gate_up = as_matrix(layer["gate_up"], 2 * layer["gate_up"].shape[1])
        hidden = _order(layer, "down", swiglu(normed, gate_up, active_rows, dtype=row_dtype(layer["down"])))
        down = as_matrix(layer["down"], layer["down"].shape[0])
        return x, linear_sum_parts(hidden, down, TENSOR_AXIS, active_rows)


def _input_dtype(weight: Any) -> Any:
    """`row_dtype` of a weight, or of one that is kept in parts of several types."""
    return row_dtype(weight[PARTS[0]] if isinstance(weight, dict) else weight)


def _run_if(condition: jax.Array, function: Callable[..., tuple], *carry: jax.Array) -> tuple:
    """The function's result if `condition`, else `carry` as it is."""
    # A loop of at most one turn: a conditional would copy the cache.
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.bool_(False), *function(*c[1:])), (condition, *carry))[1:]


def make_tables(rope: RopeConfig, head_dim: int, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rows, each float32 [T, H / 2]."""
    frequency = rope_frequencies(rope, head_dim)
    cos, sin = rope_tables(position, jnp.asarray(frequency))
    if rope.attention_factor == 1:
        return cos, sin
    factor = rope.attention_factor
    if rope.partial != 1:  # pairs that stand still keep their length
        factor = jnp.asarray(np.where(frequency == 0, 1, factor), jnp.float32)
    return cos * factor, sin * factor


def norm_input(layer: Params, cfg: ModelConfig, leaf: str, x: jax.Array) -> jax.Array:  # [T, D]
    """A block's input: normalised, for models whose norms come before blocks."""
    return rms_norm(x, layer[leaf], cfg.norm_eps) if leaf in layer else x


def finish_block(layer: Params, cfg: ModelConfig, leaf: str, x: jax.Array) -> jax.Array:  # [T, D]
    """What a block adds to the residual stream: its result, normalised and scaled for models that do so."""
    x = rms_norm(x, layer[leaf], cfg.norm_eps) if leaf in layer else x
    return x if cfg.residual_scale == 1 else x * cfg.residual_scale


def project(layer: Params, cfg: ModelConfig, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:
    """Queries, key and value of each KV head of this shard, not rotated: [T, D] -> [T, K, G + 2, H] float32.

    Where devices share KV heads (`jaxspec/models/heads.py`), [T, 1, rows, H]: all queries, all keys, all values.
    """
    qkv = multiply_heads(layer["qkv"], _order(layer, "qkv", x), active_rows)
    return qkv + layer["qkv_bias"] if "qkv_bias" in layer else qkv


def norm_heads(layer: Params, cfg: ModelConfig, qkv: jax.Array) -> jax.Array:  # [T, K, G + 2, H]
    """Norm of queries and keys, for models that have one."""
    query = rms_norm(qkv[:, :, :-2], layer["q_norm"], cfg.norm_eps)
    key = rms_norm(qkv[:, :, -2:-1], layer["k_norm"], cfg.norm_eps)
    return jnp.concatenate([query, key, qkv[:, :, -1:]], axis=2)


def norm_kind(layer: Params, cfg: ModelConfig, qkv: jax.Array, lent: jax.Array | None) -> jax.Array:
    """Queries, keys and values of a model of `LayerKinds`, normalised, [T, K, G + 2, H]; scores are not divided.

    With `lent`, keys and values that a layer before has normalised, `qkv` are queries alone, [T, K, G, H].
    """
    queries = qkv if lent is not None else qkv[:, :, :-2]
    # The kernels divide by the root of the width.
    queries = rms_norm(queries, layer["q_norm"], cfg.norm_eps) * math.sqrt(qkv.shape[-1])
    if lent is None:
        key = rms_norm(qkv[:, :, -2:-1], layer["k_norm"], cfg.norm_eps)
        value = rms_norm(qkv[:, :, -1:], jnp.ones(qkv.shape[-1]), cfg.norm_eps)
        lent = jnp.concatenate([key, value], axis=2)
    return jnp.concatenate([queries, lent], axis=2)


def finish_kind(
    layer: Params, cfg: ModelConfig, x: jax.Array, own: jax.Array | None, active_rows: jax.Array | None
) -> jax.Array:  # [T, D]
    """The end of a layer of a model of `LayerKinds`: what it makes of its own inputs [T, P], and its scale."""

    def add_own(active_rows: jax.Array | None, x: jax.Array, own: jax.Array) -> jax.Array:
        gate = linear(x, as_matrix(layer["input_gate"], layer["input_gate"].shape[0]), active_rows)
        made = linear(jax.nn.gelu(gate) * own, as_matrix(layer["input_out"], layer["input_out"].shape[0]), active_rows)
        return x + rms_norm(made, layer["input_norm"], cfg.norm_eps)

    if own is not None:
        with jax.named_scope("own_inputs"):
            x = map_active_rows(add_own, active_rows, x, own)
    return x * layer["scale"]


def norm_all_heads(layer: Params, cfg: ModelConfig, kinds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """One norm over the queries of all heads of all devices, and one over all keys; `kinds` are `split_slots`'s.

    Padding is zeros and adds nothing. A key head that several devices hold counts once.
    """
    T, H, shards = kinds[0].shape[0], cfg.head_dim, jax.lax.axis_size(TENSOR_AXIS)
    counts = [kind.shape[1] * (kind.shape[2] - 2) for kind in kinds]
    query = jnp.concatenate([kind[:, :, :-2].reshape(T, -1, H) for kind in kinds], axis=1)
    key = jnp.concatenate([kind[:, :, -2] for kind in kinds], axis=1)

    def norm(x: jax.Array, leaf: str, heads: int, counted: jax.Array | None) -> jax.Array:  # [T, n, H]
        scale = layer[leaf].reshape(-1)
        if shards == 1:
            return rms_norm(x.reshape(T, -1), scale, cfg.norm_eps).reshape(x.shape)
        squares = jnp.sum(x * x, axis=-1) if counted is None else jnp.sum(x * x, axis=-1) * counted
        mean = jax.lax.psum(jnp.sum(squares, axis=-1), TENSOR_AXIS) / (heads * H)
        return x * jax.lax.rsqrt(mean + cfg.norm_eps)[:, None, None] * scale.reshape(x.shape[1:])

    slots = head_layout(cfg.num_kv_heads, cfg.group, shards).kv_of_slots()
    slots = slots[:, : key.shape[1]].reshape(-1)
    first = [bool(kv >= 0 and kv not in slots[:place]) for place, kv in enumerate(slots)]
    counted = jnp.asarray(np.array(first, np.float32).reshape(shards, -1))[jax.lax.axis_index(TENSOR_AXIS)]
    query = norm(query, "q_norm", cfg.num_heads, None)
    key = norm(key, "k_norm", cfg.num_kv_heads, counted)
    normed, q, k = [], 0, 0
    for kind, count in zip(kinds, counts, strict=True):
        own = query[:, q : q + count].reshape(*kind.shape[:2], -1, H)
        normed.append(jnp.concatenate([own, key[:, k : k + kind.shape[1], None], kind[:, :, -1:]], axis=2))
        q, k = q + count, k + kind.shape[1]
    return tuple(normed)


def query_factors(cfg: ModelConfig, position: jax.Array) -> jax.Array:  # int32 [T] -> float32 [T, 1, 1, 1]
    """What `query_growth` multiplies the queries of rows with; from a table, so that no row depends on the others."""
    step = cfg.rope.original_context
    table = 1 + cfg.query_growth * np.log1p(np.arange(cfg.max_context // step + 1))
    return jnp.take(jnp.asarray(table, jnp.float32), position // step, mode="clip")[:, None, None, None]


def convolve(layer: Params, name: str, normed: jax.Array, result: jax.Array | None = None) -> jax.Array:
    """A sublayer's input of a block's rows, or its `result`, convolved over the rows; as it is without a kernel.

    The kernel of a row, for either side, is the layer's own and a part for groups of columns that `normed`, float32
    [T, D], says: the sublayer's input. Before the block's first row are zeros.
    """
    rows = normed if result is None else result
    if f"{name}_conv" not in layer:
        return rows
    own, side = layer[f"{name}_conv"], 0 if result is None else 1
    projection = layer[f"{name}_conv_kernel"]
    (T, D), taps = rows.shape, own.shape[1]
    said = linear(normed, as_matrix(projection, projection.shape[0])).reshape(T, 2, taps, -1)[:, side]
    kernel = own[side] + jnp.repeat(said, D // said.shape[-1], axis=-1)  # [T, taps, D]
    before = jnp.pad(rows, ((taps - 1, 0), (0, 0)))
    shifted = jnp.stack([before[taps - 1 - back :][:T] for back in range(taps)], axis=1)
    return jnp.sum(kernel * shifted, axis=1)


def scale_queries(qkv: jax.Array, factor: float | jax.Array) -> jax.Array:  # [T, K, G + 2, H]
    """Queries times a factor, or one for each row."""
    return jnp.concatenate([qkv[:, :, :-2] * factor, qkv[:, :, -2:]], axis=2)


def split_sinks(layer: Params, kinds: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
    """The sinks of each kind's query heads, [slots, queries] float32; `kinds` are `split_slots`'s."""
    if "sinks" not in layer:
        return (None,) * len(kinds)
    flat, sinks = layer["sinks"].reshape(-1), []
    for _, slots, rows, _ in (kind.shape for kind in kinds):
        count = slots * (rows - 2)
        sinks.append(flat[:count].reshape(slots, rows - 2))
        flat = flat[count:]
    return tuple(sinks)


def linear_over_devices(x: jax.Array, weight: Weight, active_rows: jax.Array | None) -> jax.Array:
    """`linear`, added up over the shards."""
    return linear_sum(x, weight, TENSOR_AXIS, active_rows)


def project_out(
    layer: Params, heads: jax.Array, active_rows: jax.Array | None, multiply: Callable[..., jax.Array] = linear
) -> jax.Array:  # [T, ..., H] -> [T, D]
    """Output projection of this shard's query heads; a partial sum over shards unless `multiply` adds them up."""
    heads = _order(layer, "out", heads.reshape(heads.shape[0], -1))
    return multiply(heads, as_matrix(layer["out"], layer["out"].shape[0]), active_rows)


def multiply_heads(weight: Any, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:  # [T, D] -> [T, K, n, H]
    """Rows times `[K, n, H, D]`, or times the parts of one that are kept in different types."""
    if isinstance(weight, dict):
        return jnp.concatenate([multiply_heads(weight[part], x, active_rows) for part in PARTS], axis=2)
    K, n, H = weight.shape[:3]
    return linear(x, as_matrix(weight, K * n * H), active_rows).reshape(x.shape[0], K, n, H)


def feed_forward(
    layer: Params,
    cfg: ModelConfig,
    x: jax.Array,
    active_rows: jax.Array | None,
    multiply: Callable[..., jax.Array] = linear,
) -> jax.Array:  # [T, D] -> [T, D] float32
    """Norm and gated MLP with the columns of this shard; a partial sum over shards unless `multiply` adds them up."""
    gate_up = as_matrix(layer["gate_up"], 2 * layer["gate_up"].shape[1])
    if cfg.activation == "silu" and "mlp_norm" in layer and not {"gate_up_order", "mlp_conv"} & layer.keys():
        dtype = row_dtype(layer["down"])
        hidden = norm_swiglu(x, layer["mlp_norm"], gate_up, cfg.norm_eps, active_rows, dtype)  # [T, F]
    else:
        gated = swiglu if cfg.activation == "silu" else geglu
        normed = convolve(layer, "mlp", norm_input(layer, cfg, "mlp_norm", x))
        hidden = gated(_order(layer, "gate_up", normed), gate_up, active_rows)
    down = as_matrix(layer["down"], layer["down"].shape[0])
    return multiply(_order(layer, "down", hidden), down, active_rows)


def _order(layer: Params, name: str, x: jax.Array) -> jax.Array:  # [T, I] -> [T, I]
    """Inputs in the order in which a weight takes them."""
    order = layer.get(f"{name}_order")
    return x if order is None else jnp.take(x, order, axis=1, mode="clip")
