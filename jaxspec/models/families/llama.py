"""Llama, and the models that share its architecture under its name (SmolLM2, TinyLlama, Yi)."""

from typing import Any

from jaxspec.models.families.base import Family
from jaxspec.models.families.experts import read_gguf_experts
from jaxspec.models.families.values import ConfigValues


class Llama(Family):
    """One key and value head per query head unless the config says otherwise; no sliding windows."""

    name = "llama"
    gguf_architecture = "llama"
    gguf_interleaves = True
    optional_kv_heads = True
    class_defaults = {
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "vocab_size": 32000,
    }  # fmt: skip

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As the base class; with a sliding window or experts it is a model that llama.cpp calls `llama` too."""
        if values.integer("expert_count", default=0, minimum=0):
            return {"family": "mixtral", "experts": read_gguf_experts(values, renormalise=True)}
        values.integer("expert_used_count", default=0, minimum=0)  # has no effect
        window = values.integer("attention.sliding_window", default=0, minimum=0)
        return {"family": "mistral", "sliding_window": window} if 0 < window < max_context else {}


FAMILY = Llama()
