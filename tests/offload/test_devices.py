"""Models that a TPU's memory does not hold are refused before anything is compiled or loaded."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from native_models import write_model

import jaxspec
from jaxspec import llm as opening
from jaxspec.errors import ConfigError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import NO_STORE
from jaxspec.methods.core.round import Models
from jaxspec.methods.specexec import SpecExec
from jaxspec.models.config import ModelConfig
from jaxspec.models.presets import load_preset
from jaxspec.offload.room import check_devices, fits_devices, memory_limits
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement
from pallas_kernels.registry import Kernels

V5E = int(15.75 * 2**30)  # what the compiler says that it has
ATTENTION = (("tree_attention", "mosaic_tpu"),)


def place(preset, count=1, **kernels):
    """A model in bfloat16 on so many devices, in the form of a TPU."""
    plan = MeshPlan(tuple(jax.devices()[:count]), Kernels("xla", "tpu", **kernels))
    return Placement(load_preset(preset), plan, jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize(("devices", "tokens", "fits"), [(1, 1024, True), (1, 16384, False), (2, 8192, True)])
def test_a_model_of_8b_on_v5e(devices, tokens, fits):
    models, method = Models(place("llama-3-8b", devices)), Autoregressive()
    limits = dict.fromkeys(jax.devices()[:devices], V5E)
    assert fits_devices(limits, False, method, models, NO_STORE, tokens) == fits
    if not fits:
        with pytest.raises(ConfigError, match="method ar and texts of 16384 tokens take .* GiB of .*, which has 15.8"):
            check_devices(limits, False, method, method.bind(models, tokens), models, tokens)


def test_a_kernel_that_writes_no_scores_takes_less():
    limits, plain = {jax.devices()[0]: int(16.7 * 2**30)}, Autoregressive()
    alone = [Models(place("llama-3-8b", **kernels)) for kernels in ({}, {"implementations": ATTENTION})]
    assert [fits_devices(limits, False, plain, models, NO_STORE, 8192) for models in alone] == [False, True]


def test_a_draft_of_the_targets_own_arrays_takes_none():
    pair = Models(place("llama-3-8b"), place("llama-3.2-1b"))
    limits = {jax.devices()[0]: V5E}
    assert [fits_devices(limits, lends, SpecExec(16), pair, NO_STORE, 512) for lends in (False, True)] == [False, True]


def test_what_does_not_fit_is_not_loaded(tmp_path, monkeypatch):
    write_model(tmp_path / "model", ModelConfig("llama", 1, 32, 40, 2, 1, 16, 50, 128))
    monkeypatch.setattr(opening, "memory_limits", lambda models: {models.target.plan.devices[0]: 1000})
    loaded = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(opening.OpenModels, "load", loaded)
    with pytest.raises(ConfigError, match="which has 1000 B .weights .*: give a smaller max_context"):
        jaxspec.LLM(tmp_path / "model", method="ar", kernels="xla")


def test_only_tpus_say_what_they_have():
    assert memory_limits(Models(place("llama-3-8b"))) == {}
