"""The files of a native checkpoint: listed in its manifest with size and SHA-256, so that none changes unnoticed.

When a checkpoint is opened, the files beside the arrays are compared with their checksums: the tokenizer's and the chat
template. Files of arrays must be there in their sizes when arrays are read, and have checksums of their own, which are
checked then. `verify_files` compares everything.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from jaxspec.errors import CheckpointError, shown
from jaxspec.files import digest_file

Files = dict[str, dict[str, Any]]  # "bytes" and "sha256" by path, relative to the folder and with slashes

# Files of these types beside the manifest decide how text is read and written.
_TEXT_TYPES = (".json", ".jinja", ".model")

_NUM_THREADS = 2  # hashing leaves the interpreter lock


def describe_files(folder: Path) -> Files:
    """Every file in a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = pool.map(digest_file, paths)
        return {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(paths, digests, strict=True)
        }


def read_files(value: object, file: Path) -> Files:
    """The list of files in a manifest; CheckpointError where it is malformed or names a file outside of the folder."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: files must be an object, got {type(value).__name__}")
    for name, entry in value.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or any(c in name for c in "\\:\0") or path.as_posix() != name:
            raise CheckpointError(f"{file}: files names {name!r}, which is no plain path inside the folder")
        types = {key: type(each) for key, each in entry.items()} if isinstance(entry, dict) else None
        if types != {"bytes": int, "sha256": str}:
            raise CheckpointError(f"{file}: files must give bytes and sha256 of {name!r}, got {shown(entry)}")
    return value


def check_text_files(folder: Path, files: Files, manifest: str) -> None:
    """CheckpointError where a file beside the arrays is gone, has changed, or was added and would be read."""
    text = {name: entry for name, entry in files.items() if "/" not in name}
    check_sizes(folder, text, manifest)
    for path in sorted(folder.iterdir()):
        if path.suffix in _TEXT_TYPES and path.name != manifest and path.name not in text:
            raise CheckpointError(f"{path}: was added to the checkpoint: {manifest} does not list it; remove it")
    _check_digests(folder, text, manifest)


def check_sizes(folder: Path, files: Files, manifest: str) -> None:
    """CheckpointError where a listed file is gone or has another size."""
    for name, entry in files.items():
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError:
            size = None
        if size is None:
            raise CheckpointError(f"{path}: is missing, and {manifest} lists it; convert the model again")
        if size != entry["bytes"]:
            raise CheckpointError(f"{path}: has {size} bytes, and {manifest} says {entry['bytes']}: damaged or changed")


def verify_files(folder: Path, files: Files, manifest: str) -> None:
    """CheckpointError where any listed file has changed, or an array has a file that is not listed."""
    check_text_files(folder, files, manifest)
    check_sizes(folder, files, manifest)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "/" in name and path.is_file() and name not in files:
            raise CheckpointError(f"{path}: was added to the checkpoint: {manifest} does not list it; remove it")
    _check_digests(folder, files, manifest)


def _check_digests(folder: Path, files: Mapping[str, dict[str, Any]], manifest: str) -> None:
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for name, digest in zip(files, pool.map(lambda name: digest_file(folder / name), files), strict=True):
                if digest != files[name]["sha256"]:
                    says = f"has SHA-256 {digest:.12}, and {manifest} says {files[name]['sha256']:.12}"
                    raise CheckpointError(f"{folder / name}: {says}: damaged or changed; convert the model again")
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error
