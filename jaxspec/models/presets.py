"""Published model geometries by name, from configs/models: for sizing, benchmarks and random weights."""

import importlib.resources
import tomllib

from jaxspec.errors import ConfigError, suggest
from jaxspec.models.config import ModelConfig, config_from_data

_FOLDER = importlib.resources.files("jaxspec_configs").joinpath("models")
_SUFFIX = ".toml"


def list_presets() -> list[str]:
    """Names of all presets, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX))


def load_preset(name: str) -> ModelConfig:
    """Geometry of a preset, such as "llama-3-8b".

    Raises:
      ConfigError: there is no such preset (the nearest name is given), or its file is wrong.
    """
    if name not in (known := list_presets()):
        raise ConfigError(f"no geometry preset {name!r}; {suggest(name, known)}")
    where = f"geometry preset {name!r}"
    try:
        data = tomllib.loads(_FOLDER.joinpath(name + _SUFFIX).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    return config_from_data(data, where)
