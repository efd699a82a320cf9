"""GGUF files as a source of tensors under Hugging Face names.

llama.cpp's own names and its interleaved query and key rows (architecture `llama` only) stop here, and its block types
where they are not to be kept: what `read` returns is what the Hugging Face folder of the same model would hold, up to
quantisation.
"""

import math
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxspec.checkpoint.block_codec import decode_blocks, format_of
from jaxspec.checkpoint.gguf_header import GGUFHeader, GGUFTensor, read_header
from jaxspec.checkpoint.keymaps import check_accounted
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import Family, ModelConfig, RopeConfig
from pallas_kernels.linear.blocks import FORMATS

# llama.cpp has no architecture of its own for Mistral: such files say `llama`.
ARCHITECTURES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"

# Hyperparameters read below, and those that change nothing in the architectures above.
_READ_KEYS = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "attention.sliding_window", "attention.causal",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor",
})  # fmt: skip
_HARMLESS_KEYS = frozenset({"tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"})
# Factors, for which one is as good as absent; for every other unknown key only zero, false and empty are.
_NEUTRAL_ONE_KEYS = frozenset({
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
    """An open GGUF file (see `TensorSource`); `read` may be called from several threads."""

    def __init__(self, path: Path, header: GGUFHeader):
        """Check everything but the accounting, which `open_gguf` adds."""
        self.path = path
        self._family = _read_family(path, header.metadata)
        self._tensors = _rename(path, header.tensors)
        self.config = _read_config(path, header, self._family)
        self.eos_ids = _read_eos_ids(path, header.metadata, self.config.vocab_size)
        _refuse_block_types(path, header.tensors)
        self._data = np.memmap(path, np.uint8, mode="r")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def weight_type(self, name: str) -> str:
        """How one tensor can be kept (see `TensorSource`)."""
        kind = self._tensors[name].ggml_type
        return _DTYPES[kind].name if kind in _DTYPES else format_of(kind) or "float32"

    def read(self, name: str, keep_blocks: bool = False) -> np.ndarray:
        """One tensor by Hugging Face name (see `TensorSource`)."""
        tensor = self._tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        if self._family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            raw = _unpermute_rows(raw, tensor.shape[0], self.config.head_dim)
        block_format = format_of(tensor.ggml_type)
        if keep_blocks and block_format is not None:
            return raw.reshape(*tensor.shape[:-1], -1, FORMATS[block_format].nbytes)
        if tensor.ggml_type in _DTYPES:
            return raw.view(_DTYPES[tensor.ggml_type]).reshape(tensor.shape)
        return decode_blocks(raw, tensor.ggml_type).reshape(tensor.shape)


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
        raise CheckpointError(
            f"{path}: is one of {metadata['split.count']} parts of a split GGUF, which are not supported; "
            "join them first with `llama-gguf-split --merge`"
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{path}: holds a GGUF {kind!r} (general.type), not a model")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]


def _rename(path: Path, tensors: dict[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """Tensors under Hugging Face names; unknown ones keep their own, for the accounting to list."""
    renamed: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        if name == _ROPE_FREQS:
            continue
        hf_name = _hugging_face_name(name)
        if hf_name in renamed:
            raise CheckpointError(f"{path}: holds the tensor {hf_name!r} twice, the second time as {name!r}")
        renamed[hf_name] = tensor
    return renamed


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _refuse_block_types(path: Path, tensors: dict[str, GGUFTensor]) -> None:
    kinds = sorted({tensor.ggml_type for tensor in tensors.values()})
    refused = [kind.name for kind in kinds if not _can_dequantise(kind)]
    if refused:
        raise CheckpointError(f"{path}: holds tensors of type {', '.join(refused)}, which cannot be dequantised")


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Ask the package with one block of zeros: it has no list."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _read_config(path: Path, header: GGUFHeader, family: Family) -> ModelConfig:
    hyper = _Hyperparameters(path, header.metadata)
    embed = header.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(f"{path}: has no two-dimensional tensor 'token_embd.weight'")
    num_layers = hyper.integer("block_count")
    embed_dim = hyper.integer("embedding_length")
    num_heads = hyper.integer("attention.head_count")
    head_dim = hyper.integer("attention.key_length", default=embed_dim // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (length := hyper.integer(key, default=head_dim)) != head_dim:
            hyper.refuse(key, length, f"only the head width {head_dim} is supported")
    vocab_size = embed.shape[0]
    if (claimed := hyper.integer("vocab_size", default=vocab_size)) != vocab_size:
        hyper.refuse("vocab_size", claimed, f"but 'token_embd.weight' has {vocab_size} rows", CheckpointError)
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens must be a list of at most {vocab_size} tokens, the rows of "
            f"'token_embd.weight', got {len(tokens) if isinstance(tokens, list) else type(tokens).__name__}"
        )
    if hyper.get("attention.causal", True) is not True:
        hyper.refuse("attention.causal", False, "only causal attention is supported")
    max_context = hyper.integer("context_length")
    sliding_window = _read_window(hyper, family, max_context)
    hyper.refuse_unknown()
    return ModelConfig(
        family="mistral" if sliding_window else family,
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=hyper.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=hyper.integer("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=max_context,
        rope=_read_rope(path, header, hyper, head_dim),
        norm_eps=hyper.number("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in header.tensors,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=sliding_window,
    )


def _read_window(hyper: "_Hyperparameters", family: Family, max_context: int) -> int | None:
    window = hyper.integer("attention.sliding_window", default=0, least=0)
    if window == 0 or window >= max_context:
        return None
    if family != "llama":
        hyper.refuse("attention.sliding_window", window, f"the file does not say which layers of {family} it holds for")
    return window


def _read_rope(path: Path, header: GGUFHeader, hyper: "_Hyperparameters", head_dim: int) -> RopeConfig:
    theta = hyper.number("rope.freq_base", default=10000.0)
    scaling = hyper.get("rope.scaling.type", "none")
    factor = hyper.number("rope.scaling.factor", default=1.0)
    if scaling not in ("none", "linear"):
        hyper.refuse("rope.scaling.type", scaling, "supported: none, linear")
    if scaling == "none":
        # Files older than the scaling keys have this one instead.
        factor = hyper.number("rope.scale_linear", default=1.0)
    divisors = header.tensors.get(_ROPE_FREQS)
    if divisors is None:
        return RopeConfig(theta=theta, scaling="linear", factor=factor) if factor > 1 else RopeConfig(theta=theta)
    if divisors.ggml_type != GGMLQuantizationType.F32 or divisors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{path}: {_ROPE_FREQS!r} must hold {head_dim // 2} F32 values, "
            f"got shape {divisors.shape} of {divisors.ggml_type.name}"
        )
    values = np.fromfile(path, "<f4", head_dim // 2, offset=divisors.offset)
    if factor > 1:
        raise ConfigError(f"{path}: asks for linear rope scaling and {_ROPE_FREQS!r} at once, which is not supported")
    return _recover_llama3(path, values, theta, head_dim)


def _recover_llama3(path: Path, divisors: np.ndarray, theta: float, head_dim: int) -> RopeConfig:
    """Llama 3.1's scaling from the per-frequency divisors that llama.cpp's converter computed from it.

    Its `factor` is the divisor of the lowest frequency; the other three numbers have had these values in every release.
    """
    largest = float(divisors.max(initial=1.0))
    if np.array_equal(divisors, np.ones_like(divisors)):
        return RopeConfig(theta=theta)
    if math.isfinite(largest) and largest >= 1:
        rope = RopeConfig(theta, "llama3", largest, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
        if np.allclose(divisors, _llama3_divisors(rope, head_dim), rtol=1e-3, atol=0):
            return rope
    raise ConfigError(f"{path}: {_ROPE_FREQS!r} holds frequency factors other than Llama 3's, which are not supported")


def _llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """By what Llama 3.1 divides each rotary frequency (the formula of its reference code), `[H / 2]`."""
    wavelength = 2 * math.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rope.original_context / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / rope.factor + smooth)


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


class _Hyperparameters:
    """The `{architecture}.*` keys of a GGUF file, by the part behind the dot."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self._path = path
        self._prefix = f"{metadata['general.architecture']}."
        self._values = {k.removeprefix(self._prefix): v for k, v in metadata.items() if k.startswith(self._prefix)}

    def refuse(self, key: str, value: Any, why: str, error: type[ValueError] = ConfigError) -> NoReturn:
        raise error(f"{self._path}: {self._prefix}{key} is {_shorten(value)}; {why}")

    def get(self, key: str, default: Any) -> Any:
        return self._values.get(key, default)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer; a list of one per layer is accepted where all of them agree."""
        value = self._required(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, list):
            self.refuse(key, value, "layers that differ in it are not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            self.refuse(key, value, f"an integer of at least {least} is needed", CheckpointError)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; float32 as the file has it, but with the digits that were meant (1e-05, not 9.9999e-06)."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(key, value, "a finite number is needed", CheckpointError)
        return float(str(np.float32(value)))

    def refuse_unknown(self) -> None:
        """Refuse every key that may change the model and that nobody here reads."""
        for key, value in self._values.items():
            if key in _READ_KEYS or key in _HARMLESS_KEYS:
                continue
            neutral = value in (0, "", []) or (key in _NEUTRAL_ONE_KEYS and value == 1)
            if not neutral:
                self.refuse(key, value, "this hyperparameter is not supported")

    def _required(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self._path}: lacks the metadata key {self._prefix}{key}")
        return value


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _unpermute_rows(raw: np.ndarray, num_rows: int, head_dim: int) -> np.ndarray:
    """Rotary halves from interleaved pairs: within each head, row 2i+j of the file is row j*H/2+i of Hugging Face.

    Whole rows move, so quantised bytes can: fewer of them than of float32.
    """
    rows = raw.reshape(num_rows // head_dim, head_dim // 2, 2, -1)  # [heads, H/2, 2, bytes]
    return rows.swapaxes(1, 2).reshape(-1)
