"""Converting a checkpoint of any format into the native one: one array in memory at a time, all or nothing on disk."""

import dataclasses
import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxspec.checkpoint.load import MTP_NAME, Weights, detect_format, open_weights
from jaxspec.checkpoint.native.manifest import PARTIAL, NativeCheckpoint, count_bytes, open_native, write_manifest
from jaxspec.checkpoint.native.write import write_arrays
from jaxspec.errors import CheckpointError, ConfigError, JaxspecError, suggest
from jaxspec.files import sync
from jaxspec.models.config import ModelConfig, keep_layers
from jaxspec.models.params import ArrayInfo, declare_leaves, declare_params
from jaxspec.models.quantization import (
    K_QUANTS,
    LeafType,
    Storage,
    collect_storage,
    encode_blocks,
    leaf_inputs,
    restrict_storage,
    weight_leaves,
)
from pallas_kernels.linear.blocks import FORMATS

DTYPES = ("float32", "bfloat16")

# The formats that weights can be quantised to, with that of embedding and head: four bits cost those two most.
QUANTISED = {"q8_0": "q8_0", "q4_0": "q8_0"}

# Disk space for the tokenizer and the folder structure.
_SPARE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class ConvertProgress:
    """How far a conversion is: arrays and bytes made so far, and in total."""

    arrays: int
    num_arrays: int
    bytes: int
    num_bytes: int


