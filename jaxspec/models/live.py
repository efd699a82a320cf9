"""Passes whose number of rows is known only at run time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Row counts that such a pass is compiled for: each adds two seconds of compilation. On two CPU cores a pass costs 1.0,
# 1.3, 1.4, 1.5 and 2.0 times a one-row pass at 1, 2, 4, 8 and 16 rows: steps between 1 and 8 would save little.
ROW_STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


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
    if live is None or rows == 1 or jax.default_backend() != "cpu":
        return function(*arrays)
    sizes = [*(size for size in ROW_STEPS if size < rows), rows]

    def on_first(size: int) -> Callable[[], Any]:
        def branch() -> Any:
            out = function(*(array[:size] for array in arrays))
            return jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, rows - size)] + [(0, 0)] * (leaf.ndim - 1)), out)

        return branch

    return lax.switch(jnp.searchsorted(jnp.array(sizes, jnp.int32), live), [on_first(size) for size in sizes])
