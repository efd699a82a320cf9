"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from typing import Any

from jaxspec.models.families.base import ConfigValues, Family
from jaxspec.models.families.values import all_but_every

_STEP = 4


class SmolLM3(Family):
    """No sliding windows, which its code knows and no published model has."""

    name = "smollm3"
    gguf_architecture = "smollm3"
    gguf_interleaves = True
    default_theta = 2000000.0
    default_tied = True

    def read_config(self, values: ConfigValues, num_layers: int) -> dict[str, Any]:
        """As the base class, with the layers that do not turn."""
        if values.flag("use_sliding_window"):
            values.refuse("use_sliding_window", "sliding windows are not supported for models of this type")
        turns = values.get("no_rope_layers")  # 1 where a layer turns
        step = values.integer("no_rope_layer_interval", default=_STEP)
        turns = list(all_but_every(step, num_layers)) if turns is None else turns
        if not isinstance(turns, list) or len(turns) < num_layers or not all(turn in (0, 1) for turn in turns):
            values.refuse("no_rope_layers", f"0 or 1 for each of {num_layers} layers is needed")
        nope = tuple(not turn for turn in turns[:num_layers])
        return super().read_config(values, num_layers) | {"nope_layers": nope if any(nope) else ()}

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As llama.cpp computes the architecture, whose files do not say it."""
        nope = tuple(not turn for turn in all_but_every(_STEP, values.integer("block_count")))
        return super().read_gguf(values, max_context) | {"nope_layers": nope if any(nope) else ()}


FAMILY = SmolLM3()
