"""Hugging Face folders (`config.json` and safetensors, whole or sharded) as a source of tensors.

A setting that jaxspec does not know is refused by name. What is particular to a family is in
`jaxspec.models.families`, rotary settings are too.
"""

import copy
import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.checkpoint.experts_together import View, split_experts
from jaxspec.checkpoint.keymaps import EMBED, HEAD, check_accounted, release_pages, split_fused
from jaxspec.checkpoint.multimodal import MTP, text_part
from jaxspec.checkpoint.quantised.dispatch import find_scheme
from jaxspec.checkpoint.quantised.layout import QuantisedWeight
from jaxspec.errors import CheckpointError, one_line
from jaxspec.files import read_json
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES, refusal
from jaxspec.models.families.rope_settings import is_neutral
from jaxspec.models.families.values import ConfigValues
from jaxspec.runtime.sharding import count_read

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Types of tensors that are no weights of their own: parts of quantised ones, and the tokens of a draft's head.
_CODE_DTYPES = {
    "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
_COMPARED_ROWS = 1024

# Settings of `generation_config.json` that change greedy text, and the values at which they do nothing.
_GREEDY_SETTINGS = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "num_beams",
    "guidance_scale", "exponential_decay_length_penalty",
)  # fmt: skip
_NEUTRAL = (None, False, 0, 1, 1.0, [], {})

