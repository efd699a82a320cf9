"""Options of a run from three places: a TOML preset, `--set name=value`, the command line; the later wins."""

import dataclasses
import tempfile
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError, suggest
from pallas_kernels import KERNEL_NAMES

OptionTypes = tuple[type, ...]

KERNELS_HELP = f"What multiplies and attends: {', '.join(KERNEL_NAMES[:-1])} or {KERNEL_NAMES[-1]}."


def merge_options(
    given: Mapping[str, Any], preset: Path | None, assignments: Iterable[str], known: Mapping[str, OptionTypes]
) -> dict[str, Any]:
    """Merge the three sources.

    Args:
      given: options from the command line; None means not given.
      preset: a TOML file of option names (with underscores) and values.
      assignments: "name=value" pairs, the value written as in TOML; a bare word is a string.
      known: the options that a preset may set, with the types of their values.

    Raises:
      ConfigError: an unreadable preset, an unknown name (the nearest known one is given), a value of another type or
        a malformed pair.
    """
    merged: dict[str, Any] = {}
    if preset is not None:
        merged.update(_checked(_read_preset(preset), known, str(preset)))
    for pair in assignments:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r} must have the form name=value")
        merged.update(_checked({name.strip().replace("-", "_"): _parse(value.strip())}, known, "--set"))
    merged.update({name: value for name, value in given.items() if value is not None})
    return merged


def setting_types(method: Any) -> dict[str, OptionTypes]:
    """Types that a method's settings may be given as, by the defaults of its fields."""

    def types(field: Any) -> OptionTypes:
        default = field.default
        if default is None:
            known = typing.get_args(field.type)
            return (bool,) if bool in known else (int, float) if float in known else (int,)
        if isinstance(default, float):
            return (int, float)
        return (list,) if isinstance(default, tuple) else (type(default),)

    # A class's own default, not the object's value: some fields are filled in from others.
    return {field.name: types(field) for field in dataclasses.fields(method)}


def check_output(path: Path | None, what: str = "--json") -> Path | None:
    """Minutes of work must not end at a folder that does not exist.

    Raises:
      ConfigError: `path` cannot be written; None and "-", standard output, can.
    """
    if path is not None and str(path) != "-" and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{what} {path} cannot be written: it must be a file in a folder that exists")
    return path


def check_new_file(path: Path | None, what: str) -> Path | None:
    """As `check_output`, for a file that is written beside its place first, so that it is there whole or not at all.

    Raises:
      ConfigError: `path` cannot be written; None can, standard output cannot.
    """
    if path is None:
        return None
    if str(path) == "-":
        raise ConfigError(f"{what} needs a file of its own: standard output has the text")
    check_output(path, what)
    if not path.exists() or path.is_file():
        try:
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
        except OSError as error:
            raise ConfigError(f"{what} {path} cannot be written: {error.strerror}") from error
    return path


def _read_preset(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"preset {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"preset {path} is not TOML: {error}") from error


def _checked(options: Mapping[str, Any], known: Mapping[str, OptionTypes], where: str) -> Mapping[str, Any]:
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown option {name!r}; {suggest(name, known)}")
        types = known[name]
        # In Python, but not to a user, True is an integer.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join("list (written [2,2])" if t is list else t.__name__ for t in types)
            raise ConfigError(f"{where}: {name} must be of type {wanted}, got {value!r}")
    return options


def _parse(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value
