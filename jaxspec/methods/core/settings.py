"""Checks that the settings of several methods share, and settings that were renamed."""

import functools
import math
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxspec.config import check_int
from jaxspec.errors import ConfigError
from jaxspec.methods.core.round import Models

Settings = TypeVar("Settings", bound=type)


def renamed_settings(**renamed: tuple[str, int]) -> Callable[[Settings], Settings]:
    """Class decorator: keep the former names of settings, with a warning.

    Each former name maps to the present one, and what has to be added to a value given under the former.
    """

    def decorate(cls: Settings) -> Settings:
        create = cls.__init__

        @functools.wraps(create)
        def init(self: Any, *args: Any, **settings: Any) -> None:
            for old, (new, shift) in renamed.items():
                if old not in settings:
                    continue
                if new in settings:
                    raise ConfigError(f"{new} and its former name {old} are both given; leave {old} out")
                value = settings.pop(old)
                is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
                settings[new] = value + shift if is_number else value
                counts = f"; it does not count the root: {new} = {old} - {-shift}" if shift else ""
                warnings.warn(f"{old} is now called {new}{counts}", FutureWarning, stacklevel=2)
            create(self, *args, **settings)

        cls.__init__ = init
        cls.renamed = dict(renamed)
        return cls

    return decorate


def renamed_of(cls: type) -> Mapping[str, tuple[str, int]]:
    """Former names of a method's settings; see `renamed_settings`."""
    return getattr(cls, "renamed", {})


def check_range(name: str, value: object, low: int, high: int) -> None:
    """Raise `ConfigError` unless the value is an integer between two limits, both allowed."""
    if check_int(name, value, low) > high:
        raise ConfigError(f"{name} must be at most {high}, got {value}")


def check_flag(name: str, value: object) -> None:
    """Raise `ConfigError` unless the value is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def log_threshold(name: str, probability: object) -> float:
    """Logarithm of a probability, -inf for 0; raises `ConfigError` outside [0, 1]."""
    if isinstance(probability, bool) or not isinstance(probability, numbers.Real) or not 0 <= float(probability) <= 1:
        raise ConfigError(f"{name} must be a probability between 0 and 1, got {probability!r}")
    return math.log(float(probability)) if float(probability) > 0 else -math.inf


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
