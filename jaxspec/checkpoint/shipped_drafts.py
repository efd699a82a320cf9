"""The drafts that ship with jaxspec: native checkpoints that know the vocabulary of their target."""

import functools
import importlib.resources
import logging
from pathlib import Path

from jaxspec.checkpoint.native.manifest import MANIFEST, NativeCheckpoint, open_native
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig


def shipped_drafts() -> list[NativeCheckpoint]:
    """All of them, opened, by name; one that is damaged is left out with a warning: nobody asked for it."""
    folder = importlib.resources.files("jaxspec_drafts")
    # A package as files, as native checkpoints are; in a zip there are none to find.
    root = Path(str(folder))
    drafts = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            drafts.append(open_native(path.parent))
        except CheckpointError as error:
            warn_of_damage(path.parent, str(error))
    return drafts


def find_shipped_draft(target: ModelConfig, vocabulary: str) -> Path | None:
    """The shipped draft that fits a target, or None.

    Args:
      target: geometry.
      vocabulary: see `jaxspec.checkpoint.vocabulary.vocabulary_digest`.
    """
    for draft in shipped_drafts():
        same_vocabulary = (draft.vocabulary, draft.config.vocab_size) == (vocabulary, target.vocab_size)
        if same_vocabulary and draft.config.embed_dim == target.embed_dim:
            return draft.path
    return None


@functools.cache
def warn_of_damage(path: Path, problem: str) -> None:
    """Say that a shipped draft is not used, once."""
    logging.getLogger(__name__).warning(
        "the draft %s, which ships with jaxspec, is damaged and left out: %s", path.name, problem
    )
