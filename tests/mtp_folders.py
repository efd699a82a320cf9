"""Tiny hybrids with a layer for multi-token prediction (`mtp.*`), as folders and GGUF files, and the layer in NumPy.

The layer is written from its equations, without the code under test; the target's own tensors come from `make`.
"""

import json

import numpy as np
from make import gguf_metadata, gguf_tensors, random_tensors, tiny_config, write_gguf, write_hf
from safetensors.numpy import load_file, save_file

FAMILIES = {
    "dense": tiny_config("qwen3_5_text", max_context=512),
    "tied": tiny_config("qwen3_5_text", max_context=512, tied=True),
    "experts": tiny_config("qwen3_5_moe_text", max_context=512),
    "next": tiny_config("qwen3_next", max_context=512),
}


def mtp_tensors(cfg, seed=1):
    """Tensors of the layer by published name; norm scales are stored less one."""
    rng = np.random.default_rng(seed)
    D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

    def weight(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def mlp(prefix, width):
        return {
            f"{prefix}.gate_proj.weight": weight(width, D), f"{prefix}.up_proj.weight": weight(width, D),
            f"{prefix}.down_proj.weight": weight(D, width),
        }  # fmt: skip

    layer = "mtp.layers.0"
    tensors = {
        "mtp.fc.weight": weight(D, 2 * D), f"{layer}.self_attn.q_proj.weight": weight(2 * N * H, D),
        f"{layer}.self_attn.k_proj.weight": weight(K * H, D), f"{layer}.self_attn.v_proj.weight": weight(K * H, D),
        f"{layer}.self_attn.o_proj.weight": weight(D, N * H),
    }  # fmt: skip
    norms = {
        "mtp.pre_fc_norm_embedding": D, "mtp.pre_fc_norm_hidden": D, "mtp.norm": D, f"{layer}.input_layernorm": D,
        f"{layer}.post_attention_layernorm": D, f"{layer}.self_attn.q_norm": H, f"{layer}.self_attn.k_norm": H,
    }  # fmt: skip
    tensors |= {f"{name}.weight": (rng.normal(size=width) / 4).astype(np.float32) for name, width in norms.items()}
    if (experts := cfg.experts) is None:
        return tensors | mlp(f"{layer}.mlp", cfg.mlp_dim)
    tensors |= mlp(f"{layer}.mlp.shared_expert", experts.shared_dim)
    tensors[f"{layer}.mlp.shared_expert_gate.weight"] = weight(1, D)
    tensors[f"{layer}.mlp.gate.weight"] = weight(experts.count, D)
    if cfg.family == "qwen3_next":
        for index in range(experts.count):
            tensors |= mlp(f"{layer}.mlp.experts.{index}", experts.dim)
        return tensors
    together = {"gate_up_proj": (experts.count, 2 * experts.dim, D), "down_proj": (experts.count, D, experts.dim)}
    return tensors | {f"{layer}.mlp.experts.{name}": weight(*shape) for name, shape in together.items()}


def write_mtp(folder, family="dense", *, seed=1, tensors=None, wrapped=False, **changes):
    """A folder with the layer, or with other `mtp.*` tensors; `wrapped` as one of a model that takes images, too."""
    cfg = FAMILIES[family]
    own = random_tensors(cfg)
    # Logits of standard deviation 3: some tokens are probable, most are not.
    own = {name: tensor * (5 if name.endswith("_proj.weight") else 1) for name, tensor in own.items()}
    own["lm_head.weight" if "lm_head.weight" in own else "model.embed_tokens.weight"] *= 4
    tensors = mtp_tensors(cfg, seed) if tensors is None else tensors
    write_hf(folder, cfg, own | tensors, changes={"mtp_num_hidden_layers": 1} | changes)
    if wrapped:
        config, found = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        config = {"model_type": "qwen3_5", "text_config": config, "vision_config": {"model_type": "qwen3_5"}}
        (folder / "config.json").write_text(json.dumps(config))
        found = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in found.items()}
        found["model.visual.blocks.0.norm.weight"] = np.zeros(3, np.float32)
        save_file(found, folder / "model.safetensors")
    return folder


