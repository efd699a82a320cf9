"""The text model of a Hugging Face folder that takes images or sound too; what is for them is left out.

Such a folder has the text model's settings in `text_config`, and its tensors under a prefix.
"""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.checkpoint.keymaps import HEAD
from jaxspec.errors import CheckpointError, one_line

# Types of folders whose text model sees text as it would alone, and what transformers assumes of its absent settings.
_WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {},
    "gemma4": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "gemma3": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
# Begins the names of tensors for multi-token prediction, a draft of the text model.
MTP = "mtp."
# Prefixes of the text model's tensors, as newer and as older folders spell them, and those of ordinary folders.
_PREFIXES = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.", MTP: MTP,
}  # fmt: skip

Tensor = TypeVar("Tensor")


@functools.cache
def _warn_left_out(folder: Path, parts: str) -> None:
    """Say it once of a folder, which may be opened for a model and again for the draft in it."""
    logging.getLogger(__name__).warning("%s: only the text model is loaded; left out: %s", folder, parts)


def text_part(
    path: Path, raw: dict[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The text model's settings and tensors, as a folder of it alone has them; those of such a folder are unchanged.

    `path` is that of the settings, for errors; `raw` are the settings, as parsed.

    Raises:
      CheckpointError: the settings of the text model are missing.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in _WRAPPERS:
        return raw, dict(tensors)
    text = raw.get("text_config")
    if not isinstance(text, dict) or not isinstance(text.get("model_type"), str):
        raise CheckpointError(f"{path}: lacks text_config with the model_type of the text model")
    kept: dict[str, Tensor] = {}
    left_out: set[str] = set()
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            left_out.add(name.removeprefix("model.").partition(".")[0])
        else:
            kept[_PREFIXES[prefix] + name.removeprefix(prefix)] = tensor
    if left_out:
        parts = one_line(", ".join(sorted(left_out)))
        _warn_left_out(path.parent, parts)
    shared = {key: raw[key] for key in ("quantization_config", "eos_token_id") if key in raw}
    # Folders of several ages say in other places that the head is the embedding.
    tied = HEAD not in kept or text.get("tie_word_embeddings") is True
    return {**_WRAPPERS[kind], **shared, **text, "tie_word_embeddings": tied}, kept
