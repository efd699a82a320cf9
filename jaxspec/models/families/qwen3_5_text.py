"""Qwen 3.5 and 3.6 (dense): gated delta nets in three layers of four, gated attention in the fourth."""

from typing import Any

from jaxspec.models.families.base import Family
from jaxspec.models.families.values import ConfigValues, all_but_every
from jaxspec.models.recurrent import RecurrentConfig


class Qwen35(Family):
    """Norm scales are stored less one, but for those of the delta nets; a quarter of each head turns."""

    name = "qwen3_5_text"
    gguf_architecture = "qwen35"
    gguf_lists = ("rope.dimension_sections",)
    gguf_names = {
        "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
        "ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias",
    }  # fmt: skip
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

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As the base class, with the delta nets; layers for multi-token prediction come last and do not count."""
        drafting = values.integer("nextn_predict_layers", default=0, minimum=0)
        num_layers = values.integer("block_count") - drafting
        values.get("rope.dimension_sections")  # as `unused_rope_keys`
        layers = values.layer_flags("attention.recurrent_layers", num_layers + drafting)
        step = values.integer("full_attention_interval", default=4)
        layers = all_but_every(step, num_layers) if layers is None else layers[:num_layers]
        value_heads, width = values.integer("ssm.time_step_rank"), values.integer("ssm.inner_size")
        if width % value_heads:
            values.refuse("ssm.inner_size", f"it must be a multiple of ssm.time_step_rank {value_heads}")
        recurrent = RecurrentConfig(
            "delta", layers, values.integer("ssm.conv_kernel"), values.integer("ssm.group_count"),
            value_heads=value_heads, key_dim=values.integer("ssm.state_size"), value_dim=width // value_heads,
        )  # fmt: skip
        return super().read_gguf(values, max_context) | {"num_layers": num_layers, "recurrent": recurrent}


FAMILY = Qwen35()
