"""`config.json` of a Hugging Face folder as a `ModelConfig`; whatever it asks for beyond that is refused by name.

Both spellings of rotary settings are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
Defaults for absent keys are those of the family's configuration class in transformers.
"""

import math
from pathlib import Path
from typing import Any, NoReturn

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import FAMILIES, ModelConfig, RopeConfig

_READ_KEYS = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings",
    "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
})  # fmt: skip

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
})  # fmt: skip

# An unknown key of such a name with the value 1.0 multiplies by one.
_FACTOR_WORDS = ("multiplier", "scale", "scaling", "factor")

_ROPE_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
})  # fmt: skip

_SLIDING, _FULL = "sliding_attention", "full_attention"


def parse_config(path: Path, raw: dict[str, Any], max_layers: int) -> ModelConfig:
    """Read the geometry out of a parsed `config.json`.

    Args:
      path: named in errors.
      raw: the JSON object.
      max_layers: the number of tensors in the checkpoint; nothing as long as a larger claim is built.

    Raises:
      CheckpointError: keys are missing or of the wrong type.
      ConfigError: the model type, or something the config asks for, is not supported; the key is named.
    """
    return _ConfigReader(path, raw).read(max_layers)


class _ConfigReader:
    def __init__(self, path: Path, raw: dict[str, Any]):
        self.path = path
        self.raw = raw
        self.family = raw.get("model_type")

    def read(self, max_layers: int) -> ModelConfig:
        if self.family not in FAMILIES:
            self.refuse("model_type", f"supported: {', '.join(FAMILIES)}")
        self.refuse_unsupported()
        num_layers = self.integer("num_hidden_layers")
        if num_layers > max_layers:
            raise CheckpointError(
                f"{self.path}: asks for {num_layers} layers, but the checkpoint holds only {max_layers} tensors"
            )
        embed_dim = self.integer("hidden_size")
        num_heads = self.integer("num_attention_heads")
        # Only Llama's class takes an absent number of KV heads for that of the heads.
        kv_default = num_heads if self.family == "llama" or "num_key_value_heads" in self.raw else None
        max_context = self.integer("max_position_embeddings")
        window, layers = self.read_window(num_layers)
        return ModelConfig(
            family=self.family,
            num_layers=num_layers,
            embed_dim=embed_dim,
            mlp_dim=self.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=self.integer("num_key_value_heads", default=kv_default),
            head_dim=self.read_head_dim(embed_dim, num_heads),
            vocab_size=self.integer("vocab_size"),
            max_context=max_context,
            rope=self.read_rope(max_context),
            norm_eps=self.number(self.raw, "rms_norm_eps", default=1e-6),
            tied=self.flag("tie_word_embeddings"),
            qkv_bias=self.family == "qwen2",
            qk_norm=self.family == "qwen3",
            sliding_window=window,
            sliding_layers=layers,
        )

    def refuse(self, key: str, why: str, error: type[ValueError] = ConfigError) -> NoReturn:
        text = repr(self.raw.get(key))
        raise error(f"{self.path}: {key} is {text if len(text) <= 60 else text[:60] + '...'}; {why}")

    def refuse_unsupported(self) -> None:
        """Refuse by name every key that may change the model and is not read."""
        if self.raw.get("quantization_config"):
            self.refuse("quantization_config", "quantised Hugging Face checkpoints are not supported, GGUF files are")
        if self.raw.get("auto_map"):
            self.refuse("auto_map", "the model brings code of its own, which jaxspec does not run")
        if self.raw.get("hidden_act", "silu") not in ("silu", "swish"):
            self.refuse("hidden_act", "only silu is supported")
        # Qwen2 has its biases whatever the key says.
        if self.family != "qwen2" and self.flag("attention_bias"):
            self.refuse("attention_bias", "attention biases are supported for qwen2 only")
        if self.flag("mlp_bias"):
            self.refuse("mlp_bias", "biases in the MLP are not supported")
        if self.raw.get("partial_rotary_factor") not in (None, 1):
            self.refuse("partial_rotary_factor", "only rotary embedding of whole heads is supported")
        if self.family == "llama" and self.raw.get("sliding_window"):
            self.refuse("sliding_window", "sliding windows are supported for mistral, qwen2 and qwen3")
        for key, value in self.raw.items():
            if key not in _READ_KEYS and key not in _HARMLESS_KEYS and not _is_neutral(key, value):
                self.refuse(key, "this setting is not known to jaxspec and may change the model")

    def read_head_dim(self, embed_dim: int, num_heads: int) -> int:
        if self.family == "qwen3" and "head_dim" not in self.raw:
            return 128  # the default of its class, whatever the width
        if self.raw.get("head_dim") is None and embed_dim % num_heads:
            self.refuse("head_dim", f"hidden_size {embed_dim} is not a multiple of num_attention_heads {num_heads}")
        return self.integer("head_dim", default=embed_dim // num_heads)

    def read_window(self, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """The window and the layers it holds for, in `ModelConfig`'s form."""
        if self.family in ("qwen2", "qwen3") and not self.flag("use_sliding_window"):
            window = None
        elif self.family == "llama" or self.raw.get("sliding_window", 4096) is None:
            window = None
        else:
            window = self.integer("sliding_window", default=4096)
        first = self.integer("max_window_layers", default=28, least=0) if self.family in ("qwen2", "qwen3") else 0
        layers = tuple(window is not None and i >= first for i in range(num_layers))
        if (types := self.raw.get("layer_types")) is not None:
            if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= {_SLIDING, _FULL}:
                self.refuse("layer_types", f"a list of {num_layers} of {_SLIDING!r} and {_FULL!r} is supported")
            listed = tuple(kind == _SLIDING for kind in types)
            if window is None and any(listed):
                self.refuse("layer_types", "but the config sets no sliding window")
            if self.family == "mistral" and listed != layers:
                self.refuse("layer_types", "all layers of a mistral model are alike")
            layers = listed
        if not any(layers):
            return None, ()
        return window, () if all(layers) else layers

    def read_rope(self, max_context: int) -> RopeConfig:
        old, new = (self.raw.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
        name = "rope_parameters" if new else "rope_scaling"
        if old and new and old != new:
            self.refuse("rope_scaling", "but rope_parameters is given too, and differs")
        rope = new or old
        if not isinstance(rope, dict):
            self.refuse(name, "a JSON object is needed", CheckpointError)
        for key, value in rope.items():
            if key not in _ROPE_KEYS and not _is_neutral(key, value):
                self.refuse(name, f"its key {key!r} is not supported")
        if rope.get("partial_rotary_factor") not in (None, 1):
            self.refuse(name, "only rotary embedding of whole heads is supported")
        theta = self.number({**self.raw, **rope}, "rope_theta", default=10000.0)
        match kind := rope.get("rope_type", rope.get("type", "default")):
            case "default":
                return RopeConfig(theta)
            case "linear":
                return RopeConfig(theta, "linear", self.number(rope, "factor"))
            case "llama3":
                # A number beside the rotary settings wins over the one inside, as in transformers.
                original = {"original_max_position_embeddings": max_context, **rope, **self.raw}
                return RopeConfig(
                    theta,
                    "llama3",
                    self.number(rope, "factor"),
                    low_freq_factor=self.number(rope, "low_freq_factor"),
                    high_freq_factor=self.number(rope, "high_freq_factor"),
                    original_context=self.integer("original_max_position_embeddings", values=original),
                )
        self.refuse(name, f"rotary scaling {kind!r} is not supported (default, linear, llama3 are)")

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false is needed", CheckpointError)
        return bool(value)

    def integer(
        self, key: str, default: int | None = None, least: int = 1, values: dict[str, Any] | None = None
    ) -> int:
        value = (self.raw if values is None else values).get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise CheckpointError(f"{self.path}: {key} must be an integer of at least {least}, got {str(value)[:60]}")
        return value

    def number(self, values: dict[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**62:
            raise CheckpointError(f"{self.path}: {key} must be a number, got {str(value)[:60]}")
        return float(value)


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a setting that is not known here asks for nothing: absent, off, zero, or a factor of one."""
    if value is None or value in (0, "") or value == [] or value == {}:
        return True
    return isinstance(value, float) and math.isclose(value, 1) and any(word in key for word in _FACTOR_WORDS)
