"""Qwen 3: heads of 128 whatever the width, a norm of each query and key head, and Qwen 2's sliding windows."""

from jaxspec.models.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Without biases, unlike Qwen 2."""

    name = "qwen3"
    gguf_architecture = "qwen3"
    features = {"qk_norm": True}
    default_head_dim = 128
    class_defaults = {
        "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "vocab_size": 151936,
    }  # fmt: skip


FAMILY = Qwen3()
