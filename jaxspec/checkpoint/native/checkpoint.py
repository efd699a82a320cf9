"""The native checkpoint: jaxspec's own parameters, written by Orbax, restored straight into their shards.

A folder holds

* `jaxspec.json`: format version, geometry, the type of most weights, end-of-sequence ids, and the shape, dtype and
  block format of every array. It makes the folder a checkpoint and is written last. A draft that shares its target's
  embedding names the digest of the target's vocabulary here, and has no tokenizer. Every other file is listed here
  with its size and SHA-256;
* `arrays/`: an Orbax checkpoint of the unpadded parameters of `declare_params`, in Zarr 3 chunks with a CRC-32C each,
  so that a flipped bit is an error and not a wrong answer (no measurable cost). Blocks are arrays of bytes under the
  name of their weight;
* the tokenizer's files, as Hugging Face names them.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.checkpoint.native.arrays import Chunk, Reading, array_chunks, check_array, orbax_checkpointer, read_array
from jaxspec.checkpoint.native.files import check_sizes
from jaxspec.checkpoint.native.manifest import MANIFEST, NativeCheckpoint
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.files import read_json
from jaxspec.models import quantization
from jaxspec.models.params import ArrayInfo, Params, declare_params, is_info, leaf_name
from jaxspec.models.quantization import PARTS, LeafType, Storage, parts_of
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.sharding import Part, placed_shapes
from pallas_kernels.linear.blocks import FORMATS, Blocks

ARRAYS = "arrays"


def restore_native(
    checkpoint: NativeCheckpoint, plan: MeshPlan, storage: Storage | Any = None, vocab_rows: int = 0
) -> Params:
    """Read every parameter, each shard straight onto its device.

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
    cfg = checkpoint.config
    stored = quantization.fit_storage(checkpoint.storage, cfg, plan.tensor)
    wanted = stored if storage is None else quantization.as_storage(storage)
    # Orbax restores the stored tree, in which query, key and value may be separate arrays.
    apart = _split_alike(checkpoint, wanted)
    declared_tree = declare_params(cfg, apart)
    # So are orders of inputs, where the weight itself is wanted as numbers.
    for name in checkpoint.storage.ordered - apart.ordered:
        _, index, leaf = name.split(".")
        declared_tree["layers"][int(index)][f"{leaf}_order"] = checkpoint.infos[f"{name}_order"]
    targets = placed_shapes(declared_tree, plan, {"vocab": vocab_rows})
    named = {leaf_name(path): target for path, target in jax.tree.flatten_with_path(targets)[0]}
    leaves, _ = jax.tree.flatten_with_path(declared_tree, is_leaf=is_info)
    declared = {leaf_name(path): info for path, info in leaves}
    readings = {
        name: Reading(checkpoint.infos[name], info, named[name], f"{name}_order" in checkpoint.infos)
        for name, info in declared.items()
    }
    arrays = _without_blocks(targets)
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=jax.Array), arrays)
    folder = checkpoint.path / ARRAYS
    tree = read_json(folder / "_METADATA")
    if tree.get("use_zarr3") is not True or (folder / "manifest.ocdbt").exists():
        raise CheckpointError(f"{folder}: is not an Orbax checkpoint of separate Zarr 3 arrays")
    if checkpoint.files is not None:
        check_sizes(checkpoint.path, checkpoint.files, MANIFEST)
    # A restore that pads would accept any shape.
    for name, info in checkpoint.infos.items():
        check_array(folder / name, info)
    try:
        with orbax_checkpointer(readings) as checkpointer:
            args = ocp.args.PyTreeRestore(item=arrays, restore_args=restore_args)
            restored = checkpointer.restore(folder.absolute(), args=args)
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax raises errors of many types on a damaged tree
        raise CheckpointError(f"{folder}: damaged or incomplete: {error}") from error
    params = jax.tree.unflatten(jax.tree.structure(targets), jax.tree.leaves(restored))
    for name in checkpoint.storage.ordered - apart.ordered:
        _, index, leaf = name.split(".")
        del params["layers"][int(index)][f"{leaf}_order"]
    for index, layer in enumerate(params["layers"]):
        leaf = f"layers.{index}.qkv"
        if wanted.type_of(leaf) != apart.type_of(leaf):
            parts = [layer["qkv"][part] for part in PARTS]
            join = jax.jit(lambda *a: jnp.concatenate(a, axis=1), out_shardings=parts[0].sharding)
            layer["qkv"] = join(*parts)
    return params


ReadBytes = Callable[[Path, int, int], np.ndarray]


def read_leaf(
    checkpoint: NativeCheckpoint, name: str, info: ArrayInfo | None = None, *,
    read_bytes: ReadBytes | None = None, expert: int | None = None, part: Part | None = None,
) -> np.ndarray:  # fmt: skip
    """One whole unpadded array by leaf name, on the host, as `info` declares it: numbers, or the stored blocks.

    Without `info` the array is as stored: blocks are bytes. A query, key and value that are stored apart are joined
    where `name` is that of all three. `read_bytes`, a function of path, offset and size that gives uint8 arrays, reads
    the files in place of Orbax; each is compared with its checksum in the manifest then. With it, `expert` asks for
    those of one expert, whose declaration `info` is. Without it, `part` asks for a part of the array as `info` declares
    it.

    Raises:
      CheckpointError: its files are missing, truncated or corrupted, or hold several experts.
    """
    if name not in checkpoint.infos and info is not None:
        K, rows, *inner = info.shape
        parts = zip(PARTS, (rows - 2, 1, 1), strict=True)
        infos = {f"{name}.{part}": dataclasses.replace(info, shape=(K, heads, *inner)) for part, heads in parts}
        parts = (read_leaf(checkpoint, each, i, read_bytes=read_bytes, part=part) for each, i in infos.items())
        return np.concatenate([*parts], axis=1)
    folder, stored = checkpoint.path / ARRAYS / name, checkpoint.infos[name]
    check_array(folder, stored)
    blocks = stored.format if info is not None and info.format is None else None  # to be decoded
    if read_bytes is not None:
        value = _read_chunks(checkpoint, folder, stored, read_bytes, expert)
    else:
        # A part of numbers may begin within a block.
        value = read_array(folder, part if blocks is None else None)
    if info is None:
        return value
    if blocks is not None:
        value = quantization.decode_blocks(value, blocks)
        if f"{name}_order" in checkpoint.infos:
            value = quantization.undo_order(value, read_leaf(checkpoint, f"{name}_order"))
        value = value.reshape(info.shape)
        if part is not None:
            value = value[part.index]
    return value.astype(info.dtype, copy=False)


