"""The native checkpoint: jaxspec's own parameters, written by Orbax, restored straight into their shards.

A folder holds

* `jaxspec.json`: format version, geometry, the type of most weights, end-of-sequence ids, and the shape and dtype of
  every array, with the block format of those that hold blocks; its presence is what makes the folder a checkpoint, so
  it is written last; a draft that shares its target's embedding names the target's vocabulary too, as
  `jaxspec.pairing.vocabulary_digest` does, and has no tokenizer of its own;
* `arrays/`: an Orbax checkpoint of the unpadded parameters of `declare_params`, in Zarr 3 chunks with a CRC-32C each,
  so that a flipped bit is an error and not a wrong answer (checking costs nothing that can be measured); blocks are
  arrays of bytes under the name of their weight;
* the tokenizer's files, as Hugging Face names them.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.checkpoint.block_codec import decode_blocks, type_of
from jaxspec.checkpoint.json_file import read_json
from jaxspec.checkpoint.load import NATIVE_MARK as MANIFEST
from jaxspec.checkpoint.native_arrays import Reading, check_array, count_bytes, orbax_checkpointer, read_array
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.mesh.plan import MeshPlan
from jaxspec.mesh.rules import placed_shapes
from jaxspec.models.config import ModelConfig
from jaxspec.models.config_data import config_from_data, config_to_data
from jaxspec.models.params import ArrayInfo, Params, declare_leaves, declare_params, leaf_name
from jaxspec.models.storage import (
    PARTS,
    WEIGHT_TYPES,
    LeafType,
    Storage,
    as_storage,
    collect_storage,
    fit_storage,
    parts_of,
    restrict_storage,
    weight_leaves,
)
from pallas_kernels.linear.blocks import FORMATS, Blocks

ARRAYS = "arrays"
FORMAT = "jaxspec"
VERSION = 1

# A folder of this name is a conversion's work in progress, whatever it holds.
PARTIAL = re.compile(r"\..*\.partial-\d+")

_MANIFEST_KEYS = ("format", "version", "model", "dtype", "eos_ids", "num_bytes", "arrays")
_DRAFT_KEYS = ("vocabulary",)  # where the embedding is the target's
_MAX_LISTED = 5


@dataclasses.dataclass(frozen=True)
class NativeCheckpoint:
    """An opened native checkpoint; its manifest is checked, its arrays are still on disk.

    Attributes:
      path: the folder.
      config: geometry.
      eos_ids: token ids that end a text.
      storage: how each weight is stored (norms and biases are float32).
      vocabulary: digest of the vocabulary of the target whose embedding the model shares; None where it has its own.
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]
    storage: Storage
    vocabulary: str | None = None

    @functools.cached_property
    def infos(self) -> dict[str, ArrayInfo]:
        """Declaration of every stored array by leaf name."""
        return declare_leaves(self.config, self.storage)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return sum(map(count_bytes, self.infos.values()))


def open_native(path: str | Path) -> NativeCheckpoint:
    """Open a native checkpoint: its manifest is read and checked; no array is.

    Raises:
      CheckpointError: the folder is no finished checkpoint, or its manifest is damaged, of an unknown version, or does
        not list exactly the arrays of its own geometry.
    """
    path = Path(path)
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path}: is no native checkpoint: {MANIFEST} is missing")
    if PARTIAL.fullmatch(path.resolve().name):
        raise CheckpointError(f"{path}: is what an interrupted conversion left; delete it and convert again")
    manifest = read_json(file)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file}: format is {manifest.get('format')!r}, not {FORMAT!r}")
    if manifest.get("version") != VERSION or isinstance(manifest["version"], bool):
        raise CheckpointError(
            f"{file}: format version {manifest.get('version')!r} is not supported, this jaxspec reads {VERSION}"
        )
    model = manifest.get("model")
    shares = isinstance(model, dict) and model.get("shares_embedding") is True
    keys = _MANIFEST_KEYS + _DRAFT_KEYS if shares else _MANIFEST_KEYS
    missing = [key for key in keys if key not in manifest]
    unknown = [key for key in manifest if key not in keys]
    if missing or unknown:
        raise CheckpointError(f"{file}: missing keys: {missing or 'none'}; unknown keys: {unknown or 'none'}")
    dtype, arrays = manifest["dtype"], manifest["arrays"]
    if dtype not in WEIGHT_TYPES:
        raise CheckpointError(f"{file}: dtype is {dtype!r}, not one of {', '.join(WEIGHT_TYPES)}")
    if not isinstance(arrays, dict):
        raise CheckpointError(f"{file}: arrays must be an object, got {type(arrays).__name__}")
    try:
        cfg = config_from_data(manifest["model"], f"{file}: model")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    # Before anything as long as the geometry claims is built.
    if cfg.num_layers > len(arrays):
        raise CheckpointError(
            f"{file}: the model has {cfg.num_layers} layers, but only {len(arrays)} arrays are listed"
        )
    vocabulary = manifest.get("vocabulary")
    if cfg.shares_embedding and not isinstance(vocabulary, str):
        raise CheckpointError(f"{file}: vocabulary must be the digest of the target's, got {vocabulary!r}")
    storage = _read_storage(cfg, dtype, arrays)
    checkpoint = NativeCheckpoint(path, cfg, _read_eos_ids(file, manifest, cfg), storage, vocabulary)
    try:
        infos = checkpoint.infos
    except ValueError as error:
        raise CheckpointError(f"{file}: arrays do not match the model: {error}") from error
    _check_arrays(file, arrays, {name: _describe_leaf(info) for name, info in infos.items()})
    if dtype != checkpoint.storage.default:
        raise CheckpointError(f"{file}: dtype is {dtype!r}, but most weights are {checkpoint.storage.default}")
    if manifest["num_bytes"] != checkpoint.num_bytes:
        raise CheckpointError(f"{file}: num_bytes is {manifest['num_bytes']!r}, the arrays have {checkpoint.num_bytes}")
    return checkpoint


