"""Checks that the settings of several methods share."""

import math
import numbers

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.methods.base import Models


def check_range(name: str, value: object, low: int, high: int) -> None:
    """An integer between two limits, both allowed.

    Raises:
      ConfigError: it is not one.
    """
    if check_int(name, value, low) > high:
        raise ConfigError(f"{name} must be at most {high}, got {value}")


def log_threshold(name: str, probability: object) -> float:
    """Logarithm of a probability in [0, 1]; -inf for 0.

    Raises:
      ConfigError: it is not one.
    """
    if isinstance(probability, bool) or not isinstance(probability, numbers.Real) or not 0 <= float(probability) <= 1:
        raise ConfigError(f"{name} must be a probability between 0 and 1, got {probability!r}")
    return math.log(float(probability)) if float(probability) > 0 else -math.inf


def check_draft(name: str, given: bool) -> None:
    """A method that drafts with a model has one.

    Raises:
      ConfigError: there is none.
    """
    if not given:
        raise ConfigError(f"method {name!r} needs a draft model: give one (draft=..., --draft-model)")


def check_branch(name: str, value: int, models: Models) -> None:
    """A node has no more children than the draft has tokens.

    Raises:
      ConfigError: it would have.
    """
    assert models.draft is not None
    tokens = models.draft.num_tokens
    if value > tokens:
        raise ConfigError(f"{name} {value} exceeds the {tokens} tokens that the draft can propose")


def check_same_devices(name: str, models: Models) -> None:
    """Draft and target take turns on the same devices.

    Raises:
      ConfigError: the draft has its own.
    """
    if models.draft is not None and models.draft.plan.devices != models.target.plan.devices:
        raise ConfigError(f"method {name!r} runs the draft on the target's devices; here it has its own, for swiftspec")
