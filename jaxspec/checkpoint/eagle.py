"""Folders of feature drafts (EAGLE-3 as SafeAILab, SpecForge and speculators write it, EAGLE-1), read and written.

The folders are told from other models by their tensors: only such a draft has `fc.weight`. Tensors get the names of an
ordinary Hugging Face folder, so that the rest of the loading is the same.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint import block_drafts
from jaxspec.checkpoint.hf import CONFIG_FILE, WEIGHTS_FILE, HFSource, TensorPlace, find_tensors, read_config
from jaxspec.checkpoint.keymaps import EMBED, HEAD, check_accounted
from jaxspec.checkpoint.torch_files import find_torch_tensors
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES, llama, qwen3
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.features import NORMED, FeatureConfig

PICKLE_FILE = "pytorch_model.bin"
_FUSION = "fc.weight"
_OFFSETS, _MEMBERS = "d2t", "t2d"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# What configurations of speculators leave out where it is the default of the class in transformers.
_CLASS_DEFAULTS = {name: family.class_defaults for name, family in FAMILIES.items() if family.class_defaults}

# Keys of a draft's configuration that say how it was trained, or repeat what the tensors say.
_HARMLESS = frozenset({
    "speculators_config", "speculators_version", "speculators_model_type", "transformer_layer_config", "architectures",
    "target_model_type", "has_no_defaults_at_init", "embed_requires_grad", "use_aux_hidden_state", "model_type",
    "num_aux_hidden_states", "ttt_length", "length", "dtype", "torch_dtype", "auto_map", "tie_word_embeddings",
    "transformers_version", "draft_vocab_size", "truncated_vocab_size", "_name_or_path", "mask_token_id",
})  # fmt: skip
_OURS = (
    "draft_vocab_size", "truncated_vocab_size", "target_hidden_size", "eagle_config", _LAYER_IDS, "fc_norm", "bias",
    "norm_before_residual", "norm_before_fc", "norm_output", "tie_word_embeddings", "auto_map", "sliding_window",
    "layer_types", "use_sliding_window", "max_window_layers", "target_model_type", "num_hidden_layers",
    "num_aux_hidden_states", "parallel_drafting", "ptd_token_id", "pard_token", *block_drafts.KEYS,
)  # fmt: skip

# Drafts that have a `fc.weight`, too, and compute something else.
_OTHER_DRAFTS = ("Domino", "DFlare", "TreeFlash", "Medusa", "Hydra", "JetFlow", "Muse")
_TYPES = ("eagle3", "eagle", "peagle")
_BLOCK_TYPES = ("dflash", "dspark")


def is_feature_draft(path: Path) -> bool:
    """Whether a folder with a `config.json` holds a feature draft; reads headers only."""
    try:
        return _FUSION in _find_tensors(path)
    except CheckpointError:
        return False  # the reader of ordinary folders says what is wrong


def _find_tensors(path: Path) -> dict[str, TensorPlace]:
    return find_torch_tensors(path / PICKLE_FILE) if has_pickle_alone(path) else find_tensors(path)


def has_pickle_alone(path: Path) -> bool:
    """Whether a folder's weights are in `pytorch_model.bin` and nowhere else."""
    return (path / PICKLE_FILE).is_file() and not any(path.glob("*.safetensors*"))


