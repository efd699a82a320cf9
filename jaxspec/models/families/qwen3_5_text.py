"""Qwen 3.5 and 3.6 (dense): gated delta nets in three layers of four, gated attention in the fourth."""

from typing import Any

from jaxspec.models.families.base import Family
from jaxspec.models.families.values import ConfigValues, all_but_every
from jaxspec.models.recurrent import RecurrentConfig


class Qwen35(Family):
    """Norm scales are stored less one, but for those of the delta nets; a quarter of each head turns."""

    name = "qwen3_5_text"
    features = {"qk_norm": True, "attention_gate": True}
    recurrent_type = "linear_attention"
    norm_offset = 1.0
    default_head_dim = 256
    default_partial = 0.25
    has_mtp = True
    # Parts of a head that turn by the coordinates of an image; all are the position for text.
    unused_rope_keys = ("mrope_section", "mrope_interleaved")

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the delta nets."""
        step = values.integer("full_attention_interval", default=4)
        types = values.get("layer_types")
        fields = super().read_config(values, num_layers)
        for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers", "attn_output_gate"):
            values.get(key)
        if types is None:
            layers = all_but_every(step, num_layers)
        else:
            layers = tuple(kind == self.recurrent_type for kind in types)
        sizes = {
            "key_heads": ("linear_num_key_heads", 16), "value_heads": ("linear_num_value_heads", 32),
            "key_dim": ("linear_key_head_dim", 128), "value_dim": ("linear_value_head_dim", 128),
            "taps": ("linear_conv_kernel_dim", 4),
        }  # fmt: skip
        read = {name: values.integer(key, default=default) for name, (key, default) in sizes.items()}
        return fields | {"recurrent": RecurrentConfig("delta", layers, **read)}


FAMILY = Qwen35()
