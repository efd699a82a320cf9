"""Seed-OSS: Llama with biases of query, key and value, and heads of 128 whatever the width."""

from typing import Any

from jaxspec.models.families.base import ConfigValues, Family


class SeedOss(Family):
    """The config says which biases there are."""

    name = "seed_oss"
    gguf_architecture = "seed_oss"
    default_bias = True
    default_head_dim = 128
    # The norm before the MLP has the name of another one.
    gguf_names = {"post_attention_norm": "post_attention_layernorm"}

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the output projection's bias."""
        values.get("residual_dropout")  # of training
        fields = super().read_config(values, num_layers)
        return fields | {"out_bias": values.flag("attention_out_bias")}


FAMILY = SeedOss()
