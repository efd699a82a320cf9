"""Logits of every family are those of Hugging Face transformers, from a Hugging Face folder and from a GGUF file."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_families import GOLDEN, TOKENS, config_of, hf_tensors, tensors_of
from make import write_gguf, write_hf
from tiny_models import empty_cache, on_one_device, relative_error, step_logits

from jaxspec.checkpoint.load import open_weights
from jaxspec.models.families import FAMILIES
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

EXPECTED = json.loads((Path(__file__).parents[1] / "golden" / "families.json").read_text(encoding="utf-8"))


def logits_of(path):
    """Logits after each token, decoded one by one."""
    weights = open_weights(path)
    params = weights.load(Placement(weights.config, plan_mesh(1), np.dtype("float32")))
    return decoder(weights.config)(params, jnp.asarray(TOKENS, jnp.int32))


@functools.lru_cache(maxsize=1)
def decoder(cfg):
    """Decoding of one configuration, compiled once for both formats."""

    def run(params, tokens):
        def step(cache, token):
            logits, cache = step_logits(params, cfg, token, cache)
            return cache, logits

        return jax.lax.scan(step, empty_cache(cfg, 64), tokens)[1]

    return on_one_device(run)


def as_in_gguf(name):
    """The tensors that llama.cpp's converter writes: norm scales as they are multiplied with."""
    added = np.float32(FAMILIES[config_of(name).family].norm_offset)
    return {key: tensor + added * key.endswith("norm.weight") for key, tensor in tensors_of(name).items()}


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_from_both_formats(tmp_path, name):
    cfg = config_of(name)
    folder = write_hf(tmp_path / "hf", cfg, hf_tensors(name))
    assert relative_error(logits_of(folder)[::4], EXPECTED[name]) < 1e-4
    gguf = write_gguf(tmp_path / "model.gguf", cfg, as_in_gguf(name))
    assert relative_error(logits_of(gguf)[::4], EXPECTED[name]) < 1e-4


def test_the_golden_logits_differ():
    rows = {name: np.array(EXPECTED[name]) for name in GOLDEN}
    assert all(np.abs(row).max() > 0.5 for row in rows.values())
    assert np.abs(rows["llama"] - rows["llama:yarn"]).max() > 1e-2
