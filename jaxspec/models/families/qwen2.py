"""Qwen 2 and 2.5: biases of query, key and value, and optional sliding windows in the later layers."""

from jaxspec.models.families.base import ConfigValues, Family


class Qwen2(Family):
    """The biases are there whatever `attention_bias` says."""

    name = "qwen2"
    gguf_architecture = "qwen2"
    features = {"qkv_bias": True}
    layers_differ = True

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """No window unless `use_sliding_window`; the first `max_window_layers` layers have none."""
        first = values.integer("max_window_layers", default=28, minimum=0)
        if not values.flag("use_sliding_window"):
            values.get("sliding_window")  # has no effect
            return None, first
        return values.optional_integer("sliding_window", default=4096), first


FAMILY = Qwen2()
