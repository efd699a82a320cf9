"""Tiny checkpoints of every family, written as Hugging Face folders and GGUF files."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from safetensors.numpy import save_file

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.layer_kinds import LayerKinds
from jaxspec.models.recurrent import RecurrentConfig
from jaxspec.models.rope import rope_frequencies, yarn_attention_factor

F32 = GGMLQuantizationType.F32

_GGUF_ARCHITECTURES = {
    "mistral": "llama", "gpt_oss": "gpt-oss",
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "gemma4_text": "gemma4", "olmo3": "olmo2", "ministral3": "mistral3", "granitemoehybrid": "granite",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
}  # fmt: skip
# Architectures whose files hold rotary pairs in neighbouring rows, and tensors that a family's file has in one.
_INTERLEAVED = ("llama", "smollm3", "granite", "mistral3")
_GATE_UP = {"ffn_up": ("ffn_gate", "ffn_up")}
_GGUF_FUSED = {"phi3": {"attn_qkv": ("attn_q", "attn_k", "attn_v")} | _GATE_UP, "glm4": _GATE_UP}
_THREE_OF_FOUR = (True, True, True, False)
_GRANITE = dict(embed_scale=4.0, residual_scale=0.5, logit_scale=0.25, query_scale=0.5, tied=True)
_GEMMA = dict(
    activation="gelu", norms="both", embed_scale=8.0, sliding_window=8, sliding_layers=(True, False), tied=True,
)  # fmt: skip
_DELTA = dict(
    qk_norm=True, attention_gate=True, rope=RopeConfig(1e4, partial=0.25), num_layers=4,
    recurrent=RecurrentConfig("delta", _THREE_OF_FOUR, 4, 2, 0, 4, 16, 16),
)  # fmt: skip
_SHARED_EXPERT = {"experts": ExpertsConfig(6, 3, 32, True, 64)}
# What families differ in, of two layers.
_FEATURES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {"experts": ExpertsConfig(4, 2, 96), "rope": RopeConfig(1e6)},
    "qwen2_moe": {"qkv_bias": True, "experts": ExpertsConfig(6, 3, 32, False, 64)},
    "qwen3_moe": {"qk_norm": True, "experts": ExpertsConfig(5, 2, 32)},
    "gemma4_text": _GEMMA | dict(
        num_layers=4, sliding_layers=(True, False) * 2, qk_norm=True, local_rope=RopeConfig(1e4), logit_softcap=30.0,
        rope=RopeConfig(1e6, "proportional", partial=0.25),
        kinds=LayerKinds(32, 2, sharing=2, sharing_mlp_dim=192, inputs_dim=32),
    ),
    "gemma2": _GEMMA | dict(attention_softcap=50.0, logit_softcap=30.0),
    "gemma3_text": _GEMMA | dict(
        qk_norm=True, sliding_layers=(), rope=RopeConfig(1e6, "linear", 8.0), local_rope=RopeConfig(1e4)
    ),
    "phi3": {"sliding_window": 9},
    "gpt_oss": {
        "qkv_bias": True, "out_bias": True, "attention_sinks": True, "sliding_window": 8,
        "sliding_layers": (True, False), "mlp_dim": 96,
        "experts": ExpertsConfig(5, 2, 96, chosen_scores=True, biases=True, limit=7.0),
        "rope": RopeConfig(15e4, "yarn", 4.0, original_context=32, truncate=False),
    },
    "olmo2": {"norms": "post", "qk_norm": True, "wide_qk_norm": True},
    "olmo3": {
        "norms": "post", "qk_norm": True, "wide_qk_norm": True, "num_layers": 4, "sliding_window": 8,
        "sliding_layers": _THREE_OF_FOUR, "local_rope": RopeConfig(5e5),
        "rope": RopeConfig(5e5, "yarn", 4.0, original_context=32, attention_factor=yarn_attention_factor(4.0)),
    },
    "seed_oss": {"qkv_bias": True},
    "smollm3": {"num_layers": 4, "nope_layers": (False, False, False, True), "tied": True},
    "exaone4": {
        "norms": "post", "qk_norm": True, "num_layers": 4, "sliding_window": 8, "sliding_layers": _THREE_OF_FOUR,
        "nope_layers": (False, False, False, True),
    },
    "glm4": {"norms": "both", "qkv_bias": True, "rope": RopeConfig(1e4, partial=0.5)},
    "granite": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "lfm2": {"qk_norm": True, "tied": True, "recurrent": RecurrentConfig("convolution", (True, False), 3, 4, 16)},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _SHARED_EXPERT,
    "qwen3_next": _DELTA | _SHARED_EXPERT,
    "ministral3": {"query_growth": 0.25, "rope": RopeConfig(1e6, "yarn", 4.0, original_context=8)},
}  # fmt: skip


# Where the float16 scales of a block lie.
_SCALES = {GGMLQuantizationType.Q4_K: (0, 2), GGMLQuantizationType.Q6_K: (208,)}


def tiny_config(family: str = "llama", **changes: Any) -> ModelConfig:
    """Two layers, four query and two KV heads; every width a multiple of 32, for GGUF's blocks."""
    values: dict[str, Any] = dict(
        family=family, num_layers=2, embed_dim=64, mlp_dim=96, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=72,
        max_context=128, rope=RopeConfig(theta=10000.0), norm_eps=1e-5, tied=False,
    )  # fmt: skip
    return ModelConfig(**values | _FEATURES.get(family, {}) | changes)


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
    if cfg.rope.scaling == "yarn":
        config["rope_scaling"] |= {"original_max_position_embeddings": cfg.rope.original_context}
        config["rope_scaling"] |= {} if cfg.rope.truncate else {"truncate": False}
    if cfg.query_growth:
        config["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": cfg.query_growth}
    if cfg.rope.partial != 1:
        config["partial_rotary_factor"] = cfg.rope.partial
    if cfg.family in ("glm4", "seed_oss"):
        config["attention_bias"] = cfg.qkv_bias
    if cfg.family == "smollm3":
        config["no_rope_layers"] = [int(not still) for still in cfg.nope_layers]
    if cfg.family.startswith("granite"):
        config |= {
            "embedding_multiplier": cfg.embed_scale, "residual_multiplier": cfg.residual_scale,
            "logits_scaling": 1 / cfg.logit_scale, "attention_multiplier": cfg.query_scale / cfg.head_dim**0.5,
        }  # fmt: skip
    if cfg.family == "granitemoehybrid":
        config |= {
            "layer_types": ["attention"] * cfg.num_layers, "num_local_experts": 0, "position_embedding_type": "rope",
            "shared_intermediate_size": cfg.mlp_dim, "mamba_n_heads": 4,
        }  # fmt: skip
    if cfg.family not in ("llama", "olmo2"):
        config["sliding_window"] = cfg.sliding_window
    if cfg.family.startswith("gemma"):
        config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": cfg.head_dim}
        del config["hidden_act"]
    if cfg.family.startswith(("gemma", "gpt_oss", "olmo3", "exaone4")):
        config["layer_types"] = [
            f"{'full' if cfg.window(index) is None else 'sliding'}_attention" for index in range(cfg.num_layers)
        ]
    if (kinds := cfg.kinds) is not None:
        config |= {
            "global_head_dim": kinds.full_head_dim, "num_global_key_value_heads": kinds.full_kv_heads,
            "num_kv_shared_layers": kinds.sharing, "use_double_wide_mlp": kinds.sharing > 0,
            "attention_k_eq_v": kinds.keys_are_values, "hidden_size_per_layer_input": kinds.inputs_dim,
            "vocab_size_per_layer_input": cfg.vocab_size, "final_logit_softcapping": cfg.logit_softcap,
            "rope_scaling": None, "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": cfg.rope.theta,
                    "partial_rotary_factor": cfg.rope.partial,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": cfg.local_rope.theta},
            },
        }  # fmt: skip
        del config["rope_theta"], config["query_pre_attn_scalar"], config["partial_rotary_factor"]
    if cfg.family == "lfm2":
        config |= {
            "layer_types": ["conv" if cfg.is_recurrent(i) else "full_attention" for i in range(cfg.num_layers)],
            "conv_L_cache": cfg.recurrent.taps, "norm_eps": cfg.norm_eps, "block_auto_adjust_ff_dim": False,
        }  # fmt: skip
    if (delta := cfg.recurrent) is not None and delta.kind == "delta":
        types = ["linear_attention" if cfg.is_recurrent(i) else "full_attention" for i in range(cfg.num_layers)]
        config |= {
            "layer_types": types, "linear_conv_kernel_dim": delta.taps,
            "linear_num_key_heads": delta.key_heads, "linear_num_value_heads": delta.value_heads,
            "linear_key_head_dim": delta.key_dim, "linear_value_head_dim": delta.value_dim,
        }  # fmt: skip
    if cfg.local_rope is not None and cfg.family not in ("olmo3", "gemma4_text"):
        config["rope_local_base_freq"] = cfg.local_rope.theta
    if (experts := cfg.experts) is not None:
        config |= {"num_experts_per_tok": experts.per_token, "router_aux_loss_coef": 0.02}
        if cfg.family in ("mixtral", "gpt_oss"):
            config["num_local_experts"] = experts.count
            config |= {"swiglu_limit": experts.limit, "attention_bias": True} if experts.biases else {}
        else:
            config |= {
                "num_experts": experts.count, "moe_intermediate_size": experts.dim, "decoder_sparse_step": 1,
                "norm_topk_prob": experts.renormalise, "mlp_only_layers": [],
            }  # fmt: skip
        if experts.shared_dim:
            config["shared_expert_intermediate_size"] = experts.shared_dim
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
    """Write a Hugging Face folder; `changes` overrides keys of `config.json`.

    Experts are put together where the family has them so. Integers keep their type.
    """
    tensors = put_together(cfg, random_tensors(cfg) if tensors is None else tensors)
    tensors = {n: t if t.dtype == np.uint8 else t.astype(dtype) for n, t in tensors.items()}
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


