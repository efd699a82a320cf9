"""Weights that are kept as they lie in memory: the same bits, for the same files only, and no damaged ones."""

import os

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from make import tiny_config, write_gguf

from jaxspec.checkpoint.load import open_weights
from jaxspec.loading import OpenModels
from jaxspec.methods.core.round import Models
from jaxspec.runtime.mesh import plan_pair
from jaxspec.runtime.store import program_files, ready_weights
from jaxspec.runtime.store.ready_weights import ReadyWeights


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model in blocks, placed for integer products: its path, weights and placement."""
    monkeypatch.setattr(program_files, "disabled", False)
    monkeypatch.setattr(program_files, "_folder", tmp_path / "cache" / "ready")
    path = write_gguf(tmp_path / "model.gguf", tiny_config(), qtype=GGMLQuantizationType.Q8_0)
    weights = open_weights(path)
    plan, _ = plan_pair(1, None, draft_platform=None, kernels="auto", method="ar", own_devices=False)
    if not plan.kernels.native:
        pytest.skip("no native kernels")
    target, _ = OpenModels(weights).place(plan, plan, "auto")
    assert target.activations == "int16"
    return path, weights, target


def find(tmp_path, path, target):
    return ReadyWeights.find(tmp_path / "cache", [path], target, None)


def keep(tmp_path, path, weights, target):
    """Load from the checkpoint and keep; the parameters, and the file."""
    ready = find(tmp_path, path, target)
    assert ready is not None and ready.load() is None
    params, _ = OpenModels(weights).load(Models(target))
    ready.save(params, None)
    ready.settle()
    (file,) = (tmp_path / "cache" / "weights").iterdir()
    return params, file


def test_the_same_bits_come_back(tmp_path, model):
    path, weights, target = model
    params, _ = keep(tmp_path, path, weights, target)
    again = find(tmp_path, path, target).load()
    assert again is not None and again[1] is None
    assert jax.tree.structure(again[0]) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(again[0]), strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_damaged_file_is_removed(tmp_path, model):
    path, weights, target = model
    _, file = keep(tmp_path, path, weights, target)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    for content in (
        b"",
        whole[:-1],
        whole + b"\0",
        bytes(flipped),
        b"x" + whole[1:],
        whole[:30] + b"\xff" * 8 + whole[38:],
    ):
        file.write_bytes(content)
        assert find(tmp_path, path, target).load() is None and not file.exists()
    file.write_bytes(whole)
    assert find(tmp_path, path, target).load() is not None


def test_another_file_or_placement_has_weights_of_its_own(tmp_path, model):
    path, weights, target = model
    keep(tmp_path, path, weights, target)
    write_gguf(path, tiny_config(), qtype=GGMLQuantizationType.Q8_0, changes={"general.name": "other"})
    assert find(tmp_path, path, target).load() is None
    os.utime(path, (1, 1))
    assert find(tmp_path, path, target).load() is None


def test_what_is_not_kept(tmp_path, model, monkeypatch):
    path, weights, target = model
    assert ReadyWeights.find(None, [path], target, None) is None
    monkeypatch.setattr(ready_weights, "LARGEST_BYTES", 1000)
    params, _ = OpenModels(weights).load(Models(target))
    ready = find(tmp_path, path, target)
    ready.save(params, None)
    ready.settle()
    assert not (tmp_path / "cache" / "weights").exists()
