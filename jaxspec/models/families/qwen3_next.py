"""Qwen3-Next: the layers of Qwen 3.5 with a mixture of experts; projections of a key head lie together."""

from typing import Any

from jaxspec.models.families.qwen2_moe import Qwen2Moe
from jaxspec.models.families.qwen3_5_moe_text import Qwen35Moe
from jaxspec.models.families.qwen3_5_text import Qwen35
from jaxspec.models.families.values import ConfigValues


class Qwen3Next(Qwen2Moe, Qwen35):
    """Its delta nets have two projections, of queries, keys, values and gates and of both rates."""

    name = "qwen3_next"
    gguf_architecture = "qwen3next"
    gguf_names = {**Qwen35.gguf_names, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
    gguf_renormalises = True
    features = Qwen35.features
    default_renormalise = True
    fuses_recurrent = True

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """The projections are read one by one, so that the model is one of Qwen 3.5 with experts."""
        return super().read_gguf(values, max_context) | {"family": Qwen35Moe.name}


FAMILY = Qwen3Next()
