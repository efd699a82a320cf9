"""The layer for multi-token prediction inside a checkpoint, opened as a feature draft of the model beside it.

Embedding and head are the model's. Tensors get the names of an ordinary folder or file, so that the rest of the loading
is the same. Published for Qwen 3.5, Qwen 3.6 and Qwen3-Next: `mtp.*` in folders, and the last layer of GGUF files.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.gguf import GGUFSource
from jaxspec.checkpoint.gguf_header import GGUFHeader, GGUFTensor, read_header
from jaxspec.checkpoint.hf import CONFIG_FILE, HFSource, TensorPlace
from jaxspec.checkpoint.keymaps import check_accounted
from jaxspec.checkpoint.multimodal import MTP
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.features import NORMED, FeatureConfig

_NAMES = {
    "norm.": "model.norm.", "layers.": "model.layers.", "pre_fc_norm_embedding.": "token_norm.",
    "pre_fc_norm_hidden.": "hidden_norm.",
}  # fmt: skip
_ROUTER = f"{MTP}layers.0.mlp.gate.weight"
# Of the layer's tensors in a GGUF file those that ordinary layers have not.
_GGUF_NAMES = {
    "nextn.eh_proj.weight": "fc.weight", "nextn.enorm.weight": "token_norm.weight",
    "nextn.hnorm.weight": "hidden_norm.weight", "nextn.shared_head_norm.weight": "output_norm.weight",
}  # fmt: skip
_ONE = "draft 'mtp' runs checkpoints with one such layer"


class MtpSource(HFSource):
    """The layer of an open Hugging Face folder (a `TensorSource`)."""

    def _describe_model(self, raw: dict[str, Any]) -> ModelConfig:
        values, cfg = ConfigValues(self.path / CONFIG_FILE, raw), super()._describe_model(raw)
        if values.integer("mtp_num_hidden_layers", default=1) != 1:
            values.refuse("mtp_num_hidden_layers", _ONE)
        if values.flag("mtp_use_dedicated_embeddings"):
            values.refuse("mtp_use_dedicated_embeddings", "draft 'mtp' has the model's own embedding")
        return _one_layer(cfg, _ROUTER in self._tensors)

    def _choose_tensors(self) -> dict[str, TensorPlace]:
        own = {name.removeprefix(MTP): place for name, place in self._tensors.items() if name.startswith(MTP)}
        begins = {name: next((begin for begin in _NAMES if name.startswith(begin)), "") for name in own}
        return {_NAMES.get(begin, "") + name.removeprefix(begin): own[name] for name, begin in begins.items()}


class MtpGGUFSource(GGUFSource):
    """The layer of an open GGUF file (a `TensorSource`): `blk.N` after the model's own N."""

    def _describe_model(self, header: GGUFHeader) -> ModelConfig:
        cfg, key = super()._describe_model(header), self._drafting_key
        if header.metadata[key] != 1:
            ConfigValues(self.path, header.metadata).refuse(key, _ONE)
        self._prefix = f"blk.{cfg.num_layers}."
        return _one_layer(cfg, f"{self._prefix}ffn_gate_inp.weight" in header.tensors)

    def _choose_tensors(self, header: GGUFHeader) -> dict[str, GGUFTensor]:
        own = {n.removeprefix(self._prefix): t for n, t in header.tensors.items() if n.startswith(self._prefix)}
        return {_GGUF_NAMES.get(name, f"blk.0.{name}"): tensor for name, tensor in own.items()}


def _one_layer(cfg: ModelConfig, has_experts: bool) -> ModelConfig:
    """The layer of a model; it has experts where the model has and its tensors say so."""
    experts = dataclasses.replace(cfg.experts, layers=()) if cfg.experts is not None and has_experts else None
    features = FeatureConfig(cfg.embed_dim, (NORMED,), "mtp", own_head=False, norm_output=True)
    return dataclasses.replace(
        cfg, num_layers=1, recurrent=None, experts=experts, tied=False, shares_embedding=True, features=features
    )


def open_mtp(path: Path) -> HFSource | GGUFSource:
    """Open the layer inside a Hugging Face folder or a GGUF file that has one; no weight is read.

    Raises:
      CheckpointError: its tensors do not match the configuration.
      ConfigError: it computes something else.
    """
    source = MtpSource(path) if path.is_dir() else MtpGGUFSource(path, read_header(path))
    try:
        check_accounted(source)
    except CheckpointError as error:
        problem = f"its layer for multi-token prediction, in names of a folder less {MTP!r}"
        raise CheckpointError(f"{problem}: {error}") from error
    return source
