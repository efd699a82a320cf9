"""Damaged, hostile and unsupported checkpoints: each gets an error of its own, and nothing else happens."""

import json
import struct

import numpy as np
import pytest
from make import random_tensors, tiny_config, write_gguf, write_hf

from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.checkpoint.gguf_header import read_header
from jaxspec.checkpoint.hf import open_hf
from jaxspec.errors import CheckpointError, ConfigError

U32, U64 = "<I", "<Q"
UINT8, UINT32, BOOL, STRING, ARRAY = 0, 4, 7, 8, 9


def text(value):
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack(U64, len(value)) + value


def pair(key, kind, payload):
    return text(key) + struct.pack(U32, kind) + payload


def entry(name="t", dims=(32,), kind=0, offset=0, rank=None):
    rank = len(dims) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def gguf(pairs=(), tensors=(), data=b"", version=3, num_tensors=None, num_pairs=None, order="<"):
    """A GGUF file, byte by byte; the data is aligned to 32."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    head = b"GGUF" + struct.pack(f"{order}IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def array(kind, count, payload=b""):
    return struct.pack("<IQ", kind, count) + payload


HUGE = 2**63
NESTED = array(ARRAY, 1) * 6 + array(UINT8, 0)

BAD_HEADERS = {
    "empty": (b"", "0 bytes are too few"),
    "magic": (b"GGML" + bytes(40), "begins with b'GGML'"),
    "version 1": (gguf(version=1), "GGUF version 1; supported: 2, 3"),
    "big-endian": (gguf(order=">"), "big-endian"),
    "tensor count": (gguf(num_tensors=HUGE), f"claims {HUGE} tensors"),
    "key length": (gguf([struct.pack(U64, HUGE) + bytes(20)]), "metadata key at byte 32 needs 9223372036854775808"),
    "key twice": (gguf([pair("a", BOOL, b"\1")] * 2), "metadata key 'a' twice"),
    "key encoding": (gguf([text(b"\xff") + bytes(12)]), "metadata key at byte 32 is not valid UTF-8"),
    "value type": (gguf([pair("a", 77, bytes(8))]), "'a' has unknown value type 77"),
    "boolean": (gguf([pair("a", BOOL, b"\7")]), "'a' holds 7 as a boolean"),
    "string length": (gguf([pair("a", STRING, struct.pack(U64, 10**6))]), "value of 'a' at byte .* needs 1000000"),
    "array length": (gguf([pair("a", ARRAY, array(UINT32, 2**62))]), f"claims {2**62} elements of 'a'"),
    "element type": (gguf([pair("a", ARRAY, array(13, 0))]), "'a' has unknown element type 13"),
    "nesting": (gguf([pair("a", ARRAY, NESTED)]), "'a' nests arrays deeper than 4"),
    "alignment 3": (gguf([pair("general.alignment", UINT32, b"\3\0\0\0")]), "power of two, got 3"),
    "rank 0": (gguf(tensors=[entry(dims=(), rank=0) + bytes(16)]), "'t' has 0 dimensions"),
    "absurd shape": (gguf(tensors=[entry(dims=(2**62, 2**62))]), "the file has 96"),
    "tensor type": (gguf(tensors=[entry(kind=4)]), "'t' has unknown type 4"),
    "row size": (gguf(tensors=[entry(dims=(33,), kind=2)]), "rows of 33 values, not a multiple of Q4_0's 32"),
    "misaligned": (gguf(tensors=[entry(offset=8)], data=bytes(256)), "offset 8, not a multiple of the alignment 32"),
    "beyond the file": (gguf(tensors=[entry(offset=2**40)], data=bytes(128)), "ends at byte 1099511627"),
    "overlap": (gguf(tensors=[entry("t"), entry("u", offset=64)], data=bytes(256)), "'t' .* and 'u' .* overlap"),
    "tensor twice": (gguf(tensors=[entry(), entry()], data=bytes(128)), "tensor 't' twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_gguf_header(tmp_path, name):
    raw, message = BAD_HEADERS[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"bad.gguf.*{message}"):
        read_header(path)


ROPE_FREQS = np.ones(4, np.float32)

BAD_GGUF_MODELS = {
    "no architecture": (CheckpointError, dict(changes={"general.architecture": 7}), "architecture"),
    "architecture": (CheckpointError, dict(architecture="gpt2"), "architecture 'gpt2' is not supported; supported"),
    "recurrent": (CheckpointError, dict(architecture="falcon-h1"), "'falcon-h1' is not supported; its recurrent"),
    "split": (CheckpointError, dict(changes={"split.count": 3}), "one of 3 parts of a split GGUF"),
    "missing key": (CheckpointError, dict(changes={"llama.block_count": None}), "lacks llama.block_count"),
    "layers absurd": (CheckpointError, dict(changes={"llama.block_count": 2**30}), "1073741824 layers"),
    "nan": (CheckpointError, dict(changes={"llama.rope.freq_base": float("nan")}), "freq_base is nan"),
    "layers differ": (ConfigError, dict(changes={"llama.feed_forward_length": [96, 64]}), "layers that differ"),
    "experts": (CheckpointError, dict(changes={"llama.expert_count": 8}), "lacks llama.expert_used_count"),
    "gating": (
        ConfigError,
        dict(changes={"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_gating_func": 2}),
        "expert_gating_func is 2; only 1 is supported, the softmax",
    ),
    "rope scaling": (ConfigError, dict(changes={"llama.rope.scaling.type": "su"}), "rope.scaling.type is 'su'"),
    "partial rope": (ConfigError, dict(changes={"llama.rope.dimension_count": 8}), "rope.dimension_count is 8"),
    "softcapping": (ConfigError, dict(changes={"llama.attn_logit_softcapping": 50.0}), "attn_logit_softcapping is 50"),
    "not causal": (ConfigError, dict(changes={"llama.attention.causal": False}), "only causal attention"),
    "unknown key": (ConfigError, dict(changes={"llama.quantum_flux": 3}), "llama.quantum_flux is 3"),
    "vocabulary": (CheckpointError, dict(changes={"llama.vocab_size": 71}), "vocab_size is 71; .* 72 rows"),
    "eos": (CheckpointError, dict(changes={"tokenizer.ggml.eos_token_id": 72}), "eos_token_id must be .* below 72"),
    "extra tensor": (CheckpointError, dict(extra={"blk.0.ffn_gate_inp.weight": ROPE_FREQS}), "unexpected .*mlp.gate"),
    "rope factors": (CheckpointError, dict(extra={"rope_freqs.weight": ROPE_FREQS}), "must hold 8 F32 values"),
    "two scalings": (
        ConfigError,
        dict(
            changes={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            extra={"rope_freqs.weight": np.ones(8, np.float32)},
        ),
        "at once",
    ),
    "integer weights": (CheckpointError, dict(extra={"x": np.ones(8, np.int32)}), "type I32, which cannot be deq"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_GGUF_MODELS)
def test_bad_gguf_model(tmp_path, name):
    error, how, message = BAD_GGUF_MODELS[name]
    path = write_gguf(tmp_path / "bad.gguf", tiny_config(), **how)
    with pytest.raises(error, match=message):
        open_gguf(path)


def test_window_of_unknown_layers(tmp_path):
    path = write_gguf(tmp_path / "bad.gguf", tiny_config("qwen2"), changes={"qwen2.attention.sliding_window": 8})
    with pytest.raises(ConfigError, match="does not say which layers"):
        open_gguf(path)


def test_gguf_of_experts_beside_mlps_of_two_widths(tmp_path):
    changes = {"gemma4.expert_count": 8, "gemma4.expert_used_count": 2}
    path = write_gguf(tmp_path / "bad.gguf", tiny_config("gemma4_text"), changes=changes)
    with pytest.raises(ConfigError, match="shared_kv_layers is 2; experts beside MLPs of two widths are not supported"):
        open_gguf(path)


EXPERTS = tiny_config("qwen3_moe")


@pytest.mark.parametrize("rows", [2 * EXPERTS.experts.dim, 2 * EXPERTS.experts.dim + 1])
def test_gguf_of_experts_in_one_tensor_and_in_two(tmp_path, rows):
    """Neither the one nor the other may win."""
    both = np.zeros((EXPERTS.experts.count, rows, EXPERTS.embed_dim), np.float32)
    path = write_gguf(tmp_path / "bad.gguf", EXPERTS, extra={"blk.0.ffn_gate_up_exps.weight": both})
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        open_gguf(path)


def test_gguf_without_a_tensor(tmp_path):
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        tensors = {n: t for n, t in random_tensors(tiny_config()).items() if n != name}
        path = write_gguf(tmp_path / "bad.gguf", tiny_config(), tensors)
        with pytest.raises(CheckpointError, match="has no two-dimensional|1 missing .*up_proj"):
            open_gguf(path)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}

BAD_CONFIGS = {
    "family": (ConfigError, {"model_type": "gpt2"}, "model_type is 'gpt2'"),
    "latent attention": (ConfigError, {"model_type": "deepseek_v3"}, "is 'deepseek_v3'; its latent attention"),
    "recurrent": (ConfigError, {"model_type": "falcon_h1"}, "is 'falcon_h1'; its recurrent layers"),
    "convolutions": (ConfigError, {"model_type": "lfm2_moe"}, "is 'lfm2_moe'; its mixture of experts beside"),
    "no settings of the text": (CheckpointError, {"model_type": "gemma4"}, "lacks text_config"),
    "no text model": (CheckpointError, {"model_type": "mistral3"}, "lacks text_config with the model_type"),
    "latent text": (
        ConfigError, {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
        "is 'mistral4'; its latent attention",
    ),
    "hybrid layers": (
        ConfigError, {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
        r"layer_types is \['mamba', 'attention'\]; recurrent layers \(Mamba\) are not supported",
    ),
    "growth": (CheckpointError, {"model_type": "ministral3"}, "yarn scaling is needed"),
    "quantised": (ConfigError, {"quantization_config": {"bits": 4}}, "quantization_config.quant_method is None"),
    "remote code": (ConfigError, {"auto_map": {"AutoModel": "x.py"}}, "auto_map is"),
    "activation": (ConfigError, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "attention bias": (ConfigError, {"attention_bias": True}, "attention_bias is True"),
    "mlp bias": (ConfigError, {"mlp_bias": True}, "mlp_bias is True"),
    "llama window": (ConfigError, {"sliding_window": 8}, "sliding_window is 8"),
    "partial rope": (ConfigError, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "mrope": (ConfigError, {"rope_scaling": {"type": "mrope", "factor": 2.0}}, "scaling 'mrope' is not supported"),
    "yarn turns": (
        ConfigError,
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 40}},
        "beta_slow 40.0 must be positive",
    ),
    "longrope pairs": (
        ConfigError,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 7}},
        "longrope has 7 factors for 8 pairs",
    ),
    "clamp": (
        ConfigError, {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": -7.0},
        "swiglu_limit is -7.0; a positive number is needed",
    ),
    "rope key": (ConfigError, {"rope_scaling": {"mrope_section": [8]}}, "key 'mrope_section'"),
    "rope twice": (
        ConfigError,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters is given too",
    ),
    "llama3 bands": (ConfigError, {"rope_scaling": LLAMA3}, "low_freq_factor 4.0 must be below"),
    "theta huge": (CheckpointError, {"rope_theta": 10**4000}, "rope_theta is 1000.*a finite number"),
    "unknown key": (ConfigError, {"logit_soft_cap": 30.0}, "logit_soft_cap is 30.0"),
    "missing key": (CheckpointError, {"hidden_size": None}, "lacks hidden_size"),
    "uneven heads": (ConfigError, {"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
    "width": (ConfigError, {"head_dim": None, "hidden_size": 65}, "not a multiple of num_attention_heads"),
    "layers absurd": (CheckpointError, {"num_hidden_layers": 2**31 - 1}, "asks for 2147483647 layers"),
    "vocabulary": (CheckpointError, {"vocab_size": 2**30}, r"weight is \[72, 64\], not \[1073741824, 64\]"),
    "fewer layers": (CheckpointError, {"num_hidden_layers": 1}, "9 unexpected .*layers.1"),
    "eos": (CheckpointError, {"eos_token_id": 100}, "eos_token_id must be token ids below 72, got 100"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_config(tmp_path, name):
    error, changes, message = BAD_CONFIGS[name]
    folder = write_hf(tmp_path, tiny_config(), changes=changes)
    with pytest.raises(error, match=message):
        open_hf(folder)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sets no sliding window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "a list of 2"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "are alike"),
    ],
)
def test_bad_config_of_other_families(tmp_path, family, changes, message):
    with pytest.raises(ConfigError, match=message):
        open_hf(write_hf(tmp_path, tiny_config(family), changes=changes))


BAD_JSON = {
    "cut": (b'{"model_type": "lla', "is not valid JSON"),
    "list": (b"[1, 2]", "must hold a JSON object, got list"),
    "deep": (b'{"a":' + b"[" * 200_000, "nested too deeply|is not valid JSON"),
    "long number": (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "is not valid JSON"),
    "key twice": (b'{"a": 1, "a": 2}', "holds the key 'a' twice"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json(tmp_path, name):
    raw, message = BAD_JSON[name]
    folder = write_hf(tmp_path, tiny_config())
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_hf(folder)


def rewrite_header(folder, change):
    """Change the JSON header of a safetensors file in place; the data stays as it is."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


