"""Passes whose number of rows is known only at run time."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Row counts that such a pass is compiled for: each adds two seconds of compilation. On two CPU cores passes of 2 and 4
# rows cost nearly what one of 8 costs: steps between 1 and 8 would save little.
ROW_STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Time of a pass of so many rows over that of one row, on two CPU cores (docs/results/rounds-cpu.md for 8 and 16; the
# others are rougher); on accelerators a pass is bound by its weights far beyond that.
CPU_PASS_COST = ((1, 1.0), (8, 1.6), (16, 2.2), (32, 3.2), (64, 4.8), (128, 8.0))


def map_live_rows(function: Callable[..., Any], live: jax.Array | None, *arrays: jax.Array) -> Any:
    """Apply a function of rows to about the first `live` rows of `arrays`, and fill the rest up with zeros.

    On CPU, where rows cost time, a switch picks the smallest of a few static row counts. Elsewhere all rows are
    computed: on accelerators a few rows cost what one costs, and a data-dependent branch would stall the host.

    Args:
      function: from arrays [t, ...] to a pytree of arrays [t, ...], for any t. What it closes over is only read.
      live: int32 [], at least 1; None computes every row.
      arrays: [T, ...] each.
    """
    rows = arrays[0].shape[0]
    sizes = row_sizes(rows)
    if live is None or len(sizes) == 1:
        return function(*arrays)

    def on_first(size: int) -> Callable[[], Any]:
        def branch() -> Any:
            out = function(*(array[:size] for array in arrays))
            return jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, rows - size)] + [(0, 0)] * (leaf.ndim - 1)), out)

        return branch

    return lax.switch(jnp.searchsorted(jnp.array(sizes, jnp.int32), live), [on_first(size) for size in sizes])


def row_sizes(rows: int) -> list[int]:
    """Row counts that a pass of up to `rows` rows is compiled for, ascending."""
    steps = ROW_STEPS if jax.default_backend() == "cpu" else ()
    return [*(size for size in steps if size < rows), rows]


def computed_rows(live: int, rows: int) -> int:
    """Rows that such a pass computes for `live` ones."""
    return next(size for size in row_sizes(rows) if size >= min(live, rows))


def relative_pass_cost(live: int, rows: int) -> float:
    """Time of a pass with `live` of `rows` rows over that of a one-row pass: a rough, fixed figure for decisions."""
    if jax.default_backend() != "cpu":
        return 1.0 + 0.003 * (live - 1)
    computed = computed_rows(live, rows)
    for (low, cheap), (high, dear) in itertools.pairwise(CPU_PASS_COST):
        if computed <= high:
            return cheap + (dear - cheap) * (computed - low) / (high - low)
    return CPU_PASS_COST[-1][1] * computed / CPU_PASS_COST[-1][0]
