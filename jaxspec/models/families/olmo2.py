"""OLMo 2: norms of each block's result instead of its input, and one norm over all queries and over all keys."""

from jaxspec.models.families.base import Family


class Olmo2(Family):
    """No sliding windows."""

    name = "olmo2"
    gguf_architecture = "olmo2"
    features = {"norms": "post", "qk_norm": True, "wide_qk_norm": True}
    optional_kv_heads = True
    default_eps = 1e-5
    tensor_names = {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }


FAMILY = Olmo2()