NORM = "model.norm.weight"

BAD_ENTRIES = {
    "other type": (lambda h: h[NORM].update(dtype="F64", shape=[32]), "'model.norm.weight' has type F64; supported"),
    "other shape": (lambda h: h[NORM].update(shape=[8, 8]), r"model.norm.weight is \[8, 8\], not \[64\]"),
    "overlap": (lambda h: h[NORM].update(data_offsets=[0, 256]), "invalid offset"),
    "renamed": (lambda h: h.update({"model.nrom.weight": h.pop(NORM)}), "1 missing .* 1 unexpected"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_bad_safetensors_entry(tmp_path, name):
    change, message = BAD_ENTRIES[name]
    folder = write_hf(tmp_path, tiny_config())
    rewrite_header(folder, change)
    with pytest.raises(CheckpointError, match=message):
        open_hf(folder)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "header too small"),
        (struct.pack(U64, HUGE) + b"{}", "header too large"),
        (struct.pack(U64, 2) + b"{}", "asks for 2 layers, but the checkpoint holds only 0 tensors"),
    ],
)
def test_bad_safetensors_file(tmp_path, raw, message):
    folder = write_hf(tmp_path, tiny_config())
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_hf(folder)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "w.bin", 7])
def test_path_tricks_in_an_index(tmp_path, file):
    folder = write_hf(tmp_path, tiny_config(), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][NORM] = file
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="a plain .safetensors file name is needed"):
        open_hf(folder)


def test_bad_index(tmp_path):
    folder = write_hf(tmp_path, tiny_config(), shards=2)
    index = folder / "model.safetensors.index.json"
    whole = index.read_text()
    content = json.loads(whole)
    content["weight_map"]["model.nrom.weight"] = content["weight_map"].pop(NORM)
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="places 'model.nrom.weight' in .* which does not hold it"):
        open_hf(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="lacks a weight_map"):
        open_hf(folder)
    index.write_text(whole)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names model-00002-of-00002.safetensors, which is not there"):
        open_hf(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match="both hold"):
        open_hf(folder)


def test_pickles_are_never_opened(tmp_path):
    folder = write_hf(tmp_path, tiny_config())
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        open_hf(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"only as pickles \(pytorch_model.bin\)"):
        open_hf(folder)


def test_oversized_json(tmp_path):
    folder = write_hf(tmp_path, tiny_config())
    with open(folder / "config.json", "r+b") as file:
        file.truncate(2**40)  # a hole: no disk is used
    with pytest.raises(CheckpointError, match="more than any configuration"):
        open_hf(folder)
