"""A recurrent block of a layer, for one shard: projected rows in, what `out` takes and the layer's kept rows out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.delta_rule import delta_chunk, delta_pass
from jaxspec.models.params import Params
from jaxspec.models.recurrent import (
    RecurrentConfig,
    RecurrentRows,
    block_start,
    commit_chunk,
    predecessors,
    write_inputs,
)  # fmt: skip
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.delta_rule import DeltaRows, short_conv
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.rms_norm import rms_norm

# Added to the squared length of a query or key.
_LENGTH_EPS = 1e-6


def mix_rows_in_time(
    layer: Params, cfg: ModelConfig, x: jax.Array, rows: RecurrentRows, length: jax.Array, position: jax.Array,
    window: Any, active_rows: jax.Array | None, count: jax.Array | None,
) -> tuple[jax.Array, RecurrentRows]:  # fmt: skip
    """Normed rows `x` `[T, D]` through the block: float32 `[T, Hk, result_width]`, and the rows that are kept.

    Args:
      rows: the layer's, for `length` committed rows.
      window: the `Window` of a pass, whose rows are written after the committed ones; None for a chunk.
      count: int32 [], rows of a chunk that are committed.
    """
    recurrent = cfg.recurrent
    assert recurrent is not None
    delta = recurrent.kind == "delta"
    T, steps, first = x.shape[0], recurrent.taps - 1, length - block_start(length)
    names = ("mix_in", "mix_gate", "mix_rates") if delta else ("mix_in",)

    def project(active: jax.Array | None, x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_project(layer[name], x, active) for name in names)

    projected = map_active_rows(project, active_rows, x)
    inputs, gate = projected[0], None
    if not delta:
        gate_in, gate, inputs = jnp.split(inputs, 3, axis=2)
        inputs = gate_in * inputs
    conv = functools.partial(short_conv, layer["conv"], silu=delta, active_rows=active_rows)
    if window is None:
        before = predecessors(T, steps, first, None)
        mixed = conv(rows.inputs, inputs, before, first)
        assert count is not None
        kept = commit_chunk(rows.inputs, inputs, length, count)
    else:
        before = predecessors(T, steps, first, window.mask)
        place = first if window.offset is None else first + window.offset
        kept = write_inputs(rows.inputs, inputs, place)
        mixed = conv(kept, inputs, before, place)
    rows = dataclasses.replace(rows, inputs=kept)
    if gate is not None:
        return gate * mixed, rows
    new = _delta_rows(layer, recurrent, mixed, projected[2])
    if window is None:
        assert count is not None
        out, rows = delta_chunk(rows, new, length, count)
    else:
        out, rows = delta_pass(rows, new, length, position, window.mask, window.offset, active_rows)
    out = rms_norm(out, layer["mix_norm"], cfg.norm_eps) * jax.nn.silu(projected[1].reshape(out.shape))
    return out.reshape(T, -1, recurrent.result_width), rows


def _delta_rows(layer: Params, recurrent: RecurrentConfig, mixed: jax.Array, rates: jax.Array) -> DeltaRows:
    """Queries, keys and values from convolved rows `[T, Hk, n]`, decays and rates from `[T, Hk, 2 g]`."""
    K, g = recurrent.key_dim, recurrent.group
    query, key, value = mixed[..., :K], mixed[..., K : 2 * K], mixed[..., 2 * K :]
    query, key = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _LENGTH_EPS) for x in (query, key))
    decay = jnp.exp(layer["decay"] * jax.nn.softplus(rates[..., g:] + layer["decay_bias"]))
    value = value.reshape(*value.shape[:2], g, -1)
    return DeltaRows(query * K**-0.5, key, value, decay, jax.nn.sigmoid(rates[..., :g]))


def _project(weight: Any, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:
    """Rows times `[Hk, n, D]`: `[T, D]` -> `[T, Hk, n]` float32."""
    heads, n = weight.shape[:2]
    return linear(x, as_matrix(weight, heads * n), active_rows).reshape(x.shape[0], heads, n)
