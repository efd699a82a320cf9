"""Files: written whole or not at all, told apart by digests, and JSON that may be damaged or hostile."""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxspec.errors import CheckpointError

_MAX_BYTES = 64 << 20  # the largest index of a published model takes a few megabytes

# A checkpoint's digest covers the list of tensors, which comes first in a file. It takes up to so many bytes in a GGUF
# file, after the vocabulary. Besides, the digest covers short samples of the rest, one for each MiB.
_INDEX_BYTES, _SAMPLE_BYTES, _MOST_SAMPLES = 1 << 24, 256, 1024


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that other processes see whole or not at all: it takes its name when the block ends.

    The folder must exist. A block that raises leaves the old file, or none. A file that is replaced keeps its mode, and
    a symbolic link stays one.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.part-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            yield file
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file as `replacing` does; text is UTF-8. A pipe or a device is written as it is."""
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with replacing(path) as file:
        file.write(content)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_text(text: str) -> str:
    """SHA-256 of a text in hexadecimal digits, as names of cached files have it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def vocabulary_digest(tokens: Sequence[str]) -> str:
    """SHA-256 of a vocabulary (tokens by id), by which a draft that shares its target's embedding names the target."""
    return digest_text("\0".join(tokens))


def checkpoint_digest(path: Path, config: object) -> str:
    """Identify what a checkpoint holds, wherever it lies: its geometry, its lists of tensors, samples of them."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    weights = [file for file in files if file.suffix in (".safetensors", ".gguf")] or files
    digest = hashlib.sha256(repr(config).encode())
    for part in sorted(map(_digest_samples, weights)):
        digest.update(part)
    return digest.hexdigest()[:32]


def file_stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, size in bytes and time of change in ns of a file, or of every file of a folder: quicker than a digest."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    found = [(file, file.stat()) for file in files]
    return [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file, stat in found]


def _digest_samples(file: Path) -> bytes:
    size, places = file.stat().st_size, set[int]()
    digest = hashlib.sha256(size.to_bytes(8))
    with file.open("rb") as content:
        if file.suffix == ".safetensors":
            start = 8 + int.from_bytes(content.read(8), "little")
            index = content.read(start - 8)
            # The beginning of every tensor: a fine-tune may have changed small ones only.
            places = {start + each["data_offsets"][0] for name, each in json.loads(index).items() if name[:2] != "__"}
        else:
            index = content.read(_INDEX_BYTES)
        digest.update(index)
        count = min(_MOST_SAMPLES, 1 + (size >> 20))
        for place in sorted(places | {size * part // count for part in range(count)} | {max(0, size - _SAMPLE_BYTES)}):
            content.seek(place)
            digest.update(content.read(_SAMPLE_BYTES))
    return digest.digest()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    CheckpointError: the file cannot be read, is absurdly large, or is not one JSON object without repeated keys.
    """

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, value in pairs:
            if key in built:
                raise CheckpointError(f"{path}: holds the key {key!r} twice")
            built[key] = value
        return built

    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size > _MAX_BYTES:
                raise CheckpointError(f"{path}: has {size} bytes, more than any configuration ({_MAX_BYTES})")
            file.seek(0)
            value = json.loads(file.read(size), object_pairs_hook=build_object)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value
