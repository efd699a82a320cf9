"""How the weights of a model are kept: as numbers of a dtype, or in blocks: a GGUF file's, or groups.

GGUF's blocks become numbers, and numbers blocks, on the host with the `gguf` package's arithmetic.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import ModelConfig
from jaxspec.models.heads import head_layout
from pallas_kernels.linear.blocks import FORMATS, GROUP_FORMATS
from pallas_kernels.linear.groups import decode_groups, quantise_groups

WEIGHT_TYPES = ("float32", "bfloat16", "float16", *FORMATS)

# The parts of a `qkv` leaf whose tensors differ in type, in the order of the fused one.
PARTS = ("query", "key", "value")

# Formats that stay in blocks where XLA multiplies on a CPU: those of which a file has no smaller or more exact form.
# Accelerators keep all of `FORMATS`.
KEPT_ON_CPU = (*GROUP_FORMATS, "mxfp4")

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
      ordered: names of the weight leaves in blocks whose inputs are permuted. The parameter `{name}_order` says which
        input each column takes.
    """

    default: str
    leaves: tuple[tuple[str, LeafType], ...] = ()
    ordered: frozenset[str] = frozenset()

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


def collect_storage(types: Mapping[str, LeafType], ordered: Iterable[str] = ()) -> Storage:
    """The storage of a whole model, from the type of each of its weight leaves; the default is the most common one.

    Of `ordered`, only the leaves that are in blocks count.
    """
    default = Counter(t for t in types.values() if isinstance(t, str)).most_common(1)[0][0]
    kept = frozenset(leaf for leaf in ordered if leaf in types and types[leaf] in FORMATS)
    return Storage(default, tuple((leaf, t) for leaf, t in types.items() if t != default), kept)


def restrict_storage(storage: Storage, cfg: ModelConfig) -> Storage:
    """The types of the leaves of `cfg` alone, which may have fewer layers, in the form of `collect_storage`."""
    return collect_storage({leaf: storage.type_of(leaf) for leaf in weight_leaves(cfg)}, storage.ordered)


def weight_leaves(cfg: ModelConfig) -> tuple[str, ...]:
    """Names of the weight leaves of a model: what a storage gives types to."""
    top = () if cfg.shares_embedding else ("embed",) if cfg.tied else ("embed", "head")
    if cfg.features is not None:
        own = {"fc": True, "fc_own": cfg.features.kind in ("added", "assistant")}
        own |= {"embed": not cfg.shares_embedding, "head": cfg.has_own_head}
        own |= {f"markov_{side}": cfg.features.markov_rank > 0 for side in ("in", "out")}
        own |= {f"selector_{side}": cfg.features.selector_rank > 0 for side in ("in", "out")}
        top = tuple(leaf for leaf, is_own in own.items() if is_own)
    inputs = cfg.kinds.inputs_dim if cfg.kinds is not None else 0
    top += ("inputs_embed", "inputs_proj") if inputs else ()
    layers = [
        itertools.compress((mixing_weights(cfg, index), mlp_weights(cfg, index)), cfg.layer_units(index))
        for index in range(cfg.num_layers)
    ]
    if cfg.features is not None and cfg.features.conv_taps:
        layers = [(*own, ("attn_conv_kernel", "mlp_conv_kernel")) for own in layers]
    return top + tuple(f"layers.{index}.{name}" for index, own in enumerate(layers) for unit in own for name in unit)


