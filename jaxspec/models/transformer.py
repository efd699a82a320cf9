"""The decoder: rows in, hidden states and a longer cache out. Written for one shard of a tensor-parallel mesh.

Every function runs inside `jax.shard_map` over the mesh axis "tensor" and sees its own heads, MLP columns and
vocabulary rows. A layer (`layer.py`) needs two all-reduces, the embedding one; logits stay vocabulary-parallel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.features import NORMED, keys_state
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.layer import finish_block, run_layer
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.mixture import Routed, mix_routed_rows
from jaxspec.models.params import Params
from jaxspec.models.recurrent import refuse_window
from jaxspec.models.rope import RopeConfig, rope_frequencies
from jaxspec.pytree import pytree
from pallas_kernels import registry
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.linear import as_matrix, linear, take_rows
from pallas_kernels.linear_sum import add_parts, all_reduce
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope_tables


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
      active_rows: rows that matter, at least 1; the others come out arbitrary, at little cost. None for all.
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
        return take_rows(table, token, alone=True)
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
    out, added, key, value, *_ = run_layer(
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
        sliding, place = cfg.window(index), slot_of.get(index)
        key, value = ((), ()) if place is None else (tuple(keys[place]), tuple(values[place]))
        if index in place_of:
            key = (recurrent[place_of[index]],)
        x, added, key, value, rows, entered = run_layer(
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
        states |= {index: entered} if index in layers else {}
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
