"""Ministral 3: Mistral with YaRN, and with queries that grow with their position."""

from typing import Any

from jaxspec.errors import CheckpointError
from jaxspec.models.families.base import ConfigValues, Family
from jaxspec.models.families.rope_settings import find_rope, read_settings

_GROWTH = "llama_4_scaling_beta"


class Ministral3(Family):
    """Published folders hold it inside `mistral3`, beside a vision tower."""

    name = "ministral3"
    gguf_architecture = "mistral3"
    gguf_interleaves = True
    default_head_dim = 128
    default_eps = 1e-5

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """One window for all layers, or none."""
        return values.optional_integer("sliding_window", default=0) or None, 0

    def read_rope(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """The growth stands among the rotary settings, and begins where YaRN's original context ends."""
        name, rope = find_rope(values)
        plain = {key: value for key, value in rope.items() if key not in (_GROWTH, "max_position_embeddings")}
        settings = read_settings(values, name, plain, max_context, values.number("rope_theta", default=1e6))
        if settings.scaling != "yarn":
            values.refuse(name, "yarn scaling is needed", CheckpointError)
        return {"rope": settings, "query_growth": ConfigValues(values.path, rope).number(_GROWTH)}

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """The growth has a key of its own."""
        growth = values.number("attention.temperature_scale", default=0.0)
        return super().read_gguf(values, max_context) | {"query_growth": growth}


FAMILY = Ministral3()
