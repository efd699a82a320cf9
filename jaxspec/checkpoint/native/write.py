"""Writing the arrays of a native checkpoint with Orbax: one in memory at a time, in chunks with checksums."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.checkpoint.native.checkpoint import ARRAYS, array_codecs, open_array
from jaxspec.checkpoint.native.manifest import count_bytes
from jaxspec.errors import CheckpointError
from jaxspec.models.params import ArrayInfo
from jaxspec.runtime.sharding import partition_spec
from pallas_kernels.linear.blocks import Blocks

# A device that needs part of an array reads (and checks) whole chunks: several per array, but not tiny files.
MIN_CHUNK_BYTES = 4 << 20
_MAX_CHUNKS = 16


def write_arrays(folder: Path, declared: Any, make: Callable[[str, ArrayInfo], np.ndarray]) -> None:
    """Write declared arrays as the Orbax checkpoint `folder`/arrays; `make` gives each by name when its turn comes."""
    # Of blocks Orbax stores the bytes.
    stored = jax.tree.map(lambda x: x.data if _is_blocks(x) else x, declared, is_leaf=_is_blocks)
    # Orbax warns on the terminal of features that are not used here.
    logger, level = logging.getLogger("absl"), logging.getLogger("absl").level
    logger.setLevel(logging.ERROR)
    try:
        registry = ocp.type_handlers.create_type_handler_registry((ArrayInfo, _Writer(make)))
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save((folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(stored))
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        logger.setLevel(level)
    # Orbax writes the folder's path into this file, of which only the existence is read. Checkpoints are handed on.
    if (done := folder / ARRAYS / "commit_success.txt").exists():
        done.write_text("Checkpoint commit was successful")


class _Interrupted(Exception):
    """Ctrl-C inside Orbax; a KeyboardInterrupt would leave its event loop with orphaned tasks."""


class _Writer(ocp.type_handlers.NumpyHandler):
    """Writes declared arrays, one in memory at a time, in chunks with checksums.

    Orbax's own handlers need all values in memory before they write. The checkpoint records NumpyHandler's type, so
    that plain Orbax reads the arrays as numpy arrays.
    """

    def __init__(self, make: Callable[[str, ArrayInfo], np.ndarray]):
        super().__init__()
        self._make = make

    async def serialize(
        self, values: Sequence[ArrayInfo], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Make and write one array after another."""
        # Ctrl-C stops the main thread only. This block ends when the current array is on the disk, so that no file
        # appears in the folder while the caller removes it.
        with ThreadPoolExecutor(1) as pool:
            try:
                for declared, info in zip(values, infos, strict=True):
                    value = self._make(info.name, declared)
                    if value.shape != declared.shape or value.dtype != np.dtype(declared.dtype):
                        found, asked = f"{value.dtype}{value.shape}", f"{np.dtype(declared.dtype)}{declared.shape}"
                        raise CheckpointError(f"{info.name}: is {found}, declared {asked}")
                    pool.submit(_write_array, Path(info.parent_dir) / info.name, declared, value).result()
            except KeyboardInterrupt as error:
                raise _Interrupted from error
        return []


def _write_array(folder: Path, info: ArrayInfo, value: np.ndarray) -> None:
    metadata = {
        "shape": list(value.shape),
        "data_type": value.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _choose_chunk(info)}},
        "codecs": array_codecs(value.dtype),
    }
    # A chunk of zeros is written like any other, so that a missing one is an error.
    store = open_array(folder, create=True, metadata=metadata, store_data_equal_to_fill_value=True)
    store.write(value, can_reference_source_data_indefinitely=True).result()


def _choose_chunk(info: ArrayInfo) -> list[int]:
    """Chunk shape: cut along the dimension that tensor parallelism cuts, or the first; each expert by itself.

    So a pass of a streamed model reads whole files of the experts that it needs.
    """
    axis = next((axis for axis, name in enumerate(partition_spec(info)) if name is not None), 0)
    # Biases of experts are small, and stay together.
    experts = info.shape[0] if info.axes[0] == "experts" and {"expert_mlp", "embed"} <= {*info.axes} else 1
    pieces = min(_MAX_CHUNKS, max(1, count_bytes(info) // experts // MIN_CHUNK_BYTES))
    whole = [-(-n // pieces) if i == axis else n for i, n in enumerate(info.shape)]
    return whole if experts == 1 else [1, *whole[1:]]


def _is_blocks(leaf: Any) -> bool:
    return isinstance(leaf, Blocks)
