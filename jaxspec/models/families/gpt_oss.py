"""gpt-oss: experts with biases and a clamped activation, attention sinks, a sliding window in every other layer."""

from typing import Any

from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.families.base import Family
from jaxspec.models.families.experts import read_experts, read_gguf_experts
from jaxspec.models.families.rope_settings import find_rope, read_settings
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.rope import RopeConfig

# What an absent object of rotary settings means.
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_WINDOW, _LIMIT, _ALPHA = 128, 7.0, 1.702


class GptOss(Family):
    """Even layers have the window. The router's scores are the softmax of the chosen experts' logits."""

    name = "gpt_oss"
    gguf_architecture = "gpt-oss"
    features = {"qkv_bias": True, "out_bias": True, "attention_sinks": True}
    default_head_dim = 64
    default_eps = 1e-5
    default_theta = 150000.0
    layers_differ = True
    experts_together = True
    yarn_truncates = False
    tensor_names = {"mlp.gate": "mlp.router"}
    # The norm before the experts has the name of another one.
    gguf_names = {"post_attention_norm": "post_attention_layernorm"}

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the experts."""
        for key in ("experts_per_token", "initial_context_length"):
            values.get(key)  # the publisher's own names for settings that stand beside them
        experts = read_experts(values, "num_local_experts", values.integer("intermediate_size"), renormalise=True)
        limit, alpha = values.number("swiglu_limit", default=_LIMIT), values.number("swiglu_alpha", default=_ALPHA)
        for key, number in (("swiglu_limit", limit), ("swiglu_alpha", alpha)):
            if number <= 0:
                values.refuse(key, "a positive number is needed")
        biases = values.flag("attention_bias", default=True)
        return super().read_config(values, num_layers) | {
            "qkv_bias": biases,
            "out_bias": biases,
            "experts": ExpertsConfig(
                experts.count, experts.per_token, experts.dim, chosen_scores=True, biases=True, limit=limit, alpha=alpha
            ),
        }

    def read_rope(self, values: ConfigValues, max_context: int) -> dict[str, RopeConfig]:
        """As the base class; absent settings are those of the published models."""
        name, rope = find_rope(values)
        theta = values.number("rope_theta", default=self.default_theta)
        return {"rope": read_settings(values, name, rope or _ROPE, max_context, theta)}

    def sliding_layers(self, values: ConfigValues, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """Every other layer, from the first on."""
        window = values.optional_integer("sliding_window", default=_WINDOW)
        return window, _alternate(num_layers) if window else (False,) * num_layers

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As llama.cpp computes the architecture; files leave out the numbers that all models share."""
        experts = read_gguf_experts(values, renormalise=True, gating=3)
        if values.integer("attention.sliding_window_pattern", default=2) != 2:
            values.refuse("attention.sliding_window_pattern", "every other layer has the window")
        theta = values.number("rope.freq_base", default=10000.0)
        if values.number("rope.freq_base_swa", default=theta) != theta:
            values.refuse("rope.freq_base_swa", f"but rope.freq_base is {theta}")
        return {
            **self.features,
            "sliding_window": values.integer("attention.sliding_window", default=_WINDOW),
            "sliding_layers": _alternate(values.integer("block_count")),
            "experts": ExpertsConfig(
                experts.count, experts.per_token, experts.dim, chosen_scores=True, biases=True, limit=_LIMIT,
                alpha=_ALPHA,
            ),
        }  # fmt: skip


def _alternate(num_layers: int) -> tuple[bool, ...]:
    return tuple(index % 2 == 0 for index in range(num_layers))


FAMILY = GptOss()
