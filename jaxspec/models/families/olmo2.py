"""OLMo 2: norms of each block's result instead of its input, and one norm over all queries and over all keys."""

from typing import Any

from jaxspec.models.families.base import ConfigValues, Family
from jaxspec.models.rope import RopeConfig


class Olmo2(Family):
    """No sliding windows. GGUF files with them are OLMo 3's."""

    name = "olmo2"
    gguf_architecture = "olmo2"
    features = {"norms": "post", "qk_norm": True, "wide_qk_norm": True}
    optional_kv_heads = True
    default_eps = 1e-5
    tensor_names = {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """llama.cpp has one architecture for OLMo 2 and 3."""
        if window := self.read_gguf_window(values):
            theta = values.number("rope.freq_base", default=self.default_theta)
            local_theta = values.number("rope.freq_base_swa", default=theta)
            return {**self.features, **window, "family": "olmo3", "local_rope": RopeConfig(local_theta)}
        return dict(self.features)


FAMILY = Olmo2()
