"""Measured figures that ship with jaxspec, for `Auto`: by draft, and by how the target's passes run."""

import importlib.resources
import tomllib
from typing import Any

from pallas_kernels.registry import Kernels

COST_SETTINGS = ("draft_cost", "pass_cost", "round_cost")


def tuned_settings(draft: str, kernels: Kernels, blocks: bool) -> dict[str, Any]:
    """The `COST_SETTINGS` of `Auto` for a shipped draft, as `jaxspec-tune` found them; empty where nobody measured.

    Args:
      draft: name of the shipped draft.
      kernels: of the target.
      blocks: whether most of its weights are kept in blocks.
    """
    file = importlib.resources.files("jaxspec_configs").joinpath("costs", f"{draft}.toml")
    if not file.is_file():
        return {}
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return tables.get(kernels.platform, {}).get(kernels.name, {}).get("blocks" if blocks else "numbers", {})
