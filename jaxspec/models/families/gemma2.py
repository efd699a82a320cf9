"""Gemma 2: norms before and after each block, bounded scores and logits, and a sliding window in every other layer."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.models.families.base import Family
from jaxspec.models.families.values import ConfigValues, all_but_every


class Gemma2(Family):
    """Embeddings are multiplied by the root of the width; norm scales are stored less one."""

    name = "gemma2"
    gguf_architecture = "gemma2"
    features: ClassVar[Mapping[str, Any]] = {"activation": "gelu", "norms": "both"}
    norm_offset = 1.0
    default_head_dim = 256
    default_tied = True
    layers_differ = True
    activation_keys = ("hidden_activation", "hidden_act")
    activations = ("gelu_pytorch_tanh",)
    tensor_names = {
        "attention_post_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    # Absent ones mean so much; null is none.
    softcaps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)
    pattern = 2
    # Layers of the model whose queries llama.cpp scales by another width than that of a head.
    wide_queries: ClassVar[int] = 46

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the bounds and factors."""
        values.get("cache_implementation")  # of transformers' generate()
        fields = super().read_config(values, num_layers)
        scores, logits = self.softcaps
        scalar = values.number("query_pre_attn_scalar", default=256.0)
        if scalar <= 0:
            values.refuse("query_pre_attn_scalar", "a positive number is needed")
        return fields | {
            "attention_softcap": _read_softcap(values, "attn_logit_softcapping", scores),
            "logit_softcap": _read_softcap(values, "final_logit_softcapping", logits),
            "query_scale": 1.0 if scalar == fields["head_dim"] else math.sqrt(fields["head_dim"] / scalar),
            "embed_scale": math.sqrt(values.integer("hidden_size")),
        }

    def sliding_layers(self, values: ConfigValues, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """All but each `pattern`th."""
        window, layers = super().sliding_layers(values, num_layers)
        if values.get("sliding_window_size", window) != window:
            values.refuse("sliding_window_size", f"but sliding_window is {window}")
        return window, layers

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As llama.cpp computes the architecture; files leave out the numbers that all models share."""
        embed_dim, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
        num_layers, width = values.integer("block_count"), values.integer("attention.key_length", default=256)
        scores, logits = self.softcaps
        window = values.integer("attention.sliding_window", default=4096)
        values.get("attention.sliding_window_pattern")
        scaled = num_layers == self.wide_queries
        return {
            **self.features,
            "head_dim": width,
            "attention_softcap": values.number("attn_logit_softcapping", scores) if scores else None,
            "logit_softcap": values.number("final_logit_softcapping", logits) if logits else None,
            "query_scale": math.sqrt(width * num_heads / embed_dim) if scaled else 1.0,
            "embed_scale": math.sqrt(embed_dim),
            "sliding_window": window,
            "sliding_layers": all_but_every(self.pattern, num_layers),
        }


def _read_softcap(values: ConfigValues, key: str, default: float | None) -> float | None:
    if values.get(key) is None:
        return None if key in values else default
    cap = values.number(key)
    if cap <= 0:
        values.refuse(key, "a positive number or null is needed")
    return cap


FAMILY = Gemma2()
