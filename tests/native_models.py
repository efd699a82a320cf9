"""Tiny native checkpoints, for tests of the format and of what reads it."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec.checkpoint.native.files import describe_files
from jaxspec.checkpoint.native.manifest import MANIFEST, manifest_checksum, write_manifest
from jaxspec.checkpoint.native.write import write_arrays
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import declare_leaves, declare_params
from jaxspec.models.quantization import as_storage

LLAMA = ModelConfig("llama", 2, 16, 24, 6, 3, 4, 50, 64)
MISTRAL = ModelConfig("mistral", 2, 16, 24, 4, 2, 4, 48, 64, sliding_window=8, sliding_layers=(True, False))
QWEN2 = ModelConfig("qwen2", 2, 16, 24, 4, 2, 4, 48, 64, tied=True, qkv_bias=True)
QWEN3 = ModelConfig("qwen3", 2, 16, 24, 4, 2, 4, 48, 64, tied=True, qk_norm=True)

EOS_IDS = (2, 5)


def random_leaves(cfg: ModelConfig, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Unpadded parameters by leaf name."""
    rng = np.random.default_rng(seed)
    infos = declare_leaves(cfg, jnp.dtype(dtype))
    return {name: rng.normal(size=info.shape).astype(info.dtype) for name, info in infos.items()}


def write_native(folder: Path, cfg: ModelConfig, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a native checkpoint without a tokenizer; returns its arrays."""
    arrays = random_leaves(cfg, dtype, seed)
    folder.mkdir(parents=True)
    write_arrays(folder, declare_params(cfg, jnp.dtype(dtype)), lambda name, _: arrays[name])
    write_manifest(folder, cfg, as_storage(dtype), EOS_IDS)
    return arrays


def write_model(folder: Path, cfg: ModelConfig) -> str:
    """Write a native checkpoint with a tokenizer; returns its folder."""
    write_native(folder, cfg)
    write_tokenizer(folder, cfg.vocab_size)
    return str(folder)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The smallest tokenizer that loads: word w<i> is token i."""
    words = models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    list_files(folder)


def list_files(folder: Path) -> None:
    """Let the manifest, if there is one, list the files that are there now."""
    if (folder / MANIFEST).exists():
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"] = {name: entry for name, entry in describe_files(folder).items() if name != MANIFEST}
        manifest["checksum"] = manifest_checksum(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))


def without_kernel_note(stderr):
    """The output of a command, less the one line that says why there are no native kernels, where there are none."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "no native CPU kernels" not in line)
