"""The arrays of a native checkpoint: an Orbax tree of Zarr 3 arrays, made, written and read a few at a time."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxspec.checkpoint.native.manifest import MANIFEST, count_bytes
from jaxspec.errors import CheckpointError
from jaxspec.files import read_json
from jaxspec.models.params import ArrayInfo
from jaxspec.models.quantization import decode_blocks, undo_order
from jaxspec.runtime.sharding import (
    Part,
    count_read,
    is_elsewhere,
    pad_to,
    partition_spec,
    place_declared,
    split_layout,
)
from jaxspec.runtime.transfer import empty

# A device that needs part of an array reads (and checks) whole chunks: several per array, but not tiny files.
MIN_CHUNK_BYTES = 4 << 20
_MAX_CHUNKS = 16

# Tensorstore reads the chunks of one array in parallel; a second one keeps the disk busy while a device copies.
_NUM_READERS = 2


@dataclasses.dataclass(frozen=True)
class PendingLeaf:
    """An array to be written: its declaration, and the function that makes it when its turn comes."""

    info: ArrayInfo
    make: Callable[[], np.ndarray]

    @property
    def dtype(self) -> np.dtype:
        """Stored dtype."""
        return np.dtype(self.info.dtype)


class Reading(NamedTuple):
    """An array to be read: how it is stored, how it is declared in memory, its shards there.

    `has_order` says that it is stored with its inputs in the order of the array of its name and `_order`.
    """

    stored: ArrayInfo
    declared: ArrayInfo
    target: jax.ShapeDtypeStruct
    has_order: bool = False


@contextmanager
def orbax_checkpointer(readings: Mapping[str, Reading]) -> Iterator[ocp.Checkpointer]:
    """A checkpointer of Orbax that writes and reads arrays with `_LeafHandler`; `readings` are by leaf name."""
    # Orbax warns on the terminal of features that are not used here.
    logger, level = logging.getLogger("absl"), logging.getLogger("absl").level
    logger.setLevel(logging.ERROR)
    try:
        handler = _LeafHandler(readings)
        registry = ocp.type_handlers.create_type_handler_registry((PendingLeaf, handler), (jax.Array, handler))
        tree_handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, type_handler_registry=registry)
        with ocp.Checkpointer(tree_handler) as checkpointer:
            yield checkpointer
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        logger.setLevel(level)


def check_array(folder: Path, info: ArrayInfo) -> None:
    """Raise CheckpointError unless the array on disk is the declared one, in chunks that fit into it."""
    zarr, shape, dtype = read_json(folder / "zarr.json"), list(info.shape), np.dtype(info.dtype)
    found = {key: zarr.get(key) for key in ("shape", "data_type", "codecs")}
    expected = {"shape": shape, "data_type": dtype.name, "codecs": _codecs(dtype)}
    if found != expected:
        raise CheckpointError(f"{folder}: is {found}, but {MANIFEST} says {expected}")
    try:
        chunk = zarr["chunk_grid"]["configuration"]["chunk_shape"]
        fits = len(chunk) == len(shape) and all(0 < c <= n for c, n in zip(chunk, shape, strict=True))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: zarr.json describes no chunks") from error
    if not fits:
        raise CheckpointError(f"{folder}: chunks of shape {chunk} do not fit into the shape {shape}")


def read_array(folder: Path, part: Part | None = None) -> np.ndarray:
    """One array or a part of it, on the host; CheckpointError where its chunks are missing, truncated or corrupted."""
    with _naming_damage(folder):
        store = _open(folder)
        return _read_whole(store if part is None else store[part.index])


class Chunk(NamedTuple):
    """A file of an array: the part of the array in it, and the shape of what it holds, which is padded at the edge."""

    path: Path
    part: tuple[slice, ...]
    shape: tuple[int, ...]


def array_chunks(folder: Path, info: ArrayInfo) -> Iterator[Chunk]:
    """Files of an array that `check_array` accepts. After the values of a chunk comes their CRC-32C, 4 bytes."""
    shape: tuple[int, ...] = tuple(read_json(folder / "zarr.json")["chunk_grid"]["configuration"]["chunk_shape"])
    for place in itertools.product(*(range(-(-n // c)) for n, c in zip(info.shape, shape, strict=True))):
        part = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(place, shape, info.shape, strict=True))
        yield Chunk(folder.joinpath("c", *map(str, place)), part, shape)


class _Interrupted(Exception):
    """Ctrl-C inside Orbax; a KeyboardInterrupt would leave its event loop with orphaned tasks."""


class _LeafHandler(ocp.type_handlers.NumpyHandler):
    """How Orbax writes and reads our arrays: a few at a time, padded, and with no thread left running after an error.

    Orbax's own handlers need all values in memory before they write, and go on reading after a failure. The checkpoint
    records NumpyHandler's type, so that plain Orbax reads the arrays as numpy arrays.
    """

    def __init__(self, readings: Mapping[str, Reading]):
        super().__init__()
        self._readings = readings

    async def serialize(
        self, values: Sequence[PendingLeaf], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Make and write one array after another."""
        # Ctrl-C stops the main thread only. This block ends when the current array is on the disk, so that no file
        # appears in the folder while the caller removes it.
        with _deferring_interrupts(), ThreadPoolExecutor(1) as pool:
            for leaf, info in zip(values, infos, strict=True):
                value = leaf.make()
                if value.shape != leaf.info.shape or value.dtype != leaf.dtype:
                    found, declared = f"{value.dtype}{value.shape}", f"{leaf.dtype}{leaf.info.shape}"
                    raise CheckpointError(f"{info.name}: is {found}, declared {declared}")
                pool.submit(_write_leaf, Path(info.parent_dir) / info.name, leaf.info, value).result()
        return []

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Read every array into its target."""
        with _deferring_interrupts(), ThreadPoolExecutor(_NUM_READERS) as pool:
            folders = {info.name: Path(info.parent_dir) / info.name for info in infos}
            futures = [pool.submit(_read_placed, folders[name], self._readings[name]) for name in folders]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _read_placed(folder: Path, reading: Reading) -> jax.Array:
    """Read one array shard by shard, and pad it with zeros for its mesh."""
    stored, declared, target, has_order = reading
    if is_elsewhere(target):
        return empty(target)
    with _naming_damage(folder):
        store = _open(folder)
        if stored.format is not None and target.dtype != stored.dtype:
            # The whole array, because shards of numbers may begin within a block.
            numbers = decode_blocks(_read_whole(store), stored.format)
            if has_order:
                numbers = undo_order(numbers, _open(folder.with_name(f"{folder.name}_order")).read().result())
            numbers = numbers.reshape(declared.shape)
            return place_declared(numbers.astype(target.dtype, copy=False), declared, target)
        if split_layout(declared, len(target.sharding.device_set)) is not None:  # pyright: ignore[reportOptionalMemberAccess]
            return place_declared(_read_whole(store).astype(target.dtype, copy=False), declared, target)

        def read_shard(index: Any) -> np.ndarray:
            bounds = [s.indices(n)[:2] for s, n in zip(index, target.shape, strict=True)]
            stored = tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, store.shape, strict=True))
            held = store[stored].read().result()
            count_read(held)
            shard = held.astype(target.dtype, copy=False)
            return pad_to(shard, tuple(stop - start for start, stop in bounds))

        return jax.make_array_from_callback(target.shape, target.sharding, read_shard, dtype=target.dtype)


def _read_whole(store: ts.TensorStore) -> np.ndarray:
    held = store.read().result()
    count_read(held)
    return held


def _open(folder: Path, *, create: bool = False, **spec: Any) -> ts.TensorStore:
    """Open the Zarr array in `folder`; a chunk that is missing is an error, not zeros."""
    store = {"driver": "file", "path": f"{folder.absolute()}/"}
    spec |= {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}
    return ts.open(spec, create=create, open=not create).result()


@contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    """Raise tensorstore's errors as CheckpointError."""
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


def _write_leaf(folder: Path, info: ArrayInfo, value: np.ndarray) -> None:
    metadata = {
        "shape": list(value.shape),
        "data_type": value.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _choose_chunk(info)}},
        "codecs": _codecs(value.dtype),
    }
    # A chunk of zeros is written like any other, so that a missing one is an error.
    store = _open(folder, create=True, metadata=metadata, store_data_equal_to_fill_value=True)
    store.write(value, can_reference_source_data_indefinitely=True).result()


def _codecs(dtype: np.dtype) -> list[dict[str, Any]]:
    # Tensorstore leaves the byte order of single bytes out.
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    return [{"name": "bytes"} | order, {"name": "crc32c"}]


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
