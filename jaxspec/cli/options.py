"""Options of a run from three places: a TOML preset, `--set name=value`, the command line; the later wins."""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError


def merge_options(
    given: Mapping[str, Any], preset: Path | None, assignments: Iterable[str], known: Iterable[str]
) -> dict[str, Any]:
    """Merge the three sources.

    Args:
      given: options from the command line; None means not given.
      preset: a TOML file of option names (with underscores) and values.
      assignments: "name=value" pairs, the value written as in TOML; a bare word is a string.
      known: option names that a preset may set.

    Raises:
      ConfigError: an unreadable preset, an unknown name (the nearest known one is given) or a malformed pair.
    """
    names = set(known)
    merged: dict[str, Any] = {}
    if preset is not None:
        merged.update(_checked(_read_preset(preset), names, str(preset)))
    for pair in assignments:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r} must have the form name=value")
        merged.update(_checked({name.strip().replace("-", "_"): _parse(value.strip())}, names, "--set"))
    merged.update({name: value for name, value in given.items() if value is not None})
    return merged


def _read_preset(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"preset {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"preset {path} is not TOML: {error}") from error


def _checked(options: Mapping[str, Any], known: set[str], where: str) -> Mapping[str, Any]:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"{where}: unknown option {name!r}{hint}")
    return options


def _parse(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
