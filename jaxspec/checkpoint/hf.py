"""Hugging Face folders (`config.json` and safetensors, whole or sharded) as a source of tensors.

A setting that jaxspec does not know is refused by name. Both spellings of rotary settings are read: `rope_theta` with
`rope_scaling`, and transformers 5's `rope_parameters`. What is particular to a family is in `jaxspec.models.families`.
"""

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.checkpoint.keymaps import EMBED, HEAD, check_accounted
from jaxspec.errors import CheckpointError
from jaxspec.json_file import read_json
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.families.base import ConfigValues

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_COMPARED_ROWS = 1024

# Settings of `generation_config.json` that change greedy text, and the values at which they do nothing.
_GREEDY_SETTINGS = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "num_beams",
    "guidance_scale", "exponential_decay_length_penalty",
)  # fmt: skip
_NEUTRAL = (None, False, 0, 1, 1.0, [], {})

# Keys that change no logit: provenance, training, how transformers runs the model, and defaults for its generate().
_HARMLESS_KEYS = frozenset({
    "architectures", "_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype",
    "unsloth_version", "unsloth_fixed", "is_llama_config", "transformers.js_config", "tokenizer_class",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "pretraining_tp",
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "torchscript",
    "use_bfloat16", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "is_decoder",
    "id2label", "label2id", "problem_type", "task_specific_params", "finetuning_task", "prefix", "max_sequence_length",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    # Read by the families on which they have an effect in transformers.
    "use_sliding_window", "max_window_layers",
    # Read by one kind of rotary scaling only.
    "original_max_position_embeddings",
})  # fmt: skip

# An unknown key of such a name with the value 1.0 multiplies by one.
_FACTOR_WORDS = ("multiplier", "scale", "scaling", "factor")
_ROPE_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
})  # fmt: skip


