"""JSON objects from files that may be damaged or hostile."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import CheckpointError

_MAX_BYTES = 64 << 20  # the largest index of a published model takes a few megabytes


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
