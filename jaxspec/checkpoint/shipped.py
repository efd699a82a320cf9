"""The drafts that ship with jaxspec: native checkpoints that know the vocabulary of their target."""

import importlib.resources
from pathlib import Path

from jaxspec.checkpoint.manifest import MANIFEST, NativeCheckpoint, open_native
from jaxspec.models.config import ModelConfig


def shipped_drafts() -> list[NativeCheckpoint]:
    """All of them, opened, by name."""
    folder = importlib.resources.files("jaxspec_drafts")
    # A package as files, as native checkpoints are; in a zip there are none to find.
    root = Path(str(folder))
    return [open_native(path.parent) for path in sorted(root.glob(f"*/{MANIFEST}"))]


def find_shipped_draft(target: ModelConfig, vocabulary: str) -> Path | None:
    """The shipped draft that fits a target, or None.

    Args:
      target: geometry.
      vocabulary: see `jaxspec.pairing.vocabulary_digest`.
    """
    for draft in shipped_drafts():
        same_vocabulary = (draft.vocabulary, draft.config.vocab_size) == (vocabulary, target.vocab_size)
        if same_vocabulary and draft.config.embed_dim == target.embed_dim:
            return draft.path
    return None
