"""How the weights of a model are kept: as numbers of a dtype, or in the blocks that a GGUF file holds.

Blocks become numbers, and numbers blocks, on the host with the `gguf` package's arithmetic.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from jaxspec.models.config import ModelConfig
from pallas_kernels.linear.blocks import FORMATS

WEIGHT_TYPES = ("float32", "bfloat16", "float16", *FORMATS)

# The parts of a `qkv` leaf whose tensors differ in type, in the order of the fused one.
PARTS = ("query", "key", "value")

# Values converted at once: enough that numpy's fixed costs vanish, few enough to stay in a core's cache. The package's
# own loop takes 16 rows at a time, which for narrow models is mostly overhead.
_CHUNK_VALUES = 64 * 1024

# Of one weight leaf: a name in `WEIGHT_TYPES`, or the three of a `qkv` that is kept in parts.
LeafType = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Storage:
    """The type of every weight leaf of a model; norms and biases are float32 always.

    Attributes:
      default: a name in `WEIGHT_TYPES`.
      leaves: names, such as `layers.3.qkv`, and types of the weight leaves that differ from the default.
    """

    default: str
    leaves: tuple[tuple[str, LeafType], ...] = ()

    def __post_init__(self):
        """Refuse unknown types, and parts of a leaf that cannot have them."""
        for leaf, leaf_type in (("default", self.default), *self.leaves):
            parts = parts_of(leaf_type)
            if parts is leaf_type and not (leaf.endswith(".qkv") and len(parts) == len(PARTS)):
                raise ValueError(f"{leaf}: a qkv has one type or {len(PARTS)}, any other leaf one; got {leaf_type!r}")
            for part in parts:
                if part not in WEIGHT_TYPES:
                    raise ValueError(f"{leaf}: weight type {part!r} is not one of {', '.join(WEIGHT_TYPES)}")

    def type_of(self, leaf: str) -> LeafType:
        """Type of one weight leaf."""
        return self._types.get(leaf, self.default)

    @functools.cached_property
    def _types(self) -> dict[str, LeafType]:
        return dict(self.leaves)

    def __str__(self) -> str:
        """The types in use, such as `q4_k, q6_k and float32`: the default, then the others by name."""
        others = {part for _, leaf_type in self.leaves for part in parts_of(leaf_type)} - {self.default}
        *names, last = [self.default, *sorted(others)]
        return f"{', '.join(names)} and {last}" if names else last


def parts_of(leaf_type: LeafType) -> tuple[str, ...]:
    """The one type of a leaf, or those of its parts."""
    return (leaf_type,) if isinstance(leaf_type, str) else leaf_type


def as_storage(storage: Any) -> Storage:
    """A `Storage` as it is; a dtype or the name of a type as that of all weights."""
    if isinstance(storage, Storage):
        return storage
    return Storage(storage if isinstance(storage, str) else jnp.dtype(storage).name)


def collect_storage(types: Mapping[str, LeafType]) -> Storage:
    """The storage of a whole model, from the type of each of its weight leaves; the default is the most common one."""
    default = Counter(t for t in types.values() if isinstance(t, str)).most_common(1)[0][0]
    return Storage(default, tuple((leaf, t) for leaf, t in types.items() if t != default))


def restrict_storage(storage: Storage, cfg: ModelConfig) -> Storage:
    """The types of the leaves of `cfg` alone, which may have fewer layers, in the form of `collect_storage`."""
    return collect_storage({leaf: storage.type_of(leaf) for leaf in weight_leaves(cfg)})


def weight_leaves(cfg: ModelConfig) -> tuple[str, ...]:
    """Names of the weight leaves of a model: what a storage gives types to."""
    top = () if cfg.shares_embedding else ("embed",) if cfg.tied else ("embed", "head")
    units = (("qkv", "out"), ("gate_up", "down"))
    layers = [itertools.compress(units, cfg.layer_units(index)) for index in range(cfg.num_layers)]
    return top + tuple(f"layers.{index}.{name}" for index, own in enumerate(layers) for unit in own for name in unit)


def fit_storage(storage: Storage, cfg: ModelConfig, degree: int) -> Storage:
    """The nearest storage that `degree` devices can share.

    The heads of an `out` leaf are split over the devices. Where those of a KV head do not fill whole blocks (K-quants
    of small heads), blocks cross from one device's heads to the next one's: several devices keep that leaf in float32.
    """

    def fit(leaf: str) -> LeafType:
        leaf_type = storage.type_of(leaf)
        crosses = degree > 1 and leaf.endswith(".out") and crosses_heads(cfg, leaf_type)
        return "float32" if crosses else leaf_type

    return collect_storage({leaf: fit(leaf) for leaf in weight_leaves(cfg)})


def crosses_heads(cfg: ModelConfig, leaf_type: LeafType) -> bool:
    """Whether the query heads of one KV head do not fill a whole number of blocks of this type."""
    block_format = FORMATS.get(leaf_type) if isinstance(leaf_type, str) else None
    return block_format is not None and cfg.group * cfg.head_dim % block_format.values != 0


def decode_blocks(raw: np.ndarray, block_type: str) -> np.ndarray:
    """The values of blocks of any GGUF tensor type that the package dequantises.

    `raw` is uint8, whole blocks in any shape; `block_type` names their type, such as "q4_k". The result is float32
    `[number of values]`.
    """
    kind = GGMLQuantizationType[block_type.upper()]
    values, nbytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, nbytes)
    return _convert_chunks(blocks, values, (values, np.float32), lambda chunk: dequantize(chunk, kind)).reshape(-1)


def encode_blocks(numbers: np.ndarray, block_format: str) -> np.ndarray:
    """Quantise float32 `[..., I]`, whole blocks, to a format of `FORMATS`: uint8 `[number of blocks, nbytes]`."""
    shape, kind = FORMATS[block_format], GGMLQuantizationType[block_format.upper()]
    rows = numbers.reshape(-1, shape.values)
    return _convert_chunks(rows, shape.values, (shape.nbytes, np.uint8), lambda chunk: quantize(chunk, kind))


def _convert_chunks(rows: np.ndarray, values: int, to: tuple[int, Any], convert: Callable) -> np.ndarray:
    """Convert rows of one block of `values` each, a few as one long row at a time; `to` is the new width and dtype."""
    out, step = np.empty((len(rows), to[0]), to[1]), _CHUNK_VALUES // values
    with np.errstate(all="ignore"):  # damaged scales give infinities, not warnings
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step].reshape(1, -1)
            out[start : start + step] = convert(chunk).reshape(-1, out.shape[1])
    return out
