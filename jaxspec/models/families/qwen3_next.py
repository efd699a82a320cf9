"""Qwen3-Next: the layers of Qwen 3.5 with a mixture of experts; projections of a key head lie together."""

from jaxspec.models.families.qwen2_moe import Qwen2Moe
from jaxspec.models.families.qwen3_5_text import Qwen35


class Qwen3Next(Qwen2Moe, Qwen35):
    """Its delta nets have two projections, of queries, keys, values and gates and of both rates."""

    name = "qwen3_next"
    gguf_architecture = None
    features = Qwen35.features
    default_renormalise = True
    fuses_recurrent = True


FAMILY = Qwen3Next()
