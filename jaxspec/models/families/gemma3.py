"""Gemma 3's text models: Gemma 2 with norms of query and key heads, without bounds, and with two rotary embeddings."""

from typing import Any

from jaxspec.models.families.gemma2 import Gemma2
from jaxspec.models.families.rope_settings import read_ropes
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.rope import RopeConfig

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
        """Layers with a window have a theta of their own."""
        local_theta = values.number("rope_local_base_freq", default=_LOCAL_THETA)
        return read_ropes(values, max_context, self.default_theta, local_theta)

    def read_gguf(self, values: ConfigValues, max_context: int) -> dict[str, Any]:
        """As Gemma 2, with the rotary embedding of layers with a window, which files leave out."""
        theta = values.number("rope.freq_base_swa", default=_LOCAL_THETA)
        return super().read_gguf(values, max_context) | {"local_rope": RopeConfig(theta)}


FAMILY = Gemma3()
