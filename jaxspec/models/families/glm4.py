"""GLM-4 (dense, 0414): norms before and after each block, and half of each head turns, in neighbouring pairs."""

from jaxspec.models.families.base import Family


class Glm4(Family):
    """The MLP's gate and up projections are one tensor."""

    name = "glm4"
    gguf_architecture = "glm4"
    features = {"norms": "both"}
    default_bias = True
    default_head_dim = 128
    default_eps = 1.5625e-7
    default_partial = 0.5
    rotary_neighbours = True
    fuses_gate_up = True
    tensor_names = {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
    # What llama.cpp calls the gate and up projections.
    gguf_names = {"ffn_up": "mlp.gate_up_proj"}


FAMILY = Glm4()
