"""Tiny random drafts that fill a block in one pass, as published folders hold them; written without the loader."""

import json

import numpy as np
from safetensors.numpy import save_file

H, F, HEADS, KV, HD, V, B, LAYERS, STATES, MASK, THETA = 48, 40, 4, 2, 8, 101, 4, 2, 2, 97, 10_000.0
CONFIG = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": H, "intermediate_size": F,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "num_hidden_layers": LAYERS,
    "vocab_size": V, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": THETA,
    "attention_bias": False, "num_target_layers": 6, "block_size": B, "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4]}, "torch_dtype": "bfloat16",
}  # fmt: skip


def random_tensors(seed=0):
    rng = np.random.default_rng(seed)

    def weight(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(width):
        return (1 + rng.normal(size=width) / 4).astype(np.float32)

    tensors = {"fc.weight": weight(H, STATES * H), "hidden_norm.weight": norm(H), "norm.weight": norm(H)}
    for index in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HD, H), "self_attn.k_proj": (KV * HD, H), "self_attn.v_proj": (KV * HD, H),
            "self_attn.o_proj": (H, HEADS * HD), "mlp.gate_proj": (F, H), "mlp.up_proj": (F, H),
            "mlp.down_proj": (H, F),
        }  # fmt: skip
        tensors |= {f"layers.{index}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        widths = {"input_layernorm": H, "post_attention_layernorm": H, "self_attn.q_norm": HD, "self_attn.k_norm": HD}
        tensors |= {f"layers.{index}.{name}.weight": norm(width) for name, width in widths.items()}
    return tensors


def write_folder(path, tensors, **changes):
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def inner(**changes):
    return {"dflash_config": CONFIG["dflash_config"] | changes}


SLIDING = {"sliding_window": 6, "use_sliding_window": True, "layer_types": ["sliding_attention"] * LAYERS}
RANK, TOP = 6, 5


def dflash2_tensors():
    tensors, rng = random_tensors(), np.random.default_rng(4)
    for index in range(LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{index}.{name}.base_kernel"] = rng.normal(size=(2, 2, H)).astype(np.float32)
            kernel = rng.normal(size=(2 * 2 * (H // 16), H)) / np.sqrt(H)
            tensors[f"layers.{index}.{name}.kernel_projection.weight"] = kernel.astype(np.float32)
    for name, shape in {
        "predecessor_codebook": (V, RANK), "successor_codebook": (V, RANK), "hidden_projection.weight": (RANK, H),
    }.items():  # fmt: skip
        tensors[f"candidate_selector.{name}"] = rng.normal(size=shape).astype(np.float32)
    return tensors


def write_dflash2(path, tensors, **changes):
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": TOP}
    return write_folder(path, tensors, architectures=["DFlash2DraftModel"], **(inner(**own) | changes))


def markov_tensors(kind="gated", rows=V):
    rng, made = np.random.default_rng(5), random_tensors()
    shapes = {"markov_w1.weight": (V, RANK), "markov_w2.weight": (rows, RANK)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (RANK, H + RANK), "gate_proj.bias": (RANK,)}
    own = {f"markov_head.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    made["confidence_head.proj.weight"] = rng.normal(size=(1, H + RANK)).astype(np.float32)
    made["confidence_head.proj.bias"] = np.zeros(1, np.float32)
    return made | own


TABLES = {
    name: np.random.default_rng(6).normal(size=(V, H)).astype(np.float32)
    for name in ("embed_tokens.weight", "lm_head.weight")
}  # fmt: skip
DSPARK = {"markov_rank": RANK, "markov_head_type": "gated", "enable_confidence_head": True}
DSPARK["confidence_head_with_markov"] = True


def write_deepspec(path, tensors, **changes):
    ids = {"target_layer_ids": [1, 4], "mask_token_id": MASK, "num_anchors": 512, "dflash_config": None}
    return write_folder(path, tensors | TABLES, architectures=["Qwen3DSparkModel"], **(ids | DSPARK | changes))


def write_speculators(path, tensors, **changes):
    own = {"block_size", "dflash_config", "num_target_layers", "architectures", "torch_dtype"}
    config = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.5.0",
        "transformer_layer_config": {key: value for key, value in CONFIG.items() if key not in own},
        "block_size": B, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 5], "draft_vocab_size": 67,
    } | changes  # fmt: skip
    write_folder(path, tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path
