"""Passes whose number of active rows is known only at run time.

A pass has a static number of rows, of which the first `active_rows` matter. This module computes those and few others.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import registry
from pallas_kernels.registry import Kernels

# Row counts that XLA's CPU backend compiles such a pass for. Each adds two seconds of compilation. On two CPU cores
# a pass of 2 or 4 rows costs nearly as much as one of 8, so steps between would save little.
ROW_STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def map_active_rows(function: Callable[..., Any], active_rows: jax.Array | None, *arrays: jax.Array) -> Any:
    """Apply a function of rows to at least the first `active_rows` rows of `arrays`.

    Native kernels take the number of active rows as data. Under XLA on CPU each row costs time, so a switch picks the
    smallest of a few static row counts; the rows after it come out as zeros. Elsewhere all rows are computed: on an
    accelerator a few rows cost as much as one, and a data-dependent branch would stall the host.

    Args:
      function: takes `active_rows` (or None for all) and arrays [t, ...], returns a pytree of arrays [t, ...]. It is
        traced with several t. Arrays that it closes over are only read.
      active_rows: int32 [], at least 1; None computes every row.
      arrays: [T, ...] each.

    Returns:
      What `function` returns, with T rows.
    """
    rows, kernels = arrays[0].shape[0], registry.current()
    sizes = row_sizes(rows, kernels)
    if active_rows is None or len(sizes) == 1 or kernels.native:
        return function(active_rows, *arrays)

    def on_first(size: int) -> Callable[[], Any]:
        def branch() -> Any:
            out = function(None, *(array[:size] for array in arrays))
            return jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, rows - size)] + [(0, 0)] * (leaf.ndim - 1)), out)

        return branch

    return lax.switch(jnp.searchsorted(jnp.array(sizes, jnp.int32), active_rows), [on_first(size) for size in sizes])


def row_sizes(rows: int, kernels: Kernels) -> list[int]:
    """Row counts that an XLA pass of up to `rows` rows is compiled for, ascending."""
    steps = ROW_STEPS if kernels.platform == "cpu" else ()
    return [*(size for size in steps if size < rows), rows]


def computed_rows(active_rows: int, rows: int, kernels: Kernels) -> int:
    """Rows that a pass of `rows` rows computes where `active_rows` of them matter."""
    if kernels.native:
        return min(active_rows, rows)
    return next(size for size in row_sizes(rows, kernels) if size >= min(active_rows, rows))