def convert(
    src: str | Path,
    dst: str | Path,
    dtype: str = "auto",
    progress: Callable[[ConvertProgress], None] | None = None,
    layers: int | None = None,
    quantize: str | None = None,
    save_tokenizer: Callable[[Path, Path], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> NativeCheckpoint:
    """Write the model at `src` as a native checkpoint `dst`, and its own draft ("mtp") as one inside.

    The files are written into a hidden folder beside `dst`, which is renamed at the very end: a conversion that is
    killed leaves nothing that loads. It takes the memory of a few copies of the largest array.

    Args:
      src: a Hugging Face folder, a GGUF file, or another native checkpoint.
      dst: a folder that does not exist yet, in one that does.
      dtype: of the weights: "float32", "bfloat16", or "auto", which keeps each as the source has it. Norms and biases
        are always float32.
      progress: called before the first array and after each.
      layers: number of layers to keep, from the first: a rough draft model without training. None keeps all,
        and the model's own draft.
      quantize: "q8_0" or "q4_0", to which weights are rounded (embedding and head to q8_0); needs dtype "auto".
        Weights that the source holds in that format are copied. Rows that are no whole blocks of 32 become float32.
      save_tokenizer: writes the tokenizer of `src` into a folder; None writes a checkpoint without a tokenizer.
      stopped: asked before each array and each later step; True undoes the conversion.

    Raises:
      KeyboardInterrupt: `stopped` said so, and nothing is left.
      CheckpointError: `src` is missing, damaged or not supported, `dst` exists or cannot be written, or the disk is too
        small. Only damage and a failing disk are found after the first file is written.
      ConfigError: an unknown dtype or format, or more layers than there are.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not supported; use auto, {' or '.join(DTYPES)}")
    check_quantize(quantize)
    if quantize is not None and dtype != "auto":
        raise ConfigError(f"quantize {quantize!r} and dtype {dtype!r} exclude each other; give one of them")
    src, dst = Path(src), Path(dst)
    detect_format(src)
    if src.resolve() == dst.resolve():
        raise CheckpointError(f"{src} and {dst} are the same place; give another destination")
    if src.resolve() in dst.resolve().parents:
        raise CheckpointError(f"{dst} lies inside {src}; give a destination outside of it")
    check_destination(dst)
    source = open_weights(src)
    cfg = source.config
    if layers is not None:
        if not 1 <= layers <= cfg.num_layers:
            raise ConfigError(f"layers must lie between 1 and the model's {cfg.num_layers}, got {layers}")
        cfg = keep_layers(cfg, range(layers))
    stored = choose_storage(source, cfg, dtype, quantize)
    # Only the whole model has a draft of its own.
    own = source.mtp() if source.mtp is not None and layers is None else None
    own_stored = own and choose_storage(own, own.config, dtype, quantize)

    def write_beside(folder: Path) -> None:
        if save_tokenizer is not None:
            save_tokenizer(src, folder)
        if own is not None and own_stored is not None:
            write_checkpoint(folder / MTP_NAME, own, own.config, own_stored, stopped=stopped)

    return write_checkpoint(dst, source, cfg, stored, progress, write_beside, stopped)


def write_checkpoint(
    dst: Path,
    source: Weights,
    cfg: ModelConfig,
    stored: Storage,
    progress: Callable[[ConvertProgress], None] | None = None,
    write_beside: Callable[[Path], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> NativeCheckpoint:
    """Write a source's first layers; see `convert`. `write_beside` adds a tokenizer to the folder of a whole model."""

    def go_on() -> None:
        if stopped():
            raise KeyboardInterrupt

    def report(done: ConvertProgress) -> None:
        go_on()
        if progress is not None:
            progress(done)

    needed = sum(map(count_bytes, declare_leaves(cfg, stored).values())) + _SPARE_BYTES
    free = shutil.disk_usage(dst.absolute().parent).free
    if needed > free:
        raise CheckpointError(f"{dst}: needs {needed} bytes, but the disk of {dst.absolute().parent} has {free} free")
    partial = partial_folder(dst)
    try:
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{dst}: the folder {partial} cannot be made: {error.strerror}") from error
    try:
        # The tokenizer first: it fails soonest.
        if write_beside is not None and not cfg.shares_embedding and cfg.features is None:
            write_beside(partial)
        write_arrays(partial, declare_params(cfg, stored), _make_leaves(source, cfg, stored, report))
        go_on()
        write_manifest(partial, cfg, stored, source.eos_ids, source.vocabulary)
        # No crash may keep the folder's name and lose its content.
        for path in (*partial.rglob("*"), partial):
            go_on()
            sync(path)
        # If the destination has appeared meanwhile, this fails unless it is empty.
        partial.rename(dst)
        sync(dst.absolute().parent)
    except JaxspecError:
        raise
    except (OSError, ValueError) as error:  # tensorstore reports a full disk as a ValueError
        raise CheckpointError(f"{dst}: cannot be written: {error}") from error
    finally:
        # Twice, because a thread of Orbax may finish a file while the first call removes the folder.
        shutil.rmtree(partial, ignore_errors=True)
        if partial.exists():
            shutil.rmtree(partial)
    return open_native(dst)


def partial_folder(dst: str | Path) -> Path:
    """The folder that this process writes in place of `dst` until it is whole."""
    dst = Path(dst).absolute()
    return dst.with_name(f".{dst.name}.partial-{os.getpid()}")


def find_leftovers(dst: str | Path) -> list[Path]:
    """Hidden folders beside `dst` of killed conversions, or of conversions that are running."""
    dst = Path(dst).absolute()
    return sorted(dst.parent.glob(f".{glob.escape(dst.name)}.partial-*"))


def check_quantize(quantize: str | None) -> None:
    """Refuse a format that weights cannot be quantised to; None is none."""
    if quantize in K_QUANTS:
        raise ConfigError(
            f"weights are not rounded to {quantize!r}, a K-quant: use q8_0 or q4_0, or convert a GGUF file that holds "
            "K-quants, whose blocks are kept"
        )
    if quantize is not None and quantize not in QUANTISED:
        raise ConfigError(f"weights cannot be quantised to {quantize!r}; {suggest(quantize, QUANTISED)}")


def check_destination(dst: Path) -> None:
    """Refuse a destination that exists or cannot be written."""
    if os.path.lexists(dst):
        raise CheckpointError(f"{dst} exists already; it is not overwritten. Remove it or give another name")
    if PARTIAL.fullmatch(dst.absolute().name):
        raise CheckpointError(f"{dst}: the name is that of an unfinished conversion; give another")
    parent = dst.absolute().parent
    if not parent.is_dir():
        raise CheckpointError(f"{dst}: the folder {parent} does not exist")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{dst}: the folder {parent} is not writable")


def choose_storage(source: Weights, cfg: ModelConfig, dtype: str, quantize: str | None) -> Storage:
    """How the weights of the result, whose geometry is `cfg`, are stored, by the options of `convert`."""
    if dtype != "auto":
        return Storage(dtype)
    if quantize is None:
        return restrict_storage(source.own_storage, cfg)

    def choose_type(leaf: str) -> LeafType:
        wanted = QUANTISED[quantize] if leaf in ("embed", "head") else quantize
        return wanted if leaf_inputs(cfg, leaf) % FORMATS[wanted].values == 0 else "float32"

    return collect_storage({leaf: choose_type(leaf) for leaf in weight_leaves(cfg)})


def _make_leaves(
    source: Weights, cfg: ModelConfig, storage: Storage, progress: Callable[[ConvertProgress], None]
) -> Callable[[str, ArrayInfo], np.ndarray]:
    """The function that makes each stored array, and reports its progress."""
    sizes = {name: count_bytes(info) for name, info in declare_leaves(cfg, storage).items()}
    held, numbers = declare_leaves(source.config, source.own_storage), declare_leaves(cfg, np.float32)
    done: dict[str, int] = {}

    def report() -> None:
        progress(ConvertProgress(len(done), len(sizes), sum(done.values()), sum(sizes.values())))

    def make(name: str, info: ArrayInfo) -> np.ndarray:
        if not done:
            report()
        if info.format is None or (name in held and held[name].format == info.format):
            value = source.read(name, info)
        else:
            value = encode_blocks(source.read(name, numbers[name]), info.format).reshape(info.shape)
        done[name] = sizes[name]
        report()
        return value

    return make
