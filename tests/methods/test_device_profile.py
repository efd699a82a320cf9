"""Measured speeds of splits: saved by the tuner, weighed by `auto`."""

import logging

import jax
import pytest
from native_models import LLAMA, write_model

from jaxspec.config import SamplingParams
from jaxspec.llm import LLM, internals
from jaxspec.loading import explain_offload
from jaxspec.methods.auto.profiles import load_profile, profile_path, save_profile, weigh_devices
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.base import Measured
from jaxspec.methods.swiftspec.settings import SwiftSpec

PLAIN = Measured("ar", {}, 8, None, 20.0)
CHAIN = Measured("chain", {"num_draft_tokens": 4}, 8, None, 25.0)
SPLIT = Measured("swiftspec", {"num_draft_tokens": 7, "depth": 5}, 6, 2, 31.2)


def weighed(tmp_path, *rows, devices=8):
    save_profile(tmp_path / "profiles" / "it.json", rows, "jaxspec-tune")
    return weigh_devices(tmp_path / "profiles" / "it.json", devices)


def test_the_fastest_placement_is_taken(tmp_path):
    found = weighed(tmp_path, PLAIN, CHAIN, SPLIT)
    assert found.best == SPLIT
    assert found.why == "measured: swiftspec on 6/2 devices, 31.2 tokens/s"
    assert found.next == "chain on 8 devices, 25.0 tokens/s"
    slow = Measured("swiftspec", {}, 6, 2, 25.3)
    assert weighed(tmp_path, PLAIN, CHAIN, slow).best == CHAIN, "a gain within the noise is none"
    assert weighed(tmp_path, SPLIT).next is None


def test_without_a_profile_nothing_is_weighed(tmp_path, caplog):
    for path in (None, tmp_path / "none.json"):
        found = weigh_devices(path, 8)
        assert found.best is None and "jaxspec-tune --method swiftspec measures one" in found.why
    assert weighed(tmp_path, SPLIT, devices=4).best is None
    assert caplog.text == ""
    damaged = tmp_path / "it.json"
    row = '{"method": "ar", "settings": {}, "target_devices": 1, "draft_devices": null, "tokens_per_s": -1}'
    for text in ("{", '{"format": "other"}', f'{{"format": "jaxspec device profile 1", "rows": [{row}]}}'):
        damaged.write_text(text)
        with caplog.at_level(logging.WARNING):
            assert load_profile(damaged) == []
        assert "is not used" in caplog.text
        caplog.clear()


def test_settings_of_ones_own_are_used_as_they_are(tmp_path):
    assert Auto(length=4).choose_devices(None, 8) is None and SwiftSpec().choose_devices(None, 8) is None


@pytest.mark.thorough
def test_auto_follows_the_profile(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    write_model(folder, LLAMA)
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda platform=None: two)
    split = Measured("swiftspec", {"num_draft_tokens": 3, "width": 2, "depth": 3}, 1, 1, 30.0)
    settings = dict.fromkeys(("dtype", "kernels", "activations", "kv_dtype"), "auto")
    path = profile_path(tmp_path / "cache", folder, folder, **settings)
    save_profile(path, [Measured("ar", {}, 2, None, 20.0), split], "jaxspec-tune")
    options = {"draft": folder, "compile_cache": str(tmp_path / "cache")}
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    llm = LLM(folder, **options)
    assert internals(llm).engine.method == SwiftSpec(3, 2, depth=3)
    assert [model.plan.devices for model in internals(llm).models] == [(jax.devices()[0],), (jax.devices()[1],)]
    out = llm.generate("w1 w2 w3", sampling)
    assert out.stats.choice.devices.why == "measured: swiftspec on 1/1 devices, 30.0 tokens/s"
    assert out.stats.choice.depth == 3
    assert out.token_ids == llm.with_method("ar").generate("w1 w2 w3", sampling).token_ids
    # A number of devices that was given is kept, and so is the method on it.
    kept = LLM(folder, target_devices=1, **options)
    assert internals(kept).engine.method == Auto()
    assert kept.generate("w1 w2 w3", sampling).stats.choice.devices is None
    # What changes the speed of a pass has a profile of its own.
    assert profile_path(tmp_path / "cache", folder, folder, **settings | {"kv_dtype": "float16"}) != path
    assert profile_path(tmp_path / "cache", folder, folder, **settings, numerics="exact") != path
    assert internals(LLM(folder, kv_dtype="float16", **options)).engine.method == Auto()
    # Streamed layers are loaded as their plan says: the profile is of resident ones.
    streamed = LLM(folder, offload="host", resident_layers=1, **options)
    assert internals(streamed).target.plan.tensor == 1 and internals(streamed).engine.method.name != "swiftspec"
    planned = explain_offload(folder, offload="host", resident_layers=1, **options)
    assert internals(streamed).offload_plan is not None
    assert [line for line in internals(streamed).offload_plan.lines() if "together" in line] == [
        line for line in planned if "together" in line
    ]


@pytest.fixture(autouse=True)
def callers_compile_cache():
    """The folder that the suite compiles into."""
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
