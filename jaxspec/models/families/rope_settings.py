"""The rotary settings of `config.json`, as transformers reads them.

Both spellings are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import CheckpointError
from jaxspec.models.families.values import ConfigValues
from jaxspec.models.rope import RopeConfig, longrope_attention_factor, yarn_attention_factor

_CONTEXT, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Keys that some kind of rotary scaling reads; for the others they have no effect in transformers.
ROPE_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", _CONTEXT,
    PARTIAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor",
})  # fmt: skip
_SUPPORTED = "default, linear, dynamic, llama3, yarn, longrope, and proportional for Gemma 4"


def find_rope(values: ConfigValues) -> tuple[str, dict[str, Any]]:
    """The key of the rotary settings, and the object under it; empty where there is none."""
    old, new = values.get("rope_scaling", {}), values.get("rope_parameters", {})
    name = "rope_parameters" if new else "rope_scaling"
    if old and new and old != new:
        values.refuse("rope_scaling", "but rope_parameters is given too, and differs")
    rope = new or old or {}
    if not isinstance(rope, dict):
        values.refuse(name, "a JSON object is needed", CheckpointError)
    return name, rope


def read_ropes(
    values: ConfigValues, max_context: int, default_theta: float, local_theta: float | None = None
) -> dict[str, RopeConfig]:
    """The rotary embedding of layers that see everything and that of layers with a window, as `ModelConfig` has them.

    `rope_scaling` is of the former; transformers 5 writes one object for each kind. `local_theta` is what an absent
    theta of the latter means, where that is not the theta of the former.
    """
    name, rope = find_rope(values)
    nested = {_LOCAL, _GLOBAL} & set(rope)
    kinds = {_GLOBAL: rope} if not nested else {kind: rope.get(kind) or {} for kind in (_GLOBAL, _LOCAL)}
    if nested and (set(rope) != nested or not all(isinstance(part, dict) for part in kinds.values())):
        values.refuse(name, f"an object with {_GLOBAL!r} and {_LOCAL!r} is needed", CheckpointError)
    theta = values.number("rope_theta", default=default_theta)
    local_theta = theta if local_theta is None else local_theta
    return {
        "rope": read_settings(values, name, kinds[_GLOBAL], max_context, theta),
        "local_rope": read_settings(values, name, kinds.get(_LOCAL, {}), max_context, local_theta),
    }


def read_settings(
    values: ConfigValues, name: str, rope: Mapping[str, Any], max_context: int, default_theta: float,
    whole: bool = True,
) -> RopeConfig:  # fmt: skip
    """One rotary embedding from its settings, which `values` has under the key `name`.

    `whole` refuses settings by which a part of each head turns; else the result is without that part.

    "dynamic" scaling changes nothing within `max_position_embeddings`, which is where a model's context ends here.
    "longrope" is read with its short factors, which hold within the original context: transformers takes the long ones
    as soon as a text is longer, and turns the keys that are cached by then no more. The context ends there, too.
    """
    for key, value in rope.items():
        if key not in ROPE_KEYS and not is_neutral(key, value):
            values.refuse(name, f"its key {key!r} is not supported")
    for key, part in ((PARTIAL, values), (name, rope)):
        if part.get(PARTIAL) not in (None, 1) and whole:
            values.refuse(key, "only rotary embedding of whole heads is supported")
    numbers = ConfigValues(values.path, rope)
    theta = numbers.number("rope_theta", default=default_theta)

    def original_context() -> int:
        # A number beside the rotary settings wins over the one inside, as in transformers.
        return values.integer(_CONTEXT, default=numbers.integer(_CONTEXT, default=max_context))

    match kind := rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", numbers.number("factor"))
        case "dynamic":
            if numbers.number("factor") < 1:
                numbers.refuse("factor", "a factor of at least 1 is needed")
            return RopeConfig(theta)
        case "llama3":
            low, high = numbers.number("low_freq_factor"), numbers.number("high_freq_factor")
            return RopeConfig(theta, "llama3", numbers.number("factor"), low, high, original_context())
        case "yarn":
            return _read_yarn(numbers, theta, max_context, original_context())
        case "longrope" | "su":
            return _read_longrope(numbers, theta, max_context, original_context())
    values.refuse(name, f"rotary scaling {kind!r} is not supported ({_SUPPORTED} are)")


def _read_yarn(numbers: ConfigValues, theta: float, max_context: int, original: int) -> RopeConfig:
    factor = numbers.number("factor", default=max_context / original)
    scale, scale_all = numbers.number("mscale", default=0.0), numbers.number("mscale_all_dim", default=0.0)
    attention = yarn_attention_factor(factor)
    if scale and scale_all:
        grown = math.log(factor) if factor > 1 else 0.0
        attention = (0.1 * scale * grown + 1) / (0.1 * scale_all * grown + 1)
    return RopeConfig(
        theta, "yarn", factor, original_context=original,
        beta_fast=numbers.number("beta_fast", default=32.0), beta_slow=numbers.number("beta_slow", default=1.0),
        truncate=numbers.get("truncate", True) is not False,
        attention_factor=numbers.number("attention_factor", default=attention),
    )  # fmt: skip


def _read_longrope(numbers: ConfigValues, theta: float, max_context: int, original: int) -> RopeConfig:
    divisors = {}
    for key in ("short_factor", "long_factor"):
        listed = numbers.get(key)
        if not isinstance(listed, list) or not listed or not all(type(n) in (int, float) and n > 0 for n in listed):
            numbers.refuse(key, "a list of positive numbers is needed", CheckpointError)
        divisors[key] = tuple(map(float, listed))
    factor = numbers.number("factor", default=max_context / original)
    attention = numbers.number("attention_factor", default=longrope_attention_factor(factor, original))
    return RopeConfig(
        theta, "longrope", original_context=original, attention_factor=attention, divisors=divisors["short_factor"]
    )


# An unknown key of such a name with the value 1.0 multiplies by one.
_FACTOR_WORDS = ("multiplier", "scale", "scaling", "factor")


def is_neutral(key: str, value: Any) -> bool:
    """Whether a setting that jaxspec does not know asks for nothing: absent, off, zero, or a factor of one."""
    is_one = isinstance(value, float) and math.isclose(value, 1)
    return value in (None, 0, "", [], {}) or (is_one and any(word in key for word in _FACTOR_WORDS))
