"""Qwen 1.5 and 2 MoE: Qwen 2 with a mixture of experts, and one expert that every row passes."""

from typing import Any

from jaxspec.models.families.base import Family
from jaxspec.models.families.experts import read_experts, read_gguf_experts
from jaxspec.models.families.values import ConfigValues


class Qwen2Moe(Family):
    """Some layers may have a plain MLP: those in `mlp_only_layers`, and all but each `decoder_sparse_step`th."""

    name = "qwen2_moe"
    gguf_architecture = "qwen2moe"
    features = {"qkv_bias": True}
    has_shared_expert = True
    default_renormalise = False
    # What llama.cpp does, whose files do not say it.
    gguf_renormalises = False

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the experts."""
        fields, step = super().read_config(values, num_layers), values.integer("decoder_sparse_step", default=1)
        dense = values.get("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(type(index) is int for index in dense):
            values.refuse("mlp_only_layers", "a list of layers is needed")
        if "qkv_bias" in self.features and "qkv_bias" in values:
            fields["qkv_bias"] = values.flag("qkv_bias")
        layers = tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
        # transformers 5 writes the other name for Qwen 3.
        count = "num_local_experts" if "num_local_experts" in values else "num_experts"
        if not any(layers) or values.get(count) == 0:
            values.refuse(count, f"a {self.name} model without experts is not supported")
        shared = values.integer("shared_expert_intermediate_size") if self.has_shared_expert else 0
        renormalise = values.flag("norm_topk_prob", self.default_renormalise)
        experts = read_experts(
            values, count, values.integer("moe_intermediate_size"), renormalise=renormalise, shared_dim=shared,
            layers=() if all(layers) else layers,
        )  # fmt: skip
        return fields | {"experts": experts}

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """None: no published model has one."""
        if values.flag("use_sliding_window"):
            values.refuse("use_sliding_window", f"models of type {self.name} have no sliding windows in jaxspec")
        for key in ("sliding_window", "max_window_layers"):
            values.get(key)  # has no effect
        return None, 0

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As the base class, with the experts; without a width of theirs, the used ones share the MLP's."""
        if "expert_feed_forward_length" not in values:
            values.refuse("expert_feed_forward_length", "convert the model again with a newer llama.cpp")
        shared = values.integer("expert_shared_feed_forward_length") if self.has_shared_expert else 0
        experts = read_gguf_experts(values, renormalise=self.gguf_renormalises, shared_dim=shared)
        return super().read_gguf(values, max_context) | {"experts": experts}


FAMILY = Qwen2Moe()
