"""Gemma 3's text models: Gemma 2 with norms of query and key heads, without bounds, and with two rotary embeddings."""

from typing import Any

from jaxspec.errors import CheckpointError
from jaxspec.models.families.gemma2 import Gemma2
from jaxspec.models.families.rope_settings import find_rope, read_settings
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.rope import RopeConfig

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_LOCAL_THETA = 10000.0


class Gemma3(Gemma2):
    """Five layers of six have a sliding window, and rotary frequencies of their own."""

    name = "gemma3_text"
    gguf_architecture = "gemma3"
    features = {"activation": "gelu", "norms": "both", "qk_norm": True}
    default_theta = 1e6
    softcaps = (None, None)
    pattern = 6
    wide_queries = 62

    def read_rope(self, values: ConfigValues, max_context: int) -> dict[str, RopeConfig]:
        """`rope_scaling` is of the layers that see everything; transformers 5 writes one object for each kind."""
        name, rope = find_rope(values)
        nested = {_LOCAL, _GLOBAL} & set(rope)
        kinds = {_GLOBAL: rope} if not nested else {kind: rope.get(kind) or {} for kind in (_GLOBAL, _LOCAL)}
        if nested and (set(rope) != nested or not all(isinstance(part, dict) for part in kinds.values())):
            values.refuse(name, f"an object with {_GLOBAL!r} and {_LOCAL!r} is needed", CheckpointError)
        theta = values.number("rope_theta", default=self.default_theta)
        local_theta = values.number("rope_local_base_freq", default=_LOCAL_THETA)
        return {
            "rope": read_settings(values, name, kinds[_GLOBAL], max_context, theta),
            "local_rope": read_settings(values, name, kinds.get(_LOCAL, {}), max_context, local_theta),
        }

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As Gemma 2, with the rotary embedding of layers with a window, which files leave out."""
        theta = values.number("rope.freq_base_swa", default=_LOCAL_THETA)
        return super().read_gguf(values, max_context) | {"local_rope": RopeConfig(theta)}


FAMILY = Gemma3()
