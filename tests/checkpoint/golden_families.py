"""The tiny models whose logits are in tests/golden/families.json; tools/make_family_golden.py makes the file."""

import functools

import numpy as np
from make import random_tensors, tiny_config

from jaxspec.models.config import RopeConfig
from jaxspec.models.families import FAMILIES

_SLIDING = tuple((index + 1) % 6 != 0 for index in range(7))

# Changes of `tiny_config`, by name; the family is the name's part before a colon.
GOLDEN = {
    "llama": {},
    "llama:yarn": {"rope": RopeConfig(1e4, "yarn", 4.0, original_context=32)},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "gemma2": {},
    "gemma3_text": {"num_layers": 7, "sliding_layers": _SLIDING},
    "phi3": {},
    "olmo2": {},
    "gpt_oss": {},
    **{name: {} for name in ("olmo3", "seed_oss", "smollm3", "exaone4", "glm4", "granite", "granitemoehybrid")},
    "ministral3": {},
    "lfm2": {},
}
TOKENS = np.random.default_rng(3).integers(0, 72, 24).tolist()


def config_of(name):
    """Geometry of a golden model."""
    return tiny_config(name.partition(":")[0], **GOLDEN[name])


@functools.cache
def tensors_of(name):
    """Weights of unit gain under Hugging Face names, and norm scales about one as the family stores them."""
    cfg = config_of(name)
    stored = 0 if cfg.family.startswith("gemma") else 1
    tensors = random_tensors(cfg)
    for key, tensor in tensors.items():
        if key.endswith("norm.weight"):
            tensors[key] = stored + 3 * tensor
        elif key.endswith("sinks"):
            tensors[key] = 10 * tensor
        elif tensor.ndim == 2:
            tensors[key] = tensor * np.float32(10 / tensor.shape[1] ** 0.5)
    return tensors


def hf_tensors(name):
    """The tensors of a Hugging Face folder, those together that a family keeps in one."""
    cfg, tensors = config_of(name), dict(tensors_of(name))
    family = FAMILIES[cfg.family]
    for index in range(cfg.num_layers if cfg.experts is None else 0):
        for whole, parts in family.fused_tensors(cfg).items():
            names = [f"model.layers.{index}.{family.tensor_name(part)}.weight" for part in (whole, *dict(parts))]
            tensors[names[0]] = np.concatenate([tensors.pop(part) for part in names[1:]])
    return tensors
