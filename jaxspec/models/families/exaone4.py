"""EXAONE 4: norms of results and of each head; if some layers have sliding windows, the others do not turn."""

from typing import Any

from jaxspec.models.families.base import ConfigValues
from jaxspec.models.families.olmo2 import Olmo2


class Exaone4(Olmo2):
    """Three layers of four have a window, or (1.2B) none has one and all turn."""

    name = "exaone4"
    gguf_architecture = "exaone4"
    features = {"norms": "post", "qk_norm": True}
    optional_kv_heads = False
    layers_differ = True
    pattern = 4

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the layers that do not turn."""
        fields = super().read_config(values, num_layers)
        if values.get("sliding_window") and fields["sliding_window"] is None:
            values.refuse("sliding_window", "but no layer has it")
        return fields | _find_nope(fields)

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As llama.cpp computes the architecture."""
        window = self.read_gguf_window(values)
        return {**self.features, **window, **_find_nope(window)}


def _find_nope(fields: dict[str, Any]) -> dict[str, Any]:
    """Where some layers have a window: the others."""
    slides = fields.get("sliding_layers", ())
    return {"nope_layers": tuple(not slide for slide in slides)} if slides else {}


FAMILY = Exaone4()
