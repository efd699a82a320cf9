"""A layer's gated delta rule: the rows of a pass, and chunks of a prompt.

The row at position p uses the state before `block_start(p)`, whatever passes its ancestors ran in
(`pallas_kernels/delta_rule/api.py` has the equations). Letters as in `recurrent.py`; T rows of a pass.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.models.recurrent import BLOCK, RecurrentRows, advance, block_start
from pallas_kernels.delta_rule import DeltaRows, delta_rule


def delta_pass(
    layer: RecurrentRows, new: DeltaRows, length: jax.Array, position: jax.Array, mask: jax.Array,
    offset: jax.Array | None = None, active_rows: jax.Array | None = None,
) -> tuple[jax.Array, RecurrentRows]:  # fmt: skip
    """Rows of a tree window after `length` committed rows.

    Args:
      layer: the kept rows; those of the pass are written after the committed ones.
      position: int32 [T], of the rows; at most B rows lie between one and the committed rows.
      mask: bool [T, W], each row's ancestors and itself among the window's slots.
      offset: slot of the first row; None is 0.
      active_rows: int32 [], the rows that matter, which come first; None for all.

    Returns:
      float32 `[T, Hk, g, V]`, and the kept rows.
    """
    start = block_start(length)
    # Rows beyond the next multiple of a block use the next state, and skip what it holds.
    late = block_start(position) > start
    out, kept = delta_rule(new, layer.kept(), length - start, mask, late, offset, block=BLOCK, active_rows=active_rows)
    return out, dataclasses.replace(layer, key=kept.key, value=kept.value, decay=kept.decay)


def delta_chunk(
    layer: RecurrentRows, new: DeltaRows, length: jax.Array, count: jax.Array
) -> tuple[jax.Array, RecurrentRows]:
    """A chain of which the first `count` rows are committed; results of the others are zeros or arbitrary.

    `layer.inputs` stay as they are. Returns float32 `[T, Hk, g, V]` and the rows after the commit.
    """
    T = new.key.shape[0]
    padded = DeltaRows(*(jnp.pad(array, ((0, -T % BLOCK), *((0, 0),) * (array.ndim - 1))) for array in new))
    mask, steps = jnp.tril(jnp.ones((BLOCK, BLOCK), bool)), jnp.arange(BLOCK)
    inputs, layer = layer.inputs, dataclasses.replace(layer, inputs=None)

    def run(piece: jax.Array, carry: tuple) -> tuple:
        layer, out = carry
        begin = piece * BLOCK
        rows = DeltaRows(*(jax.lax.dynamic_slice_in_dim(array, begin, BLOCK) for array in padded))
        at = length + begin
        done, layer = delta_pass(layer, rows, at, at + steps, mask, active_rows=jnp.minimum(count - begin, BLOCK))
        turns = (block_start(jnp.minimum(at + BLOCK, length + count)) - block_start(at)) // BLOCK
        layer = jax.lax.fori_loop(0, turns, lambda _, layer: advance(layer, length), layer)
        return layer, jax.lax.dynamic_update_slice_in_dim(out, done, begin, axis=0)

    pieces = (count + BLOCK - 1) // BLOCK
    layer, out = jax.lax.fori_loop(0, pieces, run, (layer, jnp.zeros(padded.value.shape)))
    return out[:T], dataclasses.replace(layer, inputs=inputs)
