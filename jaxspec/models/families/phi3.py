"""Phi 3 and Phi 4: query, key and value are one tensor, gate and up another."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.models.families.base import Family
from jaxspec.models.families.values import ConfigValues

if TYPE_CHECKING:
    from jaxspec.models.config import ModelConfig


class Phi3(Family):
    """One window for all layers, or none."""

    name = "phi3"
    gguf_architecture = "phi3"
    optional_kv_heads = True
    default_eps = 1e-5
    has_published_code = True
    default_partial = 1.0
    # What llama.cpp calls the gate and up projections.
    gguf_names = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class; Phi 4 mini's settings of training stand beside the others."""
        for key in ("full_attn_mod", "interpolate_factor"):
            if values.get(key, 1) != 1:
                values.refuse(key, "only 1 is supported")
        return super().read_config(values, num_layers)

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """In every layer."""
        return values.optional_integer("sliding_window", default=0) or None, 0

    def fused_tensors(self, cfg: "ModelConfig") -> Mapping[str, Sequence[tuple[str, int]]]:
        """Queries, keys and values of all heads, one kind after the other; the gate before the up projection."""
        queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        heads = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        return {
            "self_attn.qkv_proj": [(f"self_attn.{name}", rows) for name, rows in heads.items()],
            **self.fused_gate_up(cfg),
        }

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """With the window, which the file names for all layers."""
        window = values.integer("attention.sliding_window", default=0, minimum=0)
        return {"sliding_window": window if 0 < window < max_context else None}


FAMILY = Phi3()
