"""Mistral 7B: Llama with a sliding window in every layer. Its GGUF files name the architecture `llama`."""

from jaxspec.models.families.base import ConfigValues, Family


class Mistral(Family):
    """A window of 4096 positions unless the config gives another; null is none."""

    name = "mistral"

    def read_window(self, values: ConfigValues) -> tuple[int | None, int]:
        """One window for all layers."""
        return values.optional_integer("sliding_window", default=4096), 0


FAMILY = Mistral()
