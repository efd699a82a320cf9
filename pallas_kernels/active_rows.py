"""Passes whose number of rows is known only at run time."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import registry
from pallas_kernels.registry import Kernels

# Row counts that such a pass is compiled for: each adds two seconds of compilation. On two CPU cores passes of 2 and 4
# rows cost nearly what one of 8 costs: steps between 1 and 8 would save little.
ROW_STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Time of a pass of so many rows over that of one row, on two CPU cores (docs/results); on accelerators a pass is bound
# by its weights far beyond that.
XLA_CPU_PASS_COST = ((1, 1.0), (8, 1.6), (16, 2.2), (32, 3.2), (64, 4.8), (128, 8.0))
NATIVE_PASS_COST = ((1, 1.0), (4, 1.08), (8, 1.24), (16, 1.75), (32, 3.1), (64, 5.9))
# Of weights in blocks, whose single rows cost a third as much.
BLOCKS_PASS_COST = ((1, 1.0), (2, 1.11), (4, 1.45), (8, 2.1), (16, 4.0), (32, 7.9))


def map_active_rows(function: Callable[..., Any], active_rows: jax.Array | None, *arrays: jax.Array) -> Any:
    """Apply a function of rows to about the first `active_rows` rows of `arrays`, and fill the rest up with zeros.

    Native kernels take the number of active rows as data. Under XLA on CPU, where rows cost time, a switch picks the
    smallest of a few static row counts. Elsewhere all rows are computed: on accelerators a few rows cost what one
    costs, and a data-dependent branch would stall the host.

    Args:
      function: from `active_rows` or None for all, and arrays [t, ...], to a pytree of arrays [t, ...], for any t.
        What it closes over is only read.
      active_rows: int32 [], at least 1; None computes every row.
      arrays: [T, ...] each.
    """
    rows = arrays[0].shape[0]
    sizes = row_sizes(rows)
    if active_rows is None or len(sizes) == 1 or registry.current().native:
        return function(active_rows, *arrays)

    def on_first(size: int) -> Callable[[], Any]:
        def branch() -> Any:
            out = function(None, *(array[:size] for array in arrays))
            return jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, rows - size)] + [(0, 0)] * (leaf.ndim - 1)), out)

        return branch

    return lax.switch(jnp.searchsorted(jnp.array(sizes, jnp.int32), active_rows), [on_first(size) for size in sizes])


def row_sizes(rows: int) -> list[int]:
    """Row counts that an XLA pass of up to `rows` rows is compiled for, ascending."""
    steps = ROW_STEPS if registry.current().platform == "cpu" else ()
    return [*(size for size in steps if size < rows), rows]


def computed_rows(active_rows: int, rows: int, kernels: Kernels | None = None) -> int:
    """Rows that such a pass computes for `active_rows` ones; `kernels` are the current ones if not given."""
    kernels = kernels or registry.current()
    if kernels.native:
        return min(active_rows, rows)
    with registry.using(kernels):
        return next(size for size in row_sizes(rows) if size >= min(active_rows, rows))


def relative_pass_cost(active_rows: int, rows: int, blocks: bool = False) -> float:
    """Rough time of a pass with `active_rows` of `rows` rows, relative to a pass of one row.

    Args:
      active_rows: rows that matter.
      rows: of the pass.
      blocks: whether most weights are kept in blocks.
    """
    kernels = registry.current()
    if kernels.platform != "cpu":
        return 1.0 + 0.003 * (active_rows - 1)
    table = XLA_CPU_PASS_COST
    if kernels.native:
        table = BLOCKS_PASS_COST if blocks else NATIVE_PASS_COST
    computed = computed_rows(active_rows, rows)
    for (low, cheap), (high, dear) in itertools.pairwise(table):
        if computed <= high:
            return cheap + (dear - cheap) * (computed - low) / (high - low)
    return table[-1][1] * computed / table[-1][0]
