"""JSON objects from files that nobody vouches for."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import CheckpointError

# The largest index of a published model takes a few megabytes.
_MAX_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      CheckpointError: the file cannot be read, is absurdly large, or does not hold one JSON object.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size > _MAX_BYTES:
                raise CheckpointError(f"{path}: has {size} bytes, more than any configuration ({_MAX_BYTES})")
            file.seek(0)
            raw = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `raw`; `where` names its place in errors, and a repeated key is one."""

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, value in pairs:
            if key in built:
                raise CheckpointError(f"{where}: holds the key {key!r} twice")
            built[key] = value
        return built

    try:
        value = json.loads(raw, object_pairs_hook=build_object)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{where}: is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must hold a JSON object, got {type(value).__name__}")
    return value
