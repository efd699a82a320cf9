"""The native checkpoint: jaxspec's own parameters, written by Orbax, restored straight into their shards.

A folder holds

* `jaxspec.json`: format version, geometry, weight dtype, end-of-sequence ids, and the shape and dtype of every array;
  its presence is what makes the folder a checkpoint, so it is written last;
* `arrays/`: an Orbax checkpoint of the unpadded parameters of `declare_params`, in Zarr 3 chunks with a CRC-32C each,
  so that a flipped bit is an error and not a wrong answer (checking costs nothing that can be measured);
* the tokenizer's files, as Hugging Face names them.
"""

import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxspec.checkpoint.json_file import read_json
from jaxspec.checkpoint.load import NATIVE_MARK as MANIFEST
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.mesh.plan import MeshPlan
from jaxspec.mesh.rules import partition_spec, placed_shapes
from jaxspec.models.config import ModelConfig
from jaxspec.models.config_data import config_from_data, config_to_data
from jaxspec.models.params import ArrayInfo, Params, declare_params, is_info, leaf_name

ARRAYS = "arrays"
FORMAT = "jaxspec"
VERSION = 1
DTYPES = ("float32", "bfloat16")

# A folder of this name is a conversion's work in progress, whatever it holds.
PARTIAL = re.compile(r"\..*\.partial-\d+")

# A device that needs part of an array reads (and checks) whole chunks: several per array, but not tiny files.
_MIN_CHUNK_BYTES = 4 << 20
_MAX_CHUNKS = 16

_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]

# Tensorstore reads the chunks of one array in parallel; a second one keeps the disk busy while a device copies.
_NUM_READERS = 2

_MANIFEST_KEYS = ("format", "version", "model", "dtype", "eos_ids", "num_bytes", "arrays")
_MAX_LISTED = 5


@dataclasses.dataclass(frozen=True)
class NativeCheckpoint:
    """An opened native checkpoint; its manifest is checked, its arrays are still on disk.

    Attributes:
      path: the folder.
      config: geometry.
      eos_ids: token ids that end a text.
      dtype: of the stored weights (norms and biases are float32).
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]
    dtype: np.dtype

    @functools.cached_property
    def infos(self) -> dict[str, ArrayInfo]:
        """Declaration of every stored array by leaf name."""
        return declare_leaves(self.config, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of all arrays."""
        return sum(map(count_bytes, self.infos.values()))


@dataclasses.dataclass(frozen=True)
class PendingLeaf:
    """An array to be written: its declaration, and the function that makes it when its turn comes."""

    info: ArrayInfo
    make: Callable[[], np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, unpadded."""
        return self.info.shape

    @property
    def dtype(self) -> np.dtype:
        """Stored dtype."""
        return np.dtype(self.info.dtype)


def count_bytes(info: ArrayInfo) -> int:
    """Size of one declared array."""
    return math.prod(info.shape) * np.dtype(info.dtype).itemsize


def declare_leaves(cfg: ModelConfig, dtype: Any) -> dict[str, ArrayInfo]:
    """Declared arrays by leaf name, in the order of the parameters' leaves."""
    leaves, _ = jax.tree.flatten_with_path(declare_params(cfg, dtype), is_leaf=is_info)
    return {leaf_name(path): info for path, info in leaves}


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
    missing = [key for key in _MANIFEST_KEYS if key not in manifest]
    unknown = [key for key in manifest if key not in _MANIFEST_KEYS]
    if missing or unknown:
        raise CheckpointError(f"{file}: missing keys: {missing or 'none'}; unknown keys: {unknown or 'none'}")
    dtype, arrays = manifest["dtype"], manifest["arrays"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: dtype is {dtype!r}, not one of {', '.join(DTYPES)}")
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
    checkpoint = NativeCheckpoint(path, cfg, _read_eos_ids(file, manifest, cfg), jnp.dtype(dtype))
    _check_arrays(file, arrays, {name: _describe_leaf(info) for name, info in checkpoint.infos.items()})
    if manifest["num_bytes"] != checkpoint.num_bytes:
        raise CheckpointError(f"{file}: num_bytes is {manifest['num_bytes']!r}, the arrays have {checkpoint.num_bytes}")
    return checkpoint


def restore_native(checkpoint: NativeCheckpoint, plan: MeshPlan, dtype: Any = None, vocab_rows: int = 0) -> Params:
    """Read every parameter, each shard straight onto its device.

    Args:
      checkpoint: an open checkpoint.
      plan: the devices; dimensions that they do not divide are zero-padded (see `jaxspec.mesh.padding`).
      dtype: of the weights, as stored if None; norms and biases stay float32.

    Raises:
      CheckpointError: array files are missing, truncated or corrupted.
    """
    infos = declare_params(checkpoint.config, checkpoint.dtype if dtype is None else dtype)
    targets = placed_shapes(infos, plan, {"vocab": vocab_rows})
    named = {leaf_name(path): target for path, target in jax.tree.flatten_with_path(targets)[0]}
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=jax.Array), targets)
    folder = checkpoint.path / ARRAYS
    _check_stored(checkpoint)
    try:
        with _orbax_checkpointer(named) as checkpointer:
            args = ocp.args.PyTreeRestore(item=targets, restore_args=restore_args)
            return checkpointer.restore(folder.absolute(), args=args)
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # whatever Orbax meets in a tree that is not what it wrote
        raise CheckpointError(f"{folder}: damaged or incomplete: {error}") from error