# llama.cpp's names of what ordinary layers have not.
_NEXTN = {
    "mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}  # fmt: skip


def write_mtp_gguf(path, family="dense", *, without=(), more=(), layers=1):
    """A GGUF file with the layer of `write_mtp`, as llama.cpp's converter writes it: after the model's own.

    `without` are GGUF names of the layer's tensors that are left out, `more` others that it has.
    """
    cfg = FAMILIES[family]
    last, ordinary, own = cfg.num_layers, {}, {}
    for name, tensor in mtp_tensors(cfg).items():
        tensor = tensor + 1 if tensor.ndim == 1 else tensor  # norm scales
        if (part := name.removesuffix(".weight")) in _NEXTN:
            own[f"blk.{last}.nextn.{_NEXTN[part]}.weight"] = tensor
        elif name.endswith("gate_up_proj"):
            gate, up = np.split(tensor, 2, axis=1)
            own |= {f"blk.{last}.ffn_gate_exps.weight": gate, f"blk.{last}.ffn_up_exps.weight": up}
        elif name.endswith("experts.down_proj"):
            own[f"blk.{last}.ffn_down_exps.weight"] = tensor
        else:
            ordinary[name.replace("mtp.layers.0", f"model.layers.{last}")] = tensor
    own |= gguf_tensors(cfg, ordinary)
    own = {name: np.ascontiguousarray(tensor) for name, tensor in own.items() if name.split(".", 2)[2] not in without}
    (arch,) = {key.split(".")[0] for key in gguf_metadata(cfg) if key.endswith(".block_count")}
    changes = {f"{arch}.block_count": last + layers, f"{arch}.nextn_predict_layers": layers}
    extra = own | {f"blk.{last}.{name}": np.zeros((8, 64), np.float32) for name in more}
    return write_gguf(path, cfg, changes=changes, extra=extra)


def _norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + scale)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _rotate(x, position, theta, turning):  # [T, heads, H]: the first entries turn, halves of these against each other
    angle = position[:, None] / theta ** (np.arange(0, turning, 2) / turning)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second, rest = np.split(x, [turning // 2, turning], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


class MtpReference:
    """The layer in float64 and without a cache: every step runs all rows again."""

    def __init__(self, folder):
        """Read the tensors as the folder has them, and its settings."""
        config = json.loads((folder / "config.json").read_text())
        self.config = config.get("text_config", config)
        found = load_file(folder / "model.safetensors")
        self.t = {name.replace("language_model.", ""): tensor.astype(np.float64) for name, tensor in found.items()}
        self.embed = self.t["model.embed_tokens.weight"]
        self.head = self.t.get("lm_head.weight", self.embed)

    def linear(self, x, name):
        return x @ self.t[f"mtp.{name}.weight"].T

    def norm(self, x, name):
        return _norm(x, self.t[f"mtp.{name}.weight"], self.config["rms_norm_eps"])

    def attend(self, x):
        config, T = self.config, len(x)
        N, K, H = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        both = self.linear(x, "layers.0.self_attn.q_proj").reshape(T, N, 2, H)
        q, gate = both[:, :, 0], both[:, :, 1]
        k = self.linear(x, "layers.0.self_attn.k_proj").reshape(T, K, H)
        v = self.linear(x, "layers.0.self_attn.v_proj").reshape(T, K, H)
        q, k = self.norm(q, "layers.0.self_attn.q_norm"), self.norm(k, "layers.0.self_attn.k_norm")
        turning = int(H * config["partial_rotary_factor"])
        q, k = (_rotate(each, np.arange(T), config["rope_theta"], turning) for each in (q, k))
        k, v = (np.repeat(each, N // K, axis=1) for each in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(H)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
        return self.linear((mixed * _sigmoid(gate)).reshape(T, -1), "layers.0.self_attn.o_proj")

    def mlp(self, x, prefix="layers.0.mlp"):
        gate = self.linear(x, f"{prefix}.gate_proj")
        return self.linear(gate * _sigmoid(gate) * self.linear(x, f"{prefix}.up_proj"), f"{prefix}.down_proj")

    def expert(self, x, index):
        prefix = "layers.0.mlp.experts"
        if f"mtp.{prefix}.gate_up_proj" not in self.t:
            return self.mlp(x, f"{prefix}.{index}")
        gate, up = np.split(self.t[f"mtp.{prefix}.gate_up_proj"][index] @ x, 2)
        return self.t[f"mtp.{prefix}.down_proj"][index] @ (gate * _sigmoid(gate) * up)

    def mix(self, x):
        if "num_experts" not in self.config:
            return self.mlp(x)
        logits = self.linear(x, "layers.0.mlp.gate")
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out = _sigmoid(self.linear(x, "layers.0.mlp.shared_expert_gate")) * self.mlp(x, "layers.0.mlp.shared_expert")
        for row, chances in enumerate(scores):
            best = np.argsort(-chances)[: self.config["num_experts_per_tok"]]
            for index in best:
                out[row] += chances[index] / chances[best].sum() * self.expert(x[row], index)
        return out

    def run(self, tokens, states):
        """Own states of all rows, [T, D]: row t has token t + 1 of a text and the state of token t."""
        both = [self.norm(self.embed[tokens], "pre_fc_norm_embedding"), self.norm(states, "pre_fc_norm_hidden")]
        z = self.linear(np.concatenate(both, axis=-1), "fc")
        z = z + self.attend(self.norm(z, "layers.0.input_layernorm"))
        z = z + self.mix(self.norm(z, "layers.0.post_attention_layernorm"))
        return self.norm(z, "norm")

    def logits(self, text, states, drafted):
        """Logits after `text` and after each drafted token, [1 + len(drafted), V].

        `states`, [len(text) - 1, D], are the target's after its final norm, of all tokens but the last.
        """
        fed, out = np.asarray(states, np.float64), []
        for step in range(len(drafted) + 1):
            own = self.run(np.array([*text[1:], *drafted[:step]]), fed)
            out.append(self.head @ own[-1])
            fed = np.concatenate([fed, own[-1:]])
        return np.stack(out)
