"""What passes cost, relative to a target pass of one row: what methods weigh drafts with (docs/algorithms.md)."""

import dataclasses
import importlib.resources
import itertools
import tomllib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.methods.core.round import STEPS_PER_DISPATCH
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import MLP_PARAMS
from jaxspec.runtime.placement import Placement
from pallas_kernels.active_rows import computed_rows
from pallas_kernels.linear.blocks import FORMATS
from pallas_kernels.registry import Kernels

# Time of a pass of so many rows over that of one row, on two CPU cores (docs/results); on accelerators a pass is bound
# by its weights far beyond that.
XLA_CPU_PASS_COST = ((1, 1.0), (8, 1.6), (16, 2.2), (32, 3.2), (64, 4.8), (128, 8.0))
NATIVE_PASS_COST = ((1, 1.0), (4, 1.08), (8, 1.24), (16, 1.75), (32, 3.1), (64, 5.9))
# Of weights in blocks, whose single rows cost a third as much.
BLOCKS_PASS_COST = ((1, 1.0), (2, 1.11), (4, 1.45), (8, 2.1), (16, 4.0), (32, 7.9))
# On an accelerator, each further row.
ROW_COST = 0.003
# What a draft pass costs besides reading its weights, and a round besides its passes.
FIXED_DRAFT_COST, ROUND_COST = 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Times of passes, in target passes of one row."""

    passes: np.ndarray  # float64 [bs], of target passes of 1, 2, ... rows
    draft: float = 0.0  # of a draft pass of one row; 0 without a draft
    round: float = ROUND_COST  # what a round costs besides its passes
    source: str = "built in"  # where the figures come from: "built in", "shipped", "given", or two of them

    @property
    def rounds(self) -> np.ndarray:
        """Of rounds with 1, 2, ... rows, without their draft passes; float64 [bs].

        Rounds without a draft decode several tokens per dispatch, which share what a round costs besides.
        """
        rounds = self.passes + self.round
        rounds[0] = self.passes[0] + self.round / STEPS_PER_DISPATCH
        return rounds

    def report(self) -> dict[str, Any]:
        """For the statistics of a generation."""
        known = {"figures": self.source, "pass_cost": self.passes.round(3).tolist(), "round_cost": self.round}
        return known | ({"draft_cost": round(self.draft, 4)} if self.draft else {})


def pass_costs(target: Placement, rows: int, measured: Sequence[float] = ()) -> np.ndarray:
    """Times of target passes of 1, 2, ... `rows` rows over that of one row, float64 [rows].

    The target's kernels, and whether most of its weights are in blocks, say which built-in figures hold. `measured`
    gives the first of these times; the rest grows as the built-in figures do.
    """
    blocks = target.weights.default in FORMATS
    costs = np.array([_built_in_cost(1 + n, rows, target.plan.kernels, blocks) for n in range(rows)])
    known = np.array(measured[:rows], np.float64)
    if known.size:
        costs *= known[-1] / costs[known.size - 1]
        costs[: known.size] = known
    return costs


def shipped_costs(draft: str, target: Placement) -> dict[str, Any]:
    """Figures that `jaxspec-tune` measured for a shipped draft: `draft_cost`, `pass_cost`, `round_cost`; or none.

    The target's kernels, and whether most of its weights are in blocks, say which figures hold.
    """
    file = importlib.resources.files("jaxspec_configs").joinpath("costs", f"{draft}.toml")
    if not file.is_file():
        return {}
    tables, kernels = tomllib.loads(file.read_text(encoding="utf-8")), target.plan.kernels
    form = "blocks" if target.weights.default in FORMATS else "numbers"
    return tables.get(kernels.platform, {}).get(kernels.name, {}).get(form, {})


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


def _built_in_cost(active_rows: int, rows: int, kernels: Kernels, blocks: bool) -> float:
    """Time of a pass with so many active rows of `rows` over that of a one-row pass: a rough, fixed figure."""
    if kernels.platform != "cpu":
        return 1.0 + ROW_COST * (active_rows - 1)
    table = XLA_CPU_PASS_COST
    if kernels.native:
        table = BLOCKS_PASS_COST if blocks else NATIVE_PASS_COST
    computed = computed_rows(active_rows, rows, kernels)
    for (low, cheap), (high, dear) in itertools.pairwise(table):
        if computed <= high:
            return cheap + (dear - cheap) * (computed - low) / (high - low)
    return table[-1][1] * computed / table[-1][0]


def _bytes_read(placement: Placement) -> int:
    params = placement.params()
    if "head" in params:
        # Of the embedding a pass reads a row.
        params = {name: leaf for name, leaf in params.items() if name != "embed"}
    return _bytes_of(params)


def _bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
