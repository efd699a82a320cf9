"""Shared parts of all readers of quantised safetensors: the tensors of a folder, and how groups become blocks.

`QuantisedWeight` declares one weight: which tensors hold it, the block format that it is kept in, and the order of its
inputs. Storage, sharding, native checkpoints and kernels go by its format, as they do for GGUF files.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.quantization import decode_blocks, undo_order
from pallas_kernels.linear.blocks import FORMATS
from pallas_kernels.linear.groups import encode_groups, find_group_format, has_short_scales

Shape = tuple[int, ...]

SCALE_TYPES = ("float16", "bfloat16", "float32")
# Weights of a model are tens of thousands wide; beyond this a header is damaged.
_MOST_INPUTS = 1 << 24


class Tensors(Protocol):
    """The tensors of a folder of safetensors under their own names; only headers are read until `read` is called."""

    path: Path

    def names(self) -> Sequence[str]: ...

    def describe(self, name: str) -> tuple[str, Shape] | None:
        """Name of the dtype and shape of a tensor; None where there is no such tensor."""
        ...

    def read_raw(self, name: str) -> np.ndarray:
        """One whole tensor: a read-only view of the file."""
        ...


@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """A matrix `[O, I]` that a checkpoint holds in codes, scales and zero points.

    Attributes:
      shape: `(O, I)`.
      format: the block format that it is kept in, one of `pallas_kernels.linear.blocks.FORMATS`.
      tensors: names of the tensors that belong to it, those included that are not needed.
      read_blocks: reads the blocks, uint8 `[O, I / values, nbytes]`; CheckpointError where a value is damaged.
      order: int64 `[I]` where the blocks' column i is input `order[i]`; None where inputs are in order.
    """

    shape: tuple[int, int]
    format: str
    tensors: tuple[str, ...]
    read_blocks: Callable[[], np.ndarray]
    order: np.ndarray | None = None

    def read_numbers(self) -> np.ndarray:
        """The values, float32 `[O, I]`, with their inputs in order."""
        values = decode_blocks(self.read_blocks(), self.format).reshape(self.shape)
        return values if self.order is None else undo_order(values, self.order)


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How the groups of a file are cut into blocks.

    Attributes:
      format: block format.
      group_of: int64 `[I / values]`, the file's group of each block.
      order: see `QuantisedWeight`.
    """

    format: str
    group_of: np.ndarray
    order: np.ndarray | None

    def encode(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
        """Blocks from codes `[O, I]` in the file's order, and scales and zero points `[O, groups]`."""
        if self.order is not None:
            codes = codes[:, self.order]
        return encode_groups(
            codes, scale[:, self.group_of], None if zero is None else zero[:, self.group_of], self.format
        )


def cut_groups(where: str, kind: str, group_of_input: np.ndarray, scale_type: str) -> Grouping:
    """Cut groups into the largest blocks of one group each.

    Args:
      where: path and name of the weight, for errors.
      kind: "int4", "int8" or "fp8".
      group_of_input: integers `[I]`; inputs that are not in ascending order of their groups are sorted.
      scale_type: dtype of the scales.

    Raises:
      ConfigError: groups are no whole blocks, or their scales do not fit into blocks of this size.
    """
    order = None
    if (np.diff(group_of_input) < 0).any():
        order = np.argsort(group_of_input, kind="stable")
        group_of_input = group_of_input[order]
    inputs = len(group_of_input)
    starts = np.flatnonzero(np.diff(group_of_input, prepend=group_of_input[:1] - 1))
    common = int(np.gcd.reduce(np.append(starts, inputs)))
    name = find_group_format(kind, common)
    if name is None:
        raise ConfigError(f"{where}: groups of {common} inputs are not supported, multiples of 32 are")
    if has_short_scales(name) and scale_type == "float32":
        raise ConfigError(f"{where}: groups of 32 four-bit codes with float32 scales are not supported")
    return Grouping(name, group_of_input[:: FORMATS[name].values].astype(np.int64), order)


def even_groups(where: str, inputs: int, group: int) -> np.ndarray:
    """The group of each input where `group` consecutive inputs share one; -1 is one group of all."""
    if not 0 < inputs <= _MOST_INPUTS or not (group == -1 or group > 0):
        raise CheckpointError(f"{where}: {inputs} inputs in groups of {group} make no weight")
    return np.arange(inputs) // (inputs if group == -1 else group)


def expect(tensors: Tensors, name: str, dtypes: Sequence[str], shape: Sequence[int | None] | None = None) -> Shape:
    """The shape of a tensor that must be there, of one of some dtypes; None in `shape` is any length.

    Raises:
      CheckpointError: it is missing, or of another dtype or shape.
    """
    found = tensors.describe(name)
    if found is None:
        raise CheckpointError(f"{tensors.path}: lacks the tensor {name!r}")
    dtype, have = found
    if dtype not in dtypes:
        raise CheckpointError(f"{tensors.path}: tensor {name!r} has type {dtype}, not {' or '.join(dtypes)}")
    same_rank = shape is None or len(have) == len(shape)
    if not same_rank or any(n is not None and n != m for n, m in zip(shape or (), have, strict=False)):
        wanted = ["any" if n is None else n for n in shape or ()]
        raise CheckpointError(f"{tensors.path}: tensor {name!r} is {list(have)}, not {wanted}")
    if not all(have):
        raise CheckpointError(f"{tensors.path}: tensor {name!r} is empty: {list(have)}")
    return have


def read_scales(tensors: Tensors, name: str) -> np.ndarray:
    """A tensor of scales as float32.

    Raises:
      CheckpointError: a scale is not finite.
    """
    scale = tensors.read_raw(name).astype(np.float32)
    if not np.isfinite(scale).all():
        raise CheckpointError(f"{tensors.path}: {name!r} holds a scale that is not finite: the file is damaged")
    return scale


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 4 or 8 bits from int32 `[R, C]`, the lowest bits of a word first: uint8 `[R, C * 32 / bits]`."""
    raw = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return raw
    codes = np.empty((*raw.shape, 2), np.uint8)
    np.bitwise_and(raw, 15, out=codes[..., 0])
    np.right_shift(raw, 4, out=codes[..., 1])
    return codes.reshape(len(raw), -1)


def modules_with(tensors: Tensors, suffix: str) -> list[str]:
    """Names of the modules that have a tensor of this name, such as `qweight`."""
    return [name.removesuffix(f".{suffix}") for name in tensors.names() if name.endswith(f".{suffix}")]
