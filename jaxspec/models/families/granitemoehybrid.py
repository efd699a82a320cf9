"""Granite 4's dense models, whose folders have the type of its hybrids. Their GGUF files name the type `granite`."""

from typing import Any

from jaxspec.models.families.base import ConfigValues
from jaxspec.models.families.granite import Granite

# Settings of recurrent layers and of experts, which a dense model has not, of training, and one that has no effect.
_IDLE_KEYS = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok",
    "output_router_logits", "router_aux_loss_coef", "init_method", "normalization_function",
)  # fmt: skip


class GraniteDense(Granite):
    """All layers have attention and the MLP that every row of a hybrid passes; rotary embedding is optional."""

    name = "granitemoehybrid"
    gguf_architecture = None
    fuses_gate_up = True
    tensor_names = {"mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear"}

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As Granite; recurrent layers and experts are refused."""
        types = values.get("layer_types")
        if not isinstance(types, list) or not {*map(str, types)} <= {"attention", "full_attention"}:
            values.refuse("layer_types", "recurrent layers (Mamba) are not supported, dense models are")
        if values.integer("num_local_experts", default=1, minimum=0):
            values.refuse("num_local_experts", "experts beside an MLP are not supported, dense models are")
        for key in _IDLE_KEYS:
            values.get(key)
        turns = values.get("position_embedding_type") == "rope"
        return super().read_config(values, num_layers) | {
            "mlp_dim": values.integer("shared_intermediate_size"),
            "nope_layers": () if turns else (True,) * num_layers,
        }


FAMILY = GraniteDense()