def mixing_weights(cfg: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of the weights of a layer's attention, or of the recurrent block in its place."""
    if cfg.recurrent is None or not cfg.is_recurrent(layer):
        return ("qkv", "attn_gate", "out") if cfg.attention_gate else ("qkv", "out")
    return ("mix_in", "mix_gate", "out") if cfg.recurrent.kind == "delta" else ("mix_in", "out")


def mlp_weights(cfg: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of the weights of a layer's MLP or experts. A router is no weight: it is float32 always."""
    experts = cfg.layer_experts(layer)
    shared = ("shared_gate_up", "shared_down") if experts is not None and experts.shared_dim else ()
    own = ("input_gate", "input_out") if cfg.kinds is not None and cfg.kinds.inputs_dim else ()
    return ("gate_up", "down", *shared, *own)


def leaf_inputs(cfg: ModelConfig, leaf: str) -> int:
    """Inputs of a weight leaf, the values of one of its rows."""
    if leaf == "fc" and cfg.features is not None:
        return cfg.features.fusion_inputs(cfg.embed_dim)
    if leaf.startswith(("markov_", "selector_")) and cfg.features is not None:
        return cfg.features.markov_rank or cfg.features.selector_rank
    own = 0 if cfg.kinds is None else cfg.kinds.inputs_dim
    if leaf == "inputs_embed":
        return own * cfg.num_layers
    if not leaf.startswith("layers."):
        return cfg.embed_dim
    _, index, kind = leaf.split(".")
    if kind == "qkv":
        return cfg.attention_inputs(int(index))
    experts = cfg.layer_experts(int(index))
    down = cfg.layer_mlp_dim(int(index)) if experts is None else experts.dim
    shared = 0 if experts is None else experts.shared_dim
    mixed = math.prod(mixed_heads(cfg, int(index)))
    return {"out": mixed, "down": down, "shared_down": shared, "input_out": own}.get(kind, cfg.embed_dim)


def fit_storage(storage: Storage, cfg: ModelConfig, degree: int) -> Storage:
    """The nearest storage that `degree` devices can share.

    The heads of an `out` leaf are split over the devices. Where those of a KV head do not fill whole blocks (K-quants
    of small heads), blocks cross from one device's heads to the next one's: several devices keep that leaf in float32.
    So do devices that share the queries of a KV head, where a single query does not fill whole blocks. Where the inputs
    of an `out` or `down` leaf are permuted, columns of one device would take inputs of another: that leaf is float32.
    """

    splits = head_layout(cfg.num_kv_heads, cfg.group, degree).splits

    def fit(leaf: str) -> LeafType:
        leaf_type = storage.type_of(leaf)
        if degree == 1 or not leaf.endswith((".out", ".down")):
            return leaf_type
        if leaf in storage.ordered:
            return "float32"
        if leaf.endswith(".down"):
            return leaf_type
        block_format = FORMATS.get(leaf_type) if isinstance(leaf_type, str) else None
        layer = int(leaf.split(".")[1])
        cut = splits and block_format is not None and cfg.head_dim % block_format.values != 0
        cut = cut and not cfg.is_recurrent(layer)
        return "float32" if cut or crosses_heads(cfg, leaf_type, layer) else leaf_type

    return collect_storage({leaf: fit(leaf) for leaf in weight_leaves(cfg)}, storage.ordered)


def keep_blocks(storage: Storage, cfg: ModelConfig, dtype: str, formats: Collection[str]) -> Storage:
    """Weights in blocks of `formats` as they are, every other weight in `dtype`.

    A `qkv` whose parts differ keeps them if all of them are blocks of `formats`; else it becomes one weight.
    """

    def keep(leaf: str) -> LeafType:
        leaf_type = storage.type_of(leaf)
        return leaf_type if all(part in formats for part in parts_of(leaf_type)) else dtype

    return collect_storage({leaf: keep(leaf) for leaf in weight_leaves(cfg)}, storage.ordered)


def number_tables(storage: Storage, cfg: ModelConfig, dtype: str) -> Storage:
    """The same with `dtype` for embeddings and heads in blocks, whose rows are looked up, or which have few blocks."""
    types = {leaf: storage.type_of(leaf) for leaf in weight_leaves(cfg)}
    tables = {leaf: dtype for leaf, kind in types.items() if kind in FORMATS and not leaf.startswith("layers.")}
    return collect_storage(types | tables, storage.ordered)


def mixed_heads(cfg: ModelConfig, layer: int) -> tuple[int, int]:
    """KV heads of a layer, and the results of one's queries; those of a recurrent block's key heads."""
    if cfg.recurrent is not None and cfg.is_recurrent(layer):
        return cfg.recurrent.key_heads, cfg.recurrent.result_width
    K, H = cfg.layer_heads(layer)
    return K, cfg.num_heads // K * H


def crosses_heads(cfg: ModelConfig, leaf_type: LeafType, layer: int) -> bool:
    """Whether the results of one KV head (`mixed_heads`) do not fill a whole number of blocks of this type."""
    block_format = FORMATS.get(leaf_type) if isinstance(leaf_type, str) else None
    return block_format is not None and mixed_heads(cfg, layer)[1] % block_format.values != 0


def undo_order(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The numbers `[O, I]` of a weight whose columns take inputs `order`, with its inputs in order again.

    `values` has any shape whose last dimensions are the inputs.
    """
    columns = values.reshape(-1, len(order))
    numbers = np.empty_like(columns)
    numbers[:, order] = columns
    return numbers


def decode_blocks(raw: np.ndarray, block_type: str) -> np.ndarray:
    """The values of blocks of groups, or of any GGUF tensor type that the package dequantises.

    `raw` is uint8, whole blocks in any shape; `block_type` names their type, such as "q4_k" or "int4_g128". The result
    is float32 `[number of values]`.
    """
    if block_type in GROUP_FORMATS:
        group = GROUP_FORMATS[block_type]
        return _convert_chunks(
            raw.reshape(-1, group.nbytes), group.values, (group.values, np.float32),
            lambda chunk: decode_groups(chunk.reshape(-1, 1, group.nbytes), block_type),
        ).reshape(-1)  # fmt: skip
    # Imported where it is needed: a machine that measures random weights has no such package.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[block_type.upper()]
    values, nbytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, nbytes)
    return _convert_chunks(blocks, values, (values, np.float32), lambda chunk: dequantize(chunk, kind)).reshape(-1)


# GGUF's formats of 256 values, which are read and kept, and to which no number is rounded.
K_QUANTS = ("q4_k", "q5_k", "q6_k")


def encode_blocks(numbers: np.ndarray, block_format: str) -> np.ndarray:
    """Quantise float32 `[..., I]`, whole blocks, to a format that is no K-quant: uint8 `[blocks, nbytes]`."""
    shape = FORMATS[block_format]
    rows = numbers.reshape(-1, shape.values)
    if block_format in GROUP_FORMATS:
        return _convert_chunks(
            rows, shape.values, (shape.nbytes, np.uint8),
            lambda chunk: quantise_groups(chunk.reshape(-1, shape.values), block_format),
        )  # fmt: skip
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    kind = GGMLQuantizationType[block_format.upper()]
    return _convert_chunks(rows, shape.values, (shape.nbytes, np.uint8), lambda chunk: quantize(chunk, kind))


def _convert_chunks(rows: np.ndarray, values: int, to: tuple[int, Any], convert: Callable) -> np.ndarray:
    """Convert rows of one block of `values` each, a few as one long row at a time; `to` is the new width and dtype."""
    out, step = np.empty((len(rows), to[0]), to[1]), _CHUNK_VALUES // values
    with np.errstate(all="ignore"):  # damaged scales give infinities, not warnings
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step].reshape(1, -1)
            out[start : start + step] = convert(chunk).reshape(-1, out.shape[1])
    return out
