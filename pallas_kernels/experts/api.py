"""The experts of a layer in place of its MLP: each row passes a few of many."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native, registry
from pallas_kernels.exact_rows import MOST_ROWS, map_tiles
from pallas_kernels.experts.reference import (
    Activation,
    Clamp,
    Scores,
    choose_experts_by_xla,
    chosen_experts_by_xla,
    experts_by_xla,
)
from pallas_kernels.linear.api import native_weight
from pallas_kernels.linear.blocks import Blocks, Weight, find_format


def experts(
    x: jax.Array,  # [T, D]
    logits: jax.Array,  # [T, E]
    gate_up: Weight,  # [e, 2F, D]
    down: Weight,  # [e, D, F]
    per_token: int,
    *,
    scores: Scores,
    first: jax.Array | int = 0,  # int32 []
    active_rows: jax.Array | None = None,  # int32 []
    gate_up_bias: jax.Array | None = None,  # [e, 2F] float32
    down_bias: jax.Array | None = None,  # [e, D] float32
    activation: Activation = None,
) -> jax.Array:  # [T, D] float32
    """The sum of each row's best experts' results, each times its score; a partial sum where devices share experts.

    An expert's result is `(silu(x @ gate.T) * (x @ up.T)) @ down.T`.

    Args:
      x: activations.
      logits: the router's, float32, of all E experts.
      gate_up: of the e experts that this device has, the F rows of the gate before those of the up projection; numbers,
        or `Blocks` with data `[e, 2F, D / values, nbytes]`.
      down: likewise.
      per_token: experts of a row. Of equal scores the lower expert is taken, as `jax.lax.top_k` does.
      scores: "all": the softmax of all logits; "renormalised": that, divided by the sum of the chosen ones; "chosen":
        the softmax of the chosen logits, by which experts are chosen then.
      first: the first expert that this device has. Choices of others add nothing.
      active_rows: at least 1: the rows that matter, which come first. The others come out arbitrary but finite. None
        for all. Only native kernels save time by it.
      gate_up_bias: added to the results of gate and up projection; None for none.
      down_bias: added to an expert's result before its score; None for none.
      activation: another one in place of silu.

    The bits of a row's result do not depend on the other rows with native kernels. They read the weights of those
    experts only that some row is sent to. With exact numerics XLA computes up to 64 rows one after the other.

    Raises:
      ValueError: shapes do not fit together.
    """
    columns = _check(x, logits, gate_up, down, per_token)
    _check_biases(gate_up, down, gate_up_bias, down_bias)
    kernels = registry.current()
    if not kernels.native:
        biases = gate_up_bias, down_bias
        mix = lambda x, logits: experts_by_xla(  # noqa: E731
            x, logits, gate_up, down, per_token, scores, first, biases, activation
        )
        return _row_by_row(mix, x, logits)
    (up_data, up_format), (down_data, down_format) = native_weight(gate_up), native_weight(down)
    limit, alpha = _numbers_of(activation)
    none = jnp.zeros((0,), jnp.float32)
    return native.call(
        "experts", jax.ShapeDtypeStruct(x.shape, jnp.float32), x.astype(jnp.float32), logits, up_data, down_data,
        none if gate_up_bias is None else gate_up_bias, none if down_bias is None else down_bias, jnp.int32(first),
        native.row_count(active_rows, x), gate_up_format=up_format, down_format=down_format,
        columns=columns, per_token=per_token, scores=scores, limit=limit, alpha=alpha, threads=kernels.threads,
    )  # fmt: skip


def choose_experts(
    logits: jax.Array,  # float32 [T, E]
    per_token: int,
    *,
    scores: Scores,
    active_rows: jax.Array | None = None,  # int32 []
) -> tuple[jax.Array, jax.Array]:  # int32 [T, k], float32 [T, k]
    """The first half of `experts`: the experts of each row, best first, and their scores.

    With native kernels the choices of rows from `active_rows` on are -1.

    Raises:
      ValueError: logits of another type or shape.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32 or not 1 <= per_token <= logits.shape[1]:
        raise ValueError(f"{per_token} experts of a row need float32 logits [T, E], got {logits.dtype} {logits.shape}")
    if not registry.current().native:
        return _row_by_row(lambda logits: choose_experts_by_xla(logits, per_token, scores), logits)
    shape = (logits.shape[0], per_token)
    out = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    rows = native.row_count(active_rows, logits)
    choice, score = native.call("choose_experts", out, logits, rows, per_token=per_token, scores=scores)
    return choice, score


