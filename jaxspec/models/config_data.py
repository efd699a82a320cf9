"""A `ModelConfig` as plain data: what TOML presets and native checkpoints hold.

The keys are the field names; nothing is coerced, and nothing unknown is passed over.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.errors import ConfigError, suggest
from jaxspec.models.config import ModelConfig


def config_to_data(cfg: ModelConfig) -> dict[str, Any]:
    """Plain data that `config_from_data` reads back; tuples become lists, as in JSON."""
    data = dataclasses.asdict(cfg)
    data["sliding_layers"] = list(cfg.sliding_layers)
    data["head_ids"] = list(cfg.head_ids)
    if cfg.units is None:
        del data["units"]  # what most models have no word for
    else:
        data["units"] = {"attention": list(cfg.units.attention), "mlp": list(cfg.units.mlp)}
    return data


def config_from_data(data: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a geometry strictly.

    Args:
      data: field names and values, as parsed from TOML or JSON.
      where: names the place in errors.

    Raises:
      ConfigError: a key is missing, unknown (the nearest known one is named) or of the wrong type, or the geometry
        cannot be built.
    """
    return _read_dataclass(ModelConfig, data, where)


def _read_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: must be a table of named values, got {data!r}")
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}; {suggest(key, hints)}")
    fields = dataclasses.fields(kind)
    required = [f.name for f in fields if f.default is dataclasses.MISSING]
    missing = [name for name in required if name not in data]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    values = {key: _read_value(hints[key], value, f"{where}: {key}") for key, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_value(hint: Any, value: Any, where: str) -> Any:
    """One value as its annotation says; JSON's integers pass as floats, but booleans never as numbers."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_dataclass(hint, value, where)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (int, bool) and type(value) is hint:
        return value
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and isinstance(value, str) and value in choices:
        return value
    if origin is types.UnionType and types.NoneType in choices:
        return None if value is None else _read_value(choices[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_read_value(choices[0], item, where) for item in value)
    wanted = f"one of {', '.join(choices)}" if origin is Literal else getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{where} must be {wanted}, got {value!r}")
