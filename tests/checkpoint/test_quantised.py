"""Quantised safetensors, from the file to the devices, the native format and the tokens.

The files are written from the formats' definitions (`quantised_writers.py`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import quantised_writers as qw
from make import tiny_config, write_hf
from test_block_storage import check_equal_numbers, check_placed, check_same, host_numbers, place

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.load import open_checkpoint, open_weights
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.loading import OpenModels
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.models.quantization import undo_order
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from pallas_kernels.linear import reference
from pallas_kernels.linear.blocks import FORMATS, PACKED
from pallas_kernels.native import library

needs_native = pytest.mark.skipif(library.load().problem is not None, reason="no native CPU kernels")

# Heads of one KV head fill blocks of 128; widths are whole blocks.
CFG = tiny_config(num_layers=1, embed_dim=128, mlp_dim=384, num_heads=4, num_kv_heads=2, head_dim=64)
QWEN = tiny_config("qwen2", num_layers=1, embed_dim=128, mlp_dim=256, num_heads=4, num_kv_heads=2, head_dim=64)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
compressed = qw.compressed_config


GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


class Case(NamedTuple):
    """A format: settings, writer and its options, and the block format that its linear layers are kept in."""

    settings: dict[str, Any]
    write: Any
    kept: str
    options: dict[str, Any] = {}
    cfg: Any = CFG


def grouped(bits, group, **more):
    return compressed("pack-quantized", num_bits=bits, type="int", strategy="group", group_size=group, **more)


CASES = {
    "awq": Case(AWQ, qw.awq, "int4_g128"),
    "awq-qwen2": Case(AWQ | {"group_size": 64}, qw.awq, "int4_g64", {"group": 64}, QWEN),
    "awq-32": Case({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, qw.awq, "int4_g32", {"group": 32}),
    "gptq": Case(GPTQ, qw.gptq, "int4_g128"),
    "gptq-whole-words": Case(
        GPTQ | {"meta": {"quantizer": ["gptqmodel:2.0"]}}, qw.gptq, "int4_g128",
        {"whole_words": True, "least_zero": 0},
    ),
    "gptq-act-order": Case(
        GPTQ | {"desc_act": True, "sym": True}, qw.gptq, "int4_g128", {"act_order": True, "sym": True}
    ),
    "gptq-v2": Case(
        GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"}, qw.gptq, "int4_g32",
        {"version": 2, "group": 32, "least_zero": 0, "dtype": qw.BF16},
    ),
    "gptq-8": Case(GPTQ | {"bits": 8, "group_size": -1}, qw.gptq, "int8_g128", {"bits": 8, "group": -1}),
    "gptq-8-act-order": Case(
        GPTQ | {"bits": 8, "group_size": 32, "desc_act": True}, qw.gptq, "int8_g32",
        {"bits": 8, "group": 32, "act_order": True},
    ),
    "w4a16": Case(grouped(4, 128, symmetric=True), qw.packed, "int4_g128"),
    "w4a16-asymmetric": Case(
        grouped(4, 64, symmetric=False), qw.packed, "int4_g64", {"group": 64, "symmetric": False, "dtype": np.float32}
    ),
    "w4a16-act-order": Case(
        grouped(4, 128, symmetric=True, actorder="group"), qw.packed, "int4_g128", {"act_order": True}
    ),
    "w8a16": Case(
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True), qw.packed,
        "int8_g128", {"bits": 8, "group": -1},
    ),
    "w8a8": Case(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True), qw.int8, "int8_g128"
    ),
    "w8a8-asymmetric": Case(
        compressed("naive-quantized", num_bits=8, type="int", strategy="tensor", symmetric=False), qw.int8,
        "int8_g128", {"per": "tensor", "symmetric": False},
    ),
    "fp8-dynamic": Case(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), qw.fp8, "fp8_g128",
        {"block": None, "per": "channel", "name": "weight_scale", "dtype": qw.BF16},
    ),
    "fp8-compressed-block": Case(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]), qw.fp8,
        "fp8_g128", {"name": "weight_scale"},
    ),
    "fp8-block": Case(FP8, qw.fp8, "fp8_g128"),
    "fp8-tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "static"}, qw.fp8, "fp8_g128",
        {"block": None, "name": "weight_scale"},
    ),
    "fp8-ministral": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, qw.fp8, "fp8_g128",
        {"block": None, "per": "one", "dtype": qw.BF16},
    ),
    "mxfp4": Case(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), qw.mxfp4, "mxfp4"
    ),
    "gpt-oss": Case(GPT_OSS, qw.gpt_oss, "mxfp4", {}, tiny_config("gpt_oss")),
}  # fmt: skip
# One of each format and of each form that a product takes.
SOME = ("awq", "gptq-act-order", "w4a16-asymmetric", "w8a8-asymmetric", "fp8-block", "mxfp4")


@functools.cache
def written(name, root):
    case = CASES[name]
    numbers = qw.write_folder(root / name, case.cfg, case.settings, case.write, **case.options)
    write_hf(root / f"{name}-plain", case.cfg, numbers)
    return root / name, numbers


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("quantised")


@pytest.fixture(params=CASES)
def case(request, root):
    return request.param, *written(request.param, root)


def test_numbers_are_those_of_the_definition(case):
    name, folder, numbers = case
    source = open_checkpoint(folder)
    assert set(source.shapes()) == set(numbers)
    for tensor, expected in numbers.items():
        got = np.asarray(source.read(tensor)).astype(np.float32)
        np.testing.assert_array_equal(got, expected, err_msg=tensor)
    assert open_weights(folder).own_storage.type_of("layers.0.down") == CASES[name].kept


@pytest.mark.parametrize("degree", [1, 2])
def test_placed_weights_are_those_numbers(case, root, degree):
    name, folder, _ = case
    weights, plain = open_weights(folder), open_weights(root / f"{name}-plain")
    placement = place(weights, degree)
    params = weights.load(placement)
    check_placed(params, placement)
    check_equal_numbers(unordered(params), plain.load(place(plain, degree, own=False)), weights.config)


def test_native_checkpoints_keep_the_precision(case, root, tmp_path):
    name, folder, _ = case
    weights, checkpoint = open_weights(folder), convert(folder, tmp_path / "native")
    native = open_weights(checkpoint.path)
    assert native.own_storage == weights.own_storage
    for degree, own in ((1, True), (2, True), (1, False)):
        params = native.load(place(native, degree, own))
        check_placed(params, place(native, degree, own))
        check_same(params, weights.load(place(weights, degree, own)))


def unordered(params):
    """The same parameters with their inputs in order, in numbers where they were not."""
    layers = []
    for layer in params["layers"]:
        leaves = {leaf: value for leaf, value in layer.items() if not leaf.endswith("_order")}
        for leaf in leaves:
            if (order := layer.get(f"{leaf}_order")) is not None:
                numbers = host_numbers(leaves[leaf])
                leaves[leaf] = undo_order(numbers, np.asarray(order)).reshape(numbers.shape)
        layers.append(leaves)
    return params | {"layers": layers}


@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt-oss"])
def test_sizes_in_memory(name):
    """At most 1.1 of what the file holds for a matrix of a model."""
    case = CASES[name]
    tensors, _ = case.write(np.random.default_rng(0), 512, 1024, **case.options)
    stored = sum(np.asarray(part).nbytes for key, part in tensors.items() if key != "g_idx")
    for block_format in (FORMATS[case.kept], PACKED.get(f"{case.kept}_int8", FORMATS[case.kept])):
        assert 512 * 1024 // block_format.values * block_format.nbytes <= 1.1 * stored


def test_orders_that_differ_meet_in_float32(tmp_path):
    def write(rng, out, width, **options):
        return qw.gptq(rng, out, width, act_order=True, group=64)

    numbers = qw.write_folder(tmp_path / "m", CFG, GPTQ | {"group_size": 64, "desc_act": True}, write)
    weights = open_weights(tmp_path / "m")
    types = {leaf: weights.own_storage.type_of(f"layers.0.{leaf}") for leaf in ("qkv", "out", "gate_up", "down")}
    assert types == {"qkv": "float32", "out": "int4_g64", "gate_up": "float32", "down": "int4_g64"}
    assert weights.own_storage.ordered == {"layers.0.out", "layers.0.down"}
    assert not weights.storage(plan_mesh(2)).ordered
    write_hf(tmp_path / "plain", CFG, numbers)
    plain = open_weights(tmp_path / "plain")
    params = unordered(weights.load(place(weights, 1)))
    check_equal_numbers(params, plain.load(place(plain, 1, own=False)), CFG)
    assert jax.tree.leaves(params)


def greedy(weights, placement, prompt, count):
    engine = Engine(Models(placement), Autoregressive())
    engine.prepare(len(prompt) + count)
    params = OpenModels(weights).load(Models(placement)).target
    with engine.open(ModelParams(params), prompt, SamplingParams(max_tokens=count, ignore_eos=True), 0) as session:
        tokens = []
        while not session.done:
            tokens += session.step().tokens
    return tokens


@pytest.mark.thorough
@needs_native
@pytest.mark.parametrize("name", [*SOME, "gpt-oss"])
def test_greedy_tokens_are_those_of_the_dequantised_model(name, root):
    folder, _ = written(name, root)
    weights, plain = open_weights(folder), open_weights(root / f"{name}-plain")
    prompt = [3, 14, 15, 9, 2, 6]
    expected = greedy(plain, place(plain, 1, own=False), prompt, 16)
    assert greedy(weights, place(weights, 1), prompt, 16) == expected
    if name == "gpt-oss":  # 16 bits an activation: its tokens are far enough apart
        rounded = dataclasses.replace(place(weights, 1), activations="int16")
        assert greedy(weights, rounded, prompt, 16) == expected
    assert len(set(expected)) > 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-block", "gpt-oss"])
def test_xla_keeps_them_packed(name, root, monkeypatch):
    """Without native kernels: the same tokens, and weights that stay in blocks and become numbers in tiles."""
    folder, _ = written(name, root)
    weights, plain = open_weights(folder), open_weights(root / f"{name}-plain")
    monkeypatch.setattr(reference, "TILE_VALUES", 5000)
    plan = plan_mesh(1, kernels="xla")
    placement, _ = OpenModels(weights).place(plan, plan, "auto")
    params = weights.load(placement)
    assert params["layers"][0]["down"].format == CASES[name].kept
    prompt = [3, 14, 15, 9, 2, 6]
    expected = greedy(plain, Placement(plain.config, plan, np.dtype("float32")), prompt, 12)
    assert greedy(weights, placement, prompt, 12) == expected
