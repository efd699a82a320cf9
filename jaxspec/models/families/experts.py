"""Settings that the families with a mixture of experts spell alike."""

from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.families.values import ConfigValues

# llama.cpp's numbers.
_GATING = {1: "the softmax of the router's logits", 3: "the softmax of the chosen experts' logits"}
# Keys of `config.json` that matter in training only.
_TRAINING_KEYS = ("router_aux_loss_coef", "router_jitter_noise", "output_router_logits")


def read_experts(
    values: ConfigValues, count_key: str, dim: int, *, renormalise: bool, shared_dim: int = 0,
    layers: tuple[bool, ...] = (),
) -> ExpertsConfig:  # fmt: skip
    """The experts in `config.json`; `count_key` is their number's, the rest as in `ExpertsConfig`."""
    for key in _TRAINING_KEYS:
        values.get(key)
    count, per_token = values.integer(count_key), values.integer("num_experts_per_tok")
    if per_token > count:
        values.refuse("num_experts_per_tok", f"there are only {count} experts")
    return ExpertsConfig(count, per_token, dim, renormalise, shared_dim, layers)


def read_gguf_experts(
    values: ConfigValues, *, renormalise: bool, shared_dim: int = 0, gating: int = 1
) -> ExpertsConfig:  # fmt: skip
    """The experts of a GGUF file; `renormalise` and `gating` are what llama.cpp does for the architecture.

    Numbers of `gating` are llama.cpp's.
    """
    count, per_token = values.integer("expert_count"), values.integer("expert_used_count")
    if per_token > count:
        values.refuse("expert_used_count", f"there are only {count} experts")
    if values.get("expert_weights_norm", renormalise) is not renormalise:
        values.refuse("expert_weights_norm", f"only {renormalise} is supported for this architecture")
    if values.integer("expert_gating_func", default=gating) != gating:
        values.refuse("expert_gating_func", f"only {gating} is supported, {_GATING[gating]}")
    if values.number("expert_weights_scale", default=1.0) not in (0.0, 1.0):
        values.refuse("expert_weights_scale", "only 1 is supported")
    dim = values.integer("expert_feed_forward_length", default=values.get("feed_forward_length"))
    return ExpertsConfig(count, per_token, dim, renormalise, shared_dim)
