"""Tiny random feature drafts as published folders hold them; written without the code under test."""

import json

import numpy as np
from safetensors.numpy import save_file

# Of the draft, and of the tiny targets of `tiny_models` that it fits.
VOCAB, TARGET_DIM, STATES = 101, 48, 3
DIM, MLP, HEADS, KV_HEADS, HEAD_DIM = 48, 40, 6, 2, 8
# The tokens of a reduced vocabulary: a number that four devices do not divide.
IDS = np.array([t for t in range(VOCAB) if t % 3 != 1])

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": MLP,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "bos_token_id": 1, "torch_dtype": "float16", "transformers_version": "4.40.0", "pad_token_id": 0,
}  # fmt: skip


def random_tensors(
    seed=0,
    *,
    reduced=True,
    embedding=False,
    dim=DIM,
    layers=1,
    first="midlayer",
    fc_norm=None,
    states=STATES,
    head=True,
):
    """Tensors of an EAGLE-3 draft by published name; weights of unit gain, norms about one."""
    rng = np.random.default_rng(seed)

    def weight(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(width):
        return (1 + rng.normal(size=width) / 4).astype(np.float32)

    tensors = {"fc.weight": weight(dim, states * TARGET_DIM), "norm.weight": norm(dim) * 3}
    for index in range(layers):
        prefix, width = (first, 2 * dim) if index == 0 else (f"layers.{index}", dim)
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, width), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width), "self_attn.o_proj": (dim, HEADS * HEAD_DIM),
            "mlp.gate_proj": (MLP, dim), "mlp.up_proj": (MLP, dim), "mlp.down_proj": (dim, MLP),
        }  # fmt: skip
        tensors |= {f"{prefix}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if index == 0 else [])
        tensors |= {f"{prefix}.{name}.weight": norm(dim) for name in norms}
    if head:
        tensors["lm_head.weight"] = weight(len(IDS) if reduced else VOCAB, dim)
    if reduced:
        tensors["d2t"] = IDS - np.arange(len(IDS))
        tensors["t2d"] = np.isin(np.arange(VOCAB), IDS)
    if embedding:
        tensors["embed_tokens.weight"] = rng.normal(size=(VOCAB, dim)).astype(np.float32)
    if fc_norm == "whole":
        tensors["input_norm.weight"] = norm(states * TARGET_DIM)
    elif fc_norm == "each":
        tensors |= {f"fc_norm.{i}.weight": norm(TARGET_DIM) for i in range(states)}
    return tensors


def random_eagle1(seed=0, layers=1):
    """Tensors of an EAGLE-1 draft."""
    tensors = random_tensors(seed, reduced=False, layers=layers, first="layers.0", head=False)
    rng = np.random.default_rng(seed + 1)
    for name in ("norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"):
        del tensors[name]
    for name in ("q", "k", "v"):
        key = f"layers.0.self_attn.{name}_proj.weight"
        tensors[key] = np.ascontiguousarray(tensors[key][:, :DIM])
    tensors["fc.weight"] = (rng.normal(size=(DIM, 2 * DIM)) / np.sqrt(2 * DIM)).astype(np.float32)
    tensors["fc.bias"] = rng.normal(size=DIM).astype(np.float32) / 4
    return tensors


def write_folder(path, tensors, **changes):
    """A folder in SafeAILab's layout with `model.safetensors`; a change to None removes a key."""
    path.mkdir(parents=True, exist_ok=True)
    reduced = len(tensors["d2t"]) if "d2t" in tensors else VOCAB
    config = {**CONFIG, "draft_vocab_size": reduced, **changes}
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def write_speculators(path, tensors, layer=None, **settings):
    """A folder in the layout of speculators."""
    inner = {key: value for key, value in CONFIG.items() if key not in ("architectures", "torch_dtype")}
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else VOCAB, "norm_before_residual": False,
        "transformer_layer_config": inner | (layer or {}),
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
    } | settings  # fmt: skip
    write_folder(path, tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path