def leaf_bytes(checkpoint: NativeCheckpoint, name: str, info: ArrayInfo, expert: int | None = None) -> int:
    """Bytes of the files that hold a leaf as `read_leaf` reads it, checksums of chunks included."""
    if name not in checkpoint.infos:
        return sum(leaf_bytes(checkpoint, f"{name}.{part}", info) for part in PARTS)
    stored, folder = checkpoint.infos[name], checkpoint.path / ARRAYS / name
    check_array(folder, stored)
    return sum(_chunk_bytes(shape, stored) for _, _, shape in _chunks_of(folder, stored, expert))


def _chunk_bytes(shape: tuple[int, ...], info: ArrayInfo) -> int:
    return math.prod(shape) * np.dtype(info.dtype).itemsize + 4


def _chunks_of(folder: Path, info: ArrayInfo, expert: int | None) -> list[Chunk]:
    """The chunks of an array, or those of one of its experts."""
    chunks = [*array_chunks(folder, info)]
    if expert is None:
        return chunks
    if any(chunk.shape[0] != 1 for chunk in chunks):
        problem = "holds several experts in a file, and cannot be streamed"
        raise CheckpointError(f"{folder}: {problem}: convert the model again with this version")
    return [chunk for chunk in chunks if chunk.part[0].start == expert]


def _read_chunks(
    checkpoint: NativeCheckpoint, folder: Path, info: ArrayInfo, read_bytes: ReadBytes, expert: int | None
) -> np.ndarray:
    """An array, or the part of one expert, from its files, each compared with the manifest's checksum."""
    files, first = checkpoint.files, 0 if expert is None else expert
    value = np.empty(info.shape if expert is None else (1, *info.shape[1:]), info.dtype)
    if files is None:
        raise CheckpointError(f"{checkpoint.path}: is of a version without checksums of files; convert it again")
    for path, part, shape in _chunks_of(folder, info, expert):
        entry = files.get(path.relative_to(checkpoint.path).as_posix())
        if entry is None or entry["bytes"] != _chunk_bytes(shape, info):
            raise CheckpointError(f"{path}: {MANIFEST} does not list it as a chunk of this array")
        raw = read_bytes(path, 0, entry["bytes"])
        if (digest := hashlib.sha256(raw.data).hexdigest()) != entry["sha256"]:
            says = f"has SHA-256 {digest:.12}, and {MANIFEST} says {entry['sha256']:.12}"
            raise CheckpointError(f"{path}: {says}: damaged or changed; convert the model again")
        # Chunks at the edge of an array are padded.
        chunk = raw[:-4].view(info.dtype).reshape(shape)[tuple(slice(s.stop - s.start) for s in part)]
        value[slice(part[0].start - first, part[0].stop - first), *part[1:]] = chunk
    return value


def write_arrays(folder: Path, leaves: Any) -> None:
    """Write a pytree of `PendingLeaf` as the Orbax checkpoint `folder`/arrays, one array in memory at a time."""
    with orbax_checkpointer({}) as checkpointer:
        checkpointer.save((folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(_without_blocks(leaves)))
    # Orbax writes the folder's path into this file, of which only the existence is read. Checkpoints are handed on.
    if (done := folder / ARRAYS / "commit_success.txt").exists():
        done.write_text("Checkpoint commit was successful")


def _split_alike(checkpoint: NativeCheckpoint, wanted: Storage) -> Storage:
    """The wanted types, with each query, key and value apart where they are stored apart.

    Raises:
      ConfigError: blocks are wanted that are not stored, or parts of what is stored as one.
    """
    types: dict[str, LeafType] = {}
    for leaf in quantization.weight_leaves(checkpoint.config):
        stored, want = parts_of(checkpoint.storage.type_of(leaf)), parts_of(wanted.type_of(leaf))
        if len(want) == 1:
            want *= len(stored)
        if len(want) != len(stored) or any(w in FORMATS and w != s for s, w in zip(stored, want, strict=True)):
            kept, asked = ", ".join(stored), ", ".join(want)
            raise ConfigError(f"{checkpoint.path}: {leaf} is stored as {kept}, it cannot be loaded as {asked}")
        types[leaf] = want if len(stored) > 1 else want[0]
    if unknown := wanted.ordered - checkpoint.storage.ordered:
        raise ConfigError(f"{checkpoint.path}: {min(unknown)} is stored with its inputs in order")
    return quantization.collect_storage(types, wanted.ordered)


def _without_blocks(tree: Any) -> Any:
    """A tree of parameters with the bytes of blocks instead of `Blocks`: what Orbax stores."""
    is_blocks = lambda leaf: isinstance(leaf, Blocks)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.data if is_blocks(leaf) else leaf, tree, is_leaf=is_blocks)
