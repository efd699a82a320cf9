"""GGUF files as a source of tensors under Hugging Face names.

What `read` returns is what the Hugging Face folder of the same model would hold, up to quantisation. llama.cpp's own
names and its order of query and key rows are translated here. What is particular to a family is in
`jaxspec.models.families`.

This file exceeds 400 lines because one place translates llama.cpp's names, keys and orders.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxspec.checkpoint.gguf_header import GGUFHeader, GGUFTensor, read_header
from jaxspec.checkpoint.keymaps import check_accounted, release_pages, sinks_name, split_fused
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.families import FAMILIES, refusal
from jaxspec.models.families.base import Family
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.quantization import decode_blocks
from jaxspec.models.recurrent import RecurrentConfig
from jaxspec.models.rope import longrope_attention_factor, rope_frequencies, yarn_attention_factor
from jaxspec.runtime.sharding import count_read
from pallas_kernels.linear.blocks import FORMATS

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
# The final norm, and what LFM2's files call theirs.
_FINAL_NORMS = ("output_norm.weight", "token_embd_norm.weight")
_SHARED_GATE, _SINKS, _CONVS = "mlp.shared_expert_gate", "self_attn.sinks", ("conv.conv", "linear_attn.conv1d")
# Tensors whose names in a Hugging Face folder do not end in `.weight` or `.bias`.
_DECAY = "linear_attn.A_log"
_BARE = ("layer_scalar", "linear_attn.dt_bias", _DECAY)
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_sinks": _SINKS, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": _SHARED_GATE,
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "shortconv.in_proj": "conv.in_proj", "shortconv.conv": _CONVS[0], "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_ROPE_FREQS, _KV_HEADS = "rope_freqs.weight", "attention.head_count_kv"
# Divisors from which on a pair stands still.
_STILL = 1e29
# LongRoPE's divisors: those within the original context, and those beyond it, which are not used.
_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")

# Hyperparameters that change nothing in the supported architectures.
_HARMLESS_KEYS = frozenset({"tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"})
# Factors, for which one is as good as absent. For every other unknown key only zero, false and empty are.
_FACTOR_KEYS = frozenset({
    "logit_scale", "residual_scale", "embedding_scale", "attention.output_scale", "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
})  # fmt: skip

_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

# Tensor types that are numbers.
_DTYPES = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


class GGUFSource:
    """An open GGUF file (a `TensorSource`); `read` may be called from several threads."""

    has_mtp = False  # whether the file holds layers for multi-token prediction beside the model

    def __init__(self, path: Path, header: GGUFHeader):
        """Check everything but the tensors' names and shapes, which `open_gguf` does."""
        self.path = path
        self._family = _read_family(path, header.metadata)
        self.config = self._describe_model(header)
        renamed = _rename(path, self._choose_tensors(header), self.config, self._family)
        self._tensors = split_fused(renamed, self.config, _cut)
        self.eos_ids = _read_eos_ids(path, header.metadata, self.config.vocab_size)
        _refuse_block_types(path, header.tensors)
        self._data = np.memmap(path, np.uint8, mode="r")
        self._read_bytes: Callable[[Path, int, int], np.ndarray] | None = None

    def _describe_model(self, header: GGUFHeader) -> ModelConfig:
        """The geometry, from the hyperparameters."""
        return _read_config(self.path, header, self._family)

    def _choose_tensors(self, header: GGUFHeader) -> dict[str, GGUFTensor]:
        """Those of the model by the file's names; its draft's come after, and are in `jaxspec.checkpoint.mtp`."""
        # `_read_config` has read it where the family knows it, and else refuses it.
        drafting = header.metadata.get(self._drafting_key) or 0
        layers = {str(self.config.num_layers + i) for i in range(min(drafting, len(header.tensors)))}
        own = {name for name in header.tensors if name.startswith("blk.") and name.split(".")[1] in layers}
        self.has_mtp = bool(own)
        return {name: tensor for name, tensor in header.tensors.items() if name not in own}

    @property
    def _drafting_key(self) -> str:
        return f"{self._family.gguf_architecture}.nextn_predict_layers"

    def reading(self, read_bytes: Callable[[Path, int, int], np.ndarray]) -> "GGUFSource":
        """The same file, read by a function of path, offset and size instead of through a map of it."""
        other = copy.copy(self)
        other._read_bytes = read_bytes
        return other

    def nbytes(self, name: str) -> int:
        """Bytes that a tensor takes in the file."""
        return self._tensors[name].nbytes

    def release_pages(self) -> None:
        """Give back the memory that holds what was read of the file."""
        release_pages(self._data)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def weight_type(self, name: str) -> str:
        """A dtype, the name of a block format, or float32 for blocks that are not kept."""
        kind = self._tensors[name].ggml_type
        block_type = kind.name.lower()
        return _DTYPES[kind].name if kind in _DTYPES else block_type if block_type in FORMATS else "float32"

    def input_order(self, name: str) -> np.ndarray | None:
        """The value heads that the columns of a delta net's result take; None for all others, which are in order."""
        if not name.endswith("linear_attn.out_proj.weight") or (rows := self._rows(name)) is None:
            return None
        return np.argsort(rows)

    def _rows(self, name: str) -> np.ndarray | None:
        """The file's row, or column of `out_proj`, for each of a tensor's; None where all are in order."""
        if self._family.fuses_recurrent:  # value heads are in order
            return self._tensors[name].rows
        return _value_rows(name, self.config)

    def read(self, name: str, keep_blocks: bool = False, part: tuple[int, int, int] | None = None) -> np.ndarray:
        """One tensor by Hugging Face name, or its blocks where they are of a known format and to be kept."""
        tensor = self._tensors[name]
        if self._read_bytes is None:
            raw = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        else:
            raw = self._read_bytes(self.path, tensor.offset, tensor.nbytes)
        shape, rows = tensor.shape, self._rows(name)
        if part is not None:
            dimension, start, stop = part
            if rows is not None:
                return self.read(name, keep_blocks)[(slice(None),) * dimension + (slice(start, stop),)]
            cut = raw.reshape(shape[0], -1)
            if dimension == 0:
                cut, shape = cut[start:stop], (stop - start, *shape[1:])
            else:
                values, size = GGML_QUANT_SIZES[tensor.ggml_type]
                if start % values or stop % values:  # within a block: whole rows are decoded and cut
                    return self.read(name)[:, start:stop]
                cut, shape = cut[:, start // values * size : stop // values * size], (shape[0], stop - start)
            raw = np.ascontiguousarray(cut).reshape(-1)
        count_read(raw)
        if self._family.gguf_interleaves and name.endswith(("q_proj.weight", "k_proj.weight")):
            raw = _deinterleave_rows(raw, shape[0], self.config.head_dim)
        columns = rows is not None and name.endswith("out_proj.weight")
        if rows is not None and not columns:
            values, size = GGML_QUANT_SIZES[tensor.ggml_type]
            raw = np.ascontiguousarray(raw.reshape(-1, math.prod(shape[1:]) // values * size)[rows]).reshape(-1)
        block_type = tensor.ggml_type.name.lower()
        if keep_blocks and block_type in FORMATS:
            return raw.reshape(*shape[:-1], -1, FORMATS[block_type].nbytes)
        if tensor.ggml_type in _DTYPES:
            numbers = raw.view(_DTYPES[tensor.ggml_type]).reshape(shape)
        else:
            numbers = decode_blocks(raw, block_type).reshape(shape)
        if name.endswith(_DECAY):  # the file has -exp of it; of more digits, so that its exponential has the file's
            with np.errstate(invalid="ignore", divide="ignore"):
                return np.log(-numbers.astype(np.float64))
        return np.ascontiguousarray(numbers[:, rows]) if columns else numbers


def open_gguf(path: str | Path) -> GGUFSource:
    """Open a GGUF file: header, configuration and names are checked; no weight is read.

    Raises:
      CheckpointError: the file is damaged, hostile, of an unsupported architecture or tensor type, or one of several.
      ConfigError: its hyperparameters ask for something that jaxspec does not compute.
    """
    path = Path(path)
    source = GGUFSource(path, read_header(path))
    check_accounted(source)
    return source


def _read_family(path: Path, metadata: dict[str, Any]) -> Family:
    if metadata.get("split.count", 1) not in (0, 1):
        problem = f"is one of {metadata['split.count']} parts of a split GGUF, which are not supported"
        raise CheckpointError(f"{path}: {problem}; join them first with `llama-gguf-split --merge`")
    if (kind := metadata.get("general.type", "model")) != "model":
        raise CheckpointError(f"{path}: holds a GGUF {kind!r} (general.type), not a model")
    known = {family.gguf_architecture: family for family in FAMILIES.values() if family.gguf_architecture}
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in known:
        supported = f"{refusal(name)}supported: {', '.join(known)}"
        raise CheckpointError(f"{path}: GGUF architecture {name!r} is not supported; {supported}")
    return known[name]


def _rename(path: Path, tensors: dict[str, GGUFTensor], cfg: ModelConfig, of_file: Family) -> dict[str, GGUFTensor]:
    """Tensors under Hugging Face names; unknown ones keep their own, for the accounting to list."""
    renamed: dict[str, GGUFTensor] = {}
    family = FAMILIES[cfg.family]
    names = {**_LAYER_NAMES, **family.gguf_names, **of_file.gguf_names}
    for name, tensor in tensors.items():
        hf_name, parts = _TOP_NAMES.get(name, name), name.split(".")
        if name in (_ROPE_FREQS, *_ROPE_FACTORS):
            continue
        if name in _FINAL_NORMS:
            hf_name = f"{family.final_norm}.weight"
        if len(parts) >= 3 and parts[0] == "blk":
            own = ".".join(parts[2:-1]) or parts[2]
            part = names.get(own)
            if part is not None:
                hf_name = f"model.layers.{parts[1]}.{family.tensor_name(part)}.{parts[-1]}"
            if (whole := names.get(".".join(parts[2:]))) is not None:  # of a kind of its own
                hf_name = f"model.layers.{parts[1]}.{whole}"
            if part == _SINKS:
                hf_name = sinks_name(parts[1])
            if part in _BARE:
                hf_name = f"model.layers.{parts[1]}.{part}"
            if part == _SHARED_GATE and len(tensor.shape) == 1:
                # A matrix of one row has one dimension in the file.
                tensor = dataclasses.replace(tensor, shape=(1, *tensor.shape))
            if part in _CONVS and len(tensor.shape) == 2:
                tensor = dataclasses.replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
        for made, own in _split_heads(hf_name, tensor, cfg.recurrent if of_file.fuses_recurrent else None).items():
            if made in renamed:
                raise CheckpointError(f"{path}: holds the tensor {made!r} twice, the second time as {name!r}")
            renamed[made] = own
    return renamed


def _split_heads(name: str, tensor: GGUFTensor, recurrent: RecurrentConfig | None) -> dict[str, GGUFTensor]:
    """The two tensors of a delta net that files of Qwen3-Next hold in one, the rows of a key head together.

    All files have both rates so. Older ones have the other projections so, too. Any other tensor comes back alone.
    """
    prefix, _, part = name.rpartition(".")[0].rpartition(".")
    if recurrent is None or part not in ("in_proj_qkvz", "in_proj_ba"):
        return {name: tensor}
    key, values, group = recurrent.key_dim, recurrent.result_width, recurrent.group
    parts = {"qkv": (key, key, values), "z": (values,)} if part == "in_proj_qkvz" else {"b": (group,), "a": (group,)}
    every = [size for sizes in parts.values() for size in sizes]
    if tensor.shape[0] != recurrent.key_heads * sum(every):
        return {name: tensor}  # for the accounting to list
    rows = np.split(np.arange(tensor.shape[0]).reshape(recurrent.key_heads, -1), np.cumsum(every)[:-1], axis=1)
    made = {}
    for kind, sizes in parts.items():
        own = np.concatenate([rows.pop(0).reshape(-1) for _ in sizes])
        shape = (len(own), *tensor.shape[1:])
        made[f"{prefix}.in_proj_{kind}.weight"] = dataclasses.replace(tensor, shape=shape, rows=own)
    return made


def _value_rows(name: str, cfg: ModelConfig) -> np.ndarray | None:
    """The row of the file, or column of `out_proj`, for each of Hugging Face's; None where all are in order.

    Files have the first value head of every key head, then the second of every one.
    """
    layer, _, part = name.partition(".linear_attn.")
    recurrent = cfg.recurrent
    if recurrent is None or recurrent.group in (0, 1) or not part or part == "norm.weight":
        return None
    heads = np.arange(recurrent.value_heads).reshape(recurrent.group, -1).T.reshape(-1, 1)
    one = part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
    width = 1 if one else recurrent.value_dim
    rows = (heads * width + np.arange(width)).reshape(-1)
    before = 2 * recurrent.key_heads * recurrent.key_dim if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    return np.concatenate([np.arange(before), before + rows])


def _cut(tensor: GGUFTensor, shape: tuple[int, ...], offset: int, nbytes: int) -> GGUFTensor:
    return dataclasses.replace(tensor, shape=shape, offset=offset, nbytes=nbytes)


def _refuse_block_types(path: Path, tensors: dict[str, GGUFTensor]) -> None:
    """Refuse types that the package does not dequantise; it has no list, so one block of zeros is tried."""
    refused = []
    for kind in sorted({tensor.ggml_type for tensor in tensors.values()}):
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            refused.append(kind.name)
    if refused:
        raise CheckpointError(f"{path}: holds tensors of type {', '.join(refused)}, which cannot be dequantised")


class _Hyperparameters(ConfigValues):
    """The `{architecture}.*` keys of a GGUF file."""

    first_counts: tuple[str, ...] = ()  # keys of lists whose first entry is the model's own

    def get(self, key: str, default: Any = None) -> Any:
        """A value; a list of one per layer counts as its value where all layers agree."""
        value = super().get(key, default)
        if key == _KV_HEADS and isinstance(value, list) and (some := [heads for heads in value if heads != 0]):
            value = some  # of layers without attention it is 0
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value) and key not in self.first_counts:
                self.refuse(key, "layers that differ in it are not supported")
            return value[0]
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The float32 that the file holds, with the digits that were meant (1e-05, not 9.9999e-06)."""
        return float(str(np.float32(super().number(key, default))))


def _read_config(path: Path, header: GGUFHeader, family: Family) -> ModelConfig:
    values = _Hyperparameters(path, header.metadata, f"{family.gguf_architecture}.")
    values.first_counts = family.gguf_lists
    embed = header.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(f"{path}: has no two-dimensional tensor 'token_embd.weight'")
    embed_dim, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", default=embed_dim // num_heads)
    turns = values.integer("rope.dimension_count", default=head_dim)
    if turns > head_dim or (turns < head_dim and family.default_partial is None):
        values.refuse("rope.dimension_count", f"only the head width {head_dim} is supported")
    if values.integer("attention.value_length", default=head_dim) != head_dim:
        values.refuse("attention.value_length", f"only the head width {head_dim} is supported")
    vocab_size = embed.shape[0]
    if values.integer("vocab_size", default=vocab_size) != vocab_size:
        values.refuse("vocab_size", f"but 'token_embd.weight' has {vocab_size} rows", CheckpointError)
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens must be a list of at most {vocab_size} tokens, the rows of "
            f"'token_embd.weight', got {len(tokens) if isinstance(tokens, list) else type(tokens).__name__}"
        )
    if values.get("attention.causal", True) is not True:
        values.refuse("attention.causal", "only causal attention is supported")
    max_context = values.integer("context_length")
    rope = _read_rope(path, header, values, turns, max_context, family.yarn_truncates)
    fields = {
        "family": family.name,
        "num_layers": values.integer("block_count"),
        "embed_dim": embed_dim,
        "mlp_dim": values.integer("feed_forward_length", default=values.get("expert_feed_forward_length")),
        "num_heads": num_heads,
        "num_kv_heads": values.integer(_KV_HEADS, default=num_heads),
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_context": max_context,
        "rope": rope if turns == head_dim else dataclasses.replace(rope, partial=turns / head_dim),
        "norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in header.tensors,
        **family.read_gguf(values, max_context),
    }
    if (kinds := fields.get("kinds")) is not None:
        full = fields["sliding_layers"].index(False)
        alike = f"blk.{full}.attn_v.weight" not in header.tensors
        fields["kinds"] = dataclasses.replace(kinds, keys_are_values=alike)
    if family.default_bias is not None:
        fields["qkv_bias"] = "blk.0.attn_q.bias" in header.tensors
    if fields["rope"].scaling == "longrope":
        fields["max_context"] = min(max_context, fields["rope"].original_context)
    values.refuse_unread(
        lambda key, value: key in _HARMLESS_KEYS or value in (0, "", []) or (key in _FACTOR_KEYS and value == 1)
    )
    return ModelConfig(**fields)


def _read_rope(
    path: Path, header: GGUFHeader, values: ConfigValues, head_dim: int, max_context: int, truncates: bool
) -> RopeConfig:
    theta = values.number("rope.freq_base", default=10000.0)
    scaling = values.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        values.refuse("rope.scaling.type", "supported: none, linear, yarn, longrope")
    factor, old_factor = (values.number(key, default=1.0) for key in ("rope.scaling.factor", "rope.scale_linear"))
    original = values.integer("rope.scaling.original_context_length", default=max_context)
    if scaling == "none":
        factor = old_factor  # of files older than the scaling keys
    divisors = [_read_factors(path, header, name, head_dim) for name in (_ROPE_FREQS, *_ROPE_FACTORS)]
    if sum(part is not None for part in divisors[:2]) + (factor > 1) > 1:
        names = " and ".join((repr(_ROPE_FREQS), repr(_ROPE_FACTORS[0])))
        raise ConfigError(f"{path}: asks for {scaling} rope scaling and {names} at once, which is not supported")
    if divisors[0] is not None:
        return _recover_scaling(path, divisors[0], theta, head_dim)
    if divisors[1] is not None or scaling == "longrope":
        if divisors[1] is None or not np.isfinite(divisors[1]).all() or not (divisors[1] > 0).all():
            raise CheckpointError(f"{path}: longrope scaling needs positive numbers in {_ROPE_FACTORS[0]!r}")
        grown = longrope_attention_factor(max_context / original, original)
        return RopeConfig(
            theta, "longrope", original_context=original, divisors=tuple(divisors[1].astype(float).tolist()),
            attention_factor=values.number("rope.scaling.attn_factor", default=grown),
        )  # fmt: skip
    if scaling == "yarn":
        beta_fast, beta_slow = (
            values.number(f"rope.scaling.yarn_beta_{speed}", default=turns)
            for speed, turns in (("fast", 32.0), ("slow", 1.0))
        )
        attention = values.number("rope.scaling.attn_factor", default=1.0) * yarn_attention_factor(factor)
        attention /= 1 + values.number("rope.scaling.yarn_log_multiplier", default=0.0) * 0.1 * math.log(factor)
        return RopeConfig(
            theta, "yarn", factor, original_context=original, beta_fast=beta_fast, beta_slow=beta_slow,
            truncate=truncates, attention_factor=attention,
        )  # fmt: skip
    return RopeConfig(theta=theta, scaling="linear", factor=factor) if factor > 1 else RopeConfig(theta=theta)


def _read_factors(path: Path, header: GGUFHeader, name: str, head_dim: int) -> np.ndarray | None:
    """Numbers by which frequencies are divided, float32 [H / 2], or None where the file has none."""
    divisors = header.tensors.get(name)
    if divisors is None:
        return None
    if divisors.ggml_type != GGMLQuantizationType.F32 or divisors.shape != (head_dim // 2,):
        found = f"shape {divisors.shape} of {divisors.ggml_type.name}"
        raise CheckpointError(f"{path}: {name!r} must hold {head_dim // 2} F32 values, got {found}")
    return np.fromfile(path, "<f4", head_dim // 2, offset=divisors.offset)


def _recover_scaling(path: Path, divisors: np.ndarray, theta: float, head_dim: int) -> RopeConfig:
    """Llama 3.1's or Gemma 4's scaling from the per-frequency divisors that llama.cpp's converter computed from it.

    Its `factor` is the divisor of the lowest frequency; the other three numbers have had these values in every release.
    """
    largest = float(divisors.max(initial=1.0))
    turning = int(np.sum(divisors == 1))
    if 0 < turning < len(divisors) and (divisors[:turning] == 1).all() and (divisors[turning:] >= _STILL).all():
        return RopeConfig(theta, "proportional", partial=turning / len(divisors))
    if np.array_equal(divisors, np.ones_like(divisors)):
        return RopeConfig(theta=theta)
    if math.isfinite(largest) and largest >= 1:
        rope = RopeConfig(theta, "llama3", largest, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
        expected = rope_frequencies(RopeConfig(theta), head_dim) / rope_frequencies(rope, head_dim)
        if np.allclose(divisors, expected, rtol=1e-3, atol=0):
            return rope
    raise ConfigError(
        f"{path}: {_ROPE_FREQS!r} holds frequency factors other than Llama 3's and Gemma 4's, which are not supported"
    )


def _read_eos_ids(path: Path, metadata: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    ids: list[int] = []
    for key in _EOS_KEYS:
        token = metadata.get(key)
        if token is None or token in ids:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(f"{path}: {key} must be a token id below {vocab_size}, got {token!r}")
        ids.append(token)
    return tuple(ids)


def _deinterleave_rows(raw: np.ndarray, num_rows: int, head_dim: int) -> np.ndarray:
    """Hugging Face's order of rows: row j*H/2+i of each head is row 2i+j of the file. Quantised rows can move too."""
    return raw.reshape(num_rows // head_dim, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(-1)
