"""Checks that the settings of several methods share."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.config import LARGEST_INT
from jaxspec.errors import ConfigError, JaxspecError, shown
from jaxspec.methods.core.round import Models
from jaxspec.models.recurrent import refuse_tree

_LONGEST_LIST, _LARGEST_NUMBER = 1000, 2**63


def check_layers(method: Any, models: Models) -> None:
    """Raise `ConfigError` where recurrent layers, or layers of two kinds, are asked for what they cannot do yet."""
    for role, model in zip(("target", "draft"), models, strict=True):
        if model is None or (model.cfg.recurrent is None and model.cfg.kinds is None):
            continue
        asked = {
            "offload": model.resident_layers is not None,
            "several processes": jax.process_count() > 1,
            f"method {method.name!r}, which leaves out layers": method.own_layers,
        }
        if model.cfg.recurrent is not None:
            asked |= {"numerics 'exact'": model.plan.kernels.exact}
            refuse_tree(model.cfg.recurrent, method.num_rows if role == "target" else 0, method.max_path - 1)
        else:
            heads, degree = {model.cfg.layer_heads(index)[0] for index in model.cfg.attention_layers}, model.plan.tensor
            asked |= {f"a split over {degree} devices": degree > 1 and (len(heads) > 1 or min(heads) % degree > 0)}
        which = "recurrent layers" if model.cfg.recurrent is not None else "layers of two kinds"
        for what, is_asked in asked.items():
            if is_asked:
                raise ConfigError(f"the {role} has {which}, which {what} does not support yet")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ConfigError` unless the value is one of some words."""
    if not isinstance(value, str) or value not in choices:
        words = " or ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{name} must be {words}, got {shown(value)}")


def log_threshold(name: str, probability: Any) -> float:
    """Logarithm of a probability, -inf for 0; raises `ConfigError` outside [0, 1]."""
    if not _is_number(probability) or not 0 <= probability <= 1:
        raise ConfigError(f"{name} must be a probability between 0 and 1, got {shown(probability)}")
    return math.log(float(probability)) if float(probability) > 0 else -math.inf


def check_settings(method: Any, own_checks: Callable[[], object]) -> None:
    """Run a method's own checks of its settings, after those that all methods share.

    Numbers have a size that a message can quote, a setting that lists numbers does, and flags are true or false.
    `ConfigError` also where the own checks fail on a value in a way that they did not foresee.
    """
    types = {field.name: str(field.type) for field in dataclasses.fields(method)}
    for name, kind in types.items():
        value = getattr(method, name)
        if isinstance(value, numbers.Integral) and abs(int(value)) > LARGEST_INT:
            raise ConfigError(f"{name} must be at most {LARGEST_INT}, got {shown(value)}")
        if kind.startswith(("tuple", "Sequence", "collections.abc.Sequence")):
            check_numbers(name, value)
        if kind in ("bool", "<class 'bool'>") and not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {shown(value)}")
    try:
        own_checks()
    except JaxspecError:
        raise
    except Exception as error:  # whatever a value does when it is compared or printed
        given = {name: getattr(method, name) for name in types}
        raise ConfigError(f"the settings of method {method.name!r} do not fit: {shown(given)}: {error}") from error


def check_numbers(name: str, value: object) -> None:
    """Raise `ConfigError` unless the value lists numbers, at most 1,000."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | np.ndarray):
        raise ConfigError(f"{name} must be a list of numbers, got {shown(value)}")
    if len(value) > _LONGEST_LIST:
        raise ConfigError(f"{name} must have at most {_LONGEST_LIST} numbers, got {len(value)}")
    for number in value:
        if not _is_number(number) or not abs(number) < _LARGEST_NUMBER:
            raise ConfigError(f"{name} must be a list of numbers, got {shown(number)} in it")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_draft(name: str, given: bool) -> None:
    """Raise `ConfigError` unless a method that drafts with a model has one."""
    if not given:
        raise ConfigError(f"method {name!r} needs a draft model: give one (draft=..., --draft-model)")


def check_branch(name: str, value: int, models: Models) -> None:
    """Raise `ConfigError` where a node would have more children than the draft has tokens."""
    assert models.draft is not None
    tokens = models.draft.num_tokens
    if value > tokens:
        raise ConfigError(f"{name} {value} exceeds the {tokens} tokens that the draft can propose")


def check_same_devices(name: str, models: Models) -> None:
    """Raise `ConfigError` unless draft and target take turns on the same devices."""
    if models.draft is not None and models.draft.plan.devices != models.target.plan.devices:
        raise ConfigError(f"method {name!r} runs the draft on the target's devices; here it has its own, for swiftspec")
