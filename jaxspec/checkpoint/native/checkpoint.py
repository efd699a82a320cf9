"""The native checkpoint: jaxspec's own parameters as an Orbax checkpoint, with a manifest.

A folder holds

* `jaxspec.json`: format version, geometry, the type of most weights, end-of-sequence ids, and the shape, dtype and
  block format of every array. It makes the folder a checkpoint and is written last. A draft that shares its target's
  embedding names the digest of the target's vocabulary here, and has no tokenizer. Every other file is listed here
  with its size and SHA-256;
* `arrays/`: an Orbax checkpoint of the unpadded parameters of `declare_params`, in Zarr 3 chunks with a CRC-32C each,
  so that a flipped bit is an error and not a wrong answer (no measurable cost). Blocks are arrays of bytes under the
  name of their weight;
* the tokenizer's files, as Hugging Face names them.

Orbax writes, and any Orbax reads it. Here TensorStore reads, the library with which Orbax does: Orbax's own restore
goes on after a failure, and cannot decode blocks or arrange heads that devices share (docs/decisions.md).
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxspec.checkpoint.native.files import check_sizes
from jaxspec.checkpoint.native.manifest import MANIFEST, NativeCheckpoint
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.files import read_json
from jaxspec.models import quantization
from jaxspec.models.params import ArrayInfo, Params, declare_params
from jaxspec.models.quantization import PARTS, Storage, parts_of
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.sharding import Part, count_read, place_tree, placed_shapes
from pallas_kernels.linear.blocks import FORMATS

ARRAYS = "arrays"


def restore_native(
    checkpoint: NativeCheckpoint, plan: MeshPlan, storage: Storage | Any = None, vocab_rows: int = 0
) -> Params:
    """Read every parameter onto its devices; in addition, about one array per thread is in memory.

    Args:
      checkpoint: an open checkpoint.
      plan: the devices; dimensions that they do not divide are zero-padded.
      storage: how each weight is kept, in blocks only as they are stored; a dtype is that of all weights. None keeps
        what is stored, where the devices can share it.
      vocab_rows: least number of vocabulary rows; fewer are zero-padded.

    Raises:
      CheckpointError: array files are missing, truncated or corrupted.
      ConfigError: a weight is asked for in blocks that the checkpoint does not hold.
    """
    stored = quantization.fit_storage(checkpoint.storage, checkpoint.config, plan.tensor)
    wanted = stored if storage is None else quantization.as_storage(storage)
    _check_storage(checkpoint, wanted)
    declared = declare_params(checkpoint.config, wanted)
    if checkpoint.files is not None:
        check_sizes(checkpoint.path, checkpoint.files, MANIFEST)

    def read(name: str, info: ArrayInfo, part: Part | None = None) -> np.ndarray:
        return read_leaf(checkpoint, name, info, part)

    return place_tree(read, declared, placed_shapes(declared, plan, {"vocab": vocab_rows}))


def read_leaf(
    checkpoint: NativeCheckpoint, name: str, info: ArrayInfo | None = None, part: Part | None = None
) -> np.ndarray:
    """One unpadded array by leaf name, or a part of it, on the host, as `info` declares it: numbers, or stored blocks.

    Without `info` the array is as stored: blocks are bytes. A query, key and value that are stored apart are joined
    where `name` is that of all three.

    Raises:
      CheckpointError: its files are missing, truncated or corrupted.
    """
    if name not in checkpoint.infos and info is not None:
        K, rows, *inner = info.shape
        parts = zip(PARTS, (rows - 2, 1, 1), strict=True)
        infos = {f"{name}.{part}": dataclasses.replace(info, shape=(K, heads, *inner)) for part, heads in parts}
        return np.concatenate([read_leaf(checkpoint, each, one, part) for each, one in infos.items()], axis=1)
    folder, stored = checkpoint.path / ARRAYS / name, checkpoint.infos[name]
    _check_array(folder, stored)
    decodes = stored.format is not None and info is not None and info.format is None
    # A part of numbers may begin within a block; experts do not.
    later = part if part is not None and decodes and not part.is_of_experts(stored) else None
    with _naming_damage(folder):
        store = open_array(folder)
        value: np.ndarray = (store if part is None or later else store[part.index]).read().result()
    count_read(value)
    if info is None:
        return value
    if decodes:
        numbers = quantization.decode_blocks(value, stored.format or "")
        if f"{name}_order" in checkpoint.infos:
            numbers = quantization.undo_order(numbers, read_leaf(checkpoint, f"{name}_order"))
        count = info.shape[0] if part is None or later else part.stop - part.start  # of experts
        value = numbers.reshape(count, *info.shape[1:])
        value = value if later is None else value[later.index]
    return value.astype(info.dtype, copy=False)


def open_array(folder: Path, *, create: bool = False, **spec: Any) -> ts.TensorStore:
    """Open the Zarr array in `folder`; a chunk that is missing is an error, not zeros."""
    store = {"driver": "file", "path": f"{folder.absolute()}/"}
    spec |= {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}
    return ts.open(spec, create=create, open=not create).result()


def _check_array(folder: Path, info: ArrayInfo) -> None:
    """Raise CheckpointError unless the array on disk is the declared one, in chunks that fit into it."""
    zarr, shape, dtype = read_json(folder / "zarr.json"), list(info.shape), np.dtype(info.dtype)
    found = {key: zarr.get(key) for key in ("shape", "data_type", "codecs")}
    expected = {"shape": shape, "data_type": dtype.name, "codecs": array_codecs(dtype)}
    if found != expected:
        raise CheckpointError(f"{folder}: is {found}, but {MANIFEST} says {expected}")
    try:
        chunk = zarr["chunk_grid"]["configuration"]["chunk_shape"]
        fits = len(chunk) == len(shape) and all(0 < c <= n for c, n in zip(chunk, shape, strict=True))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: zarr.json describes no chunks") from error
    if not fits:
        raise CheckpointError(f"{folder}: chunks of shape {chunk} do not fit into the shape {shape}")


def array_codecs(dtype: np.dtype) -> list[dict[str, Any]]:
    """Zarr's codecs of an array: plain bytes, and a CRC-32C of each chunk."""
    # Tensorstore leaves the byte order of single bytes out.
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    return [{"name": "bytes"} | order, {"name": "crc32c"}]


@contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    """Raise tensorstore's errors as CheckpointError."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{folder}: damaged or incomplete: {(str(error).splitlines() or [''])[0]}") from error


def _check_storage(checkpoint: NativeCheckpoint, wanted: Storage) -> None:
    """ConfigError where blocks are wanted that are not stored, or parts of what is stored as one."""
    for leaf in quantization.weight_leaves(checkpoint.config):
        stored, want = parts_of(checkpoint.storage.type_of(leaf)), parts_of(wanted.type_of(leaf))
        if len(want) == 1:
            want *= len(stored)
        if len(want) != len(stored) or any(w in FORMATS and w != s for s, w in zip(stored, want, strict=True)):
            kept, asked = ", ".join(stored), ", ".join(want)
            raise ConfigError(f"{checkpoint.path}: {leaf} is stored as {kept}, it cannot be loaded as {asked}")
    if unknown := wanted.ordered - checkpoint.storage.ordered:
        raise ConfigError(f"{checkpoint.path}: {min(unknown)} is stored with its inputs in order")
