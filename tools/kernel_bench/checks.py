"""Numbers of the GPU kernels where there is no pytest: each beside numpy, as before any program uses it."""

from collections.abc import Iterator
from typing import Any

import jax

from pallas_kernels import selection
from pallas_kernels.registry import Kernels


def check_kernels(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each implementation of each operation, then their counts; `smoke`: Triton's, in the interpreter."""
    device = jax.devices()[0]
    base = Kernels("xla", "gpu", capability=(9, 0), interpret=True) if smoke else selection.describe_gpu(device)
    counts: dict[str, int] = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for operation, implementation in list_implementations():
        name = f"check of {operation} by {implementation}"
        row: dict[str, Any] = {"name": name, "outcome": "passed"}
        obstacle = selection.find_obstacle(implementation, base.capability)
        if obstacle or (smoke and implementation != "triton"):
            row["outcome"] = "skipped"
        elif failure := selection.find_failure(operation, implementation, base, device):
            row |= {"outcome": "failed", "error": failure}
        counts[row["outcome"]] += 1
        yield row
    yield {"name": "checks of kernels, without pytest", **counts}


def list_implementations() -> list[tuple[str, str]]:
    """Operations and implementations of all sets, each once."""
    return list(
        dict.fromkeys(
            (operation, implementation)
            for operations in selection.SETS.values()
            for operation, implementations in operations.items()
            for implementation in implementations
        )
    )