def chosen_experts(
    x: jax.Array,  # [T, D]
    choice: jax.Array,  # int32 [T, k]
    score: jax.Array,  # float32 [T, k]
    places: jax.Array,  # int32 [E]
    gate_up: Weight,  # [e, 2F, D]
    down: Weight,  # [e, D, F]
    *,
    gate_up_bias: jax.Array | None = None,  # [E, 2F] float32
    down_bias: jax.Array | None = None,  # [E, D] float32
    activation: Activation = None,
) -> jax.Array:  # [T, D] float32
    """The second half of `experts`, with weights that lie in any order: those of expert i at `places[i]`.

    A negative choice adds nothing, nor does an expert whose place is negative. Weights at other places are not read by
    native kernels, and what lies there does not matter. Biases are those of all E experts. The bits are those of
    `experts`.

    Raises:
      ValueError: shapes do not fit together.
    """
    none = jnp.zeros((0,), jnp.float32)
    columns = _check_chosen(x, choice, score, places, gate_up, down)
    for bias, width in ((gate_up_bias, 2 * columns), (down_bias, x.shape[1])):
        if bias is not None and (bias.shape != (places.shape[0], width) or bias.dtype != jnp.float32):
            raise ValueError(f"biases of experts must be float32 [E, {width}], got {bias.dtype} {bias.shape}")
    kernels = registry.current()
    if not kernels.native:
        biases = gate_up_bias, down_bias
        mix = lambda x, choice, score: chosen_experts_by_xla(  # noqa: E731
            x, choice, score, places, gate_up, down, biases, activation
        )
        return _row_by_row(mix, x, choice, score)
    (up_data, up_format), (down_data, down_format) = native_weight(gate_up), native_weight(down)
    limit, alpha = _numbers_of(activation)
    return native.call(
        "chosen_experts", jax.ShapeDtypeStruct(x.shape, jnp.float32), x.astype(jnp.float32), choice, score, places,
        up_data, down_data, none if gate_up_bias is None else gate_up_bias, none if down_bias is None else down_bias,
        gate_up_format=up_format, down_format=down_format, columns=columns, limit=limit, alpha=alpha,
        threads=kernels.threads,
    )  # fmt: skip


def _numbers_of(activation: Activation) -> tuple[np.float32, np.float32]:
    """Limit and alpha of an activation, as the native operations take it: a limit of 0 is silu, one below it gelu."""
    clamp = activation if isinstance(activation, Clamp) else Clamp(-1.0 if activation == "gelu" else 0.0, 0.0)
    return np.float32(clamp.limit), np.float32(clamp.alpha)


def _row_by_row(function: Callable[..., Any], *rows: jax.Array) -> Any:
    """A function of rows; with exact numerics of one after the other, so that only experts of a row are read."""
    exact = registry.current().exact and rows[0].shape[0] <= MOST_ROWS
    return map_tiles(function, *rows, tile=1) if exact else function(*rows)


def _check_chosen(
    x: jax.Array, choice: jax.Array, score: jax.Array, places: jax.Array, gate_up: Weight, down: Weight
) -> int:
    """F; ValueError for operands that do not fit together."""
    known = choice.ndim == 2 and choice.shape[0] == x.shape[0] and choice.shape[1] >= 1 and score.shape == choice.shape
    if not known or places.ndim != 1 or {choice.dtype, places.dtype} != {jnp.dtype(jnp.int32)}:
        raise ValueError(f"chosen experts need int32 [T, k] and [E], got {choice.shape} and {places.shape}")
    if score.dtype != jnp.float32:
        raise ValueError(f"scores of chosen experts must be float32, got {score.dtype}")
    return _check_weights(x, gate_up, down)


def _check(x: jax.Array, logits: jax.Array, gate_up: Weight, down: Weight, per_token: int) -> int:
    """F; ValueError for operands that do not fit together."""
    if x.ndim != 2 or logits.ndim != 2 or logits.shape[0] != x.shape[0] or logits.dtype != jnp.float32:
        raise ValueError(f"experts need [T, D] and float32 logits [T, E], got {x.shape} and {logits.shape}")
    if not 1 <= per_token <= logits.shape[1]:
        raise ValueError(f"{per_token} experts of a row, of {logits.shape[1]} that there are")
    return _check_weights(x, gate_up, down)


def _check_weights(x: jax.Array, gate_up: Weight, down: Weight) -> int:
    """F; ValueError for weights that do not fit together."""
    shapes = [_shape(gate_up), _shape(down)]
    (e, rows, width), (others, outputs, columns) = shapes
    if e != others or width != x.shape[1] or outputs != width or rows != 2 * columns:
        raise ValueError(f"experts need [e, 2F, D] and [e, D, F] for rows of {x.shape[1]}, got {shapes}")
    return columns


def _check_biases(gate_up: Weight, down: Weight, gate_up_bias: jax.Array | None, down_bias: jax.Array | None) -> None:
    for bias, weight in ((gate_up_bias, gate_up), (down_bias, down)):
        wanted = weight.shape[:2]
        if bias is not None and (bias.shape != wanted or bias.dtype != jnp.float32):
            raise ValueError(f"the bias of experts {wanted} must be float32 {wanted}, got {bias.dtype} {bias.shape}")


def _shape(weight: Weight) -> tuple[int, int, int]:
    """Shape of the experts' weights, counted in values."""
    shape = weight.shape
    if isinstance(weight, Blocks):
        known = find_format(weight.format)
        if known is None or weight.ndim != 4 or shape[3] != known.nbytes:
            raise ValueError(f"{weight.format!r} blocks {shape} are no [e, outputs, inputs / values, bytes]")
        return shape[0], shape[1], shape[2] * known.values
    if weight.ndim != 3 or weight.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"experts need float32, bfloat16 or float16 [e, outputs, inputs], got {weight.dtype} {shape}")
    return shape[0], shape[1], shape[2]
