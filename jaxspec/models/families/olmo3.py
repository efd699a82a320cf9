"""OLMo 3: OLMo 2 with a sliding window in three layers of four; rotary scaling is of the others alone."""

from typing import Any

from jaxspec.models.families.olmo2 import Olmo2
from jaxspec.models.families.rope_settings import read_ropes
from jaxspec.models.families.values import ConfigValues


class Olmo3(Olmo2):
    """Its GGUF files name the architecture `olmo2`."""

    name = "olmo3"
    gguf_architecture = None
    default_theta = 500000.0
    layers_differ = True
    pattern = 4

    def read_rope(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """Two rotary embeddings."""
        return read_ropes(values, max_context, self.default_theta)


FAMILY = Olmo3()
