"""Opening a checkpoint of any format, loading its weights straight onto a mesh, and packing them for its kernels.

A checkpoint is opened and checked first; its weights stay on disk until they are loaded.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jaxspec.checkpoint.assistants import is_assistant, open_assistant
from jaxspec.checkpoint.eagle import is_feature_draft, open_feature_draft
from jaxspec.checkpoint.gguf import GGUFSource, open_gguf
from jaxspec.checkpoint.gguf_header import MAGIC
from jaxspec.checkpoint.hf import HFSource, open_hf
from jaxspec.checkpoint.keymaps import Recipe, TensorSource, recipes, source_storage
from jaxspec.checkpoint.mtp import open_mtp
from jaxspec.checkpoint.native.manifest import MANIFEST, open_native
from jaxspec.checkpoint.shipped import default_model_path, verify_default
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.files import file_stamps
from jaxspec.models.config import ModelConfig
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import ArrayInfo, Params, declare_params, leaf_name
from jaxspec.models.quantization import Storage, fit_storage
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.sharding import NUM_THREADS, Part, ReadLeaf, place_tree, placed_shapes
from pallas_kernels.linear.blocks import COLUMNS, PLANES, Blocks
from pallas_kernels.linear.columns import to_columns
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.linear.planes import to_planes

Format = Literal["hf", "gguf", "native"]

# Names a checkpoint's own draft, its layer for multi-token prediction, and its folder in a native checkpoint.
MTP_NAME = "mtp"

# Formats that run code when they are opened.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Reader(Protocol):
    """Reads files, and counts what it reads; `jaxspec.offload.reader.DirectReader` is one."""

    def __call__(self, path: Path, offset: int, nbytes: int, /) -> np.ndarray:
        """A new uint8 array `[nbytes]`."""
        ...

    def counting(self, nbytes: int, /) -> AbstractContextManager[None]:
        """Within, bytes are read by other means, and count as if this read them."""
        ...


@dataclasses.dataclass(frozen=True)
class Weights:
    """A checkpoint whose headers are read and checked, and whose weights are still on disk.

    Attributes:
      own_storage: the types of the weights as the checkpoint holds them.
      load: reads every parameter that the checkpoint holds for a placement: in blocks where its storage says so.
      read: reads one unpadded parameter by leaf name, as its declaration says: all of it, or a part.
      vocabulary: digest of the vocabulary of the target whose embedding the model shares; None where it has its own.
      layers: blocks of the target of which the model consists, as its draft; None for a model with weights of its own.
      direct: the same, of all of a parameter or one `expert`, while layers are streamed: through a reader.
      file_bytes: bytes that `direct` counts for a parameter, or one expert of it.
      mtp: opens the checkpoint's own draft, its layer for multi-token prediction; None where it has none.
      files: where the weights are, if that is not `path`.
    """

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]
    own_storage: Storage
    load: Callable[[Placement], Params]
    read: ReadLeaf
    vocabulary: str | None = None
    layers: LayerSet | None = None
    direct: Callable[[Reader], ReadLeaf] | None = None
    file_bytes: Callable[..., int] | None = None
    mtp: "Callable[[], Weights] | None" = None
    files: Path | None = None

    def storage(self, plan: MeshPlan) -> Storage:
        """The types on `plan` where weights stay as the checkpoint holds them."""
        return fit_storage(self.own_storage, self.config, plan.tensor)


def open_weights(path: Path | None) -> Weights:
    """Open a checkpoint of any format, or the default model where `path` is None.

    Raises:
      CheckpointError: it is missing, damaged or incomplete, or asks for something that is not supported.
    """
    is_default = path is None
    if path is None:
        path = default_model_path()
    if detect_format(path) == "native":
        return _open_native(path)
    try:
        source = open_checkpoint(path)
    except ConfigError as error:
        # The checkpoint asks for it, not the caller.
        raise CheckpointError(str(error)) from error
    weights = _open_source(source, is_default)
    if not (isinstance(source, HFSource | GGUFSource) and source.has_mtp):
        return weights
    inside = {"path": path / MTP_NAME, "files": path}
    return dataclasses.replace(
        weights, mtp=lambda: dataclasses.replace(_open_source(open_mtp(path), is_default=False), **inside)
    )


def _open_source(source: TensorSource, is_default: bool) -> Weights:
    """The weights of an open Hugging Face folder or GGUF file."""

    def load(placement: Placement) -> Params:
        if is_default:
            verify_default(source.path)
        params = load_foreign(source, placement.plan, placement.weights, placement.vocab_rows)
        source.release_pages()
        return params

    storage = source_storage(source)

    @functools.cache
    def all_recipes() -> dict[str, Recipe]:
        # Query, key and value of different types also have recipes of their own.
        return recipes(source.config) | recipes(source.config, storage)

    def read(name: str, info: ArrayInfo, part: Part | None = None) -> np.ndarray:
        return _read_recipe(source, name, dataclasses.replace(all_recipes()[name], info=info), part)

    def direct(reader: Reader) -> ReadLeaf:
        if is_default:
            verify_default(source.path)
        reading = source.reading(reader)

        def read_directly(name: str, info: ArrayInfo, expert: int | None = None) -> np.ndarray:
            recipe = all_recipes()[name]
            if expert is None:
                return dataclasses.replace(recipe, info=info).read(reading)
            whole = dataclasses.replace(info, shape=(recipe.info.shape[0], *info.shape[1:]))
            return dataclasses.replace(recipe, info=whole).read(reading, name, Part(0, expert, expert + 1))

        return read_directly

    def file_bytes(name: str, info: ArrayInfo, expert: int | None = None) -> int:
        recipe = all_recipes()[name]
        if recipe.is_order:
            return 0
        sources = recipe.sources
        if expert is not None:
            each = len(sources) // recipe.info.shape[0]
            sources = sources[expert * each : (expert + 1) * each]
        return sum(source.nbytes(tensor) for tensor, _ in sources)

    return Weights(
        source.path, source.config, source.eos_ids, storage, load, read, direct=direct, file_bytes=file_bytes
    )


def _open_native(path: Path) -> Weights:
    native, manifest, inside = open_native(path), path / MANIFEST, path / MTP_NAME
    stamps = file_stamps(manifest)

    def module() -> Any:
        # TensorStore takes a quarter of a second to import; here that runs beside the compiler.
        from jaxspec.checkpoint.native import checkpoint

        return checkpoint

    def direct(reader: Reader) -> ReadLeaf:
        def read(name: str, info: ArrayInfo, expert: int | None = None) -> np.ndarray:
            if file_stamps(manifest) != stamps:
                raise CheckpointError(f"{manifest}: was changed while it was in use: load the model again")
            part = None if expert is None else Part(0, expert, expert + 1)
            with reader.counting(native.leaf_bytes(name, expert)):
                return module().read_leaf(native, name, info, part)

        return read

    return Weights(
        path, native.config, native.eos_ids, native.storage, vocabulary=native.vocabulary,
        load=lambda at: module().restore_native(native, at.plan, at.weights, at.vocab_rows),
        read=lambda *leaf, **part: module().read_leaf(native, *leaf, **part), direct=direct,
        file_bytes=lambda name, info, expert=None: native.leaf_bytes(name, expert),
        mtp=(lambda: open_weights(inside)) if (inside / MANIFEST).is_file() else None,
    )  # fmt: skip


def open_checkpoint(path: str | Path) -> TensorSource:
    """Open a Hugging Face folder or a GGUF file; only headers are read.

    Raises:
      CheckpointError: not such a checkpoint (a native one is restored, not read tensor by tensor), or a damaged one.
      ConfigError: its configuration asks for something that jaxspec does not compute.
    """
    path = Path(path)
    match detect_format(path):
        case "hf":
            if is_assistant(path):
                return open_assistant(path)
            return open_feature_draft(path) if is_feature_draft(path) else open_hf(path)
        case "gguf":
            return open_gguf(path)
    raise CheckpointError(f"{path}: is a native checkpoint already; a Hugging Face folder or GGUF file is needed")


def load_foreign(source: TensorSource, plan: MeshPlan, storage: Storage | Any, vocab_rows: int = 0) -> Params:
    """Read every parameter and place each shard on its device; in addition, about one leaf per thread is in memory.

    Args:
      source: an open checkpoint.
      plan: the devices; dimensions that they do not divide are zero-padded.
      storage: how each weight is kept, in blocks only as the checkpoint has them; a dtype is that of all weights.
      vocab_rows: least number of vocabulary rows; fewer are zero-padded.

    Raises:
      ConfigError: a weight is asked for in blocks that the checkpoint does not hold.
    """
    declared, made = declare_params(source.config, storage), recipes(source.config, storage)

    def read(name: str, _: ArrayInfo, part: Part | None = None) -> np.ndarray:
        return _read_recipe(source, name, made[name], part)

    return place_tree(read, declared, placed_shapes(declared, plan, {"vocab": vocab_rows}))


def _read_recipe(source: TensorSource, name: str, recipe: Recipe, part: Part | None) -> np.ndarray:
    if part is None or part.start < part.stop:
        return recipe.read(source, name, part)
    shape = tuple(0 if axis == part.axis else n for axis, n in enumerate(recipe.info.shape))
    return np.zeros(shape, recipe.info.dtype)  # padding alone


def detect_format(path: str | Path) -> Format:
    """The format of a checkpoint, by content and not by name.

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
    except CheckpointError:
        raise
    except ValueError as error:  # a NUL character
        raise CheckpointError(f"{path}: is no path: {error}") from error
    wanted = "a Hugging Face folder, a GGUF file or a native checkpoint"
    raise CheckpointError(f"{path}: no such file or folder; give {wanted}")


