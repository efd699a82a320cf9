"""A tiny target and a draft that is like it, as checkpoints on disk, for processes that load them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from native_models import write_tokenizer
from tiny_models import RandomSource

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.checkpoint.native.manifest import write_manifest
from jaxspec.checkpoint.native.write import write_arrays
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import declare_params
from jaxspec.models.quantization import as_storage

TARGET = ModelConfig("qwen3", 3, 32, 64, 8, 4, 8, 96, max_context=256, qk_norm=True)


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a target and its first two layers as the draft; returns both folders."""
    source = RandomSource(TARGET, seed=3)
    arrays = {name: recipe.read(source) for name, recipe in recipes(TARGET).items()}  # pyright: ignore[reportArgumentType]
    paths = folder / "target", folder / "draft"
    for path, layers in zip(paths, (TARGET.num_layers, TARGET.num_layers - 1), strict=True):
        _write(path, dataclasses.replace(TARGET, num_layers=layers), arrays)
    return paths


def _write(path: Path, cfg: ModelConfig, arrays: dict[str, np.ndarray]) -> None:
    path.mkdir(parents=True)
    write_arrays(path, declare_params(cfg, jnp.float32), lambda name, _: arrays[name])
    write_manifest(path, cfg, as_storage(jnp.float32), ())
    write_tokenizer(path, cfg.vocab_size)
