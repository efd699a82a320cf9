"""Configurations of drafts that fill a block in one pass: DFlash, JetSpec, DSpark, DFlash2 and P-EAGLE.

Sources: DFlash (arXiv 2602.06036), DSpark (2607.05147), P-EAGLE (2602.01469), and the classes that load checkpoints of
z-lab, SpecForge, DeepSpec and speculators. JetSpec is DFlash with a causal block.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.keymaps import EMBED, HEAD
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.features import FeatureConfig

_SETTINGS, _ENTERED = "dflash_config", "aux_hidden_state_layer_ids"
# Architectures of drafts that are not in the layout of speculators, and whether these have tables of their own.
DFLASH, DFLASH2, DSPARK, DEEPSPEC = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel"
_ARCHITECTURES = (DFLASH, DFLASH2, DSPARK, DEEPSPEC)
# Keys of a file beside those of the layers.
KEYS = (
    "block_size", "num_target_layers", _SETTINGS, "is_causal", "mask_token_id", "target_hidden_size", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "target_layer_ids", "num_anchors",
    "sample_from_anchor", "sliding_window_non_causal", _ENTERED, "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
)  # fmt: skip
# Those that `dflash_config` may have.
_INNER = {"mask_token_id", "target_layer_ids", "block_size", "causal", "causal_head", "projector_type"}
_INNER_DSPARK = {
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha",
    "dspark_backbone_conv_enabled", "num_anchors",
}  # fmt: skip
_INNER_DFLASH2 = {
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping",
}  # fmt: skip
# What says how sure a DSpark draft is of its tokens: jaxspec learns that of what becomes of them.
UNUSED = ("confidence_head.proj.weight", "confidence_head.proj.bias")
# Tokens of a path that P-EAGLE proposes where nothing says it: drafts are trained for 4 to 8.
USUAL_PLACES = 8


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
      CheckpointError, ConfigError: something is missing, contradicts something else, or is a relative of these.
    """
    kind = DFLASH if nested else _read_kind(values)
    inner = {} if nested else _read_inner(values, kind)
    settings = ConfigValues(values.path, _join(values, inner))
    causal = [settings.flag(key) for key in ("is_causal", "causal", "causal_head") if key in settings]
    if len(set(causal)) > 1:
        values.refuse(_SETTINGS, "is_causal, causal and causal_head contradict each other")
    is_dspark = kind in (DSPARK, DEEPSPEC) or values.get("speculators_model_type") == "dspark"
    from_root = values.flag("sample_from_anchor", default=is_dspark) if nested else is_dspark
    block, mask = settings.integer("block_size"), settings.integer("mask_token_id", minimum=0)
    if not 2 <= block <= 65:
        values.refuse("block_size", "blocks of 2 to 65 rows are supported")
    if mask >= cfg.vocab_size:
        raise CheckpointError(f"{values.path}: the mask token {mask} is none of the vocabulary")
    made_for = settings.integer("num_target_layers") if "num_target_layers" in settings else 0
    shape, width = tuple(tensors["fc.weight"].shape), settings.integer("target_hidden_size", default=cfg.embed_dim)
    if nested:
        layers = _check_layers(values, _ENTERED, values.get(_ENTERED), 0)
    else:
        layers = _read_layers(settings, made_for, shape[-1] // width, kind)
    if shape != (cfg.embed_dim, len(layers) * width):
        raise CheckpointError(
            f"{values.path}: fc.weight is {list(shape)}, which does not take {len(layers)} states of a target "
            f"{width} wide"
        )
    if not nested and kind != DEEPSPEC and (EMBED in tensors or HEAD in tensors):
        raise CheckpointError(f"{values.path}: a {kind} with its own embedding or head is not supported")
    # Sliding layers are causal in the block unless something says otherwise.
    sliding = not values.flag("sliding_window_non_causal") if nested else (*causal, True)[0]
    return FeatureConfig(
        width, layers, "block", own_head=HEAD in tensors, block=block, mask_token=mask, causal=any(causal),
        target_layers=made_for, first_row=0 if from_root else 1, sliding_causal=sliding, window_from_root=nested,
        **(_read_markov(settings, tensors) if is_dspark else {}),
        **(_read_selector(settings, cfg) if kind == DFLASH2 else {}),
    )  # fmt: skip


def read_scales(values: ConfigValues) -> dict[str, float]:
    """Factors of embedding and logits that a DFlash2 draft has of its own, as fields of `ModelConfig`."""
    inner = values.get(_SETTINGS)
    settings = ConfigValues(values.path, _join(values, inner if isinstance(inner, dict) else {}))
    names = {
        "input_embedding_scale": "embed_scale", "output_multiplier": "logit_scale",
        "final_logit_softcapping": "logit_softcap",
    }  # fmt: skip
    return {field: settings.number(key) for key, field in names.items() if settings.get(key) is not None}


def read_parallel(values: ConfigValues, cfg: ModelConfig) -> dict[str, Any]:
    """The fields of `FeatureConfig` of a P-EAGLE draft: an EAGLE-3 draft with masked rows after the verified ones."""
    keys = ("mask_token_id", "ptd_token_id", "pard_token")
    masks = [values.integer(key, minimum=0) for key in keys if values.get(key) is not None]
    if not masks:
        values.refuse("mask_token_id", "a draft that proposes several tokens in a pass needs it", CheckpointError)
    if masks[0] >= cfg.vocab_size:
        raise CheckpointError(f"{values.path}: the mask token {masks[0]} is none of the vocabulary")
    places = USUAL_PLACES
    proposals = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if isinstance(proposals[0], dict) and type(said := proposals[0].get("speculative_tokens")) is int:
        places = said
    if not 2 <= places <= 64:
        values.refuse("speculators_config", "2 to 64 speculative_tokens are supported")
    return {"block": places, "first_row": 0, "mask_token": masks[0]}


def _read_kind(values: ConfigValues) -> str:
    found = values.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in _ARCHITECTURES:
        listed = ", ".join(_ARCHITECTURES)
        values.refuse("architectures", f"of drafts that fill a block in one pass, {listed} are supported")
    return found[0]


def _read_inner(values: ConfigValues, kind: str) -> dict[str, Any]:
    """What z-lab's layout has in `dflash_config`, checked."""
    inner = values.get(_SETTINGS, {})
    if not isinstance(inner, dict):
        values.refuse(_SETTINGS, "a JSON object is needed", CheckpointError)
    projector = "dspark" if kind == DSPARK else "dflash"
    if inner.get("projector_type", projector) not in (projector, "dflash2" if kind == DFLASH2 else projector):
        values.refuse(_SETTINGS, f"projector_type {inner['projector_type']!r} is not supported; {projector!r} is")
    known = _INNER | {DSPARK: _INNER_DSPARK, DFLASH2: _INNER_DFLASH2}.get(kind, set())
    if unknown := sorted(set(inner) - known):
        values.refuse(_SETTINGS, f"{unknown[0]!r} is not supported")
    if inner.get("dspark_backbone_conv_enabled"):
        values.refuse(_SETTINGS, "'dspark_backbone_conv_enabled' is not supported")
    return inner


def _join(values: ConfigValues, inner: dict[str, Any]) -> dict[str, Any]:
    """The draft's settings, which files have at the top or inside `dflash_config`."""
    top = {key: values.get(key) for key in KEYS if key in values and key != _SETTINGS}
    for key in top.keys() & inner.keys():
        if top[key] != inner[key]:
            values.refuse(key, f"but {_SETTINGS} says {inner[key]!r}", CheckpointError)
    return top | inner


def _read_markov(settings: ConfigValues, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The correction of DSpark by the token before; a rank of 0 is none."""
    rank, kind = settings.integer("markov_rank", default=0, minimum=0), settings.get("markov_head_type", "vanilla")
    if rank and kind not in ("vanilla", "gated"):
        settings.refuse("markov_head_type", "'vanilla' and 'gated' are supported, which know the token before alone")
    if not rank and any(name.startswith("markov_head.") for name in tensors):
        raise CheckpointError(f"{settings.path}: the files hold a markov_head, and markov_rank is 0")
    return {"markov_rank": rank, "markov_gated": bool(rank) and kind == "gated"}


def _read_selector(settings: ConfigValues, cfg: ModelConfig) -> dict[str, Any]:
    """The convolutions and the choice among the likeliest tokens of DFlash2."""
    group, top = settings.integer("conv_group_size"), settings.integer("selector_top_k")
    if cfg.embed_dim % group:
        settings.refuse("conv_group_size", f"which does not divide a width of {cfg.embed_dim}")
    if top > min(cfg.vocab_size, 64):
        settings.refuse("selector_top_k", "at most 64 tokens are supported, and those of the vocabulary")
    return {
        "conv_taps": settings.integer("conv_kernel_size"), "conv_group": group, "selector_top": top,
        "selector_rank": settings.integer("selector_rank"),
    }  # fmt: skip


def _read_layers(settings: ConfigValues, target_layers: int, count: int, kind: str) -> tuple[int, ...]:
    """The states, from the ids of the layers that they leave; without ids, by z-lab's rule for `count` states.

    To DeepSpec the embedding is layer -1.
    """
    ids = settings.get("target_layer_ids")
    if ids is None:
        if target_layers < 4 or count < 1:
            settings.refuse(_SETTINGS, "target_layer_ids or num_target_layers is needed", CheckpointError)
        last = target_layers - 4
        ids = [target_layers // 2] if count == 1 else [round(1 + i * last / (count - 1)) for i in range(count)]
    layers = _check_layers(settings, "target_layer_ids", ids, -1 if kind == DEEPSPEC else 0)
    return tuple(i + 1 for i in layers)


def _check_layers(values: ConfigValues, key: str, ids: Any, least: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= least for i in ids):
        values.refuse(key, "a list of layers is needed", CheckpointError)
    return tuple(ids)