def restore_native(
    checkpoint: NativeCheckpoint, plan: MeshPlan, storage: Storage | Any = None, vocab_rows: int = 0
) -> Params:
    """Read every parameter, each shard straight onto its device.

    Args:
      checkpoint: an open checkpoint.
      plan: the devices; dimensions that they do not divide are zero-padded (see `jaxspec.mesh.padding`).
      storage: how each weight is kept: blocks only as they are stored. A dtype is that of all weights; norms and biases
        stay float32. None is as stored, as far as the devices can share it.
      vocab_rows: least number of vocabulary rows; fewer are zero-padded.

    Raises:
      CheckpointError: array files are missing, truncated or corrupted.
      ConfigError: a weight is asked for in blocks that the checkpoint does not hold.
    """
    cfg = checkpoint.config
    wanted = fit_storage(checkpoint.storage, cfg, plan.tensor) if storage is None else as_storage(storage)
    # Orbax restores the tree that is stored, whose query, key and value may be apart.
    apart = _split_alike(checkpoint, wanted)
    targets = placed_shapes(declare_params(cfg, apart), plan, {"vocab": vocab_rows})
    named = {leaf_name(path): target for path, target in jax.tree.flatten_with_path(targets)[0]}
    readings = {
        name: Reading(checkpoint.infos[name], info.shape, named[name])
        for name, info in declare_leaves(cfg, apart).items()
    }
    arrays = _without_blocks(targets)
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=jax.Array), arrays)
    folder = checkpoint.path / ARRAYS
    _check_stored(checkpoint)
    try:
        with orbax_checkpointer(readings) as checkpointer:
            args = ocp.args.PyTreeRestore(item=arrays, restore_args=restore_args)
            restored = checkpointer.restore(folder.absolute(), args=args)
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever Orbax meets in a tree that is not what it wrote
        raise CheckpointError(f"{folder}: damaged or incomplete: {error}") from error
    params = jax.tree.unflatten(jax.tree.structure(targets), jax.tree.leaves(restored))
    for index, layer in enumerate(params["layers"]):
        leaf = f"layers.{index}.qkv"
        if wanted.type_of(leaf) != apart.type_of(leaf):
            layer["qkv"] = _join_parts(layer["qkv"])
    return params


def read_leaf(checkpoint: NativeCheckpoint, name: str) -> np.ndarray:
    """One whole unpadded array by leaf name, on the host; the bytes of one in blocks.

    Raises:
      CheckpointError: its files are missing, truncated or corrupted.
    """
    folder = checkpoint.path / ARRAYS / name
    check_array(folder, checkpoint.infos[name])
    return read_array(folder)


def read_leaf_as(checkpoint: NativeCheckpoint, name: str, info: ArrayInfo) -> np.ndarray:
    """One whole unpadded array as `info` declares it: as numbers, or in the blocks that are stored.

    A query, key and value that are stored apart are joined where `name` is that of all three.

    Raises:
      CheckpointError: its files are missing, truncated or corrupted.
    """
    if name not in checkpoint.infos:
        K, rows, *inner = info.shape
        parts = zip(PARTS, (rows - 2, 1, 1), strict=True)
        infos = {f"{name}.{part}": dataclasses.replace(info, shape=(K, heads, *inner)) for part, heads in parts}
        return np.concatenate([read_leaf_as(checkpoint, part, info) for part, info in infos.items()], axis=1)
    stored = checkpoint.infos[name]
    value = read_leaf(checkpoint, name)
    if stored.format is not None and info.format is None:
        value = decode_blocks(value, type_of(stored.format)).reshape(info.shape)
    return value.astype(info.dtype, copy=False)


