"""gpt-oss's folders with experts in MXFP4: sizes, GGUF, damage; test_quantised.py has their numbers and tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import quantised_writers as qw
from gguf import GGMLQuantizationType
from make import hf_config, write_gguf
from safetensors.numpy import save_file
from test_quantised import CASES, GPT_OSS
from test_quantised_damage import load_file

from jaxspec.checkpoint.hf import read_config
from jaxspec.checkpoint.load import open_checkpoint, open_weights
from jaxspec.errors import CheckpointError

CFG = CASES["gpt-oss"].cfg
EXPERTS = "model.layers.0.mlp.experts"


def write(folder):
    """The folder, and its numbers by projection."""
    return folder, qw.write_folder(folder, CFG, GPT_OSS, qw.gpt_oss)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gpt-oss") / "m")


def test_sizes_and_types(written):
    folder, numbers = written
    source, storage = open_checkpoint(folder), open_weights(folder).own_storage
    held = load_file(folder / "model.safetensors")
    assert sum(source.nbytes(name) for name in numbers) == sum(tensor.nbytes for tensor in held.values())
    assert [storage.type_of(f"layers.1.{leaf}") for leaf in ("gate_up", "qkv")] == ["mxfp4", "bfloat16"]


def test_gguf_files_hold_the_same(written, tmp_path):
    def kind_of(name):
        return GGMLQuantizationType.MXFP4 if "_exps" in name else GGMLQuantizationType.F32

    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", CFG, written[1], qtype=kind_of))
    assert source.config.experts == CFG.experts and not source.config.rope.truncate
    assert [source.config.window(index) for index in range(2)] == [8, None]
    assert source.weight_type(f"{EXPERTS}.3.up_proj.weight") == "mxfp4"
    assert set(source.shapes()) == set(written[1])
    for name, expected in written[1].items():
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
    assert open_weights(tmp_path / "m.gguf").own_storage.type_of("layers.1.down") == "mxfp4"


FAULTS = {
    "no blocks": (
        lambda t: t.pop(f"{EXPERTS}.gate_up_proj_blocks"), f"lacks the tensor '{EXPERTS}.gate_up_proj_blocks'"
    ),
    "neither": (
        lambda t: [t.pop(f"{EXPERTS}.down_proj_{kind}") for kind in ("blocks", "scales")],
        rf"5 missing \({EXPERTS}.0.down_proj.weight",
    ),
    "no bias": (lambda t: t.pop(f"{EXPERTS}.down_proj_bias"), rf"1 missing \({EXPERTS}.down_proj.bias\)"),
    "twice": (lambda t: t.update({f"{EXPERTS}.down_proj": np.zeros((5, 96, 64), np.float16)}), "'.*down_proj' twice"),
    "codes for numbers": (
        lambda t: t.update({f"{EXPERTS}.down_proj_bias": np.zeros((5, 64), np.uint8)}),
        "down_proj_bias' has type uint8, not float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_have_messages_of_their_own(name, written, tmp_path):
    change, message = FAULTS[name]
    tensors = load_file(written[0] / "model.safetensors")
    change(tensors)
    (tmp_path / "config.json").write_text((written[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_scale_that_is_no_number(written, tmp_path):
    tensors = load_file(written[0] / "model.safetensors")
    tensors[f"{EXPERTS}.gate_up_proj_scales"][2, 7, 1] = 255
    (tmp_path / "config.json").write_text((written[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path)
    source.read(f"{EXPERTS}.2.gate_proj.weight")
    with pytest.raises(CheckpointError, match="2.up_proj.scales' holds a scale that is no number: the file is damaged"):
        source.read(f"{EXPERTS}.2.up_proj.weight")


def test_codes_without_settings(written, tmp_path):
    config = json.loads((written[0] / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(written[0] / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has type uint8.*only in quantised weights \(quantization_config\)"):
        open_checkpoint(tmp_path)


def test_what_absent_settings_mean():
    config = hf_config(CFG)
    for key in ("rope_scaling", "rope_theta", "sliding_window", "layer_types", "swiglu_limit", "attention_bias"):
        del config[key]
    cfg = read_config(Path("config.json"), config, 100)
    rope = cfg.rope
    assert (rope.theta, rope.scaling, rope.factor, rope.original_context, rope.truncate) == (
        15e4,
        "yarn",
        32,
        4096,
        False,
    )
    assert (cfg.sliding_window, cfg.sliding_layers) == (128, (True, False))
    assert cfg.qkv_bias and cfg.out_bias and (cfg.experts.limit, cfg.experts.alpha) == (7, 1.702)
    without = read_config(Path("config.json"), config | {"attention_bias": False}, 100)
    assert not without.qkv_bias and not without.out_bias and without.attention_sinks
