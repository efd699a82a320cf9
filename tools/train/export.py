"""Writing a trained draft: a native checkpoint that shares its target's embedding, or an EAGLE-3 head's folder."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jaxspec.checkpoint.convert import check_destination, check_quantize, choose_storage, write_checkpoint
from jaxspec.checkpoint.eagle import write_eagle3
from jaxspec.checkpoint.load import Weights, open_weights
from jaxspec.checkpoint.native.manifest import MANIFEST, NativeCheckpoint
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import ArrayInfo, Params, declare_params, is_info, leaf_name
from jaxspec.models.quantization import Storage


def save_draft(
    dst: str | Path,
    params: Params,
    cfg: ModelConfig,
    vocabulary: str,
    eos_ids: Sequence[int] = (),
    quantize: str | None = None,
) -> NativeCheckpoint:
    """Write a draft that shares its target's embedding, all or nothing, as `jaxspec.checkpoint.convert.convert` does.

    Args:
      dst: a folder that does not exist yet, in one that does.
      params: its own parameters (`declare_params`), float32.
      cfg: its geometry, with `shares_embedding`.
      vocabulary: digest of the target's vocabulary, see `jaxspec.files.vocabulary_digest`.
      eos_ids: token ids that end a text; the target's decide.
      quantize: see `convert`.

    Raises:
      CheckpointError, ConfigError: as `convert`.
    """
    dst = Path(dst)
    check_destination(dst)
    if not cfg.shares_embedding:
        raise ConfigError("this model has an embedding of its own (shares_embedding is False): it is no draft to save")
    if not isinstance(vocabulary, str):
        raise ConfigError(f"vocabulary must be the digest of the target's, got {vocabulary!r}")
    if bad := [token for token in eos_ids if not 0 <= token < cfg.vocab_size]:
        raise ConfigError(f"eos_ids must be token ids below {cfg.vocab_size}, got {bad[0]}")
    check_quantize(quantize)
    leaves = {leaf_name(path): np.asarray(leaf) for path, leaf in jax.tree.flatten_with_path(params)[0]}
    ends, storage = tuple(eos_ids), Storage("float32")
    source = Weights(dst, cfg, ends, storage, lambda placement: params, lambda name, info: leaves[name], vocabulary)
    return write_checkpoint(dst, source, cfg, choose_storage(source, cfg, "auto", quantize))


def is_native(path: Path) -> bool:
    """Whether a folder holds a native checkpoint."""
    return (path / MANIFEST).is_file()


def read_native(path: Path, vocabulary: str) -> tuple[ModelConfig, Params]:
    """Geometry and weights, float32, of a native draft that shares the embedding of a target.

    Raises:
      typer.BadParameter: it is damaged, or no draft of the target with the digest `vocabulary`.
    """
    try:
        weights = open_weights(path)
        if weights.vocabulary is None:
            raise typer.BadParameter(f"{path}: does not name the target whose embedding it shares")
        if weights.vocabulary != vocabulary:
            raise typer.BadParameter(f"{path}: is a draft of another target")

        def read(place: tuple[Any, ...], info: ArrayInfo) -> jax.Array:
            return jnp.asarray(weights.read(leaf_name(place), info), jnp.float32)

        declared = declare_params(weights.config, "float32")
        return weights.config, jax.tree.map_with_path(read, declared, is_leaf=is_info)
    except JaxspecError as error:
        raise typer.BadParameter(str(error)) from error


def begin_with_native(begun: Params, cfg: ModelConfig, path: Path, vocabulary: str) -> tuple[Params, bool]:
    """The weights `begun` of a draft with those of a native one in their place, and whether that is fed states.

    Raises:
      typer.BadParameter: it is no draft of this target, or differs in its layers or in what it is fed.
    """
    found_cfg, found = read_native(path, vocabulary)
    if found_cfg.features is not None and found_cfg.features != cfg.features:
        raise typer.BadParameter(f"--begin-with {path}: is fed other states, or in another way")
    taken = {name: found[name] for name in begun if name in found}
    if jax.tree.map(jnp.shape, taken) != jax.tree.map(jnp.shape, {name: begun[name] for name in taken}):
        has, wants = len(found["layers"]), len(begun["layers"])
        raise typer.BadParameter(f"--begin-with {path}: has {has} layers of other shapes, the draft {wants}")
    return begun | taken, found_cfg.features is not None


def save_head(dst: str | Path, cfg: ModelConfig, leaves: Mapping[str, np.ndarray]) -> int:
    """Write an EAGLE-3 head in SafeAILab's layout, all or nothing; returns its size in bytes.

    Args:
      dst: a folder that does not exist yet, in one that does.
      cfg: its geometry.
      leaves: see `write_eagle3`.

    Raises:
      CheckpointError: the folder exists, or the one that it is to be in does not.
      ConfigError: the layout cannot express the geometry.
    """
    dst = Path(dst)
    check_destination(dst)
    partial = dst.with_name(f".{dst.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_eagle3(partial, cfg, leaves)
        os.replace(partial, dst)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(file.stat().st_size for file in dst.iterdir())
