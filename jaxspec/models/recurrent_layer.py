"""A recurrent block of a layer, for one shard: projected rows in, what `out` takes and the layer's kept rows out."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params
from jaxspec.models.recurrent import (
    RecurrentRows,
    block_start,
    commit_chunk,
    convolve,
    predecessors,
    write_inputs,
)  # fmt: skip
from pallas_kernels.active_rows import map_active_rows
from pallas_kernels.linear import as_matrix, linear


def mix_rows_in_time(
    layer: Params, cfg: ModelConfig, x: jax.Array, rows: RecurrentRows, length: jax.Array, window: Any,
    active_rows: jax.Array | None, count: jax.Array | None,
) -> tuple[jax.Array, RecurrentRows]:  # fmt: skip
    """Normed rows `x` `[T, D]` through the block: float32 `[T, Hk, result_width]`, and the rows that are kept.

    Args:
      rows: the layer's, for `length` committed rows.
      window: the `Window` of a pass, whose rows are written after the committed ones; None for a chunk.
      count: int32 [], rows of a chunk that are committed.
    """
    recurrent = cfg.recurrent
    assert recurrent is not None
    T, steps, first = x.shape[0], recurrent.taps - 1, length - block_start(length)
    projected = map_active_rows(lambda active, x: _project(layer["mix_in"], x, active), active_rows, x)
    gate_in, gate_out, inputs = jnp.split(projected, 3, axis=2)
    inputs = gate_in * inputs
    if window is None:
        assert count is not None
        before = predecessors(T, steps, first, None, None)
        wide = jnp.pad(rows.inputs, ((0, 0), (0, T), (0, 0)))
        mixed = convolve(layer["conv"], write_inputs(wide, inputs, first), inputs, before)
        kept = commit_chunk(rows.inputs, inputs, length, count)
    else:
        before = predecessors(T, steps, first, window.mask, window.offset)
        kept = write_inputs(rows.inputs, inputs, first if window.offset is None else first + window.offset)
        mixed = convolve(layer["conv"], kept, inputs, before)
    return gate_out * mixed, RecurrentRows(kept)


def _project(weight: Any, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:
    """Rows times `[Hk, n, D]`: `[T, D]` -> `[T, Hk, n]` float32."""
    heads, n = weight.shape[:2]
    return linear(x, as_matrix(weight, heads * n), active_rows).reshape(x.shape[0], heads, n)
