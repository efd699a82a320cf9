import dataclasses
import math

import jax
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from make import random_tensors, tiny_config, write_gguf
from tiny_models import RandomSource

from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.checkpoint.gguf_header import read_header
from jaxspec.checkpoint.load import load_foreign
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.config import RopeConfig
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.layer_kinds import LayerKinds
from jaxspec.models.recurrent import RecurrentConfig
from jaxspec.models.rope import yarn_attention_factor
from jaxspec.runtime.mesh import plan_mesh

DELTA = (True, True, True, False)
BESIDE = ExpertsConfig(4, 2, 32, shared_dim=96, beside=True)
CASES = {
    "llama": tiny_config("llama"),
    "mistral": tiny_config("mistral"),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3", tied=True),
    "mixtral": tiny_config("mixtral"),
    "qwen2_moe": tiny_config("qwen2_moe"),
    "qwen3_moe": tiny_config("qwen3_moe"),
    "gemma2": tiny_config("gemma2"),
    "gemma4": tiny_config("gemma4_text"),
    "gemma4_large": tiny_config("gemma4_text", kinds=LayerKinds(32, 1, keys_are_values=True), logit_softcap=None),
    "gemma4_experts": tiny_config("gemma4_text", kinds=LayerKinds(32, 1, keys_are_values=True), experts=BESIDE),
    "gemma3": tiny_config("gemma3_text", num_layers=7, sliding_layers=(True,) * 5 + (False, True)),
    "phi3": tiny_config("phi3"),
    "olmo2": tiny_config("olmo2"),
    **{
        name: tiny_config(name) for name in ("olmo3", "seed_oss", "smollm3", "exaone4", "glm4", "granite", "ministral3")
    },
    "lfm2": tiny_config("lfm2"),
    "qwen3_5": tiny_config("qwen3_5_text"),
    "qwen3_5_moe": tiny_config("qwen3_5_moe_text"),
    "qwen3_5_alike": tiny_config("qwen3_5_text", recurrent=RecurrentConfig("delta", DELTA, 4, 3, 0, 3, 16, 8)),
    "phi4_mini": tiny_config("phi3", rope=RopeConfig(1e4, partial=0.75)),
    "seed_oss_without_biases": tiny_config("seed_oss", qkv_bias=False),
    "yarn": tiny_config(
        "qwen2", rope=RopeConfig(1e6, "yarn", 4.0, original_context=32, attention_factor=yarn_attention_factor(4.0))
    ),
    "linear": tiny_config("llama", rope=RopeConfig(500000.0, "linear", 4.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_round_trip(tmp_path, name):
    cfg, tensors = CASES[name], random_tensors(CASES[name])
    source = open_gguf(write_gguf(tmp_path / "m.gguf", cfg, tensors))
    assert source.config == cfg
    assert source.eos_ids == (2,)
    assert source.shapes() == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        read = source.read(name)
        if name.endswith("A_log"):  # the file has the decay, whose bits come back
            read, tensor = (-np.exp(x).astype(np.float32) for x in (read, tensor))
        np.testing.assert_array_equal(read, tensor, err_msg=name)


@pytest.mark.parametrize("name", ["gemma4_experts", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0"])
def test_gate_and_up_of_experts_together(tmp_path, name, kind):
    """The parameters are those of a file that has two tensors."""
    cfg, qtype = CASES[name], GGMLQuantizationType[kind]
    tensors = random_tensors(cfg)
    files = [write_gguf(tmp_path / f"{both}.gguf", cfg, tensors, qtype=qtype, together=both) for both in (False, True)]
    apart, together = (open_gguf(file) for file in files)
    assert apart.config == together.config == cfg and apart.shapes() == together.shapes()
    for name in apart.shapes():
        assert apart.weight_type(name) == together.weight_type(name)
        for keep in (False, True):
            np.testing.assert_array_equal(together.read(name, keep), apart.read(name, keep), err_msg=name)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_delta_nets_of_qwen3_next(tmp_path, kind, is_old):
    """A file has the parameters of a folder, whose projections lie together; of an old file they do, too."""
    cfg, qtype, extra = tiny_config("qwen3_next"), GGMLQuantizationType[kind], {}
    source = RandomSource(cfg)
    tensors = dict(source._tensors)
    if is_old:
        for layer in (0, 1, 2):
            rows = tensors.pop(f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight")
            extra[f"blk.{layer}.ssm_in.weight"] = rows
    for name, tensor in tensors.items() if kind != "F32" else ():
        if tensor.ndim == 2 and len(tensor) > 1:
            source._tensors[name] = dequantize(quantize(tensor, qtype), qtype)
    file = open_gguf(write_gguf(tmp_path / "m.gguf", cfg, tensors, qtype=qtype, extra=extra))
    assert file.config == dataclasses.replace(cfg, family="qwen3_5_moe_text")
    got, expected = (load_foreign(s, plan_mesh(1), np.dtype("float32")) for s in (file, source))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        largest = np.abs(np.asarray(leaf) - np.asarray(other)).max()
        assert largest == 0 or (path[-1].key == "decay" and largest < 1e-6), path


def test_projections_of_qwen3_next_of_a_wrong_size(tmp_path):
    cfg = tiny_config("qwen3_next")
    tensors = random_tensors(cfg)
    name = "model.layers.0.linear_attn.in_proj_ba.weight"
    tensors[name] = tensors[name][:-1]
    with pytest.raises(CheckpointError, match="in_proj_ba"):
        open_gguf(write_gguf(tmp_path / "m.gguf", cfg, tensors))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_quantised_round_trip(tmp_path, kind):
    """Equal to quantising and dequantising each row: blocks stay in their rows through the permutation."""
    qtype = GGMLQuantizationType[kind]
    cfg = tiny_config()
    tensors = random_tensors(cfg)
    source = open_gguf(write_gguf(tmp_path / "m.gguf", cfg, tensors, qtype=qtype))
    for name, tensor in tensors.items():
        expected = dequantize(quantize(tensor, qtype), qtype) if tensor.ndim == 2 else tensor
        np.testing.assert_array_equal(source.read(name).astype(np.float32), expected, err_msg=name)


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_S", "TQ1_0"])
def test_block_types_without_a_quantiser(tmp_path, kind):
    """Random blocks: what is read equals the package's own dequantisation of the same bytes."""
    qtype = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[qtype]
    cfg = tiny_config(embed_dim=256, head_dim=16, mlp_dim=256, num_layers=1)
    path = write_gguf(tmp_path / "m.gguf", cfg, qtype=GGMLQuantizationType.Q8_0)
    # The down projection becomes blocks of the wanted type: rewrite its entry in the directory, then its bytes.
    name = "blk.0.ffn_down.weight"
    tensor = read_header(path).tensors[name]
    raw = bytearray(path.read_bytes())
    at = raw.index(name.encode()) + len(name) + 4 + 16
    raw[at : at + 4] = int(qtype).to_bytes(4, "little")
    size = math.prod(tensor.shape) // block * block_bytes
    blocks = np.random.default_rng(0).integers(0, 100, size, np.uint8)
    raw[tensor.offset : tensor.offset + size] = blocks.tobytes()
    path.write_bytes(raw)
    with np.errstate(all="ignore"):
        expected = dequantize(blocks.reshape(256, -1), qtype)
    np.testing.assert_array_equal(open_gguf(path).read("model.layers.0.mlp.down_proj.weight"), expected)


def test_header_agrees_with_the_package(tmp_path):
    changes = {"a.list": [1, 2, 3], "a.names": ["x", "yé", ""], "a.flag": True, "a.number": 0.5}
    path = write_gguf(tmp_path / "m.gguf", tiny_config(), qtype=GGMLQuantizationType.Q4_0, changes=changes)
    header, reader = read_header(path), GGUFReader(path)
    for key, value in header.metadata.items():
        assert reader.fields[key].contents() == value, key
    assert header.metadata.items() >= changes.items()
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = header.tensors[tensor.name]
        assert (mine.offset, mine.nbytes, mine.ggml_type) == (
            tensor.data_offset, tensor.n_bytes, tensor.tensor_type,
        )  # fmt: skip
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


def test_several_eos_ids(tmp_path):
    changes = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert open_gguf(write_gguf(tmp_path / "m.gguf", tiny_config(), changes=changes)).eos_ids == (2, 5)
    changes = {"tokenizer.ggml.eos_token_id": None}
    assert open_gguf(write_gguf(tmp_path / "n.gguf", tiny_config(), changes=changes)).eos_ids == ()


def test_defaults_of_absent_keys(tmp_path):
    """Old files have no head widths, and no KV heads where there is one per query head."""
    absent = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base", "vocab_size",
              "attention.head_count_kv")  # fmt: skip
    cfg = tiny_config(num_kv_heads=4)
    path = write_gguf(tmp_path / "m.gguf", cfg, changes={f"llama.{key}": None for key in absent})
    assert open_gguf(path).config == cfg


def test_window_as_wide_as_the_context_is_none(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_config("qwen2"), changes={"qwen2.attention.sliding_window": 128})
    assert open_gguf(path).config.sliding_window is None


def test_old_linear_scaling_key(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_config(), changes={"llama.rope.scale_linear": 2.0})
    assert open_gguf(path).config.rope == RopeConfig(10000.0, "linear", 2.0)


def converter_rope_factors(rope, head_dim):
    """The loop of llama.cpp's converter, written out."""
    factors = []
    low_wavelen = rope.original_context / rope.low_freq_factor
    high_wavelen = rope.original_context / rope.high_freq_factor
    for i in range(0, head_dim, 2):
        wavelen = 2 * math.pi * rope.theta ** (i / head_dim)
        if wavelen < high_wavelen:
            factors.append(1.0)
        elif wavelen > low_wavelen:
            factors.append(rope.factor)
        else:
            smooth = (rope.original_context / wavelen - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_recovered(tmp_path):
    rope = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    cfg = tiny_config(rope=rope, head_dim=64)
    extra = {"rope_freqs.weight": converter_rope_factors(rope, 64)}
    source = open_gguf(write_gguf(tmp_path / "m.gguf", cfg, extra=extra))
    assert source.config == cfg
    assert "rope_freqs.weight" not in source.shapes()


def test_other_frequency_factors_are_refused(tmp_path):
    rope = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 4096)
    for index, factors in enumerate((converter_rope_factors(rope, 16), np.full(8, np.nan, np.float32))):
        path = write_gguf(tmp_path / f"{index}.gguf", tiny_config(), extra={"rope_freqs.weight": factors})
        with pytest.raises(ConfigError, match="frequency factors other than Llama 3's"):
            open_gguf(path)