# Keys that change no logit: provenance, training, how transformers runs the model, and defaults for its generate().
HARMLESS_KEYS = frozenset({
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


class TensorPlace(NamedTuple):
    """A tensor's place; `offset` is in bytes from the start of the file.

    With a `view` it is a part of what lies there, and `nbytes` are its own.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    nbytes: int
    view: View | None = None


class HFSource:
    """An open Hugging Face folder (a `TensorSource`); tensors are views of the mapped files."""

    has_mtp = False  # whether the folder holds layers for multi-token prediction beside the model

    def __init__(self, path: Path):
        """Check everything but the tensors' names and shapes, which `open_hf` does."""
        self.path = path
        raw = read_json(path / CONFIG_FILE)
        raw, self._tensors = text_part(path / CONFIG_FILE, raw, self._find_tensors())
        self.config = self._describe_model(raw)
        self._tensors = split_experts(path, self._choose_tensors(), self.config, _cut_view)
        self._tensors = split_fused(self._tensors, self.config, _cut)
        scheme = find_scheme(path, raw, path / CONFIG_FILE)
        self._norm_offset = FAMILIES[self.config.family].norm_offset
        generation = read_json(path / GENERATION_FILE) if (path / GENERATION_FILE).is_file() else {}
        self.eos_ids = _read_eos_ids(path, generation, raw, self.config.vocab_size)
        _warn_unapplied(path / GENERATION_FILE, generation)
        self._data = {tensor.file: np.memmap(tensor.file, np.uint8, mode="r") for tensor in self._tensors.values()}
        self._quantised: dict[str, QuantisedWeight] = {}
        self._scheme = scheme
        self._read_bytes: Callable[[Path, int, int], np.ndarray] | None = None
        hidden: set[str] = set()
        if scheme is not None:
            self._quantised, hidden = scheme.find_weights(self)
            hidden |= {name for weight in self._quantised.values() for name in weight.tensors} | self._zero_biases()
        self._plain = {name: tensor for name, tensor in self._tensors.items() if name not in hidden}
        for name, tensor in self._plain.items():
            if tensor.dtype in _CODE_DTYPES.values():
                problem = f"has type {tensor.dtype.name}; supported: {', '.join(_DTYPES)}"
                quantised = "" if scheme is not None else ", others only in quantised weights (quantization_config)"
                raise CheckpointError(f"{tensor.file}: tensor {name!r} {problem}{quantised}")

    def _find_tensors(self) -> dict[str, TensorPlace]:
        """Places of the folder's tensors, by their names in the files."""
        return find_tensors(self.path)

    def _describe_model(self, raw: dict[str, Any]) -> ModelConfig:
        """The geometry, from what `config.json` holds."""
        return read_config(self.path / CONFIG_FILE, raw, max_layers=len(self._tensors))

    def _choose_tensors(self) -> dict[str, TensorPlace]:
        """Those of the model among the text model's and its draft's; the draft's are in `jaxspec.checkpoint.mtp`."""
        mtp = {name for name in self._tensors if FAMILIES[self.config.family].has_mtp and name.startswith(MTP)}
        self.has_mtp = bool(mtp)
        return {name: tensor for name, tensor in self._tensors.items() if name not in mtp}

    def reading(self, read_bytes: Callable[[Path, int, int], np.ndarray]) -> "HFSource":
        """The same files, read by a function of path, offset and size instead of through maps of them."""
        other = copy.copy(self)
        if self._scheme is not None:
            other._quantised, _ = self._scheme.find_weights(other)
        other._read_bytes = read_bytes
        return other

    def nbytes(self, name: str) -> int:
        """Bytes that a weight takes in its files."""
        names = self._quantised[name].tensors if name in self._quantised else (name,)
        return sum(self._tensors[part].nbytes for part in names)

    def release_pages(self) -> None:
        """Give back the memory that holds what was read of the files."""
        for data in self._data.values():
            release_pages(data)

    def names(self) -> list[str]:
        """Names of all tensors as the files have them."""
        return list(self._tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Name of the dtype and shape of a tensor; None where the files have none of that name."""
        tensor = self._tensors.get(name)
        return None if tensor is None else (tensor.dtype.name, tensor.shape)

    def read_raw(self, name: str) -> np.ndarray:
        """One tensor as the file has it: a read-only view."""
        tensor = self._tensors[name]
        shape = tensor.shape if tensor.view is None else tensor.view.shape
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        if self._read_bytes is None:
            raw = self._data[tensor.file][tensor.offset : tensor.offset + nbytes]
        else:
            raw = self._read_bytes(tensor.file, tensor.offset, nbytes)
        array = np.asarray(raw).view(tensor.dtype).reshape(shape)
        return array if tensor.view is None else tensor.view.take(array)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {name: tensor.shape for name, tensor in self._plain.items()}
        return plain | {name: weight.shape for name, weight in self._quantised.items()}

    def weight_type(self, name: str) -> str:
        return self._quantised[name].format if name in self._quantised else self._tensors[name].dtype.name

    def input_order(self, name: str) -> np.ndarray | None:
        """int64 `[I]`: which input each column of a weight in blocks takes; None where they are in order."""
        return self._quantised[name].order if name in self._quantised else None

    def _zero_biases(self) -> set[str]:
        """Biases of zeros beside quantised weights, which AutoGPTQ writes for models that have none."""
        names = {name.removesuffix("weight") + "bias" for name in self._quantised} & self._tensors.keys()
        of_model = ("q_proj.bias", "k_proj.bias", "v_proj.bias") if self.config.qkv_bias else ()
        of_model += ("o_proj.bias",) if self.config.out_bias else ()
        return {name for name in names if not name.endswith(of_model) and not self.read_raw(name).any()}

    def read(self, name: str, keep_blocks: bool = False, part: tuple[int, int, int] | None = None) -> np.ndarray:
        """One tensor by name, in its own dtype: a read-only view of the file, or numbers or blocks made of several."""
        if name in self._quantised:
            weight = self._quantised[name]
            array = weight.read_blocks() if keep_blocks else weight.read_numbers()
            count_read(array)  # all of it: its parts do not lie side by side in the file
            return array if part is None else _cut_weight(array, weight.shape, part)
        array = self.read_raw(name)
        if part is not None:
            dimension, start, stop = part
            array = array[start:stop] if dimension == 0 else array[:, start:stop]
        count_read(array)
        if self._norm_offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
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


def find_tensors(path: Path) -> dict[str, TensorPlace]:
    """Places of the tensors in a folder's safetensors files; headers only. CheckpointError: files do not agree."""
    tensors: dict[str, TensorPlace] = {}
    for file in _list_weights(path):
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{path}: {tensors[name].file.name} and {file.name} both hold {name!r}")
            tensors[name] = tensor
    for name, file in _read_weight_map(path).items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{path}: {_INDEX_FILE} places {name!r} in {file}, which does not hold it")
    return tensors


def _cut(tensor: TensorPlace, shape: tuple[int, ...], offset: int, nbytes: int) -> TensorPlace:
    return tensor._replace(shape=shape, offset=offset, nbytes=nbytes)


def _cut_view(tensor: TensorPlace, first: int, count: int, view: View) -> TensorPlace:
    shape, size = view.part_shape, tensor.dtype.itemsize
    return tensor._replace(shape=shape, offset=tensor.offset + first * size, nbytes=math.prod(shape) * size, view=view)


def _read_header(path: Path) -> dict[str, TensorPlace]:
    """Directory of a safetensors file by tensor name; the package checks the header against the size of the file."""
    tensors: dict[str, TensorPlace] = {}
    try:
        with open(path, "rb") as file:
            offset = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="np") as header:
            # The package refuses gaps and overlaps, so that each tensor begins where the one before it ends.
            for name in header.offset_keys():
                part = header.get_slice(name)
                dtypes = _DTYPES | _CODE_DTYPES
                if (kind := part.get_dtype()) not in dtypes:
                    raise CheckpointError(f"{path}: tensor {name!r} has type {kind}; supported: {', '.join(_DTYPES)}")
                shape, dtype = tuple(part.get_shape()), dtypes[kind]
                tensors[name] = TensorPlace(path, shape, dtype, offset, math.prod(shape) * dtype.itemsize)
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
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
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
    raise CheckpointError(f"{path}: holds neither {WEIGHTS_FILE} nor {_INDEX_FILE}")


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name to file name of a sharded checkpoint; empty for a whole one."""
    if (path / WEIGHTS_FILE).is_file() or not (path / _INDEX_FILE).is_file():
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
        logging.getLogger(__name__).warning(message, path, one_line(", ".join(asked)))


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


def read_config(
    path: Path, raw: dict[str, Any], max_layers: int, harmless: frozenset[str] = frozenset()
) -> ModelConfig:
    """The geometry of a parsed `config.json`; more than `max_layers` layers are refused before anything is built.

    `harmless` are keys of `raw` that change no logit, in addition to those of every model.
    """
    values = ConfigValues(path, raw)
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        values.refuse("model_type", f"{refusal(name)}supported: {', '.join(FAMILIES)}")
    values.get("quantization_config")  # see `find_scheme`
    if values.get("auto_map") and not FAMILIES[name].has_published_code:
        values.refuse("auto_map", "the model brings code of its own, which jaxspec does not run")
    if values.flag("mlp_bias"):
        values.refuse("mlp_bias", "biases in the MLP are not supported")
    family = FAMILIES[name]
    num_layers = values.integer("num_hidden_layers")
    if num_layers > max_layers:
        held = f"the checkpoint holds only {max_layers} tensors"
        raise CheckpointError(f"{path}: asks for {num_layers} layers, but {held}")
    max_context = values.integer("max_position_embeddings")
    fields = {
        "family": name,
        "num_layers": num_layers,
        "embed_dim": values.integer("hidden_size"),
        "mlp_dim": family.read_mlp_dim(values),
        "num_heads": values.integer("num_attention_heads"),
        "vocab_size": values.integer("vocab_size"),
        "max_context": max_context,
        "norm_eps": values.number("rms_norm_eps", default=family.default_eps),
        "tied": values.flag("tie_word_embeddings", family.default_tied),
        **family.read_rope(values, max_context),
        **family.read_config(values, num_layers),
    }
    if fields["rope"].scaling == "longrope":
        fields["max_context"] = min(max_context, fields["rope"].original_context)
    values.refuse_unread(lambda key, value: key in HARMLESS_KEYS or key in harmless or is_neutral(key, value))
    return ModelConfig(**fields)


def _cut_weight(array: np.ndarray, shape: tuple[int, int], part: tuple[int, int, int]) -> np.ndarray:
    """Rows or columns of a weight `[O, I]`, in values, from its numbers or its blocks `[O, I / values, nbytes]`."""
    dimension, start, stop = part
    if dimension == 0:
        return array[start:stop]
    values = shape[1] // array.shape[1]
    return array[:, start // values : stop // values]
