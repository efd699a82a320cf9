"""`jaxspec-convert`: a checkpoint in, a native checkpoint out."""

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli.run import command, interrupts_noted
from jaxspec.errors import ConfigError

NAME = "jaxspec-convert"

DEFAULT_WORD = "default"  # as SRC: the default model, wherever it is installed


@command(NAME)
def app(
    src: Annotated[
        str | None, typer.Argument(help="Hugging Face folder, GGUF file, native checkpoint, or the word default.")
    ] = None,
    dst: Annotated[
        Path | None, typer.Argument(help="The checkpoint to make: a folder that does not exist yet.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16; auto keeps every weight as SRC holds it, in blocks too.")
    ] = "auto",
    quantize: Annotated[
        str | None, typer.Option(help="q8_0 or q4_0: round the weights to blocks; not with --dtype.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Keep only the first N layers: a rough draft model, untrained.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(help="Convert nothing: read this native checkpoint, and compare all its checksums.")
    ] = None,
) -> None:
    """Convert a checkpoint into jaxspec's native format, which restores straight onto its devices.

    It is written whole or not at all: an interrupted conversion leaves nothing that loads.
    """
    if verify is not None:
        if src is not None or dtype != "auto" or quantize is not None or layers is not None:
            raise ConfigError("--verify converts nothing: give it one folder, and no other argument")
        _verify(verify)
    elif src is None or dst is None:
        raise ConfigError(f"give SRC and DST, or --verify and a folder; {NAME} --help says more")
    else:
        _run(src, dst, dtype, quantize, layers)


def _run(src: str, dst: Path, dtype: str, quantize: str | None, layers: int | None) -> None:
    from rich.console import Console  # heavy imports only now: --help and usage errors answer at once
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from jaxspec.checkpoint.convert import ConvertProgress, find_leftovers, partial_folder
    from jaxspec.checkpoint.convert import convert as convert_checkpoint

    for leftover in find_leftovers(dst):
        print(
            f"{NAME}: note: {leftover} is of a conversion that was killed or still runs; in the first case, delete it",
            file=sys.stderr,
        )
    source = _find_source(src)
    # With a dtype, too, it is refused.
    source_bytes = math.inf if quantize is None or dtype != "auto" else _check_rounding(source, quantize)
    console = Console(stderr=True)
    size = TextColumn("{task.fields[size]}")
    columns = (TextColumn("tensors"), MofNCompleteColumn(), BarColumn(), size, TimeRemainingColumn())
    with ExitStack() as stack:
        # Before there is a folder to remove, an interrupt ends the process at once.
        noted = stack.enter_context(interrupts_noted(partial_folder(dst).exists))
        bar = Progress(*columns, console=console, transient=True)
        task = bar.add_task("", total=None, size="")

        def show(progress: ConvertProgress) -> None:
            # Shown once work begins, and to people only: refusals and log files hold nothing but their line.
            if progress.arrays == 0:
                if layers is None and progress.num_bytes > source_bytes:
                    _warn(
                        f"the result takes {progress.num_bytes / 1e6:.1f} MB, {src} only {source_bytes / 1e6:.1f} MB: "
                        "without --quantize it keeps the size of its source"
                    )
                if console.is_terminal:
                    stack.enter_context(bar)
            megabytes = f"{progress.bytes / 1e6:.0f}/{progress.num_bytes / 1e6:.0f} MB"
            bar.update(task, completed=progress.arrays, total=progress.num_arrays, size=megabytes)

        checkpoint = convert_checkpoint(source, dst, dtype, show, layers, quantize, _save_tokenizer, noted.is_set)
    print(f"{checkpoint.path}: {checkpoint.num_bytes / 1e6:.1f} MB, {checkpoint.storage}")


def _verify(folder: Path) -> None:
    from jaxspec.checkpoint.native.manifest import verify_native

    checkpoint = verify_native(folder)
    files = checkpoint.files or {}
    num_bytes = sum(entry["bytes"] for entry in files.values())
    print(f"{checkpoint.path}: {len(files)} files, {num_bytes / 1e6:.1f} MB, all as they were written")


def _warn(message: str) -> None:
    print(f"{NAME}: warning: {message}", file=sys.stderr)


def _check_rounding(source: Path, quantize: str) -> float:
    """Warn where weights that are rounded to blocks already would be rounded again; returns the source's bytes."""
    from jaxspec.checkpoint.convert import QUANTISED
    from jaxspec.checkpoint.keymaps import source_storage
    from jaxspec.checkpoint.load import detect_format, open_checkpoint
    from jaxspec.checkpoint.native.manifest import open_native
    from jaxspec.models.quantization import parts_of, weight_leaves
    from pallas_kernels.linear.blocks import FORMATS

    if quantize not in QUANTISED:
        return math.inf  # refused by the conversion
    if detect_format(source) == "native":
        native = open_native(source)
        cfg, storage, num_bytes = native.config, native.storage, native.num_bytes
    else:
        opened = open_checkpoint(source)
        cfg, storage = opened.config, source_storage(opened)
        files = [source] if source.is_file() else source.glob("*.safetensors")
        num_bytes = sum(file.stat().st_size for file in files)
    rounded = set()
    for leaf in weight_leaves(cfg):
        wanted = QUANTISED[quantize] if leaf in ("embed", "head") else quantize
        rounded |= {part for part in parts_of(storage.type_of(leaf)) if part in FORMATS and part != wanted}
    if rounded:
        _warn(
            f"{source} holds weights in {', '.join(sorted(rounded))} blocks already: rounding them to {quantize} adds "
            "a second error; convert the unquantised model, or leave --quantize out to keep them as they are"
        )
    return num_bytes


def _save_tokenizer(src: Path, folder: Path) -> None:
    from jaxspec.text.tokenizer import save_tokenizer  # heavy, and not needed by conversions that are refused

    save_tokenizer(src, folder)


def _find_source(src: str) -> Path:
    if src != DEFAULT_WORD:
        return Path(src)
    from jaxspec.checkpoint.shipped import default_model_path, verify_default

    path = default_model_path()
    verify_default(path)
    return path