class FeatureDraftSource(HFSource):
    """An open folder of a feature draft (a `TensorSource`)."""

    def _find_tensors(self) -> dict[str, TensorPlace]:
        found = _find_tensors(self.path)
        self._vocabulary = {name: found.pop(name) for name in (_OFFSETS, _MEMBERS) if name in found}
        for name in block_drafts.UNUSED:
            found.pop(name, None)
        renamed = {canonical_name(name): tensor for name, tensor in found.items()}
        if len(renamed) != len(found):
            raise CheckpointError(f"{self.path}: holds a tensor under two names")
        return renamed

    def _describe_model(self, raw: dict[str, Any]) -> ModelConfig:
        return read_draft_config(self.path / CONFIG_FILE, raw, self._tensors, self._read_head_ids())

    def _read_head_ids(self) -> np.ndarray | None:
        """The target's ids of the head's rows, int64; None where the files do not say."""
        if _OFFSETS not in self._vocabulary:
            return None
        offsets = _read_small(self._vocabulary[_OFFSETS])
        if offsets.dtype.kind != "i" or offsets.ndim != 1:
            raise CheckpointError(
                f"{self.path}: {_OFFSETS} is {offsets.dtype} {list(offsets.shape)}, not a list of ids"
            )
        ids = np.arange(len(offsets)) + offsets
        if len(ids) == 0 or ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise CheckpointError(f"{self.path}: the tokens of {_OFFSETS} are not ascending ids, each once")
        if _MEMBERS in self._vocabulary:
            members = np.flatnonzero(_read_small(self._vocabulary[_MEMBERS]))
            if not np.array_equal(members, ids):
                raise CheckpointError(
                    f"{self.path}: {_OFFSETS} names {len(ids)} tokens and {_MEMBERS} {len(members)}, and they differ"
                )
        return ids


def open_feature_draft(path: Path) -> FeatureDraftSource:
    """Open a feature draft's folder: configuration, headers and names are checked, no weight is read.

    Raises:
      CheckpointError: files are missing, damaged or hostile, or do not match the configuration.
      ConfigError: the configuration asks for something that jaxspec does not compute.
    """
    source = FeatureDraftSource(path)
    check_accounted(source)
    return source


