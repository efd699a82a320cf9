"""MXFP4: floats of four bits (E2M1), 32 of which share a power of two.

A byte holds an even element in its low half and the next, odd one in its high half. A scale is a byte: the power of two
plus 127. Blocks are kept as GGUF files have them, where the low halves of 16 bytes come first.

gpt-oss keeps experts this way: of each one, `blocks` uint8 `[O, I / 32, 16]` and `scales` uint8 `[O, I / 32]`, which
its folders hold together (`jaxspec.checkpoint.experts_together`).
"""

import functools
from pathlib import Path

import numpy as np

from jaxspec.checkpoint.quantised.layout import QuantisedWeight, Tensors, expect, modules_with
from jaxspec.errors import CheckpointError
from jaxspec.models.families.base import ConfigValues
from pallas_kernels.linear.blocks import FORMATS

GROUP = FORMATS["mxfp4"].values

HARMLESS_KEYS = frozenset({"modules_to_not_convert", "dequantize"})


def check(values: ConfigValues) -> None:
    """Nothing: the layout has no settings."""


def find_weights(tensors: Tensors, values: ConfigValues) -> dict[str, QuantisedWeight]:
    """The quantised weights by name, such as `model.layers.0.mlp.experts.7.up_proj.weight`.

    Raises:
      CheckpointError: tensors are missing or do not fit together.
    """
    return {f"{module}.weight": _find_blocks(tensors, module) for module in modules_with(tensors, "blocks")}


def _find_blocks(tensors: Tensors, module: str) -> QuantisedWeight:
    names = (f"{module}.blocks", f"{module}.scales")
    outputs, groups, _ = expect(tensors, names[0], ("uint8",), (None, None, GROUP // 2))
    expect(tensors, names[1], ("uint8",), (outputs, groups))
    read = functools.partial(_read_blocks, tensors, names)
    return QuantisedWeight((outputs, GROUP * groups), "mxfp4", names, read)


def _read_blocks(tensors: Tensors, names: tuple[str, str]) -> np.ndarray:
    return expert_blocks(tensors.path, names[1], tensors.read_raw(names[0]), tensors.read_raw(names[1]))


def find_packed(tensors: Tensors, module: str) -> QuantisedWeight:
    """A weight of `weight_packed` uint8 `[O, I / 2]` and `weight_scale` uint8 `[O, I / 32]`."""
    names = (f"{module}.weight_packed", f"{module}.weight_scale")
    outputs, half = expect(tensors, names[0], ("uint8",), (None, None))
    if half % (GROUP // 2):
        raise CheckpointError(f"{tensors.path}: {module}: {2 * half} inputs are no whole groups of {GROUP}")
    expect(tensors, names[1], ("uint8",), (outputs, 2 * half // GROUP))
    read = functools.partial(_read_packed, tensors, names)
    return QuantisedWeight((outputs, 2 * half), "mxfp4", names, read)


def expert_blocks(path: Path, name: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks from codes uint8 `[..., I / 32, 16]` and scales uint8 `[..., I / 32]`: uint8 `[..., I / 32, 17]`.

    `path` and `name` are for errors.

    Raises:
      CheckpointError: a scale is no number.
    """
    if (scales == 255).any():
        raise CheckpointError(f"{path}: {name!r} holds a scale that is no number: the file is damaged")
    blocks = np.empty((*scales.shape, 17), np.uint8)
    blocks[..., 0] = scales
    # Elements 2i and 2i + 1 share byte i; in the blocks element i shares byte i with element 16 + i.
    even, odd = codes & np.uint8(15), codes >> np.uint8(4)
    elements = np.stack([even, odd], axis=-1).reshape(*codes.shape[:-1], 2, 16)
    blocks[..., 1:] = elements[..., 0, :] | elements[..., 1, :] << np.uint8(4)
    return blocks


def _read_packed(tensors: Tensors, names: tuple[str, str]) -> np.ndarray:
    codes = tensors.read_raw(names[0])
    return expert_blocks(
        tensors.path, names[1], codes.reshape(len(codes), -1, 16), np.asarray(tensors.read_raw(names[1]))
    )
