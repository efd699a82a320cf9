"""Qwen 3: heads of 128 whatever the width, a norm of each query and key head, and Qwen 2's sliding windows."""

from jaxspec.models.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Without biases, unlike Qwen 2."""

    name = "qwen3"
    gguf_architecture = "qwen3"
    features = {"qk_norm": True}
    default_head_dim = 128


FAMILY = Qwen3()