def _detect_folder(path: Path) -> Format:
    if (path / MANIFEST).is_file():
        return "native"
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(f"{path}: holds an adapter (adapter_config.json); merge it into its base model first")
    if (path / "config.json").is_file():
        return "hf"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        raise CheckpointError(f"{path}: the folder is empty")
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        raise CheckpointError(f"{path}: is a folder; give the GGUF file in it, such as {path / ggufs[0]}")
    held = ", ".join(names[:5])
    raise CheckpointError(f"{path}: holds neither config.json (Hugging Face) nor {MANIFEST} (native); it holds {held}")


def _detect_file(path: Path) -> Format:
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
    if start == MAGIC:
        return "gguf"
    if path.suffix in _PICKLES:
        problem = "looks like a pickle, which can run code; it was not opened"
        raise CheckpointError(f"{path}: {problem}. Convert it to safetensors")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the folder around it, which holds config.json and the tokenizer")
    found = f"it begins with {start!r}, a GGUF file with {MAGIC!r}"
    raise CheckpointError(f"{path}: is no checkpoint that jaxspec reads: {found}")


def pack_trees(trees: list[Params], shapes: list[Params]) -> list[Params]:
    """Pack the weights of loaded models as integer products, GPU kernels and TPUs take them, where `shapes` says so.

    An array that several trees have is packed once. The trees are emptied, and each array that was packed is given up
    before the next one of its thread, so that the models are never in memory twice.
    """
    given = [*trees]
    paths_leaves, treedef = jax.tree.flatten_with_path(trees, is_leaf=_is_blocks)
    # Of an output projection all dimensions after the first are inputs, of any other weight the last one alone.
    is_out = [leaf_name(path).endswith(".out") for path, _ in paths_leaves]
    leaves = [leaf for _, leaf in paths_leaves]
    del paths_leaves
    wanted = jax.tree.leaves(shapes, is_leaf=_is_blocks)
    places: dict[int, list[int]] = {}
    for index, (leaf, shape) in enumerate(zip(leaves, wanted, strict=True)):
        if (_is_blocks(leaf) and leaf.format != shape.format) or leaf.shape != shape.shape:
            places.setdefault(id(*jax.tree.leaves(leaf)), []).append(index)
    # The caller's trees hold the arrays too.
    for tree in given:
        tree.clear()
    trees.clear()
    del given

    def pack(indices: list[int]) -> None:
        leaf, shape = leaves[indices[0]], wanted[indices[0]]
        for index in indices:
            leaves[index] = None
        packed = jax.tree.map(lambda to: _pack_array(leaf, shape, to, is_out[indices[0]]), shape)
        for index in indices:
            leaves[index] = packed

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(pack, places.values()))
    return jax.tree.unflatten(treedef, leaves)


def _pack_array(leaf: Any, packed: Any, shape: Any, is_out: bool) -> jax.Array:
    """Each device's shard, packed by itself: planes by the device, other blocks by the host; numbers as a matrix."""
    shards, (data,) = [], jax.tree.leaves(leaf)
    for shard in data.addressable_shards:
        outputs = shard.data.shape[0] if is_out else math.prod(shard.data.shape[:-2])
        if not _is_blocks(leaf):
            shards.append(shard.data.reshape(outputs, -1))
        elif packed.format in PLANES:
            shards.append(_lay_planes(shard.data, leaf.format, outputs))
        else:
            pack = to_columns if packed.format in COLUMNS else pack_blocks
            shards.append(jax.device_put(pack(np.asarray(shard.data), leaf.format, outputs), shard.device))
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, shards, dtype=shape.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _lay_planes(blocks: jax.Array, name: str, outputs: int) -> jax.Array:
    return to_planes(blocks, name, outputs)


def _is_blocks(leaf: Any) -> bool:
    return isinstance(leaf, Blocks)
