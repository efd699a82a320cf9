"""The supported families of models, by `model_type` of Hugging Face's `config.json`.

A new dense family is one file in this folder and one line in `_MODULES`.
"""

import importlib

from jaxspec.models.families.base import Family

_MODULES = ("llama", "mistral", "qwen2", "qwen3")


def load_family(module: str) -> Family:
    """The `FAMILY` that a module of this folder describes."""
    return importlib.import_module(f"{__name__}.{module}").FAMILY


FAMILIES: dict[str, Family] = {family.name: family for family in map(load_family, _MODULES)}