def put_together(cfg: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss's tensors of all experts of a layer: inputs first, gate and up columns in turns."""
    if cfg.family != "gpt_oss" or cfg.experts is None:
        return dict(tensors)
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for index in range(cfg.num_layers):
        prefix = f"model.layers.{index}.mlp.experts"
        if f"{prefix}.gate_proj.bias" not in tensors:
            made |= {name: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}
            continue
        bias = {name: tensors[f"{prefix}.{name}_proj.bias"] for name in ("gate", "up", "down")}
        gate, up, down = (
            np.stack([tensors[f"{prefix}.{i}.{name}_proj.weight"] for i in range(cfg.experts.count)]).swapaxes(1, 2)
            for name in ("gate", "up", "down")
        )
        made |= {
            f"{prefix}.gate_up_proj": np.stack([gate, up], axis=-1).reshape(*gate.shape[:2], -1),
            f"{prefix}.gate_up_proj_bias": np.stack([bias["gate"], bias["up"]], axis=-1).reshape(len(gate), -1),
            f"{prefix}.down_proj": np.ascontiguousarray(down),
            f"{prefix}.down_proj_bias": bias["down"],
        }
    return made


@functools.cache
def gguf_name(name: str, family: str = "llama") -> str:
    """llama.cpp's name of a Hugging Face tensor, by the table of the package `gguf`."""
    # Some files have gate and up in one.
    plain = family == "phi3" or (family in _GGUF_FUSED and ".mlp." in name)
    architecture = "llama" if plain else _GGUF_ARCHITECTURES.get(family, family)
    own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    if (part := ".".join(name.split(".")[3:])) in own:
        return f"blk.{name.split('.')[2]}.{own[part]}"
    name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    (arch,) = [arch for arch, known in MODEL_ARCH_NAMES.items() if known == architecture]
    name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
    found = get_tensor_name_map(arch, 100).get_name(name, (".weight", ".bias"))
    return f"{found}.weight" if name.endswith(("sinks", "layer_scalar")) else found


def gguf_tensors(cfg: ModelConfig, tensors: Mapping[str, np.ndarray], together: bool = False) -> dict[str, np.ndarray]:
    """Tensors under llama.cpp's names, those of experts and Phi's fused ones together.

    With `together` the experts' gate and up projections are one tensor.
    """
    named: dict[str, np.ndarray] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        pieces = name.split(".")
        if "experts" in pieces:
            projection = {"w1": "gate", "w2": "down", "w3": "up"}.get(pieces[-2], pieces[-2].removesuffix("_proj"))
            if pieces[-1] == "bias":
                named[f"blk.{pieces[2]}.ffn_{projection}_exps.bias"] = tensor
            else:
                parts.setdefault(f"blk.{pieces[2]}.ffn_{projection}_exps.weight", []).append(tensor)
            continue
        gguf = gguf_name(name, cfg.family)
        if name.endswith("in_proj_qkvz.weight"):
            named |= split_projection(tensor, f"blk.{pieces[2]}", cfg.recurrent)
            continue
        if "linear_attn" in name and cfg.family == "qwen3_next":
            tensor = -np.exp(tensor) if name.endswith("A_log") else tensor
        elif "linear_attn" in name and cfg.recurrent is not None:
            tensor = tile_value_heads(-np.exp(tensor) if name.endswith("A_log") else tensor, name, cfg.recurrent)
        for fused, of in _GGUF_FUSED.get(cfg.family, {}).items():
            if gguf.split(".")[2:3] and gguf.split(".")[2] in of:
                parts.setdefault(f"blk.{pieces[2]}.{fused}.weight", []).append(tensor)
                break
        else:
            whole = "ffn_gate_inp_shexp" in gguf or "shortconv.conv" in gguf or "ssm_conv1d" in gguf
            named[gguf] = tensor.squeeze(0 if tensor.ndim == 2 else 1) if whole else tensor
    if together:
        for index in range(cfg.num_layers):
            gates, ups = (parts.pop(f"blk.{index}.ffn_{name}_exps.weight") for name in ("gate", "up"))
            both = [np.concatenate(pair) for pair in zip(gates, ups, strict=True)]
            parts[f"blk.{index}.ffn_gate_up_exps.weight"] = both
    join = {True: np.stack, False: np.concatenate}
    return named | {name: join["_exps" in name](arrays) for name, arrays in parts.items()}


def split_projection(tensor: np.ndarray, layer: str, cfg: RecurrentConfig) -> dict[str, np.ndarray]:
    """Queries, keys and values of all heads, and their gates, of rows that lie key head by key head."""
    K, V = cfg.key_dim, cfg.group * cfg.value_dim
    heads = tensor.reshape(cfg.key_heads, -1, tensor.shape[1])
    kinds = [heads[:, :K], heads[:, K : 2 * K], heads[:, 2 * K : 2 * K + V], heads[:, 2 * K + V :]]
    query, key, value, gate = (kind.reshape(-1, tensor.shape[1]) for kind in kinds)
    return {f"{layer}.attn_qkv.weight": np.concatenate([query, key, value]), f"{layer}.attn_gate.weight": gate}


def tile_value_heads(tensor: np.ndarray, name: str, cfg: RecurrentConfig) -> np.ndarray:
    """llama.cpp's order of the value heads of a delta net: the first one of every key head, then the second ones."""
    if name.endswith(".norm.weight"):
        return tensor
    axis, width = (1 if "out_proj" in name else 0), cfg.value_dim
    before = 2 * cfg.key_heads * cfg.key_dim if "qkv" in name or "conv1d" in name else 0
    if "in_proj_a" in name or "in_proj_b" in name or tensor.ndim == 1:
        width = 1
    tensor = np.moveaxis(tensor, axis, 0)
    heads = tensor[before:].reshape(cfg.key_heads, cfg.group, width, *tensor.shape[1:]).swapaxes(0, 1)
    return np.moveaxis(np.concatenate([tensor[:before], heads.reshape(-1, *tensor.shape[1:])]), 0, axis)


def interleave_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows, as its converter writes `permute`."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_metadata(cfg: ModelConfig) -> dict[str, Any]:
    """Hyperparameters under llama.cpp's keys."""
    arch = _GGUF_ARCHITECTURES.get(cfg.family, cfg.family)
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
        f"{arch}.rope.dimension_count": round(cfg.rope.partial * cfg.head_dim),
        f"{arch}.vocab_size": cfg.vocab_size,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if cfg.rope.scaling == "linear":
        metadata |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": cfg.rope.factor}
    if cfg.rope.scaling == "yarn":
        metadata |= {
            f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.factor": cfg.rope.factor,
            f"{arch}.rope.scaling.original_context_length": cfg.rope.original_context,
        }  # fmt: skip
    if cfg.sliding_window:
        metadata[f"{arch}.attention.sliding_window"] = cfg.sliding_window
    if cfg.family in ("olmo3", "exaone4"):
        metadata[f"{arch}.attention.sliding_window_pattern"] = list(cfg.sliding_layers)
    if (kinds := cfg.kinds) is not None:
        layers = range(cfg.num_layers)
        metadata |= {
            f"{arch}.attention.key_length": kinds.full_head_dim, f"{arch}.attention.value_length": kinds.full_head_dim,
            f"{arch}.attention.key_length_swa": cfg.head_dim, f"{arch}.attention.value_length_swa": cfg.head_dim,
            f"{arch}.rope.dimension_count": kinds.full_head_dim, f"{arch}.rope.dimension_count_swa": cfg.head_dim,
            f"{arch}.rope.freq_base_swa": cfg.local_rope.theta,
            f"{arch}.attention.sliding_window_pattern": list(cfg.sliding_layers),
            f"{arch}.attention.shared_kv_layers": kinds.sharing,
            f"{arch}.attention.head_count_kv": [cfg.layer_heads(index)[0] for index in layers],
            f"{arch}.feed_forward_length": [cfg.layer_mlp_dim(index) for index in layers],
            f"{arch}.embedding_length_per_layer_input": kinds.inputs_dim,
        }  # fmt: skip
    if cfg.query_growth:
        metadata |= {
            f"{arch}.attention.temperature_scale": cfg.query_growth,
            f"{arch}.rope.scaling.yarn_log_multiplier": 1.0,
        }
    if arch == "lfm2":
        heads = [0 if cfg.is_recurrent(index) else cfg.num_kv_heads for index in range(cfg.num_layers)]
        metadata |= {f"{arch}.shortconv.l_cache": cfg.recurrent.taps, f"{arch}.attention.head_count_kv": heads}
    if (delta := cfg.recurrent) is not None and delta.kind == "delta":
        metadata |= {
            f"{arch}.ssm.conv_kernel": delta.taps, f"{arch}.ssm.group_count": delta.key_heads,
            f"{arch}.ssm.time_step_rank": delta.value_heads, f"{arch}.ssm.state_size": delta.key_dim,
            f"{arch}.ssm.inner_size": delta.value_heads * delta.value_dim, f"{arch}.full_attention_interval": 4,
        }  # fmt: skip
        if arch != "qwen3next":
            metadata[f"{arch}.rope.dimension_sections"] = [1, 1, 0, 0]
    if arch == "granite":
        metadata |= {
            f"{arch}.embedding_scale": cfg.embed_scale, f"{arch}.residual_scale": cfg.residual_scale,
            f"{arch}.logit_scale": 1 / cfg.logit_scale, f"{arch}.attention.scale": cfg.query_scale / cfg.head_dim**0.5,
        }  # fmt: skip
    for key, cap in (("attn_logit_softcapping", cfg.attention_softcap), ("final_logit_softcapping", cfg.logit_softcap)):
        if cap is not None:
            metadata[f"{arch}.{key}"] = cap
    if (experts := cfg.experts) is not None:
        metadata |= {
            f"{arch}.expert_count": experts.count, f"{arch}.expert_used_count": experts.per_token,
            f"{arch}.expert_feed_forward_length": experts.dim,
        }  # fmt: skip
        if experts.shared_dim and not experts.beside:
            metadata[f"{arch}.expert_shared_feed_forward_length"] = experts.shared_dim
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
    together: bool = False,
) -> Path:
    """Write a GGUF file: matrices as `qtype` or as it says for their names, vectors as F32.

    Types that the package cannot quantise to get random blocks instead. `changes` overrides metadata (None drops a
    key), `extra` adds tensors under their GGUF names.
    """
    architecture = architecture or _GGUF_ARCHITECTURES.get(cfg.family, cfg.family)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    for key, value in (gguf_metadata(cfg) | dict(changes or {})).items():
        _add_value(writer, key, value)
    tensors = random_tensors(cfg) if tensors is None else tensors
    # `qtype` goes by the names of Hugging Face where a tensor has one.
    known = {gguf_name(name, cfg.family): name for name in tensors if ".experts." not in name}
    for name, tensor in gguf_tensors(cfg, tensors, together).items():
        if architecture in _INTERLEAVED and name.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = interleave_rows(tensor, cfg.num_heads if "attn_q" in name else cfg.num_kv_heads)
        kind = (
            F32
            if tensor.ndim == 1 or name.endswith((".bias", "shortconv.conv.weight", "ssm_conv1d.weight"))
            else qtype
            if isinstance(qtype, GGMLQuantizationType)
            else qtype(known.get(name, name))
        )
        try:
            data = quantize(np.ascontiguousarray(tensor), kind)
        except NotImplementedError:
            data = random_blocks(kind, *tensor.shape)
        writer.add_tensor(name, data, raw_dtype=kind)
    extra = dict(extra or {})
    if cfg.rope.scaling == "proportional":
        turning = rope_frequencies(cfg.rope, cfg.kinds.full_head_dim) != 0
        extra["rope_freqs.weight"] = np.where(turning, 1, 1e30).astype(np.float32)
    for name, tensor in extra.items():
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
