"""The gated delta rule left to XLA; see `api.py`. A row's bits do not depend on the rows beside it on a CPU."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DeltaRows(NamedTuple):
    """Rows of a pass: `query` and `key` `[T, Hk, K]`, `value` `[T, Hk, g, V]`, `decay` and `rate` `[T, Hk, g]`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    rate: jax.Array


class KeptRows(NamedTuple):
    """Rows that a layer keeps: `key` `[Hk, R, K]`, `value` `[Hk, R, g V]` (corrected, the u of the rule) and `decay`
    `[Hk, R, g]`; and the `state` `[Hk, K, g V]` before the first of them."""

    key: jax.Array
    value: jax.Array
    decay: jax.Array
    state: jax.Array


def delta_rule(
    new: DeltaRows, kept: KeptRows, first: jax.Array, mask: jax.Array, late: jax.Array, offset: jax.Array | None,
    *, block: int,
) -> tuple[jax.Array, KeptRows]:  # fmt: skip
    """As in `api.py`: walks the kept rows one by one, for all rows of the pass at once."""
    T, Hk, g, V = new.value.shape
    place = first if offset is None else first + offset
    key, decay = (
        jax.lax.dynamic_update_slice(old, array.swapaxes(0, 1), (0, place, 0))
        for old, array in ((kept.key, new.key), (kept.decay, new.decay))
    )
    R = key.shape[1]
    slot = jnp.arange(R)
    sees = jax.lax.dynamic_update_slice(jnp.zeros((T, R + mask.shape[1]), bool), mask, (0, first))[:, :R]
    sees = (sees | (slot < first)) & ((slot >= block) | ~late[:, None])  # [T, R]

    def begin(turn: jax.Array, carry: tuple) -> tuple:
        """S k and S q of the rows that use the layer's state, then of the late ones."""
        state, y, z = carry
        state = fold(KeptRows(key, kept.value, decay, state), turn * block)
        mine = ((turn == 0) | late)[:, None, None]
        found = _product(state, loop_turns(first, new.key.shape[2]), new.key, new.query)
        return state, *(jnp.where(mine, x, old) for x, old in zip(found, (y, z), strict=True))

    zeros = jnp.zeros((T, Hk, g * V))
    # Columns of y are those of keys, columns of z those of queries.
    _, y, z = jax.lax.fori_loop(0, 1 + late.any().astype(jnp.int32), begin, (kept.state, zeros, zeros))
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

    carry = jax.lax.fori_loop(0, place, walk, (y, z, kept.value))
    _, z, values = jax.lax.fori_loop(0, loop_turns(first, T), correct, carry)
    return z, KeptRows(key, values, decay, kept.state)


def fold(kept: KeptRows, count: jax.Array) -> jax.Array:
    """The state after the first `count` rows."""
    group = kept.decay.shape[2]
    state = kept.state.reshape(*kept.state.shape[:2], group, -1)  # [Hk, K, g, V]
    values = kept.value.reshape(*kept.value.shape[:2], group, -1)

    def add(row: jax.Array, state: jax.Array) -> jax.Array:
        key, value, decay = (
            jax.lax.dynamic_index_in_dim(array, row, 1, keepdims=False) for array in (kept.key, values, kept.decay)
        )
        # Of two products that are added, the compiler rounds either one alone; a selected one is never that one.
        added = jnp.where(row < count, value[:, None] * key[:, :, None, None], 0.0)
        return decay[:, None, :, None] * state + added

    return jax.lax.fori_loop(0, count, add, state).reshape(kept.state.shape)


def fold_at_once(kept: KeptRows, block: int) -> jax.Array:
    """The state after the first `block` rows, by one product over all of them."""
    group = kept.decay.shape[2]
    state = kept.state.reshape(*kept.state.shape[:2], group, -1)
    values = kept.value.reshape(*kept.value.shape[:2], group, -1)
    decay = kept.decay[:, :block]
    after = jnp.cumprod(decay[:, ::-1], axis=1)[:, ::-1]  # of a row and those after it
    later = jnp.concatenate([after[:, 1:], jnp.ones_like(after[:, :1])], axis=1)
    added = jnp.einsum("hrgv,hrk->hkgv", values[:, :block] * later[..., None], kept.key[:, :block])
    return (state * after[:, 0, None, :, None] + added).reshape(kept.state.shape)


def loop_turns(number: jax.Array, count: int) -> jax.Array:
    """`count`, where a number is not negative, but no constant: a loop of so many turns stays one in every program.

    What XLA unrolls or merges with its surroundings may be rounded otherwise there.
    """
    return jnp.where(number < 0, 0, jnp.int32(count))


def short_conv(
    weight: jax.Array, kept: jax.Array, x: jax.Array, before: jax.Array, place: jax.Array, *, silu: bool
) -> jax.Array:
    """As in `api.py`."""
    taken = jnp.take(kept, jnp.maximum(before, 0), axis=1, mode="clip")  # [Hk, taps - 1, T, n]
    own = jnp.take(x, jnp.maximum(before - place, 0), axis=0, mode="clip").transpose(2, 0, 1, 3)
    taken = jnp.where((before >= place)[None, :, :, None], own, taken)
    # Selected after they are multiplied: else the compiler may round either of two products that are added alone.
    weighted = taken * weight[:, :, :-1].transpose(0, 2, 1)[:, :, None]
    weighted = jnp.where((before >= 0)[None, :, :, None], weighted, 0.0)
    out = weighted[:, 0]
    for tap in range(1, before.shape[0]):
        out = out + weighted[:, tap]
    out = out.swapaxes(0, 1) + x * weight[:, :, -1]
    return jax.nn.silu(out) if silu else out


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
