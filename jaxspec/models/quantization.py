"""How the weights of a model are kept: as numbers of a dtype, or in the blocks that a GGUF file holds."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from pallas_kernels.linear.blocks import FORMATS

WEIGHT_TYPES = ("float32", "bfloat16", "float16", *FORMATS)

# The parts of a `qkv` leaf whose tensors differ in type, in the order of the fused one.
PARTS = ("query", "key", "value")

# Of one weight leaf: a name in `WEIGHT_TYPES`, or the three of a `qkv` that is kept in parts.
LeafType = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Storage:
    """The type of every weight leaf of a model; norms and biases are float32 always.

    Attributes:
      default: a name in `WEIGHT_TYPES`.
      leaves: leaf names, such as `layers.3.qkv`, and the types of those that differ from the default.
    """

    default: str
    leaves: tuple[tuple[str, LeafType], ...] = ()

    def __post_init__(self):
        """Refuse unknown types, and parts of a leaf that has none."""
        for leaf, leaf_type in (("default", self.default), *self.leaves):
            parts = parts_of(leaf_type)
            if parts is leaf_type and not (leaf.endswith(".qkv") and len(parts) == len(PARTS)):
                raise ValueError(f"{leaf}: a qkv has one type or {len(PARTS)}, any other leaf one; got {leaf_type!r}")
            for part in parts:
                if part not in WEIGHT_TYPES:
                    raise ValueError(f"{leaf}: weight type {part!r} is not one of {', '.join(WEIGHT_TYPES)}")

    @functools.cached_property
    def _types(self) -> dict[str, LeafType]:
        return dict(self.leaves)

    def type_of(self, leaf: str) -> LeafType:
        """Type of one weight leaf."""
        return self._types.get(leaf, self.default)

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
    blocks = (("qkv", "out"), ("gate_up", "down"))
    layers = [itertools.compress(blocks, cfg.blocks(index)) for index in range(cfg.num_layers)]
    return top + tuple(f"layers.{index}.{name}" for index, own in enumerate(layers) for block in own for name in block)


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
    """Whether the query heads of one KV head are no whole number of blocks of this type."""
    block_format = FORMATS.get(leaf_type) if isinstance(leaf_type, str) else None
    return block_format is not None and cfg.group * cfg.head_dim % block_format.values != 0
