"""Tiny checkpoints of every family, written as Hugging Face folders and GGUF files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.models.config import ModelConfig, RopeConfig

F32 = GGMLQuantizationType.F32

_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


# Where the float16 scales of a block lie.
_SCALES = {GGMLQuantizationType.Q4_K: (0, 2), GGMLQuantizationType.Q6_K: (208,)}


def tiny_config(family: str = "llama", **changes: Any) -> ModelConfig:
    """Two layers, four query and two KV heads; every width a multiple of 32, for GGUF's blocks."""
    values: dict[str, Any] = dict(
        family=family, num_layers=2, embed_dim=64, mlp_dim=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=72,
        max_context=128, rope=RopeConfig(theta=10000.0), norm_eps=1e-5, tied=False,
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
        sliding_window=8 if family == "mistral" else None,
    )  # fmt: skip
    return ModelConfig(**values | changes)


def random_tensors(cfg: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    sources = [source for recipe in recipes(cfg).values() for source in recipe.sources]
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in sources}


def hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """`config.json` as transformers 4 wrote it."""
    config: dict[str, Any] = {
        "architectures": [f"{cfg.family.capitalize()}ForCausalLM"],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.embed_dim,
        "intermediate_size": cfg.mlp_dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_context,
        "rms_norm_eps": cfg.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": cfg.tied,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": None,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    if cfg.rope.scaling != "default":
        config["rope_scaling"] = {"rope_type": cfg.rope.scaling, "factor": cfg.rope.factor}
    if cfg.rope.scaling == "llama3":
        config["rope_scaling"] |= {
            "low_freq_factor": cfg.rope.low_freq_factor,
            "high_freq_factor": cfg.rope.high_freq_factor,
            "original_max_position_embeddings": cfg.rope.original_context,
        }
    if cfg.family != "llama":
        config["sliding_window"] = cfg.sliding_window
    if cfg.family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = cfg.sliding_window is not None
        config["max_window_layers"] = cfg.sliding_layers.index(True) if cfg.sliding_layers else 0
    return config


def write_hf(
    folder: Path,
    cfg: ModelConfig,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    shards: int = 1,
    dtype: Any = np.float32,
    changes: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder; `changes` overrides keys of `config.json`."""
    tensors = {n: t.astype(dtype) for n, t in (random_tensors(cfg) if tensors is None else tensors).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(cfg) | dict(changes or {})))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[index::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{_GGUF_LAYER['.'.join(middle)]}.{kind}"


def interleave_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows, as its converter writes `permute`."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_metadata(cfg: ModelConfig) -> dict[str, Any]:
    """Hyperparameters under llama.cpp's keys."""
    arch = "llama" if cfg.family == "mistral" else cfg.family
    metadata: dict[str, Any] = {
        f"{arch}.block_count": cfg.num_layers,
        f"{arch}.context_length": cfg.max_context,
        f"{arch}.embedding_length": cfg.embed_dim,
        f"{arch}.feed_forward_length": cfg.mlp_dim,
        f"{arch}.attention.head_count": cfg.num_heads,
        f"{arch}.attention.head_count_kv": cfg.num_kv_heads,
        f"{arch}.attention.key_length": cfg.head_dim,
        f"{arch}.attention.value_length": cfg.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": cfg.norm_eps,
        f"{arch}.rope.freq_base": cfg.rope.theta,
        f"{arch}.rope.dimension_count": cfg.head_dim,
        f"{arch}.vocab_size": cfg.vocab_size,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if cfg.rope.scaling == "linear":
        metadata |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": cfg.rope.factor}
    if cfg.sliding_window:
        metadata[f"{arch}.attention.sliding_window"] = cfg.sliding_window
    return metadata


def write_gguf(
    path: Path,
    cfg: ModelConfig,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    qtype: GGMLQuantizationType | Callable[[str], GGMLQuantizationType] = F32,
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write a GGUF file: matrices as `qtype` or as it says for their names, vectors as F32.

    Types that the package cannot quantise to get random blocks instead. `changes` overrides metadata (None drops a
    key), `extra` adds tensors under their GGUF names.
    """
    architecture = architecture or ("llama" if cfg.family == "mistral" else cfg.family)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    for key, value in (gguf_metadata(cfg) | dict(changes or {})).items():
        _add_value(writer, key, value)
    for name, tensor in (random_tensors(cfg) if tensors is None else tensors).items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave_rows(tensor, cfg.num_heads if "q_proj" in name else cfg.num_kv_heads)
        kind = F32 if tensor.ndim == 1 else qtype if isinstance(qtype, GGMLQuantizationType) else qtype(name)
        try:
            data = quantize(np.ascontiguousarray(tensor), kind)
        except NotImplementedError:
            data = random_blocks(kind, *tensor.shape)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: GGMLQuantizationType, rows: int, inputs: int) -> np.ndarray:
    """Rows of random blocks of K-quants, of values about one."""
    values, nbytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, inputs // values, nbytes), np.uint8)
    for at in _SCALES[kind]:
        scale = np.random.default_rng(at).uniform(0.5e-3, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case int() if key == "general.alignment":
            writer.add_custom_alignment(value)  # the writer follows it, too
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
