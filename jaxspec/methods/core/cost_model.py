"""What passes cost, relative to a target pass of one row: what methods weigh drafts with."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import MLP_PARAMS
from jaxspec.runtime.placement import Placement
from pallas_kernels import registry
from pallas_kernels.active_rows import relative_pass_cost
from pallas_kernels.linear.blocks import FORMATS

# What a draft pass costs besides reading its weights.
FIXED_DRAFT_COST = 0.01


def pass_costs(target: Placement, rows: int, measured: Sequence[float] = ()) -> np.ndarray:
    """Times of target passes of 1, 2, ... `rows` rows over that of one row, float64 [rows].

    Args:
      target: its kernels, and whether most of its weights are in blocks, say which built-in figures hold.
      rows: of the pass.
      measured: the first of these times, where somebody measured them; the rest grows as the built-in figures do.
    """
    blocks = target.weights.default in FORMATS
    with registry.using(target.plan.kernels):
        costs = np.array([relative_pass_cost(1 + n, rows, blocks) for n in range(rows)])
    known = np.array(measured[:rows], np.float64)
    if known.size:
        costs *= known[-1] / costs[known.size - 1]
        costs[: known.size] = known
    return costs


def relative_draft_cost(target: Placement, draft: Placement) -> float:
    """A draft pass of one row over a target pass, by the bytes of weights that each reads."""
    return _bytes_read(draft) / _bytes_read(target) + FIXED_DRAFT_COST


def relative_set_cost(target: Placement, layers: LayerSet) -> float:
    """A pass of one row through some of the target's layers over one through all, by the bytes of weights read."""
    skipped = 0
    for layer, runs in zip(target.params()["layers"], layers.runs, strict=True):
        for name, leaf in layer.items():
            skipped += 0 if runs[int(name in MLP_PARAMS)] else _bytes_of(leaf)
    return 1 - skipped / _bytes_read(target) + FIXED_DRAFT_COST


def _bytes_read(placement: Placement) -> int:
    params = placement.params()
    if "head" in params:
        # Of the embedding a pass reads a row.
        params = {name: leaf for name, leaf in params.items() if name != "embed"}
    return _bytes_of(params)


def _bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
