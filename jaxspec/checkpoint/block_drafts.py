"""Configurations of drafts that fill a block in one pass: DFlash as z-lab, SpecForge and speculators write it, JetSpec.

Sources: DFlash (arXiv 2602.06036) and the classes that load its checkpoints. JetSpec is the same with a causal block.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.keymaps import EMBED, HEAD
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.features import FeatureConfig

_SETTINGS, _ENTERED = "dflash_config", "aux_hidden_state_layer_ids"
ARCHITECTURE = "DFlashDraftModel"
# Keys beside those of the layers.
KEYS = ("block_size", "num_target_layers", _SETTINGS, "is_causal", "mask_token_id", "target_hidden_size")
_INNER = frozenset({"mask_token_id", "target_layer_ids", "block_size", "causal", "causal_head", "projector_type"})


def is_block_draft(tensors: Mapping[str, Any]) -> bool:
    """Whether the tensors, by canonical name, are those of a draft whose fused state has one norm for all layers."""
    return "hidden_norm.weight" in tensors


def read_block_features(
    values: ConfigValues, cfg: ModelConfig, tensors: Mapping[str, Any], nested: bool
) -> FeatureConfig:
    """Read which hidden states a block draft takes, and its block; `cfg` is that of its layers.

    Args:
      values: of the file.
      cfg: geometry of the layers.
      tensors: by canonical name.
      nested: whether the layout is that of speculators, whose ids are those of the layers that states enter.

    Raises:
      CheckpointError, ConfigError: something is missing, contradicts something else, or is a relative of DFlash.
    """
    inner = {} if nested else _read_inner(values, tensors)
    settings = ConfigValues(values.path, _join(values, inner))
    causal = [settings.flag(key) for key in ("is_causal", "causal", "causal_head") if key in settings]
    if len(set(causal)) > 1:
        values.refuse(_SETTINGS, "is_causal, causal and causal_head contradict each other")
    if nested and values.flag("sample_from_anchor"):
        values.refuse("sample_from_anchor", "drafts whose first row proposes a token are not supported")
    block, mask = settings.integer("block_size"), settings.integer("mask_token_id", minimum=0)
    if not 2 <= block <= 65:
        values.refuse("block_size", "blocks of 2 to 65 rows are supported")
    if mask >= cfg.vocab_size:
        raise CheckpointError(f"{values.path}: the mask token {mask} is none of the vocabulary")
    made_for = settings.integer("num_target_layers") if "num_target_layers" in settings else 0
    shape, width = tuple(tensors["fc.weight"].shape), settings.integer("target_hidden_size", default=cfg.embed_dim)
    if nested:
        layers = _check_layers(values, _ENTERED, values.get(_ENTERED))
    else:
        layers = _read_layers(values, inner, made_for, shape[-1] // width)
    if shape != (cfg.embed_dim, len(layers) * width):
        raise CheckpointError(
            f"{values.path}: fc.weight is {list(shape)}, which does not take {len(layers)} states of a target "
            f"{width} wide"
        )
    return FeatureConfig(
        width, layers, "block", own_head=HEAD in tensors, block=block, mask_token=mask, causal=any(causal),
        target_layers=made_for,
    )  # fmt: skip


def _read_inner(values: ConfigValues, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What z-lab's layout has in `dflash_config`, checked."""
    inner = values.get(_SETTINGS, {})
    if not isinstance(inner, dict):
        values.refuse(_SETTINGS, "a JSON object is needed", CheckpointError)
    if values.get("architectures") != [ARCHITECTURE]:
        values.refuse("architectures", f"of drafts that fill a block in one pass, {ARCHITECTURE} is supported")
    if inner.get("projector_type", "dflash") != "dflash":
        values.refuse(_SETTINGS, f"projector_type {inner['projector_type']!r} is not supported; 'dflash' is")
    if unknown := sorted(set(inner) - _INNER):
        values.refuse(_SETTINGS, f"{unknown[0]!r} is not supported")
    if EMBED in tensors or HEAD in tensors:
        raise CheckpointError(f"{values.path}: a {ARCHITECTURE} with its own embedding or head is not supported")
    return inner


def _join(values: ConfigValues, inner: dict[str, Any]) -> dict[str, Any]:
    """The draft's settings, which files have at the top or inside `dflash_config`."""
    top = {key: values.get(key) for key in KEYS if key in values and key != _SETTINGS}
    for key in top.keys() & inner.keys():
        if top[key] != inner[key]:
            values.refuse(key, f"but {_SETTINGS} says {inner[key]!r}", CheckpointError)
    return top | inner


def _read_layers(values: ConfigValues, inner: dict[str, Any], target_layers: int, count: int) -> tuple[int, ...]:
    """The states, from the ids of the layers that they leave; without ids, by z-lab's rule for `count` states."""
    ids = inner.get("target_layer_ids")
    if ids is None:
        if target_layers < 4 or count < 1:
            values.refuse(_SETTINGS, "target_layer_ids or num_target_layers is needed", CheckpointError)
        last = target_layers - 4
        ids = [target_layers // 2] if count == 1 else [round(1 + i * last / (count - 1)) for i in range(count)]
    return tuple(i + 1 for i in _check_layers(values, _SETTINGS, ids))


def _check_layers(values: ConfigValues, key: str, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        values.refuse(key, "a list of layers is needed", CheckpointError)
    return tuple(ids)
