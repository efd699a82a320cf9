"""What every foreign checkpoint format offers once it is open: a config, tensor shapes, and one tensor at a time."""

from pathlib import Path
from typing import Protocol

import numpy as np

from jaxspec.models.config import ModelConfig


class TensorSource(Protocol):
    """An open Hugging Face folder or GGUF file, already validated, with tensors under Hugging Face names.

    Opening reads headers only. `read` returns one tensor, whole, laid out as Hugging Face lays it out (`[out, in]`,
    rotary halves, not llama.cpp's interleaved rows).
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""
        ...

    def weight_type(self, name: str) -> str:
        """How one tensor can be kept without loss: one of `jaxspec.models.quantization.WEIGHT_TYPES`."""
        ...

    def read(self, name: str, keep_blocks: bool = False) -> np.ndarray:
        """One tensor by Hugging Face name, in its own dtype.

        Blocks are dequantised to float32. With `keep_blocks` those of a known format (`weight_type` names it) are left
        as they are: uint8 `[out, in / values, nbytes]`.
        """
        ...
