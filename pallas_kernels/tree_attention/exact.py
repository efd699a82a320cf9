"""Attention of exact numerics (`pallas_kernels/exact_rows.py`): each row by itself, over fixed blocks of positions.

A row sees one key at each position of its own text: in a slot of the prefix, or, for those of its ancestors in the tree
and its own, of the window. `path_slots` says which. Whether a token lies in the prefix or in the window differs from
pass to pass; its position does not. So keys are read by position, in blocks that begin at multiples of `BLOCK`, and
parts of the prefix, which run at the same time, begin at multiples of `PART`.

The reference runs on any device. On NVIDIA GPUs two Pallas kernels do the same: a program for each row, KV head and
part, and a merge of the parts in their order.

Letters: T rows, K KV heads, G query heads per KV head, H head width, S cache slots, W window slots.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import registry
from pallas_kernels.exact_rows import TILE
from pallas_kernels.tree_attention.reference import MASKED, PRECISION, bound_scores
from pallas_kernels.tree_attention.xla import write_rotated

BLOCK, PART = 64, 256
NAME = "jaxspec_exact_attention"


def tree_attention(
    qkv, cos, sin, key, value, length, window_mask, position, *, offset, sliding_window, softcap=None, sinks=None,
    dtype: Any = jnp.float32,
):  # fmt: skip
    """The operation, with the contract of `api.tree_attention`, for rows with a window."""
    query, key, value = write_rotated(qkv, cos, sin, key, value, length, offset)
    slots = path_slots(window_mask, position, length, key.shape[1], sliding_window)
    # One row and eight rows are the same call; a row without a position attends to nothing.
    rows, padding = query.shape[0], -query.shape[0] % TILE
    query, slots = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (query.astype(key.dtype), slots))
    position = jnp.pad(position, (0, padding), constant_values=-1)
    fused = "triton" in registry.current().candidates("tree_attention") and key.dtype != jnp.float32
    if fused and softcap is None and sinks is None and query.shape[3] <= 256:
        return _attend_by_kernel(query, key, value, slots, position, dtype)[:rows], key, value
    attend = functools.partial(_attend_row, key=key, value=value, softcap=softcap, sinks=sinks)
    out = lax.map(
        lambda row: lax.optimization_barrier(attend(*lax.optimization_barrier(row))), (query, slots, position)
    )
    return out[:rows].astype(dtype), key, value


def path_slots(window_mask, position, length, num_slots, sliding_window):  # -> int32 [T, S]
    """Cache slot of the token at each position of a row's text, -1 where it sees none; S up to a multiple of `PART`."""
    width = window_mask.shape[1]
    at = jnp.arange(-(-num_slots // PART) * PART, dtype=jnp.int32)[None, :]
    # Window slots that a row sees ascend along its path, and end with the row itself.
    seen = jnp.sort(jnp.where(window_mask, jnp.arange(width, dtype=jnp.int32)[None, :], width), axis=1)
    count = window_mask.sum(axis=1, dtype=jnp.int32)[:, None]
    place = at - (position[:, None] - count + 1)
    in_window = jnp.take_along_axis(seen, jnp.clip(place, 0, width - 1), axis=1)
    inside = (place >= 0) & (place < count)
    slots = jnp.where(inside, length + in_window, jnp.where(at < length, at, -1))
    return slots if sliding_window is None else jnp.where(at > position[:, None] - sliding_window, slots, -1)


def _attend_row(query, slots, position, *, key, value, softcap, sinks):
    """One row: rotated query [K, G, H], slots [S], position [] -> [K, G, H] float32."""
    K, G, H = query.shape

    def add(block, state):
        highest, total, out = state
        slot = lax.dynamic_slice_in_dim(slots, block * BLOCK, BLOCK)
        keys, values = (jnp.take(cache, jnp.maximum(slot, 0), axis=1, mode="clip") for cache in (key, value))
        scores = jnp.einsum("kgh,kbh->kgb", query, keys, precision=PRECISION, preferred_element_type=jnp.float32)
        scores = jnp.where(slot >= 0, bound_scores(scores * H**-0.5, softcap), MASKED)
        largest = jnp.maximum(highest, scores.max(-1))
        weights = jnp.where(slot >= 0, jnp.exp(scores - largest[..., None]), 0.0)
        scale = jnp.exp(highest - largest)
        added = jnp.einsum(
            "kgb,kbh->kgh", weights.astype(value.dtype), values, precision=PRECISION,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return largest, total * scale + weights.sum(-1), out * scale[..., None] + added

    start = jnp.full((K, G), MASKED), jnp.zeros((K, G)), jnp.zeros((K, G, H))
    highest, total, out = lax.fori_loop(0, position // BLOCK + 1, add, start)
    if sinks is not None:
        largest = jnp.maximum(highest, sinks)
        scale = jnp.exp(highest - largest)
        total, out = total * scale + jnp.exp(sinks - largest), out * scale[..., None]
    return out / jnp.where(total > 0, total, 1.0)[..., None]


def _attend_by_kernel(query, key, value, slots, position, dtype):
    """Two launches: the parts, and their merge; [T, K, G, H]."""
    from jax.experimental.pallas import triton as plt

    (T, K, G, H), parts = query.shape, slots.shape[1] // PART
    sums = jax.ShapeDtypeStruct((T, K, parts, G), jnp.float32)
    interpret = registry.current().interpret
    largest, total, values = pl.pallas_call(
        _attend_part,
        out_shape=[sums, sums, jax.ShapeDtypeStruct((*sums.shape, H), jnp.float32)],
        grid=(parts, T, K),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=NAME,
    )(query, key, value, slots, position)
    return pl.pallas_call(
        _merge_parts,
        out_shape=jax.ShapeDtypeStruct((T, K, G, H), dtype),
        grid=(T, K),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=f"{NAME}_merge",
    )(largest, total, values, position)


def _attend_part(query_ref, key_ref, value_ref, slots_ref, position_ref, *out):
    """One program: a row's queries of one KV head over one part of its positions."""
    from jax.experimental.pallas import triton as plt

    from pallas_kernels.tree_attention.triton import LAST, LOG2_E, Sums

    part, row, kv_head = (pl.program_id(axis) for axis in range(3))
    G, H = query_ref.shape[2:]
    heads, width = _padded(G), _padded(H)
    head, column = jnp.arange(heads, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
    both = (head < G)[:, None] & (column < H)[None, :]
    query = plt.load(query_ref.at[row, kv_head, head[:, None], column[None, :]], mask=both, other=0.0)

    def add(carry):
        first, state = carry
        slot = plt.load(slots_ref.at[row, first + jnp.arange(BLOCK, dtype=jnp.int32)])
        seen = slot >= 0
        place = (kv_head, jnp.maximum(slot, 0)[:, None], column[None, :])
        mask = seen[:, None] & (column < H)[None, :]
        keys, values = (plt.load(ref.at[place], mask=mask, other=0.0) for ref in (key_ref, value_ref))
        product = lax.dot_general(query, keys, LAST, precision=PRECISION, preferred_element_type=jnp.float32)
        scores = product * (H**-0.5 * LOG2_E)
        return first + BLOCK, state.add(scores, jnp.broadcast_to(seen[None, :], scores.shape), values)

    state = Sums(
        jnp.full(heads, MASKED, jnp.float32), jnp.zeros(heads, jnp.float32), jnp.zeros((heads, width), jnp.float32)
    )
    stop = jnp.minimum((part + 1) * PART, plt.load(position_ref.at[row]) + 1)
    _, state = lax.while_loop(lambda carry: carry[0] < stop, add, (part * PART, state))
    plt.store(out[0].at[row, kv_head, part, head], state.largest, mask=head < G)
    plt.store(out[1].at[row, kv_head, part, head], state.total, mask=head < G)
    plt.store(out[2].at[row, kv_head, part, head[:, None], column[None, :]], state.values, mask=both)


def _merge_parts(largest_ref, total_ref, values_ref, position_ref, out_ref):
    """One program: the parts of a row's queries of one KV head, one after another."""
    from jax.experimental.pallas import triton as plt

    row, kv_head = pl.program_id(0), pl.program_id(1)
    G, H = out_ref.shape[2:]
    heads, width = _padded(G), _padded(H)
    head, column = jnp.arange(heads, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
    both = (head < G)[:, None] & (column < H)[None, :]

    def add(carry):
        part, highest, total, values = carry
        here = plt.load(largest_ref.at[row, kv_head, part, head], mask=head < G, other=MASKED)
        count = plt.load(total_ref.at[row, kv_head, part, head], mask=head < G, other=0.0)
        more = plt.load(values_ref.at[row, kv_head, part, head[:, None], column[None, :]], mask=both, other=0.0)
        most = jnp.maximum(highest, here)
        old, new = jnp.exp2(highest - most), jnp.exp2(here - most)
        return part + 1, most, total * old + count * new, values * old[:, None] + more * new[:, None]

    start = jnp.int32(0), jnp.full(heads, MASKED, jnp.float32), jnp.zeros(heads, jnp.float32)
    parts = plt.load(position_ref.at[row]) // PART + 1
    carry = (*start, jnp.zeros((heads, width), jnp.float32))
    _, _, total, values = lax.while_loop(lambda carry: carry[0] < parts, add, carry)
    result = values / jnp.where(total > 0, total, 1.0)[:, None]
    plt.store(out_ref.at[row, kv_head, head[:, None], column[None, :]], result.astype(out_ref.dtype), mask=both)


def _padded(number: int) -> int:
    return max(1 << (number - 1).bit_length(), 16)
