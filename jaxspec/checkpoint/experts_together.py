"""Experts of a layer in one tensor each, as gpt-oss's folders hold them, as the tensors of single experts.

Of `model.layers.N.mlp.experts.`, with E experts, width D and F columns:

| tensor | numbers | MXFP4 |
|---|---|---|
| gate and up | `gate_up_proj` `[E, D, 2F]` | `gate_up_proj_blocks` `[E, 2F, D / 32, 16]`, `_scales` `[E, 2F, D / 32]` |
| down | `down_proj` `[E, F, D]` | `down_proj_blocks` `[E, D, F / 32, 16]`, `_scales` `[E, D, F / 32]` |
| biases | `gate_up_proj_bias` `[E, 2F]`, `down_proj_bias` `[E, D]` | the same |

Gate and up take turns: even ones are the gate's. Numbers have their inputs first, other than in every other tensor.
The parts get the names `N.gate_proj.weight` and so on, or `.blocks` and `.scales`; the biases of all experts of a
projection stay together, as in GGUF files: `gate_proj.bias` `[E, F]`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from pallas_kernels.linear.blocks import FORMATS

Shape = tuple[int, ...]
_GROUP = FORMATS["mxfp4"].values
_CODES = ("blocks", "scales")


class View(NamedTuple):
    """Place of the entries of a part in the bytes that are read for it.

    Attributes:
      shape: of those bytes.
      axis: whose entries `start`, `start + step` and so on belong to the part.
      start: see `axis`.
      step: see `axis`.
      transposed: whether the two dimensions are to be swapped after that.
    """

    shape: Shape
    axis: int
    start: int
    step: int
    transposed: bool

    def take(self, array: np.ndarray) -> np.ndarray:
        """The part of an array of `shape`."""
        part = array[(slice(None),) * self.axis + (slice(self.start, None, self.step),)]
        return part.T if self.transposed else part

    @property
    def part_shape(self) -> Shape:
        """The shape of what `take` gives."""
        count = len(range(self.start, self.shape[self.axis], self.step))
        part = (*self.shape[: self.axis], count, *self.shape[self.axis + 1 :])
        return part[::-1] if self.transposed else part


class Located(Protocol):
    """A tensor of a file."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype: ...


Tensor = TypeVar("Tensor", bound=Located)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A tensor of all experts: the projections in it, what follows their names, and its shape without the experts."""

    parts: tuple[str, ...]
    kind: str
    shape: Shape
    transposed: bool = False


def split_experts(
    path: Path, tensors: Mapping[str, Tensor], cfg: ModelConfig, cut: Callable[[Tensor, int, int, View], Tensor]
) -> dict[str, Tensor]:
    """The tensors of a folder, those of all experts replaced by their parts.

    Args:
      path: for errors.
      tensors: by name.
      cfg: geometry.
      cut: makes a part from a tensor, the offset and the number of the entries that hold it, and where it is in those.

    Raises:
      CheckpointError: a tensor has another type or shape, or codes without scales.
    """
    if cfg.experts is not None and FAMILIES[cfg.family].experts_by_rows:
        return {_name_rows(name): tensor for name, tensor in tensors.items()}
    if cfg.experts is None or not FAMILIES[cfg.family].experts_together:
        return dict(tensors)
    layouts, split = _layouts(cfg), {}
    for name, tensor in tensors.items():
        prefix, infix, part = name.rpartition(".mlp.experts.")
        layout = layouts.get(part) if prefix.startswith("model.layers.") else None
        if layout is None:
            split[name] = tensor
            continue
        _check(path, name, tensor, (cfg.experts.count, *layout.shape), layout, tensors)
        for made, offset, size, view in _parts(layout, cfg.experts.count):
            split[f"{prefix}{infix}{made}"] = cut(tensor, offset, size, view)
    return split


def _name_rows(name: str) -> str:
    """The name of a tensor of all experts as others end, for `split_fused`; any other name as it is."""
    prefix, _, part = name.rpartition(".experts.")
    known = part in ("gate_up_proj", "down_proj")
    return f"{prefix.removesuffix('.mlp')}.mlp.experts.{part}.weight" if known else name


def _layouts(cfg: ModelConfig) -> dict[str, _Layout]:
    assert cfg.experts is not None  # see `split_experts`
    D, F = cfg.embed_dim, cfg.experts.dim
    made = {}
    for name, parts, outputs, inputs in (
        ("gate_up_proj", ("gate_proj", "up_proj"), 2 * F, D),
        ("down_proj", ("down_proj",), D, F),
    ):
        made[name] = _Layout(parts, "weight", (inputs, outputs), transposed=True)
        made[f"{name}_bias"] = _Layout(parts, "bias", (outputs,))
        made[f"{name}_blocks"] = _Layout(parts, "blocks", (outputs, inputs // _GROUP, _GROUP // 2))
        made[f"{name}_scales"] = _Layout(parts, "scales", (outputs, inputs // _GROUP))
        if inputs % _GROUP:  # no tensor has such blocks
            made[f"{name}_blocks"] = made[f"{name}_scales"] = _Layout(parts, "blocks", ())
    return made


def _parts(layout: _Layout, experts: int) -> Iterator[tuple[str, int, int, View]]:
    """Name, offset, size and view of each part; offset and size in entries."""
    size, step = math.prod(layout.shape), len(layout.parts)
    for place, part in enumerate(layout.parts):
        if layout.kind == "bias":
            yield f"{part}.bias", 0, experts * size, View((experts, *layout.shape), 1, place, step, False)
            continue
        view = View(layout.shape, 1 if layout.transposed else 0, place, step, layout.transposed)
        for expert in range(experts):
            yield f"{expert}.{part}.{layout.kind}", expert * size, size, view


def _check(
    path: Path, name: str, tensor: Located, shape: Shape, layout: _Layout, tensors: Mapping[str, Located]
) -> None:
    coded = layout.kind in _CODES
    if coded and not layout.shape:
        raise CheckpointError(f"{path}: {name!r} is of MXFP4, whose groups of {_GROUP} do not divide the inputs")
    if tensor.shape != shape:
        raise CheckpointError(f"{path}: tensor {name!r} is {list(tensor.shape)}, not {list(shape)}")
    if coded != (tensor.dtype == np.uint8):
        wanted = "uint8" if coded else "float32, bfloat16 or float16"
        raise CheckpointError(f"{path}: tensor {name!r} has type {tensor.dtype.name}, not {wanted}")
    if coded:
        whole, _, kind = name.rpartition("_")
        partner = f"{whole}_{_CODES[1 - _CODES.index(kind)]}"
        if partner not in tensors:
            raise CheckpointError(f"{path}: lacks the tensor {partner!r}, which belongs to {name!r}")
        if whole in tensors:
            raise CheckpointError(f"{path}: holds {whole!r} twice: as numbers, and quantised")
