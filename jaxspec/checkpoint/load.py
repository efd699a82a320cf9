"""Telling checkpoint formats apart, and loading foreign ones straight onto a mesh."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.checkpoint.gguf_header import MAGIC
from jaxspec.checkpoint.hf import open_hf
from jaxspec.checkpoint.keymaps import recipes
from jaxspec.checkpoint.source import TensorSource
from jaxspec.errors import CheckpointError
from jaxspec.models.params import Params, declare_params, leaf_name
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.sharding import placed_shapes

Format = Literal["hf", "gguf", "native"]

NATIVE_MARK = "jaxspec.json"

# Formats that run code when they are opened.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

# Dequantising and casting release the interpreter lock; each thread holds one leaf in memory.
_NUM_THREADS = 2


def detect_format(path: str | Path) -> Format:
    """Which format a checkpoint has, from what lies there and not from its name.

    Raises:
      CheckpointError: there is nothing, or nothing that jaxspec reads; the message says what was found.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _detect_folder(path)
        if path.is_file():
            return _detect_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    raise CheckpointError(
        f"{path}: no such file or folder (nothing is downloaded); "
        "give a Hugging Face folder, a GGUF file or a native checkpoint"
    )


def open_checkpoint(path: str | Path) -> TensorSource:
    """Open a Hugging Face folder or a GGUF file; headers only.

    Raises:
      CheckpointError: not such a checkpoint (a native one is restored, not read tensor by tensor), or a damaged one.
      ConfigError: its configuration asks for something that jaxspec does not compute.
    """
    path = Path(path)
    match detect_format(path):
        case "hf":
            return open_hf(path)
        case "gguf":
            return open_gguf(path)
        case "native":
            raise CheckpointError(
                f"{path}: is a native checkpoint already; a Hugging Face folder or GGUF file is needed"
            )


def load_foreign(source: TensorSource, plan: MeshPlan, storage: Storage | Any, vocab_rows: int = 0) -> Params:
    """Read every parameter and place each shard on its device.

    Args:
      source: an open checkpoint.
      plan: the devices; dimensions that they do not divide are zero-padded (see `jaxspec.runtime.padding`).
      storage: how each weight is kept: blocks only as the checkpoint has them. A dtype is that of all weights; norms
        and biases stay float32.
      vocab_rows: least number of vocabulary rows; fewer are zero-padded.

    Raises:
      ConfigError: a weight is asked for in blocks that the checkpoint does not hold.

    Memory beyond the parameters themselves is about one leaf per thread.
    """
    shapes = placed_shapes(declare_params(source.config, storage), plan, {"vocab": vocab_rows})
    placed, treedef = jax.tree.flatten_with_path(shapes)
    made = recipes(source.config, storage)

    def load_leaf(path: tuple[Any, ...], target: jax.ShapeDtypeStruct) -> jax.Array:
        return place_leaf(made[leaf_name(path)].read(source), target)

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        futures = [pool.submit(load_leaf, path, target) for path, target in placed]
        try:
            leaves = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return jax.tree.unflatten(treedef, leaves)


def place_leaf(leaf: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """One whole unpadded parameter, padded and sharded as `target` says."""

    def cut_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # JAX declares None and never passes it
        shard = leaf[index]
        shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, target.shape, strict=True))
        if shard.shape == shape:
            return shard
        return np.pad(shard, [(0, n - have) for n, have in zip(shape, shard.shape, strict=True)])

    return jax.make_array_from_callback(target.shape, target.sharding, cut_shard, dtype=target.dtype)


def _detect_folder(path: Path) -> Format:
    if (path / NATIVE_MARK).is_file():
        return "native"
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(f"{path}: holds an adapter (adapter_config.json); merge it into its base model first")
    if (path / "config.json").is_file():
        return "hf"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        raise CheckpointError(f"{path}: the folder is empty")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise CheckpointError(f"{path}: is a folder; give the GGUF file in it, such as {path / ggufs[0]}")
    raise CheckpointError(
        f"{path}: holds neither config.json (Hugging Face) nor {NATIVE_MARK} (native); it holds {', '.join(names[:5])}"
    )


def _detect_file(path: Path) -> Format:
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
    if start == MAGIC:
        return "gguf"
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{path}: looks like a pickle, which can run code; it was not opened. Convert it to safetensors"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the folder around it, which holds config.json and the tokenizer")
    raise CheckpointError(
        f"{path}: is no checkpoint that jaxspec reads: it begins with {start!r}, a GGUF file with {MAGIC!r}"
    )
