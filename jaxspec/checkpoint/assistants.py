"""Gemma 4's assistants (`gemma4_assistant`), opened as feature drafts that are fed keys and values of their target.

Tensors get the names of an ordinary folder, so that the rest of the loading is the same.
"""

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.hf import CONFIG_FILE, HARMLESS_KEYS, HFSource, TensorPlace, read_config
from jaxspec.checkpoint.keymaps import EMBED, HEAD, check_accounted
from jaxspec.errors import CheckpointError
from jaxspec.files import read_json
from jaxspec.models.config import ModelConfig
from jaxspec.models.families.gemma4 import Gemma4
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.features import FeatureConfig

_TYPE = "gemma4_assistant"
# With them transformers scores the tokens of a few centroids alone.
_CENTROIDS = "masked_embedding."
_NAMES = {"pre_projection.": "fc.", "post_projection.": "fc_own."}
# Rows of transformers see so many positions more, counted from the root's, than a layer with the same window.
_FURTHER = 2


class AssistantSource(HFSource):
    """An open folder of an assistant (a `TensorSource`)."""

    def _describe_model(self, raw: dict[str, Any]) -> ModelConfig:
        path = self.path / CONFIG_FILE
        values, text = ConfigValues(path, raw), raw.get("text_config")
        if not isinstance(text, dict) or text.get("model_type") != Gemma4.name:
            raise CheckpointError(f"{path}: lacks text_config of model_type {Gemma4.name!r}")
        width = values.integer("backbone_hidden_size")
        if values.flag("use_ordered_embeddings"):
            logging.getLogger(__name__).warning(
                "%s: all tokens are scored, and not those of a few centroids", self.path
            )
        for key in ("num_centroids", "centroid_intermediate_top_k", "tie_word_embeddings", "quantization_config"):
            values.get(key)
        values.refuse_unread(lambda key, value: key in HARMLESS_KEYS or key in ("model_type", "text_config"))
        own = ConfigValues(path, text)
        layers = own.integer("num_hidden_layers")
        if own.integer("num_kv_shared_layers", default=0, minimum=0) not in (0, layers):
            own.refuse("num_kv_shared_layers", "all layers of an assistant take the keys of its target")
        unlike = {"use_double_wide_mlp": False, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
        for key, plain in unlike.items():
            if own.get(key, plain) != plain:
                own.refuse(key, "assistants do not have it")
        # A model of the same layers, which have keys; what follows says that they have none.
        cfg = read_config(path, text | unlike | {"num_kv_shared_layers": 0}, max_layers=len(self._tensors))
        assert cfg.kinds is not None and cfg.sliding_window is not None  # as in every model of this family
        kinds = dataclasses.replace(cfg.kinds, sharing=layers, sharing_mlp_dim=cfg.mlp_dim, keys_are_values=False)
        keys = 2 * (cfg.num_kv_heads * cfg.head_dim + kinds.full_kv_heads * kinds.full_head_dim)
        return dataclasses.replace(
            cfg, kinds=kinds, tied=False, shares_embedding=True, logit_softcap=None, embed_scale=math.sqrt(width),
            sliding_window=cfg.sliding_window + _FURTHER, features=FeatureConfig(width, (), "assistant", keys_dim=keys),
        )  # fmt: skip

    def _choose_tensors(self) -> dict[str, TensorPlace]:
        found = {name: tensor for name, tensor in self._tensors.items() if not name.startswith(_CENTROIDS)}
        # The embedding is the head alone: rows begin with the target's.
        head = found.pop(EMBED, None)
        if head is not None:
            found.setdefault(HEAD, head)
        begins = {name: next((begin for begin in _NAMES if name.startswith(begin)), "") for name in found}
        return {_NAMES.get(begin, "") + name.removeprefix(begin): found[name] for name, begin in begins.items()}


def is_assistant(path: Path) -> bool:
    """Whether a folder with a `config.json` holds an assistant."""
    return read_json(path / CONFIG_FILE).get("model_type") == _TYPE


def open_assistant(path: Path) -> AssistantSource:
    """Open an assistant's folder: configuration, headers and names are checked, no weight is read.

    Raises:
      CheckpointError: files are missing or damaged, or do not match the configuration.
      ConfigError: it computes something else.
    """
    source = AssistantSource(path)
    check_accounted(source)
    return source
