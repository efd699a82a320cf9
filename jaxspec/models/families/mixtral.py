"""Mixtral: Mistral with a mixture of experts in every layer. Its GGUF files name the architecture `llama`."""

from typing import Any

from jaxspec.models.families.base import Family
from jaxspec.models.families.experts import read_experts
from jaxspec.models.families.values import ConfigValues

_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Mixtral(Family):
    """The scores of a row's experts add up to one."""

    name = "mixtral"
    default_eps = 1e-5
    default_theta = 1e6

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the experts."""
        experts = read_experts(values, "num_local_experts", values.integer("intermediate_size"), renormalise=True)
        return super().read_config(values, num_layers) | {"experts": experts}

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """One window for all layers, or none."""
        return values.optional_integer("sliding_window", default=0) or None, 0

    def tensor_name(self, part: str) -> str:
        """The router and the experts are under `block_sparse_moe`, the projections are w1, w3 and w2."""
        if part != "mlp.gate" and not part.startswith("mlp.experts."):
            return part
        *outer, last = part.removeprefix("mlp.").split(".")
        return ".".join(["block_sparse_moe", *outer, _PROJECTIONS.get(last, last)])


FAMILY = Mixtral()