class _Tensor(NamedTuple):
    """Where one tensor lies; `offset` is in bytes from the start of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    nbytes: int


class HFSource:
    """An open Hugging Face folder (a `TensorSource`); tensors are views of the mapped files."""

    def __init__(self, path: Path):
        """Check everything but the tensors' names and shapes, which `open_hf` does."""
        self.path = path
        raw = read_json(path / CONFIG_FILE)
        self._tensors: dict[str, _Tensor] = {}
        for file in _list_weights(path):
            for name, tensor in _read_header(file).items():
                if name in self._tensors:
                    raise CheckpointError(f"{path}: {self._tensors[name].file.name} and {file.name} both hold {name!r}")
                self._tensors[name] = tensor
        for name, file in _read_weight_map(path).items():
            if name not in self._tensors or self._tensors[name].file.name != file:
                raise CheckpointError(f"{path}: {_INDEX_FILE} places {name!r} in {file}, which does not hold it")
        self.config = _read_config(path / CONFIG_FILE, raw, max_layers=len(self._tensors))
        self._norm_offset = FAMILIES[self.config.family].norm_offset
        generation = read_json(path / GENERATION_FILE) if (path / GENERATION_FILE).is_file() else {}
        self.eos_ids = _read_eos_ids(path, generation, raw, self.config.vocab_size)
        _warn_unapplied(path / GENERATION_FILE, generation)
        self._data = {tensor.file: np.memmap(tensor.file, np.uint8, mode="r") for tensor in self._tensors.values()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def weight_type(self, name: str) -> str:
        return self._tensors[name].dtype.name

    def read(self, name: str, keep_blocks: bool = False) -> np.ndarray:
        """One tensor by name, in its own dtype: a read-only view of the file. There are no blocks to keep."""
        tensor = self._tensors[name]
        raw = self._data[tensor.file][tensor.offset : tensor.offset + tensor.nbytes]
        array = np.asarray(raw).view(tensor.dtype).reshape(tensor.shape)
        if self._norm_offset and name.endswith("norm.weight"):
            return array.astype(np.float32) + np.float32(self._norm_offset)
        return array


def open_hf(path: str | Path) -> HFSource:
    """Open a Hugging Face folder: configuration, headers and names are checked.

    No weight is read, with one exception: where the config ties the embeddings and the folder holds a head, both are
    compared. If they differ, the head counts and not the config, as in transformers 5.

    Raises:
      CheckpointError: files are missing, damaged or hostile, or do not match the configuration.
      ConfigError: the configuration asks for something that jaxspec does not compute.
    """
    source = HFSource(Path(path))
    check_accounted(source)
    if source.config.tied and HEAD in source.shapes() and not _are_equal(source.read(EMBED), source.read(HEAD)):
        source.config = dataclasses.replace(source.config, tied=False)
    return source


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Directory of a safetensors file by tensor name; the package checks the header against the size of the file."""
    tensors: dict[str, _Tensor] = {}
    try:
        with open(path, "rb") as file:
            offset = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="np") as header:
            # The package refuses gaps and overlaps, so that each tensor begins where the one before it ends.
            for name in header.offset_keys():
                part = header.get_slice(name)
                if (kind := part.get_dtype()) not in _DTYPES:
                    raise CheckpointError(f"{path}: tensor {name!r} has type {kind}; supported: {', '.join(_DTYPES)}")
                shape, dtype = tuple(part.get_shape()), _DTYPES[kind]
                tensors[name] = _Tensor(path, shape, dtype, offset, math.prod(shape) * dtype.itemsize)
                offset += tensors[name].nbytes
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is damaged or no safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return tensors


def _are_equal(embed: np.ndarray, head: np.ndarray) -> bool:
    """Compare some rows at a time, so that two large matrices never lie in memory."""
    starts = range(0, len(embed), _COMPARED_ROWS)
    return all(np.array_equal(embed[i : i + _COMPARED_ROWS], head[i : i + _COMPARED_ROWS]) for i in starts)


def _list_weights(path: Path) -> list[Path]:
    """The safetensors files of a folder, the whole file before the shards, as transformers prefers."""
    if (path / _WEIGHTS_FILE).is_file():
        return [path / _WEIGHTS_FILE]
    files = [path / name for name in sorted(set(_read_weight_map(path).values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{path}: {_INDEX_FILE} names {file.name}, which is not there")
    if files:
        return files
    if pickles := sorted(f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")):
        raise CheckpointError(
            f"{path}: holds weights only as pickles ({', '.join(pickles[:3])}), which can run code "
            "and were not opened; convert them to safetensors first"
        )
    raise CheckpointError(f"{path}: holds neither {_WEIGHTS_FILE} nor {_INDEX_FILE}")


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name to file name of a sharded checkpoint; empty for a whole one."""
    if (path / _WEIGHTS_FILE).is_file() or not (path / _INDEX_FILE).is_file():
        return {}
    weight_map = read_json(path / _INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / _INDEX_FILE}: lacks a weight_map")
    for name, file in weight_map.items():
        # A plain name: nothing outside the folder can be reached, but links in it (as in Hugging Face's cache) can.
        if not isinstance(file, str) or not file.endswith(".safetensors") or any(c in file for c in "/\\:\0"):
            problem = f"places {name!r} in {str(file)[:60]!r}; a plain .safetensors file name is needed"
            raise CheckpointError(f"{path / _INDEX_FILE}: {problem}")
    return weight_map


def _warn_unapplied(path: Path, generation: dict[str, Any]) -> None:
    """Name the settings with which transformers would generate other greedy text than jaxspec does."""
    if asked := [f"{key}={generation[key]}" for key in _GREEDY_SETTINGS if generation.get(key) not in _NEUTRAL]:
        message = "%s asks for %s, which jaxspec does not apply by itself; set what you want in SamplingParams"
        logging.getLogger(__name__).warning(message, path, ", ".join(asked))


def _read_eos_ids(path: Path, generation: dict[str, Any], config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a text, from `generation_config.json` or else from `config.json`."""
    file, ids = GENERATION_FILE, generation.get("eos_token_id")
    if ids is None:
        file, ids = CONFIG_FILE, config.get("eos_token_id", [])
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            wanted = f"token ids below {vocab_size}"
            raise CheckpointError(f"{path / file}: eos_token_id must be {wanted}, got {str(token)[:60]}")
    return tuple(dict.fromkeys(ids))


def _read_config(path: Path, raw: dict[str, Any], max_layers: int) -> ModelConfig:
    """The geometry of a parsed `config.json`; more than `max_layers` layers are refused before anything is built."""
    values = ConfigValues(path, raw)
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        values.refuse("model_type", f"supported: {', '.join(FAMILIES)}")
    if values.get("quantization_config"):
        values.refuse("quantization_config", "quantised Hugging Face checkpoints are not supported, GGUF files are")
    if values.get("auto_map"):
        values.refuse("auto_map", "the model brings code of its own, which jaxspec does not run")
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        values.refuse("hidden_act", "only silu is supported")
    if values.flag("mlp_bias"):
        values.refuse("mlp_bias", "biases in the MLP are not supported")
    num_layers = values.integer("num_hidden_layers")
    if num_layers > max_layers:
        held = f"the checkpoint holds only {max_layers} tensors"
        raise CheckpointError(f"{path}: asks for {num_layers} layers, but {held}")
    max_context = values.integer("max_position_embeddings")
    fields = {
        "family": name,
        "num_layers": num_layers,
        "embed_dim": values.integer("hidden_size"),
        "mlp_dim": values.integer("intermediate_size"),
        "num_heads": values.integer("num_attention_heads"),
        "vocab_size": values.integer("vocab_size"),
        "max_context": max_context,
        "rope": _read_rope(path, values, raw, max_context),
        "norm_eps": values.number("rms_norm_eps", default=1e-6),
        "tied": values.flag("tie_word_embeddings"),
        **FAMILIES[name].read_config(values, num_layers),
    }
    values.refuse_unread(lambda key, value: key in _HARMLESS_KEYS or _is_neutral(key, value))
    return ModelConfig(**fields)


def _read_rope(path: Path, values: ConfigValues, raw: dict[str, Any], max_context: int) -> RopeConfig:
    old, new = values.get("rope_scaling", {}), values.get("rope_parameters", {})
    name = "rope_parameters" if new else "rope_scaling"
    if old and new and old != new:
        values.refuse("rope_scaling", "but rope_parameters is given too, and differs")
    rope = new or old or {}
    if not isinstance(rope, dict):
        values.refuse(name, "a JSON object is needed", CheckpointError)
    for key, value in rope.items():
        if key not in _ROPE_KEYS and not _is_neutral(key, value):
            values.refuse(name, f"its key {key!r} is not supported")
    for key, part in (("partial_rotary_factor", values), (name, rope)):
        if part.get("partial_rotary_factor") not in (None, 1):
            values.refuse(key, "only rotary embedding of whole heads is supported")
    numbers = ConfigValues(path, rope)
    theta = numbers.number("rope_theta", default=values.number("rope_theta", default=10000.0))
    match kind := rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", numbers.number("factor"))
        case "llama3":
            # A number beside the rotary settings wins over the one inside, as in transformers.
            inside = numbers.integer("original_max_position_embeddings", default=max_context)
            context = values.integer("original_max_position_embeddings", default=inside)
            low, high = numbers.number("low_freq_factor"), numbers.number("high_freq_factor")
            return RopeConfig(theta, "llama3", numbers.number("factor"), low, high, context)
    values.refuse(name, f"rotary scaling {kind!r} is not supported (default, linear, llama3 are)")


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a setting that jaxspec does not know asks for nothing: absent, off, zero, or a factor of one."""
    is_one = isinstance(value, float) and math.isclose(value, 1)
    return value in (None, 0, "", [], {}) or (is_one and any(word in key for word in _FACTOR_WORDS))
