"""One layer of the decoder, for all families: norm, attention and feed-forward of a shard, with two all-reduces."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import TENSOR_AXIS, ModelConfig
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.family_steps import finish_kind, norm_all_heads, norm_heads, norm_kind, query_factors
from jaxspec.models.mixture import mix_beside, mix_rows, route_rows
from jaxspec.models.params import Params
from jaxspec.models.quantization import PARTS
from jaxspec.models.recurrent_layer import mix_rows_in_time
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.add_norm import add_norm
from pallas_kernels.add_norm import fuses as fuses_norm
from pallas_kernels.linear import Weight, as_matrix, linear, row_dtype
from pallas_kernels.linear_sum import add_parts, all_reduce, linear_sum, linear_sum_parts
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.swiglu import geglu, norm_swiglu, swiglu
from pallas_kernels.tree_attention import tree_attention


def _run_layer(
    layer: Params, x, added, rope, key, value, length, position, window, units, joined=None, active_rows=None,
    count=None, own=None, lent=None, *, runs: tuple[bool, bool], cfg: ModelConfig, experts: ExpertsConfig | None,
    sliding, cache_only, kernels, route_only=False, recurrent=False, lends=False,
):  # fmt: skip
    """One layer: the residual stream `x` and parts that it lacks yet, [P, T, D] or None, before and after; the cache.

    `own` are the rows' inputs of this layer alone, [T, P], `lent` the keys and values that it shares, [T, K, 2, H]. The
    last results are those that it `lends`, or None, and the residual stream that entered, with its parts.

    Only a kernel that adds and normalises at once is given parts, and leaves its own to the next layer.
    """
    active_rows = active_rows if window is None else window.active_rows
    whole = all(runs) and units is None and joined is None and not cache_only and not recurrent
    fused = whole and experts is None and _takes_parts(layer, cfg, x)
    if fused and added is not None:
        x, joined = add_norm(x, added, layer["attn_norm"], cfg.norm_eps, _input_dtype(layer["qkv"]), active_rows)
    else:
        x = add_parts(x, added)
    entered = x

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
            qkv, cos, sin, key, value, length, *tree, sliding_window=sliding, active_rows=active_rows,
            write_only=cache_only, softcap=cfg.attention_softcap, sinks=sinks, dtype=row_dtype(layer["out"]),
        )  # fmt: skip

    def attend(x, key, value):
        if recurrent:
            with jax.named_scope("recurrent"):
                normed = norm_input(layer, cfg, "attn_norm", x)
                heads, rows = mix_rows_in_time(layer, cfg, normed, key[0], length, position, window, active_rows, count)
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
        return x, None, key, value, None, entered
    if units is not None:
        attended, key, value = attention_unit(x, key, value)
        x = jnp.where(units[0][:, None], attended, x)
        return jnp.where(units[1][:, None], mlp_unit(x)[0], x), None, key, value, None, entered
    if all(runs):
        heads, key, value = attend(x, key, value)
        lending = to_lend[0] if lends else None
        if cache_only:
            return x, None, key, value, lending, entered
        if fused:
            return *_finish_in_parts(layer, cfg, x, heads, active_rows), key, value, lending, entered
        end = route if route_only else add_mlp

        def finish(active_rows, x, heads):
            return end(active_rows, add_attention(active_rows, x, heads))

        x = map_active_rows(finish, active_rows, x, heads)
        x = x if cfg.kinds is None else finish_kind(layer, cfg, x, own, active_rows)
        return x, None, key, value, lending, entered
    if runs[0]:
        x, key, value = attention_unit(x, key, value)
    if runs[1]:
        (x,) = mlp_unit(x)
    return x, None, key, value, None, entered


# Jitted so that equal layers are traced once: tracing thirty of them took a second per program. `kernels` is what the
# operations ask the registry for: it is an argument so that no trace is used for another choice.
run_layer = jax.jit(
    _run_layer,
    static_argnames=("runs", "cfg", "experts", "sliding", "cache_only", "route_only", "kernels", "recurrent", "lends"),
)


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


def split_slots(qkv: jax.Array, group: int) -> tuple[jax.Array, ...]:
    """Projected rows of a device by kind of KV head: `[T, K', rows, H]` -> arrays `[T, slots, queries + 2, H]`.

    With whole heads only, or one shared head only, the array is that already.
    """
    T, _, rows, H = qkv.shape
    if rows <= group + 2:
        return (qkv,)
    whole = (rows - 3) // (group + 2)  # of G + 2 rows each, beside a shared head of 3 rows or more
    queries = rows - 2 * (whole + 1)
    flat = qkv[:, 0]
    query, key, value = flat[:, :queries], flat[:, queries : queries + whole + 1], flat[:, queries + whole + 1 :]
    heads = [query[:, : whole * group].reshape(T, whole, group, H), key[:, :whole, None], value[:, :whole, None]]
    shared = [query[:, whole * group :], key[:, whole:], value[:, whole:]]
    return jnp.concatenate(heads, axis=2), jnp.concatenate(shared, axis=1)[:, None]


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
    layer: Params, cfg: ModelConfig, x: jax.Array, active_rows: jax.Array | None,
    multiply: Callable[..., jax.Array] = linear,
) -> jax.Array:  # fmt: skip
    """Norm and gated MLP with the columns of this shard, [T, D] -> [T, D] float32.

    A partial sum over shards unless `multiply` adds them up.
    """
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
