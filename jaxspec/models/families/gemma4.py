"""Gemma 4's text models: two kinds of heads, layers that share keys, and inputs of each layer's own."""

import math
from typing import Any

from jaxspec.errors import CheckpointError
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
    gguf_architecture = None
    norm_offset = 0.0

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the two kinds of layers."""
        if values.flag("enable_moe_block"):
            values.refuse("enable_moe_block", "experts beside an MLP are not supported")
        if values.get("use_bidirectional_attention") == "all":
            values.refuse("use_bidirectional_attention", "only causal attention is supported")
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            values.get(key)  # of the experts that are not there
        fields = super().read_config(values, num_layers)
        layers = fields["sliding_layers"]
        if len(set(layers)) < 2:
            values.refuse("layer_types", f"a {self.name} model has layers with a sliding window and some without")
        sharing = values.integer("num_kv_shared_layers", default=0, minimum=0)
        wide = values.flag("use_double_wide_mlp")
        inputs = values.integer("hidden_size_per_layer_input", default=256, minimum=0)
        vocabulary = values.integer("vocab_size")
        if values.integer("vocab_size_per_layer_input", default=262144) != vocabulary and inputs:
            values.refuse("vocab_size_per_layer_input", f"but vocab_size is {vocabulary}")
        alike = values.flag("attention_k_eq_v")
        width, heads = self._read_full(values, layers, fields["num_kv_heads"] if not alike else None)
        mlp_dim = values.integer("intermediate_size") * (2 if wide else 1)
        kinds = LayerKinds(width, heads, sharing, mlp_dim if sharing else 0, alike, inputs)
        own = {"query_scale": 1.0, "kinds": kinds, "logit_softcap": None}
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