def canonical_name(name: str) -> str:
    """A tensor's name as an ordinary folder would have it: the first layer is `model.layers.0`."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = f"layers.0.{name.removeprefix('midlayer.')}"
    return f"model.{name}" if name.startswith(("layers.", "norm.", "embed_tokens.")) else name


def read_draft_config(
    path: Path, raw: dict[str, Any], tensors: Mapping[str, Any], head_ids: np.ndarray | None
) -> ModelConfig:
    """The geometry of a draft from its parsed `config.json` and its tensors' names and shapes.

    Args:
      path: of the file, for errors.
      raw: what it holds.
      tensors: by canonical name, anything with a `shape`.
      head_ids: the target's ids of the head's rows; None where the files do not say.

    Raises:
      CheckpointError, ConfigError: something is missing, contradicts something else, or is not supported.
    """
    values = ConfigValues(path, raw)
    nested = "transformer_layer_config" in raw or "speculators_model_type" in raw
    kind, is_block = values.get("speculators_model_type", "eagle3"), block_drafts.is_block_draft(tensors)
    if kind not in (_BLOCK_TYPES if nested and is_block else _TYPES):
        listed = ", ".join((*_TYPES, *_BLOCK_TYPES))
        values.refuse("speculators_model_type", f"drafts of type {listed} are supported, each with its tensors")
    others = _OTHER_DRAFTS if is_block else (*_OTHER_DRAFTS, "DFlash", "DSpark")
    if any(word in str(values.get("architectures")) for word in others):
        supported = "EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DFlash2, JetSpec and DSpark are"
        values.refuse("architectures", f"drafts of this architecture are not supported; {supported}")
    is_parallel = not is_block and "mask_hidden" in tensors
    if not is_parallel and (values.flag("parallel_drafting") or kind == "peagle"):
        values.refuse("architectures", "a draft that proposes several tokens in a pass needs the tensor mask_hidden")
    layer = _layer_settings(values, raw, nested)
    layer_values = ConfigValues(path, layer)
    indices = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    num_layers = 1 + max((int(index) for index in indices if index.isdecimal() and len(index) < 7), default=-1)
    if num_layers < 1:
        raise CheckpointError(f"{path}: the files hold no layer of a draft")
    if (asked := layer_values.get("num_hidden_layers")) not in (None, num_layers):
        raise CheckpointError(f"{path}: num_hidden_layers is {asked}, but the files hold {num_layers} layers")
    plain = {key: value for key, value in layer.items() if key not in _OURS} | {"num_hidden_layers": num_layers}
    cfg = read_config(path, plain, max_layers=len(tensors), harmless=_HARMLESS)
    if is_block:
        features = block_drafts.read_block_features(values, cfg, tensors, nested)
        cfg = dataclasses.replace(cfg, **block_drafts.read_scales(values))
    else:
        features = _read_features(values, cfg, tensors, nested)
    if is_parallel:
        features = dataclasses.replace(features, **block_drafts.read_parallel(values, cfg))
    own_embedding = EMBED in tensors
    if head_ids is not None and not features.own_head:
        raise CheckpointError(f"{path}: the files hold {_OFFSETS} and no {HEAD}")
    ids = () if head_ids is None or len(head_ids) == cfg.vocab_size else tuple(head_ids.tolist())
    rows = values.get("draft_vocab_size", values.get("truncated_vocab_size"))
    held = len(ids) or cfg.vocab_size
    if features.own_head and (found := tuple(tensors[HEAD].shape[:1])) != (held,):
        raise CheckpointError(f"{path}: the head has {list(found)} rows, and the files name {held} tokens ({_OFFSETS})")
    if features.own_head and rows not in (None, held):
        raise CheckpointError(f"{path}: draft_vocab_size is {rows}, and the head has {held} rows")
    window, sliding = _read_window(layer_values, num_layers)
    if features.window_from_root:
        # The root sees the token that is a window away, too.
        window = None if window is None else window + 1
        features = dataclasses.replace(features, window_from_root=window is not None)
    return dataclasses.replace(
        cfg, features=features, head_ids=ids, shares_embedding=not own_embedding, tied=False, sliding_window=window,
        sliding_layers=sliding,
    )  # fmt: skip


def _layer_settings(values: ConfigValues, raw: dict[str, Any], nested: bool) -> dict[str, Any]:
    """The settings of the draft's layers, in the spelling of transformers."""
    if not nested:
        settings = {"model_type": llama.FAMILY.name, "max_position_embeddings": 2048} | raw
        if str(settings["model_type"]) not in _CLASS_DEFAULTS:
            values.refuse("model_type", f"layers of {' and '.join(_CLASS_DEFAULTS)} are supported in drafts")
        return settings
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        values.refuse("transformer_layer_config", "a JSON object is needed", CheckpointError)
    # Without a type it is the class that speculators falls back to.
    kind = str(layer.get("model_type", qwen3.FAMILY.name))
    if kind not in _CLASS_DEFAULTS:
        values.refuse("transformer_layer_config", f"layers of {' and '.join(_CLASS_DEFAULTS)} are supported in drafts")
    return {**_CLASS_DEFAULTS[kind], "model_type": kind, **layer}


def _read_features(values: ConfigValues, cfg: ModelConfig, tensors: Mapping[str, Any], nested: bool) -> FeatureConfig:
    """Read which hidden states the draft takes, and how it takes them."""
    shape, own_head = tuple(tensors[_FUSION].shape), HEAD in tensors
    bias = "fc.bias" in tensors
    if not any(name.endswith(".hidden_norm.weight") for name in tensors):
        if shape != (cfg.embed_dim, 2 * cfg.embed_dim):
            wanted = [cfg.embed_dim, 2 * cfg.embed_dim]
            raise CheckpointError(f"{values.path}: {_FUSION} of an EAGLE-1 draft is {list(shape)}, not {wanted}")
        return FeatureConfig(cfg.embed_dim, (NORMED,), "eagle1", own_head=False, fc_bias=bias)
    target_dim = values.integer("target_hidden_size", default=cfg.embed_dim)
    layers = _read_layers(values)
    if len(shape) != 2 or shape[1] % target_dim or (layers and shape[1] != len(layers) * target_dim):
        count = f"{len(layers) or 3} states"
        raise CheckpointError(
            f"{values.path}: {_FUSION} is {list(shape)}, which does not take {count} of a target {target_dim} wide"
        )
    if not layers and shape[1] != 3 * target_dim:
        raise CheckpointError(
            f"{values.path}: {_FUSION} takes {shape[1] // target_dim} states; {_LAYER_IDS} is missing"
        )
    whole, each = values.flag("norm_before_fc"), values.flag("fc_norm")
    if whole and each:
        values.refuse("fc_norm", "and norm_before_fc is true; one of them is possible")
    if nested and "norm_before_residual" not in values:
        logging.getLogger(__name__).warning(
            "%s does not say norm_before_residual; false is taken, the default of speculators", values.path
        )
    return FeatureConfig(
        target_dim, layers, own_head=own_head, fc_bias=bias,
        norm_before_residual=values.flag("norm_before_residual"),
        # Elsewhere the key means a norm before the head, which is always there.
        norm_output=nested and values.flag("norm_output"),
        fc_norm="whole" if whole else "each" if each else "none",
    )  # fmt: skip


