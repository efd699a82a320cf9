"""gpt-oss's folders with experts in MXFP4: exact numbers, sizes, shards, native checkpoints, tokens, damage."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import quantised_writers as qw
from gguf import GGMLQuantizationType
from make import hf_config, tiny_config, write_gguf, write_hf
from safetensors.numpy import save_file
from test_block_storage import check_equal_numbers, check_placed, check_same, place
from test_quantised import greedy, needs_native
from test_quantised_damage import load_file

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.hf import read_config
from jaxspec.checkpoint.load import open_checkpoint, open_weights
from jaxspec.errors import CheckpointError
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

CFG = tiny_config("gpt_oss")
SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS = "model.layers.0.mlp.experts"
PROMPT = [3, 14, 15, 9, 2, 6]


def write(folder, cfg=CFG):
    """The folder, and its numbers by projection."""
    stored, numbers = qw.gpt_oss(np.random.default_rng(0), cfg)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(cfg) | {"quantization_config": SETTINGS}))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, numbers


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gpt-oss") / "m")


@pytest.fixture(scope="module")
def plain(written, tmp_path_factory):
    """The same numbers as a folder of float32."""
    return write_hf(tmp_path_factory.mktemp("gpt-oss") / "plain", CFG, written[1])


def test_numbers_are_those_of_the_definition(written, plain):
    folder, numbers = written
    for path in written[0], plain:
        source = open_checkpoint(path)
        assert set(source.shapes()) == set(numbers)
        for name, expected in numbers.items():
            got = np.asarray(source.read(name)).astype(np.float32)
            np.testing.assert_array_equal(got, expected, err_msg=name)
    source = open_checkpoint(folder)
    held = load_file(folder / "model.safetensors")
    assert sum(source.nbytes(name) for name in numbers) == sum(tensor.nbytes for tensor in held.values())
    storage = open_weights(folder).own_storage
    assert [storage.type_of(f"layers.1.{leaf}") for leaf in ("gate_up", "down", "qkv")] == [
        "mxfp4",
        "mxfp4",
        "bfloat16",
    ]


@pytest.mark.parametrize("degree", [1, 2])
def test_placed_weights_are_those_numbers(written, plain, degree):
    weights, numbers = open_weights(written[0]), open_weights(plain)
    params = weights.load(place(weights, degree))
    check_placed(params, place(weights, degree))
    check_equal_numbers(params, numbers.load(place(numbers, degree, own=False)), CFG)


def test_native_checkpoints_keep_the_precision(written, tmp_path):
    weights, checkpoint = open_weights(written[0]), convert(written[0], tmp_path / "native")
    native = open_weights(checkpoint.path)
    assert (native.own_storage, native.config) == (weights.own_storage, weights.config)
    for degree, own in ((1, True), (2, True), (1, False)):
        check_same(native.load(place(native, degree, own)), weights.load(place(weights, degree, own)))


@needs_native
def test_greedy_tokens_are_those_of_the_dequantised_model(written, plain):
    weights, numbers = open_weights(written[0]), open_weights(plain)
    expected = greedy(numbers, place(numbers, 1, own=False), PROMPT, 24)
    assert greedy(weights, place(weights, 1), PROMPT, 24) == expected
    assert len(set(expected)) > 3
    # 16 bits an activation: the tokens of these models are far enough apart.
    rounded = dataclasses.replace(place(weights, 1), activations="int16")
    assert greedy(weights, rounded, PROMPT, 24) == expected


def test_xla_keeps_them_packed(written, plain):
    weights, numbers, plan = open_weights(written[0]), open_weights(plain), plan_mesh(1, kernels="xla")
    placement = Placement(weights.config, plan, np.dtype("float32"), storage=weights.storage(plan))
    assert weights.load(placement)["layers"][0]["down"].format == "mxfp4"
    expected = greedy(numbers, Placement(numbers.config, plan, np.dtype("float32")), PROMPT, 12)
    assert greedy(weights, placement, PROMPT, 12) == expected


def test_gguf_files_hold_the_same(written, plain, tmp_path):
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