def read_leaf(checkpoint: NativeCheckpoint, name: str) -> np.ndarray:
    """One whole unpadded array by leaf name, on the host.

    Raises:
      CheckpointError: its files are missing, truncated or corrupted.
    """
    folder = checkpoint.path / ARRAYS / name
    _check_stored_leaf(folder, checkpoint.infos[name])
    with _naming_damage(folder):
        return _open_leaf(folder).read().result()


def write_arrays(folder: Path, leaves: Any) -> None:
    """Write a pytree of `PendingLeaf` as the Orbax checkpoint `folder`/arrays, one array in memory at a time."""
    with _orbax_checkpointer({}) as checkpointer:
        checkpointer.save((folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(leaves))


def write_manifest(folder: Path, cfg: ModelConfig, dtype: np.dtype, eos_ids: Sequence[int]) -> None:
    """Write `jaxspec.json`, which makes `folder` a checkpoint: call it last."""
    infos = declare_leaves(cfg, dtype)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "model": config_to_data(cfg),
        "dtype": dtype.name,
        "eos_ids": list(eos_ids),
        "num_bytes": sum(map(count_bytes, infos.values())),
        "arrays": {name: _describe_leaf(info) for name, info in infos.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


class _Interrupted(Exception):
    """Ctrl-C inside Orbax; a KeyboardInterrupt would leave its event loop with orphaned tasks."""


class _LeafHandler(ocp.type_handlers.NumpyHandler):
    """How Orbax writes and reads our arrays: few at a time, padded, and with nothing left running after an error.

    Orbax's own handlers want all values in memory before they write, and go on reading after a failure. The type that
    the checkpoint records is still NumpyHandler's: plain Orbax reads the arrays as numpy arrays.
    """

    def __init__(self, targets: Mapping[str, jax.ShapeDtypeStruct]):
        super().__init__()
        self._targets = targets

    async def serialize(
        self, values: Sequence[PendingLeaf], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Make and write one array after another."""
        # Ctrl-C stops the main thread alone and leaves this block when the array at hand is on the disk: whoever then
        # removes the folder does not race with files that still appear in it.
        with _deferring_interrupts(), ThreadPoolExecutor(1) as pool:
            for leaf, info in zip(values, infos, strict=True):
                value = _make_leaf(info.name, leaf)
                pool.submit(_write_leaf, Path(info.parent_dir) / info.name, leaf.info, value).result()
        return []

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Read every array into its target."""
        with _deferring_interrupts(), ThreadPoolExecutor(_NUM_READERS) as pool:
            futures = [
                pool.submit(_place_leaf, Path(info.parent_dir) / info.name, self._targets[info.name]) for info in infos
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _place_leaf(folder: Path, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Read one array shard by shard; what lies beyond its stored shape is the zero padding of the mesh."""
    with _naming_damage(folder):
        store = _open_leaf(folder)

        def read_shard(index: Any) -> np.ndarray:
            bounds = [s.indices(n)[:2] for s, n in zip(index, target.shape, strict=True)]
            shape = [stop - start for start, stop in bounds]
            stored = tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, store.shape, strict=True))
            shard = store[stored].read().result().astype(target.dtype, copy=False)
            missing = [(0, n - have) for n, have in zip(shape, shard.shape, strict=True)]
            return np.pad(shard, missing) if any(after for _, after in missing) else shard

        return jax.make_array_from_callback(target.shape, target.sharding, read_shard)


def _open_leaf(folder: Path) -> ts.TensorStore:
    # A missing chunk is an error, not zeros.
    return ts.open(_zarr_spec(folder) | {"fill_missing_data_reads": False}, open=True).result()


@contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    """Tensorstore's errors as ours."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{folder}: damaged or incomplete: {(str(error).splitlines() or [''])[0]}") from error


@contextmanager
def _deferring_interrupts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise _Interrupted from error


def _make_leaf(name: str, leaf: PendingLeaf) -> np.ndarray:
    value = leaf.make()
    if value.shape != leaf.shape or value.dtype != leaf.dtype:
        raise CheckpointError(f"{name}: is {value.dtype}{value.shape}, declared {leaf.dtype}{leaf.shape}")
    return value


def _write_leaf(folder: Path, info: ArrayInfo, value: np.ndarray) -> None:
    spec = _zarr_spec(folder) | {
        "metadata": {
            "shape": list(value.shape),
            "data_type": value.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _choose_chunk(info)}},
            "codecs": _CODECS,
        },
        # A chunk of zeros is written like any other, so that a missing one is an error.
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True).result().write(value, can_reference_source_data_indefinitely=True).result()


def _zarr_spec(folder: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"}}


def _choose_chunk(info: ArrayInfo) -> list[int]:
    """Chunk shape: cut along the dimension that tensor parallelism cuts, or the first."""
    split = [axis for axis, name in enumerate(partition_spec(info)) if name is not None]
    axis = split[0] if split else 0
    pieces = min(_MAX_CHUNKS, max(1, count_bytes(info) // _MIN_CHUNK_BYTES))
    chunk = list(info.shape)
    chunk[axis] = -(-chunk[axis] // pieces)
    return chunk


def _describe_leaf(info: ArrayInfo) -> dict[str, Any]:
    """Shape and dtype, as the manifest holds them."""
    return {"shape": list(info.shape), "dtype": np.dtype(info.dtype).name}


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
        _check_stored_leaf(folder / name, info)


def _check_stored_leaf(folder: Path, info: ArrayInfo) -> None:
    zarr = read_json(folder / "zarr.json")
    shape, dtype = _describe_leaf(info).values()
    found = {key: zarr.get(key) for key in ("shape", "data_type", "codecs")}
    expected = {"shape": shape, "data_type": dtype, "codecs": _CODECS}
    if found != expected:
        raise CheckpointError(f"{folder}: is {found}, but {MANIFEST} says {expected}")
    try:
        chunk = zarr["chunk_grid"]["configuration"]["chunk_shape"]
        fits = len(chunk) == len(shape) and all(0 < c <= n for c, n in zip(chunk, shape, strict=True))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: zarr.json describes no chunks") from error
    if not fits:
        raise CheckpointError(f"{folder}: chunks of shape {chunk} do not fit into the shape {shape}")


@contextmanager
def _orbax_checkpointer(targets: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[ocp.Checkpointer]:
    """Orbax with our way to write arrays and to read them into `targets` (by leaf name)."""
    # Orbax warns of features that are not used here; that would go to the terminal.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        handler = _LeafHandler(targets)
        registry = ocp.type_handlers.create_type_handler_registry((PendingLeaf, handler), (jax.Array, handler))
        tree_handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, type_handler_registry=registry)
        with ocp.Checkpointer(tree_handler) as checkpointer:
            yield checkpointer
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        logger.setLevel(level)
