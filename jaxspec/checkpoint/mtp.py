"""The layer for multi-token prediction inside a checkpoint (`mtp.*`), opened as a feature draft of the model beside it.

Embedding and head are the model's. Tensors get the names of an ordinary folder, so that the rest of the loading is the
same. Published for Qwen 3.5, Qwen 3.6 and Qwen3-Next.
"""

import dataclasses
from pathlib import Path
from typing import Any

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


class MtpSource(HFSource):
    """The layer of an open Hugging Face folder (a `TensorSource`)."""

    def _describe_model(self, raw: dict[str, Any]) -> ModelConfig:
        values, cfg = ConfigValues(self.path / CONFIG_FILE, raw), super()._describe_model(raw)
        if values.integer("mtp_num_hidden_layers", default=1) != 1:
            values.refuse("mtp_num_hidden_layers", "draft 'mtp' runs checkpoints with one such layer")
        if values.flag("mtp_use_dedicated_embeddings"):
            values.refuse("mtp_use_dedicated_embeddings", "draft 'mtp' has the model's own embedding")
        experts = None if cfg.experts is None else dataclasses.replace(cfg.experts, layers=())
        features = FeatureConfig(cfg.embed_dim, (NORMED,), "mtp", own_head=False, norm_output=True)
        return dataclasses.replace(
            cfg, num_layers=1, recurrent=None, experts=experts if _ROUTER in self._tensors else None, tied=False,
            shares_embedding=True, features=features,
        )  # fmt: skip

    def _choose_tensors(self) -> dict[str, TensorPlace]:
        own = {name.removeprefix(MTP): place for name, place in self._tensors.items() if name.startswith(MTP)}
        begins = {name: next((begin for begin in _NAMES if name.startswith(begin)), "") for name in own}
        return {_NAMES.get(begin, "") + name.removeprefix(begin): own[name] for name, begin in begins.items()}


def open_mtp(path: Path) -> MtpSource:
    """Open the layer inside a Hugging Face folder that has one; no weight is read.

    Raises:
      CheckpointError: its tensors do not match the configuration.
      ConfigError: it computes something else.
    """
    source = MtpSource(path)
    try:
        check_accounted(source)
    except CheckpointError as error:
        raise CheckpointError(f"its layer for multi-token prediction, less {MTP!r} in names: {error}") from error
    return source
