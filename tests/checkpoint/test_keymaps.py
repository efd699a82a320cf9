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


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_qkv_groups_each_kv_head_with_its_queries(part):
    cfg = tiny_config("qwen2", num_heads=6, num_kv_heads=2)
    tensors = random_tensors(cfg)
    leaf = "layers.1.qkv" if part == "weight" else "layers.1.qkv_bias"
    qkv = recipes(cfg)[leaf].read(FakeSource(cfg, tensors))
    heads = {
        kind: tensors[f"model.layers.1.self_attn.{kind}_proj.{part}"].reshape(-1, cfg.head_dim, *qkv.shape[3:])
        for kind in "qkv"
    }
    for head in range(cfg.num_kv_heads):
        for g in range(cfg.group):
            np.testing.assert_array_equal(qkv[head, g], heads["q"][head * cfg.group + g])
        np.testing.assert_array_equal(qkv[head, cfg.group], heads["k"][head])
        np.testing.assert_array_equal(qkv[head, cfg.group + 1], heads["v"][head])


def test_out_and_gate_up_layout():
    cfg = tiny_config()
    tensors = random_tensors(cfg)
    made, source = recipes(cfg), FakeSource(cfg, tensors)
    out = made["layers.0.out"].read(source)
    o_proj = tensors["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(out[:, 1, 0, 3], o_proj[:, 2 * cfg.head_dim + 3])
    gate_up = made["layers.0.gate_up"].read(source)
    np.testing.assert_array_equal(gate_up[0], tensors["model.layers.0.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[1], tensors["model.layers.0.mlp.up_proj.weight"])


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
