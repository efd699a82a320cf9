"""Exact numerics: a row's bits do not depend on the rows beside it, nor on how many there are.

XLA picks another kernel, or another order of sums, for other numbers of rows. With `Kernels.exact` operations on rows
run in tiles of eight rows, one row is padded to a tile, and every tile is computed by the same code. That holds for up
to `MOST_ROWS` rows; chunks of prompts may be larger, and are the same for every method. Native kernels are exact by
themselves.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TILE, MOST_ROWS = 8, 64


def map_tiles(function: Callable[..., Any], *arrays: jax.Array, tile: int = TILE) -> Any:  # [T, ...] -> [T, ...]
    """Apply a function of `tile` rows to all rows, a tile at a time; it returns an array or several.

    The barriers keep XLA from fusing a tile with what is before and after it, which differs from pass to pass.
    """
    rows = arrays[0].shape[0]
    padding = -rows % tile

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(-1, tile, *array.shape[1:])

    def run(operands: tuple[jax.Array, ...]) -> Any:
        return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(operands)))

    out = jax.lax.map(run, tuple(map(split, arrays)))
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:])[:rows], out)
