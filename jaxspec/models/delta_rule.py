"""The gated delta rule over the rows of a tree: each row's result, from the state before the kept rows.

Per value head, with decay a, rate b and a key of length one: S_t = a_t S_(t-1) (I - b_t k_t k_t^T) + b_t v_t k_t^T and
o_t = S_t q_t. Over rows that follow a state S this is, walking a row's ancestors i from the oldest to the newest,

    y := S k_t;  y := a_i y + (k_i . k_t) u_i for each i;  u_t := b_t (v_t - a_t y);  o_t likewise with q_t

So a layer keeps k, u and a of its rows, as attention keeps keys and values, and a tree's mask says who the ancestors
are. Rows are walked in the order of their slots: parents have lower ones. No quotient of decays is formed: they
underflow. The row at position p uses the state before `block_start(p)`, whatever passes its ancestors ran in.

Letters as in `recurrent.py`; T rows of a pass.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.recurrent import BLOCK, RecurrentRows, advance, block_start, fold, loop_turns


class DeltaRows(NamedTuple):
    """Rows of a pass: `query` and `key` `[T, Hk, K]`, `value` `[T, Hk, g, V]`, `decay` and `rate` `[T, Hk, g]`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    rate: jax.Array


def delta_pass(
    layer: RecurrentRows, new: DeltaRows, length: jax.Array, position: jax.Array, mask: jax.Array,
    offset: jax.Array | None = None,
) -> tuple[jax.Array, RecurrentRows]:  # fmt: skip
    """Rows of a tree window after `length` committed rows.

    Args:
      layer: the kept rows; those of the pass are written after the committed ones.
      position: int32 [T], of the rows; at most B rows lie between one and the committed rows.
      mask: bool [T, W], each row's ancestors and itself among the window's slots.
      offset: slot of the first row; None is 0.

    Returns:
      float32 `[T, Hk, g, V]`, and the kept rows.
    """
    T, Hk, g, V = new.value.shape
    first = length - block_start(length)
    place = first if offset is None else first + offset
    rows = layer.rows() | {
        name: jax.lax.dynamic_update_slice(getattr(layer, name), array.reshape(T, Hk, -1).swapaxes(0, 1), (0, place, 0))
        for name, array in (("key", new.key), ("decay", new.decay))
    }
    key, decay, R = rows["key"], rows["decay"], layer.key.shape[1]
    # Rows beyond the next multiple of a block use the next state, and skip what it holds.
    late = block_start(position) > block_start(length)
    slot = jnp.arange(R)
    sees = jax.lax.dynamic_update_slice(jnp.zeros((T, R + mask.shape[1]), bool), mask, (0, first))[:, :R]
    sees = (sees | (slot < first)) & ((slot >= BLOCK) | ~late[:, None])  # [T, R]

    def begin(turn: jax.Array, carry: tuple) -> tuple:
        """S k and S q of the rows that use the layer's state, then of the late ones."""
        state, y, z = carry
        state = fold(dataclasses.replace(layer.with_rows(rows), state=state), turn * BLOCK)
        mine = ((turn == 0) | late)[:, None, None]
        found = _product(state, loop_turns(length, new.key.shape[2]), new.key, new.query)
        return state, *(jnp.where(mine, x, old) for x, old in zip(found, (y, z), strict=True))

    zeros = jnp.zeros((T, Hk, g * V))
    # Columns of y are those of keys, columns of z those of queries.
    _, y, z = jax.lax.fori_loop(0, 1 + late.any().astype(jnp.int32), begin, (layer.state, zeros, zeros))
    y, z = (array.reshape(T, Hk, g, V) for array in (y, z))

    def walk(i: jax.Array, carry: tuple) -> tuple:
        """One slot, for all rows that see it."""
        y, z, values = carry
        value = jax.lax.dynamic_index_in_dim(values, i, 1, keepdims=False).reshape(Hk, g, V)
        k = jax.lax.dynamic_index_in_dim(key, i, 1, keepdims=False)
        a = jax.lax.dynamic_index_in_dim(decay, i, 1, keepdims=False)[:, :, None]
        seen = jax.lax.dynamic_index_in_dim(sees, i, 1, keepdims=False)
        earlier = seen & (i != place + jnp.arange(T))  # a row's result has its own value, which needs its ancestors
        y, z = (add(x, rows, mask, a, k, value) for x, rows, mask in ((y, new.key, earlier), (z, new.query, seen)))
        return y, z, values

    def add(x: jax.Array, rows: jax.Array, mask: jax.Array, a: jax.Array, k: jax.Array, value: jax.Array) -> jax.Array:
        """x := a x + (k . row) u in the rows of a mask."""
        # Of two products that are added, the compiler rounds either one alone; a selected one is never that one.
        mask = mask[:, None, None, None]
        added = jnp.where(mask, _dot(k, rows, mask[:, 0])[:, :, None, None] * value, 0.0)
        return jnp.where(mask, a, 1.0) * x + added

    def correct(t: jax.Array, carry: tuple) -> tuple:
        """The value of row t, whose ancestors have been walked; then the row is one for those after it."""
        y, z, values = carry
        v, b, a, before = (
            jax.lax.dynamic_index_in_dim(array, t, 0, keepdims=False) for array in (new.value, new.rate, new.decay, y)
        )
        u = b[..., None] * (v - a[..., None] * before)
        values = jax.lax.dynamic_update_slice(values, u.reshape(Hk, 1, g * V), (0, place + t, 0))
        return walk(place + t, (y, z, values))

    carry = jax.lax.fori_loop(0, place, walk, (y, z, layer.value))
    _, z, values = jax.lax.fori_loop(0, loop_turns(length, T), correct, carry)
    return z, layer.with_rows(rows | {"value": values})


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
        done, layer = delta_pass(layer, rows, at, at + steps, mask)
        turns = (block_start(jnp.minimum(at + BLOCK, length + count)) - block_start(at)) // BLOCK
        layer = jax.lax.fori_loop(0, turns, lambda _, layer: advance(layer, length), layer)
        return layer, jax.lax.dynamic_update_slice_in_dim(out, done, begin, axis=0)

    pieces = (count + BLOCK - 1) // BLOCK
    layer, out = jax.lax.fori_loop(0, pieces, run, (layer, jnp.zeros(padded.value.shape)))
    return out[:T], dataclasses.replace(layer, inputs=inputs)


def _dot(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
    """Products over the last dimension, 0 outside of a mask; the order of additions depends on its size alone."""
    products = jnp.where(mask, a * b, 0.0)
    width = 1 << (products.shape[-1] - 1).bit_length()
    products = jnp.pad(products, [(0, 0)] * (products.ndim - 1) + [(0, width - products.shape[-1])])
    while width > 1:
        width //= 2
        products = products[..., :width] + products[..., width:]
    return products[..., 0]


def _product(state: jax.Array, width: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
    """`[Hk, K, n]` times each of some rows `[T, Hk, K]`: `[T, Hk, n]`, added up in the order of K, the `width`."""

    def add(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # XLA's own products, of one row and of several, add in other orders.
        column = jax.lax.dynamic_index_in_dim(state, k, 1, keepdims=False)
        taken = (jax.lax.dynamic_index_in_dim(x, k, 2) for x in rows)
        return tuple(total + x * column for total, x in zip(sums, taken, strict=True))

    zeros = jnp.zeros((*rows[0].shape[:2], state.shape[2]))
    return jax.lax.fori_loop(0, width, add, (zeros,) * len(rows))
