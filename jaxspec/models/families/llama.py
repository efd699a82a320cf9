"""Llama, and the models that share its architecture under its name (SmolLM2, TinyLlama, Yi)."""

from typing import Any

from jaxspec.models.families.base import ConfigValues, Family


class Llama(Family):
    """One key and value head per query head unless the config says otherwise; no sliding windows."""

    name = "llama"
    gguf_architecture = "llama"
    gguf_interleaves = True
    optional_kv_heads = True

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As the base class; with a sliding window it is a Mistral model, which llama.cpp calls `llama` too."""
        window = values.integer("attention.sliding_window", default=0, least=0)
        return {"family": "mistral", "sliding_window": window} if 0 < window < max_context else {}


FAMILY = Llama()
