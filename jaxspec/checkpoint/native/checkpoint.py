"""The native checkpoint: jaxspec's own parameters, written by Orbax, restored straight into their shards.

A folder holds

* `jaxspec.json`: format version, geometry, the type of most weights, end-of-sequence ids, and the shape, dtype and
  block format of every array. It makes the folder a checkpoint and is written last. A draft that shares its target's
  embedding names the digest of the target's vocabulary here, and has no tokenizer;
* `arrays/`: an Orbax checkpoint of the unpadded parameters of `declare_params`, in Zarr 3 chunks with a CRC-32C each,
  so that a flipped bit is an error and not a wrong answer (no measurable cost). Blocks are arrays of bytes under the
  name of their weight;
* the tokenizer's files, as Hugging Face names them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.checkpoint.native.arrays import Reading, check_array, orbax_checkpointer, read_array
from jaxspec.checkpoint.native.manifest import NativeCheckpoint
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.json_file import read_json
from jaxspec.models.params import ArrayInfo, Params, declare_leaves, declare_params, leaf_name
from jaxspec.models.quantization import (
    PARTS,
    LeafType,
    Storage,
    as_storage,
    collect_storage,
    decode_blocks,
    fit_storage,
    parts_of,
    weight_leaves,
)
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.sharding import placed_shapes
from pallas_kernels.linear.blocks import FORMATS, Blocks

ARRAYS = "arrays"


def restore_native(
    checkpoint: NativeCheckpoint, plan: MeshPlan, storage: Storage | Any = None, vocab_rows: int = 0
) -> Params:
    """Read every parameter, each shard straight onto its device.

    Args:
      checkpoint: an open checkpoint.
      plan: the devices; dimensions that they do not divide are zero-padded.
      storage: how each weight is kept: blocks only as they are stored. A dtype is that of all weights; norms and biases
        stay float32. None keeps what is stored, where the devices can share it.
      vocab_rows: least number of vocabulary rows; fewer are zero-padded.

    Raises:
      CheckpointError: array files are missing, truncated or corrupted.
      ConfigError: a weight is asked for in blocks that the checkpoint does not hold.
    """
    cfg = checkpoint.config
    wanted = fit_storage(checkpoint.storage, cfg, plan.tensor) if storage is None else as_storage(storage)
    # Orbax restores the stored tree, in which query, key and value may be separate arrays.
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
    except Exception as error:  # Orbax raises errors of many types on a damaged tree
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
    """As `read_leaf`, in the form that `info` declares: numbers, or the blocks that are stored.

    A query, key and value that are stored apart are joined where `name` is that of all three.
    """
    if name not in checkpoint.infos:
        K, rows, *inner = info.shape
        parts = zip(PARTS, (rows - 2, 1, 1), strict=True)
        infos = {f"{name}.{part}": dataclasses.replace(info, shape=(K, heads, *inner)) for part, heads in parts}
        return np.concatenate([read_leaf_as(checkpoint, part, info) for part, info in infos.items()], axis=1)
    stored = checkpoint.infos[name]
    value = read_leaf(checkpoint, name)
    if stored.format is not None and info.format is None:
        value = decode_blocks(value, stored.format).reshape(info.shape)
    return value.astype(info.dtype, copy=False)


def write_arrays(folder: Path, leaves: Any) -> None:
    """Write a pytree of `PendingLeaf` as the Orbax checkpoint `folder`/arrays, one array in memory at a time."""
    with orbax_checkpointer({}) as checkpointer:
        checkpointer.save((folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(_without_blocks(leaves)))


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
    """A tree of parameters with the bytes of blocks instead of `Blocks`: what Orbax stores."""
    return jax.tree.map(
        lambda leaf: leaf.data if isinstance(leaf, Blocks) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Blocks),
    )


def _check_stored(checkpoint: NativeCheckpoint) -> None:
    """Check that the arrays on disk are those of the manifest; a restore that pads would accept any shape."""
    folder = checkpoint.path / ARRAYS
    tree = read_json(folder / "_METADATA")
    if tree.get("use_zarr3") is not True or (folder / "manifest.ocdbt").exists():
        raise CheckpointError(f"{folder}: is not an Orbax checkpoint of separate Zarr 3 arrays")
    for name, info in checkpoint.infos.items():
        check_array(folder / name, info)
