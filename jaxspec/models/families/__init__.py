"""The supported families of models, by `model_type` of Hugging Face's `config.json`.

A new family is one file in this folder and one line in `_MODULES`.
"""

import importlib

from jaxspec.models.families.base import Family

_MODULES = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3", "phi3", "olmo2",
    "gemma4", "gpt_oss", "olmo3", "seed_oss", "smollm3", "exaone4", "glm4", "granite", "granitemoehybrid", "ministral3",
    "lfm2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next",
)  # fmt: skip

# Why some types of models and GGUF architectures are not supported, for errors and docs/models.md.
_REASONS = {
    "its latent attention (MLA) needs a cache without heads":
        "deepseek_v2 deepseek_v3 deepseek_v32 deepseek2 kimi_k2 mistral4",
    "its recurrent layers need a cache that jaxspec lacks":
        "granitehybrid "
        "mamba mamba2 jamba bamba falcon_h1 falcon-h1 nemotron_h",
    "its mixture of experts beside short convolutions is not supported, lfm2 is": "lfm2_moe lfm2moe",
    "its text model is that of gemma4, which is supported, but its folder was never seen":
        "gemma4_unified gemma4_unified_text",
    "its mixture of experts is not supported, dense models are": "granitemoe granitemoeshared glm4_moe glm4moe",
    "its chunked attention, which some layers have without rotary embedding, is not supported": "llama4 llama4_text",
    "its first generation is not supported, gemma2 and gemma3_text are": "gemma",
}  # fmt: skip
REFUSED = {name: why for why, names in _REASONS.items() for name in names.split()}


def load_family(module: str) -> Family:
    """The `FAMILY` that a module of this folder describes."""
    return importlib.import_module(f"{__name__}.{module}").FAMILY


def refusal(name: object) -> str:
    """Why a type of model or a GGUF architecture is not supported, to begin a list of those that are."""
    return f"{REFUSED[name]}; " if isinstance(name, str) and name in REFUSED else ""


FAMILIES: dict[str, Family] = {family.name: family for family in map(load_family, _MODULES)}
