import numpy as np
import pytest
from make import random_tensors, tiny_config, write_hf

from jaxspec.checkpoint.hf import open_hf
from jaxspec.checkpoint.keymaps import check_accounted, recipes
from jaxspec.errors import CheckpointError


class FakeSource:
    path = "fake"
    eos_ids = ()

    def __init__(self, config, tensors):
        self.config, self.tensors = config, tensors

    def shapes(self):
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name):
        return self.tensors[name]


def test_all_problems_in_one_error():
    cfg = tiny_config()
    tensors = random_tensors(cfg)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((95, 64), np.float32)
    with pytest.raises(CheckpointError) as caught:
        check_accounted(FakeSource(cfg, tensors))
    message = str(caught.value)
    assert "1 missing (model.norm.weight)" in message
    assert "1 unexpected (model.layers.0.self_attn.q_proj.bias)" in message
    assert "model.layers.1.mlp.up_proj.weight is [95, 64], not [96, 64]" in message


def test_harmless_extras_are_allowed():
    cfg = tiny_config(tied=True)
    tensors = random_tensors(cfg)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    check_accounted(FakeSource(cfg, tensors))
    tensors["lm_head.weight"] = np.zeros((72, 32), np.float32)
    with pytest.raises(CheckpointError, match=r"unexpected \(lm_head.weight\)"):
        check_accounted(FakeSource(cfg, tensors))


def test_leaves_do_not_alias_the_file(tmp_path):
    cfg = tiny_config()
    source = open_hf(write_hf(tmp_path, cfg))
    assert not source.read("model.norm.weight").flags.writeable
    assert all(recipe.read(source).flags.writeable for recipe in recipes(cfg).values())
