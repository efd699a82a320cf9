"""`config.json` of a Hugging Face folder as a `ModelConfig`; a setting that jaxspec does not know is refused by name.

Both spellings of rotary settings are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
What is particular to a family is in `jaxspec.models.families`.
"""

import math
from pathlib import Path
from typing import Any

from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.families.base import ConfigValues

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
        raise CheckpointError(
            f"{path}: asks for {num_layers} layers, but the checkpoint holds only {max_layers} tensors"
        )
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
            return RopeConfig(
                theta,
                "llama3",
                numbers.number("factor"),
                low_freq_factor=numbers.number("low_freq_factor"),
                high_freq_factor=numbers.number("high_freq_factor"),
                original_context=values.integer("original_max_position_embeddings", default=inside),
            )
    values.refuse(name, f"rotary scaling {kind!r} is not supported (default, linear, llama3 are)")


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a setting that jaxspec does not know asks for nothing: absent, off, zero, or a factor of one."""
    if value is None or value in (0, "") or value == [] or value == {}:
        return True
    return isinstance(value, float) and math.isclose(value, 1) and any(word in key for word in _FACTOR_WORDS)
