"""Granite 3, and GGUF files of Granite 4's dense models: Llama with four factors."""

import math
from typing import Any

from jaxspec.models.families.base import ConfigValues, Family


class Granite(Family):
    """Of embeddings, the blocks' results, logits and scores."""

    name = "granite"
    gguf_architecture = "granite"
    gguf_interleaves = True
    optional_kv_heads = True

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the factors."""
        keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
        fields = super().read_config(values, num_layers)
        embed, residual, logits, scores = (values.number(key, default=1.0) for key in keys)
        return fields | _factors(fields["head_dim"], embed, residual, logits, scores)

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As llama.cpp computes the architecture: a factor of zero is none."""
        if values.get("rope.scaling.finetuned", True) is not True:
            values.refuse("rope.scaling.finetuned", "models without rotary embedding are not supported")
        width = values.integer("embedding_length") // values.integer("attention.head_count")
        width = values.integer("attention.key_length", default=width)
        keys = ("embedding_scale", "residual_scale", "logit_scale")
        embed, residual, logits = (values.number(key, default=0.0) or 1.0 for key in keys)
        scores = values.number("attention.scale", default=0.0) or 1 / math.sqrt(width)
        return super().read_gguf(values, max_context) | _factors(width, embed, residual, logits, scores)


def _factors(head_dim: int, embed: float, residual: float, logits: float, scores: float) -> dict[str, float]:
    """Fields of `ModelConfig`. Logits are divided; `scores` replaces the division by the root of the head width."""
    scales = {"embed_scale": embed, "residual_scale": residual, "query_scale": scores * math.sqrt(head_dim)}
    return scales | {"logit_scale": 1 / logits if logits else 0.0}


FAMILY = Granite()
