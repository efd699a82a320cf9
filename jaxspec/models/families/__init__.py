"""The supported families of models, by `model_type` of Hugging Face's `config.json`.

A new family is one file in this folder and one line in `_MODULES`.
"""

import importlib

from jaxspec.models.families.base import Family

_MODULES = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3", "phi3", "olmo2",
    "gpt_oss",
)  # fmt: skip

# Why some types of models are not supported, for errors and docs/models.md.
REFUSED = {
    "deepseek_v2": "its latent attention (MLA) needs a cache without heads",
    "deepseek_v3": "its latent attention (MLA) needs a cache without heads",
    "llama4": "it takes images; its chunked attention and its layers without rotary embedding are not supported",
    "llama4_text": "its chunked attention and its layers without rotary embedding are not supported",
    "gemma": "its first generation is not supported, gemma2 and gemma3_text are",
    "gemma3": "it takes images; text models (gemma3_text) are supported",
}


def load_family(module: str) -> Family:
    """The `FAMILY` that a module of this folder describes."""
    return importlib.import_module(f"{__name__}.{module}").FAMILY


FAMILIES: dict[str, Family] = {family.name: family for family in map(load_family, _MODULES)}
