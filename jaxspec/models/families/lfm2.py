"""LFM2: short convolutions in place of attention in most layers."""

import math
from typing import Any

from jaxspec.models.families.base import Family
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.recurrent import RecurrentConfig

# Keys of the authors' training code that published folders have beside transformers' own.
_SAME_WIDTH = ("block_dim", "conv_dim", "conv_dim_out")
_UNUSED = (
    "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init",
    "conv_use_xavier_init", "num_heads", "use_pos_enc", "theta",
)  # fmt: skip


class Lfm2(Family):
    """Layers of type `conv` have `out_proj(C * conv(B * x))`, the others attention with a norm of each head."""

    name = "lfm2"
    gguf_architecture = "lfm2"
    features = {"qk_norm": True}
    recurrent_type = "conv"
    final_norm = "model.embedding_norm"
    default_theta = 1000000.0
    default_tied = True
    tensor_names = {
        "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip

    def read_mlp_dim(self, values: ConfigValues) -> int:
        """Two thirds of a number, rounded up, where `block_auto_adjust_ff_dim` is set."""
        size = values.integer("intermediate_size", default=values.get("block_ff_dim"))
        size = values.integer("block_ff_dim", default=size)
        factor, unit = values.number("block_ffn_dim_multiplier", default=1.0), values.integer("block_multiple_of", 256)
        if values.flag("block_auto_adjust_ff_dim", default=True):
            size = -(-int(factor * int(2 * size / 3)) // unit) * unit
        return size

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the convolutions."""
        width = values.integer("hidden_size")
        for key in _SAME_WIDTH:
            if values.integer(key, default=width) != width:
                values.refuse(key, f"only hidden_size {width} is supported")
        for key in _UNUSED:
            values.get(key)
        if values.flag("conv_bias"):
            values.refuse("conv_bias", "biases of short convolutions are not supported")
        full = values.get("full_attn_idxs")
        types = values.get("layer_types")
        fields = super().read_config(values, num_layers)
        if types is None and not isinstance(full, list):
            values.refuse("layer_types", "it or full_attn_idxs is needed")
        listed = types or ["attention" if index in full else "conv" for index in range(num_layers)]
        layers = tuple(kind == self.recurrent_type for kind in listed)
        return fields | {
            "norm_eps": values.number("norm_eps", default=1e-5),
            "tied": values.flag("tie_embedding", default=values.flag("tie_word_embeddings", self.default_tied)),
            "recurrent": _convolutions(
                layers, values.integer("conv_L_cache", default=3), width, values.integer("num_attention_heads")
            ),
        }

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """Layers without key heads have a convolution."""
        kv_heads = values.listed("attention.head_count_kv", values.integer("block_count"))
        fields = super().read_gguf(values, max_context)
        taps, width = values.integer("shortconv.l_cache"), values.integer("embedding_length")
        layers = tuple(heads == 0 for heads in kv_heads)
        return fields | {"recurrent": _convolutions(layers, taps, width, values.integer("attention.head_count"))}


def _convolutions(layers: tuple[bool, ...], taps: int, width: int, heads: int) -> RecurrentConfig:
    """The short convolutions; devices share their channels as they do attention heads."""
    heads = math.gcd(heads, width)
    return RecurrentConfig("convolution", layers, taps, heads, width // heads)


FAMILY = Lfm2()
