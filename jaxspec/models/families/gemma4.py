"""Gemma 4's text models: two kinds of heads, layers that share keys, and inputs of each layer's own."""

import dataclasses
import math
from typing import Any

from jaxspec.errors import CheckpointError
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.families.experts import read_gguf_experts
from jaxspec.models.families.gemma3 import Gemma3
from jaxspec.models.families.rope_settings import PARTIAL, find_rope
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.layer_kinds import LayerKinds
from jaxspec.models.rope import RopeConfig

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_ROPES = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    _GLOBAL: {"rope_type": "proportional", PARTIAL: 0.25, "rope_theta": 1e6},
}  # fmt: skip


class Gemma4(Gemma3):
    """Norm scales are stored as they are. Scores are not divided; values are normed without a scale."""

    name = "gemma4_text"
    gguf_architecture = "gemma4"
    gguf_lists = ("attention.head_count_kv", "feed_forward_length")
    gguf_names = {
        "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
        "layer_output_scale": "layer_scalar", "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    }  # fmt: skip
    norm_offset = 0.0
    experts_by_rows = True

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the two kinds of layers."""
        if values.get("use_bidirectional_attention") == "all":
            values.refuse("use_bidirectional_attention", "only causal attention is supported")
        experts, keys = None, ("num_experts", "top_k_experts", "moe_intermediate_size")
        if values.flag("enable_moe_block"):
            if values.flag("use_double_wide_mlp"):
                values.refuse("use_double_wide_mlp", "experts beside MLPs of two widths are not supported")
            count, per_token, dim = (values.integer(key) for key in keys)
            experts = ExpertsConfig(count, per_token, dim, shared_dim=values.integer("intermediate_size"), beside=True)
        else:
            for key in keys:
                values.get(key)  # of the experts that are not there
        fields = super().read_config(values, num_layers)
        layers = fields["sliding_layers"]
        if len(set(layers)) < 2:
            values.refuse("layer_types", f"a {self.name} model has layers with a sliding window and some without")
        sharing = values.integer("num_kv_shared_layers", default=0, minimum=0)
        wide = values.flag("use_double_wide_mlp")
        inputs = values.integer("hidden_size_per_layer_input", default=256, minimum=0)
        vocabulary = values.integer("vocab_size")
        if values.integer("vocab_size_per_layer_input", default=262144, minimum=0) != vocabulary and inputs:
            values.refuse("vocab_size_per_layer_input", f"but vocab_size is {vocabulary}")
        alike = values.flag("attention_k_eq_v")
        width, heads = self._read_full(values, layers, fields["num_kv_heads"] if not alike else None)
        mlp_dim = values.integer("intermediate_size") * (2 if wide else 1)
        kinds = LayerKinds(width, heads, sharing, mlp_dim if sharing else 0, alike, inputs)
        own = {"query_scale": 1.0, "kinds": kinds, "logit_softcap": None, "experts": experts}
        if values.get("final_logit_softcapping") is not None:
            own["logit_softcap"] = values.number("final_logit_softcapping")
        return fields | own

    def _read_full(self, values: ConfigValues, layers: tuple[bool, ...], heads: int | None) -> tuple[int, int]:
        """H and K of layers without a window; `heads` are K where they have as many as the others.

        Published folders name both; transformers writes what differs by layer.
        """
        named = values.integer("global_head_dim", default=512), values.get("num_global_key_value_heads")
        listed = values.get("per_layer_config")
        if listed is not None:
            full = [str(index) for index, sliding in enumerate(layers) if not sliding]
            known = isinstance(listed, dict) and sorted(listed) == sorted(full)
            first = listed[full[0]] if known else None
            if not isinstance(first, dict) or any(other != first for other in listed.values()):
                values.refuse("per_layer_config", "the same numbers for all layers without a window are needed")
            numbers = ConfigValues(values.path, first, "")
            named = numbers.integer("head_dim", default=512), numbers.get("num_key_value_heads")
            numbers.refuse_unread(lambda key, value: False)
        if heads is None or (listed is not None and named[1] is not None):
            heads = named[1] if named[1] is not None else values.integer("num_key_value_heads")
        if type(heads) is not int or heads < 1:
            values.refuse("num_global_key_value_heads", "a positive number is needed", CheckpointError)
        return named[0], heads

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As llama.cpp computes the architecture; whether keys are values follows from the tensors."""
        num_layers, width = values.integer("block_count"), values.integer("attention.key_length")
        narrow = values.integer("attention.key_length_swa")
        for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
            if values.integer(key, default=narrow) != narrow:
                values.refuse(key, f"only the head width {narrow} is supported")
        layers = values.layer_flags("attention.sliding_window_pattern", num_layers)
        if layers is None or len(set(layers)) < 2:
            values.refuse("attention.sliding_window_pattern", "true for some layers, and false for others, is needed")
        sharing = values.integer("attention.shared_kv_layers", default=0, minimum=0)
        heads, mlp_dims = (values.by_layer(key, num_layers) for key in self.gguf_lists)
        known = {(sliding, count) for sliding, count in zip(layers, heads, strict=True)}
        wide = mlp_dims[-1]
        alike = [mlp_dims[0]] * (num_layers - sharing) + [wide] * sharing == mlp_dims
        if len(known) > 2 or not alike:
            values.refuse("feed_forward_length", "layers that differ otherwise than by sharing keys are not supported")
        inputs, experts = values.integer("embedding_length_per_layer_input", default=0, minimum=0), None
        if values.integer("expert_count", default=0, minimum=0):
            if sharing:
                values.refuse("attention.shared_kv_layers", "experts beside MLPs of two widths are not supported")
            experts = read_gguf_experts(values, renormalise=True, shared_dim=wide)
            experts = dataclasses.replace(experts, beside=True)
        full = heads[layers.index(False)]
        kinds = LayerKinds(width, full, sharing, wide if sharing else 0, inputs_dim=inputs)
        return {
            **self.features, "embed_scale": math.sqrt(values.integer("embedding_length")),
            "num_kv_heads": heads[layers.index(True)], "head_dim": narrow, "query_scale": 1.0, "kinds": kinds,
            "sliding_window": values.integer("attention.sliding_window"), "sliding_layers": layers, "experts": experts,
            "local_rope": RopeConfig(values.number("rope.freq_base_swa", default=10000.0)),
            "logit_softcap": values.number("final_logit_softcapping", default=0.0) or None,
        }  # fmt: skip

    def read_rope(self, values: ConfigValues, max_context: int) -> dict[str, RopeConfig]:
        """Layers without a window turn a part of each head, by the first frequencies of a whole one."""
        name, given = find_rope(values)
        given = given or _ROPES
        if set(given) != set(_ROPES) or not all(isinstance(part, dict) for part in given.values()):
            values.refuse(name, f"an object with {_GLOBAL!r} and {_LOCAL!r} is needed", CheckpointError)
        made = {}
        for kind, defaults in _ROPES.items():
            numbers = ConfigValues(values.path, given[kind])
            scaling, theta = numbers.get("rope_type", "default"), numbers.number("rope_theta", defaults["rope_theta"])
            if scaling != defaults["rope_type"]:
                values.refuse(name, f"only {defaults['rope_type']!r} is supported for layers of {kind}")
            if scaling == "default":
                made[kind] = RopeConfig(theta)
            else:
                made[kind] = RopeConfig(theta, "proportional", partial=numbers.number(PARTIAL, default=1.0))
            if not math.isclose(numbers.number("factor", default=1.0), 1.0):
                values.refuse(name, "a factor is not supported")
            numbers.refuse_unread(lambda key, value: False)
        return {"rope": made[_GLOBAL], "local_rope": made[_LOCAL]}


FAMILY = Gemma4()