def _read_layers(values: ConfigValues) -> tuple[int, ...]:
    """The states that the configuration names; empty where it names none.

    Beside the draft's own settings an id is that of the layer which the state enters; inside `eagle_config` it is that
    of the layer which it leaves.
    """
    inner = values.get("eagle_config", {})
    inner = inner if isinstance(inner, dict) else {}
    found = []
    for ids, shift in ((values.get(_LAYER_IDS), 0), (inner.get(_LAYER_IDS), 1)):
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i + shift >= 0 for i in ids):
            values.refuse(_LAYER_IDS if shift == 0 else "eagle_config", "a list of layers is needed", CheckpointError)
        found.append(tuple(i + shift for i in ids))
    if len(found) == 2 and found[0] != found[1]:
        values.refuse(_LAYER_IDS, f"but eagle_config means the states {list(found[1])}", CheckpointError)
    return found[0] if found else ()


def _read_window(layer: ConfigValues, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window of the draft's own attention, and the layers that have it."""
    kinds, window = layer.get("layer_types"), layer.get("sliding_window")
    if window is None or not layer.flag("use_sliding_window", default=True):
        return None, ()
    window = layer.integer("sliding_window")
    if not isinstance(kinds, list):
        # Without a list no class of transformers would use it.
        return None, ()
    sliding = tuple(kind == "sliding_attention" for kind in kinds[:num_layers])
    if len(sliding) != num_layers or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
        layer.refuse("layer_types", f"a list of {num_layers} kinds of attention is supported")
    return (None, ()) if not any(sliding) else (window, () if all(sliding) else sliding)


def _read_small(tensor: TensorPlace) -> np.ndarray:
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        return np.frombuffer(file.read(tensor.nbytes), tensor.dtype).reshape(tensor.shape)


def write_eagle3(path: Path, cfg: ModelConfig, leaves: Mapping[str, np.ndarray]) -> None:
    """Write an EAGLE-3 draft as a folder in the layout of SafeAILab: `config.json` and `model.safetensors`.

    Args:
      path: a folder, made where it does not exist.
      cfg: a geometry with `features` of kind "eagle3" and one layer.
      leaves: the parameters of `declare_params(cfg, ...)` by leaf name, unpadded numbers in one dtype each.

    Raises:
      ConfigError: the layout cannot express the geometry.
    """
    features = cfg.features
    if features is None or features.kind != "eagle3" or cfg.num_layers != 1:
        raise ConfigError("an EAGLE-3 folder holds one layer that is fed a target's hidden states")
    if features.norm_output or cfg.family not in _CLASS_DEFAULTS or cfg.rope.scaling not in ("default", "llama3"):
        raise ConfigError(
            "norm_output, other families than those of published drafts, and this rotary scaling cannot be written"
        )
    path.mkdir(parents=True, exist_ok=True)
    tensors = {_published_name(name): np.ascontiguousarray(t) for name, t in split_leaves(cfg, leaves).items()}
    if cfg.head_ids:
        ids = np.array(cfg.head_ids, np.int64)
        tensors[_OFFSETS] = ids - np.arange(len(ids))
        tensors[_MEMBERS] = np.isin(np.arange(cfg.vocab_size), ids)
    save_file(tensors, path / WEIGHTS_FILE)
    (path / CONFIG_FILE).write_text(json.dumps(_config_data(cfg, features), indent=1) + "\n", encoding="utf-8")


def split_leaves(cfg: ModelConfig, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, by canonical name, that `recipes(cfg)` makes the parameters from: the reverse of it."""
    D, G, H = cfg.embed_dim, cfg.group, cfg.head_dim
    top = {
        "embed": EMBED, "head": HEAD, "final_norm": "model.norm.weight", "fc": _FUSION, "fc_bias": "fc.bias",
        "fc_norm": "input_norm.weight",
    }  # fmt: skip
    parts = {
        "attn_norm": "input_layernorm", "hidden_norm": "hidden_norm", "mlp_norm": "post_attention_layernorm",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "out": "self_attn.o_proj", "down": "mlp.down_proj",
    }  # fmt: skip
    tensors: dict[str, np.ndarray] = {}
    for name, leaf in leaves.items():
        if name == "fc_norm" and leaf.ndim == 2:
            tensors |= {f"fc_norm.{i}.weight": row for i, row in enumerate(leaf)}
        elif name in top:
            tensors[top[name]] = leaf
        else:
            _, index, part = name.split(".")
            prefix = f"model.layers.{index}"
            if part == "qkv":
                for tensor, rows in (("q", leaf[:, :G]), ("k", leaf[:, G]), ("v", leaf[:, G + 1])):
                    tensors[f"{prefix}.self_attn.{tensor}_proj.weight"] = rows.reshape(-1, leaf.shape[-1])
            elif part == "gate_up":
                tensors |= {f"{prefix}.mlp.{n}_proj.weight": leaf[i] for i, n in enumerate(("gate", "up"))}
            else:
                whole = leaf.reshape(D, -1, H).reshape(D, -1) if part == "out" else leaf
                tensors[f"{prefix}.{parts[part]}.weight"] = whole
    return tensors


def _published_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _config_data(cfg: ModelConfig, features: FeatureConfig) -> dict[str, Any]:
    rope = cfg.rope
    data: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": cfg.family, "hidden_size": cfg.embed_dim,
        "intermediate_size": cfg.mlp_dim, "num_attention_heads": cfg.num_heads, "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim, "num_hidden_layers": cfg.num_layers, "vocab_size": cfg.vocab_size,
        "draft_vocab_size": len(cfg.head_ids) or cfg.vocab_size, "max_position_embeddings": cfg.max_context,
        "rms_norm_eps": cfg.norm_eps, "rope_theta": rope.theta, "hidden_act": "silu", "tie_word_embeddings": False,
        "target_hidden_size": features.target_dim, "norm_before_residual": features.norm_before_residual,
        "norm_before_fc": features.fc_norm == "whole", "fc_norm": features.fc_norm == "each",
    }  # fmt: skip
    if rope.scaling == "llama3":
        data["rope_scaling"] = {
            "rope_type": "llama3", "factor": rope.factor, "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor, "original_max_position_embeddings": rope.original_context,
        }  # fmt: skip
    if features.layers and min(features.layers) > 0:
        ids = [layer - 1 for layer in features.layers]
        data["eagle_config"] = {"use_aux_hidden_state": True, _LAYER_IDS: ids}
    elif features.layers:
        data[_LAYER_IDS] = list(features.layers)
    if cfg.sliding_window is not None:
        kinds = cfg.sliding_layers or (True,) * cfg.num_layers
        data |= {"sliding_window": cfg.sliding_window}
        data["layer_types"] = ["sliding_attention" if kind else "full_attention" for kind in kinds]
    return data
