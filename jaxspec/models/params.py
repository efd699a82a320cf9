"""Parameters: one declaration from which abstract shapes, shardings and restores derive.

Axis letters are those of `ModelConfig`. Weights are stored `[out..., in...]`, as checkpoints have them: a
one-token step is then a row-major matrix-vector product, the fastest form on CPU (docs/decisions.md). Query, key and
value share one tensor grouped by KV head; gate and up share another. Sharding the first named axis then gives each
device whole heads with their keys.

A weight is kept as numbers or in a file's blocks (`jaxspec.models.quantization`). Blocks replace the last dimension
`I` by two, `I / values` and `nbytes`; those before them, and with them the shards, stay what they are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.quantization import PARTS, LeafType, Storage, as_storage, crosses_heads, weight_leaves
from pallas_kernels.linear.blocks import FORMATS, Blocks

Params = dict[str, Any]

# Parameters of a layer's MLP block; the others are its attention's.
MLP_PARAMS = ("mlp_norm", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One declared array.

    Attributes:
      shape: unpadded.
      dtype: of the numbers; uint8 where they are in blocks.
      axes: one logical axis name per dimension, or None.
      format: name of the block format; None for numbers.
      multiple: a device's part of the split dimension is padded to a multiple of this number.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    format: str | None = None
    multiple: int = 1

    def __post_init__(self):
        """Every dimension has a logical name or None."""
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


def declare_params(cfg: ModelConfig, storage: Storage | Any) -> Params:
    """Declare every parameter of `cfg` as an `ArrayInfo`; layers are a list of per-layer dicts.

    Norm scales stay float32: they are tiny and multiply float32 activations.

    Args:
      cfg: geometry.
      storage: how each weight is kept; a dtype is that of all of them. Weights in blocks are declared as `Blocks`
        around their `ArrayInfo`, a `qkv` of three types as a dict of its query, key and value.

    Raises:
      ValueError: the storage names a leaf that the model does not have, or blocks that do not fill a leaf's rows.
    """
    D, F, K, G, H, V = cfg.embed_dim, cfg.mlp_dim, cfg.num_kv_heads, cfg.group, cfg.head_dim, cfg.vocab_size
    storage = as_storage(storage)
    if unknown := {leaf for leaf, _ in storage.leaves} - set(weight_leaves(cfg)):
        raise ValueError(f"the storage names {min(unknown)!r}, which is no weight of this model")
    norm = ArrayInfo((D,), jnp.float32, (None,))

    def declare_out(leaf: str) -> Any:
        leaf_type = storage.type_of(leaf)
        shape, axes = (D, K, G, H), ("embed", "kv_heads", None, None)
        if crosses_heads(cfg, leaf_type):
            shape, axes = (D, 1, K * G * H), ("embed", "uncut", None)
        elif leaf_type in FORMATS:
            shape, axes = (D, K, G * H), ("embed", "kv_heads", None)
        return _declare_weight(leaf, leaf_type, shape, axes)

    def declare_qkv(leaf: str) -> Any:
        leaf_type, axes = storage.type_of(leaf), ("kv_heads", None, None, "embed")
        if isinstance(leaf_type, str):
            return _declare_weight(leaf, leaf_type, (K, G + 2, H, D), axes)
        parts = zip(PARTS, leaf_type, (G, 1, 1), strict=True)
        return {part: _declare_weight(f"{leaf}.{part}", kind, (K, n, H, D), axes) for part, kind, n in parts}

    def declare_layer(index: int) -> Params:
        name, units, gate_up = f"layers.{index}", cfg.layer_units(index), f"layers.{index}.gate_up"
        down_type = storage.type_of(f"{name}.down")
        # Where the down projection is in blocks, each device's columns are whole ones.
        multiple = FORMATS[down_type].values if down_type in FORMATS else 1
        layer = {
            "attn_norm": norm,
            "qkv": declare_qkv(f"{name}.qkv"),
            "out": declare_out(f"{name}.out"),
            "mlp_norm": norm,
            "gate_up": _declare_weight(gate_up, storage.type_of(gate_up), (2, F, D), (None, "mlp", "embed"), multiple),
            "down": _declare_weight(f"{name}.down", down_type, (D, F), ("embed", "mlp")),
        }
        if cfg.qkv_bias:
            layer["qkv_bias"] = ArrayInfo((K, G + 2, H), jnp.float32, ("kv_heads", None, None))
        if cfg.qk_norm:
            layer["q_norm"] = layer["k_norm"] = ArrayInfo((H,), jnp.float32, (None,))
        return {leaf: info for leaf, info in layer.items() if units[leaf in MLP_PARAMS]}

    params: Params = {"final_norm": norm, "layers": [declare_layer(index) for index in range(cfg.num_layers)]}
    for leaf in ("embed", "head"):
        if not cfg.shares_embedding and not (leaf == "head" and cfg.tied):
            params[leaf] = _declare_weight(leaf, storage.type_of(leaf), (V, D), ("vocab", "embed"))
    return params


def declare_shared(cfg: ModelConfig, storage: Storage, target: Params) -> Params:
    """Declare what a draft with `shares_embedding` takes from its target: `embed`, and `head` where it needs one.

    A restricted head (`head_ids`) is a copy of the target's rows, `[len(head_ids), D]`, in the draft's own type. `cfg`
    and `storage` are the draft's, `target` is the target's declaration.
    """
    if cfg.head_ids:
        shape, axes = (len(cfg.head_ids), cfg.embed_dim), ("head_rows", "embed")
        return {"embed": target["embed"], "head": _declare_weight("head", storage.default, shape, axes)}
    return {leaf: target[leaf] for leaf in ("embed", "head") if leaf in target}


def declare_leaves(cfg: ModelConfig, storage: Storage | Any) -> dict[str, ArrayInfo]:
    """Declared arrays by leaf name, in the order of the parameters' leaves; see `declare_params`."""
    leaves, _ = jax.tree.flatten_with_path(declare_params(cfg, storage), is_leaf=is_info)
    return {leaf_name(path): info for path, info in leaves}


def is_info(leaf: Any) -> bool:
    """Tree predicate: stop at declarations."""
    return isinstance(leaf, ArrayInfo)


def leaf_name(path: tuple[Any, ...]) -> str:
    """Dotted name of a leaf, such as `layers.3.qkv`, as in native checkpoints. Blocks have the name of their weight."""
    if isinstance(path[-1], jax.tree_util.GetAttrKey):  # only `Blocks.data` is an attribute
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _declare_weight(
    leaf: str, leaf_type: LeafType, shape: tuple[int, ...], axes: tuple[str | None, ...], multiple: int = 1
) -> Any:
    """A weight of one type: the array of `shape`, or the blocks that its last dimension is cut into."""
    assert isinstance(leaf_type, str)  # a `Storage` has three types for qkv only
    block_format = FORMATS.get(leaf_type)
    if block_format is None:
        return ArrayInfo(shape, jnp.dtype(leaf_type), axes, multiple=multiple)
    *outer, inputs = shape
    if inputs % block_format.values:
        whole = f"a whole number of {leaf_type} blocks of {block_format.values}"
        raise ValueError(f"{leaf}: rows of {inputs} values are not {whole}")
    shape = (*outer, inputs // block_format.values, block_format.nbytes)
    info = ArrayInfo(shape, jnp.dtype(jnp.uint8), (*axes, None), format=leaf_type, multiple=multiple)
    return Blocks(info, leaf_type)  # pyright: ignore[reportArgumentType]
