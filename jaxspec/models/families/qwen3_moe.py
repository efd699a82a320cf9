"""Qwen 3 MoE: Qwen 3 with a mixture of experts, without a shared one."""

from jaxspec.models.families.qwen2_moe import Qwen2Moe


class Qwen3Moe(Qwen2Moe):
    """Without biases, with a norm of each query and key head."""

    name = "qwen3_moe"
    gguf_architecture = "qwen3moe"
    features = {"qk_norm": True}
    has_shared_expert = False
    gguf_renormalises = True


FAMILY = Qwen3Moe()
