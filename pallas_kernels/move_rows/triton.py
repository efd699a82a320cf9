"""Rows of all layers' caches moved in one launch, in Pallas' Triton dialect: NVIDIA GPUs from Ampere on.

A program moves the rows of one KV head of one cache, some columns of them. It has read them all before it writes any,
and no other program reads or writes there. So the caches can be changed in place.

Letters: K KV heads, S slots, H head width, P rows that are moved.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import registry

NAME = "jaxspec_move_rows"
# Numbers that a program holds in registers.
MOST_NUMBERS = 8192
# Caches of one launch: a pointer to each goes in and out, and a kernel takes 4 KB of arguments.
MOST_CACHES = 160
MIN_COLUMNS = 16


def supports(caches: Sequence[jax.Array], source: jax.Array, start: jax.Array) -> bool:
    """Whether `move_rows` takes a call: as many rows as registers hold, caches whose numbers 32 bits count."""
    few = 0 < source.shape[0] and _power_of_two(source.shape[0]) * MIN_COLUMNS <= MOST_NUMBERS
    return few and all(math.prod(cache.shape) < 1 << 31 for cache in caches)


def move_rows(
    caches: tuple[jax.Array, ...],  # [K, S, H] each
    source: jax.Array,  # int32 [P]
    start: jax.Array,  # int32 []
) -> tuple[jax.Array, ...]:
    """The operation, with the contract of `api.move_rows`."""
    alike: dict[tuple, list[int]] = {}
    for index, cache in enumerate(caches):
        alike.setdefault((cache.shape, cache.dtype), []).append(index)
    moved = list(caches)
    for indices in alike.values():
        for first in range(0, len(indices), MOST_CACHES):
            part = indices[first : first + MOST_CACHES]
            for index, cache in zip(part, _move(tuple(caches[i] for i in part), source, start), strict=True):
                moved[index] = cache
    return tuple(moved)


def _move(caches: tuple[jax.Array, ...], source: jax.Array, start: jax.Array) -> list[jax.Array]:
    """Move the rows of caches of one shape and dtype."""
    K, _, H = caches[0].shape
    rows = _power_of_two(source.shape[0])
    columns = min(_power_of_two(H), MOST_NUMBERS // rows)
    return pl.pallas_call(
        functools.partial(_move_head, rows=rows, columns=columns),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        grid=(len(caches), K, pl.cdiv(H, columns)),
        input_output_aliases={2 + index: index for index in range(len(caches))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=registry.current().interpret,
        name=NAME,
    )(source, jnp.reshape(start, 1), *caches)


def _move_head(source_ref, start_ref, *refs, rows: int, columns: int):
    """One program. `refs` are the caches, then the same ones as results."""
    count, H = source_ref.shape[0], refs[0].shape[2]
    cache, kv_head = pl.program_id(0), pl.program_id(1)
    column = pl.program_id(2) * columns + jnp.arange(columns)[None, :]
    row = jnp.arange(rows)
    slot = plgpu.load(source_ref.at[row], mask=row < count, other=0)
    mask = jnp.broadcast_to((row < count)[:, None] & (column < H), (rows, columns))
    half = len(refs) // 2
    for index, (given, result) in enumerate(zip(refs[:half], refs[half:], strict=True)):

        @pl.when(cache == index)
        def _(before=given, after=result):
            moved = plgpu.load(before.at[kv_head, slot[:, None], column], mask=mask, other=0)
            if not registry.current().interpret:
                # Other threads of the program may read what this one writes.
                plgpu.debug_barrier()
            plgpu.store(after.at[kv_head, start_ref[0] + row[:, None], column], moved, mask=mask)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
