"""Qwen 3.5 and 3.6 with a mixture of experts."""

from jaxspec.models.families.qwen2_moe import Qwen2Moe
from jaxspec.models.families.qwen3_5_text import Qwen35
from jaxspec.models.families.values import ConfigValues


class Qwen35Moe(Qwen2Moe, Qwen35):
    """Scores of a row's experts add up to one; a Hugging Face folder has a layer's experts together."""

    name = "qwen3_5_moe_text"
    gguf_architecture = "qwen35moe"
    gguf_renormalises = True
    features = Qwen35.features
    default_renormalise = True
    experts_by_rows = True

    def read_mlp_dim(self, values: ConfigValues) -> int:
        """No layer has a plain MLP."""
        return values.integer("intermediate_size", default=values.integer("moe_intermediate_size"))


FAMILY = Qwen35Moe()