def write_arrays(folder: Path, leaves: Any) -> None:
    """Write a pytree of `PendingLeaf` as the Orbax checkpoint `folder`/arrays, one array in memory at a time."""
    with orbax_checkpointer({}) as checkpointer:
        checkpointer.save((folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(_without_blocks(leaves)))


def write_manifest(
    folder: Path, cfg: ModelConfig, storage: Storage, eos_ids: Sequence[int], vocabulary: str | None = None
) -> None:
    """Write `jaxspec.json`, which makes `folder` a checkpoint: call it last."""
    storage = restrict_storage(storage, cfg)
    infos = declare_leaves(cfg, storage)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": config_to_data(cfg),
        "dtype": storage.default,
        "eos_ids": list(eos_ids),
        "num_bytes": sum(map(count_bytes, infos.values())),
        "arrays": {name: _describe_leaf(info) for name, info in infos.items()},
    } | ({} if vocabulary is None else {"vocabulary": vocabulary})
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _split_alike(checkpoint: NativeCheckpoint, wanted: Storage) -> Storage:
    """The wanted types, with each query, key and value apart where they are stored apart.

    Raises:
      ConfigError: blocks are wanted that are not stored, or parts of what is stored as one.
    """
    types: dict[str, LeafType] = {}
    for leaf in weight_leaves(checkpoint.config):
        stored, want = parts_of(checkpoint.storage.type_of(leaf)), parts_of(wanted.type_of(leaf))
        if len(want) == 1:
            want *= len(stored)
        if len(want) != len(stored) or any(w in FORMATS and w != s for s, w in zip(stored, want, strict=True)):
            raise ConfigError(
                f"{checkpoint.path}: {leaf} is stored as {', '.join(stored)}, it cannot be loaded as {', '.join(want)}"
            )
        types[leaf] = want if len(stored) > 1 else want[0]
    return collect_storage(types)


def _join_parts(parts: Mapping[str, jax.Array]) -> jax.Array:
    """One `qkv` from its parts; they are split over the devices alike."""
    arrays = [parts[part] for part in PARTS]
    return jax.jit(lambda *a: jnp.concatenate(a, axis=1), out_shardings=arrays[0].sharding)(*arrays)


def _without_blocks(tree: Any) -> Any:
    """A tree of parameters whose weights in blocks are their bytes alone: what Orbax stores."""

    def is_blocks(leaf: Any) -> bool:
        return isinstance(leaf, Blocks)

    return jax.tree.map(lambda leaf: leaf.data if is_blocks(leaf) else leaf, tree, is_leaf=is_blocks)


def _describe_leaf(info: ArrayInfo) -> dict[str, Any]:
    """Shape, dtype and block format, as the manifest holds them."""
    described = {"shape": list(info.shape), "dtype": np.dtype(info.dtype).name}
    return described if info.format is None else described | {"format": info.format}


def _read_storage(cfg: ModelConfig, default: str, arrays: dict[str, Any]) -> Storage:
    """The types of the weights as the manifest lists them; one that it gives no type is left to `_check_arrays`."""

    def read_type(name: str) -> str | None:
        entry = arrays.get(name)
        listed = (entry.get("format"), entry.get("dtype")) if isinstance(entry, dict) else ()
        return next((t for t in listed if isinstance(t, str) and t in WEIGHT_TYPES), None)

    types: dict[str, LeafType] = {}
    for leaf in weight_leaves(cfg):
        query, key, value = (read_type(f"{leaf}.{part}") for part in PARTS)
        if query and key and value and leaf.endswith(".qkv"):
            types[leaf] = (query, key, value)
        else:
            types[leaf] = read_type(leaf) or default
    return collect_storage(types)


def _read_eos_ids(file: Path, manifest: dict[str, Any], cfg: ModelConfig) -> tuple[int, ...]:
    ids = manifest["eos_ids"]
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < cfg.vocab_size for i in ids):
        raise CheckpointError(f"{file}: eos_ids must be token ids below {cfg.vocab_size}, got {ids!r}")
    return tuple(ids)


def _check_arrays(file: Path, listed: dict[str, Any], expected: dict[str, Any]) -> None:
    problems = [f"{name} is missing" for name in expected if name not in listed]
    problems += [f"{name} is unexpected" for name in listed if name not in expected]
    problems += [f"{n} is {listed[n]}, not {e}" for n, e in expected.items() if n in listed and listed[n] != e]
    if problems:
        more = f" and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise CheckpointError(f"{file}: arrays do not match the model: {'; '.join(problems[:_MAX_LISTED])}{more}")


def _check_stored(checkpoint: NativeCheckpoint) -> None:
    """The arrays on disk are those of the manifest: a restore that pads would take any shape for theirs."""
    folder = checkpoint.path / ARRAYS
    tree = read_json(folder / "_METADATA")
    if tree.get("use_zarr3") is not True or (folder / "manifest.ocdbt").exists():
        raise CheckpointError(f"{folder}: is not an Orbax checkpoint of separate Zarr 3 arrays")
    for name, info in checkpoint.infos.items():
        check_array(folder / name, info)
