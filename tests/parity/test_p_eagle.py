"""P-EAGLE drafts against a pass in NumPy, written from the paper and the published layouts; it keeps no cache.

All verified rows and the masked ones after them run together, causal, at positions that go on. A verified row joins a
token to the hidden states of the one before it, a masked row the token `mask` to `mask_hidden`, through the same norms.
"""

import eagle_folders as folders
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import empty_cache, on_one_device

from jaxspec.checkpoint.eagle import open_feature_draft
from jaxspec.checkpoint.load import load_foreign
from jaxspec.methods.core.draft_passes import run_verified
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.models.feature_draft import fuse, prefill_draft
from jaxspec.models.transformer import vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.sampling.accept import Verified

MASK, WINDOW, LAYERS, ROWS, CHUNK, SLOTS = 9, 6, 3, 4, 7, 128
HEADS, KV, HD, WIDTH = folders.HEADS, folders.KV_HEADS, folders.HEAD_DIM, folders.STATES * folders.TARGET_DIM


def normed(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def rotate(x):  # [T, heads, HD]
    angle = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(0, HD, 2) / HD)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., : HD // 2], x[..., HD // 2 :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def reference(tensors, token, states, places, window=None, before_residual=False):
    """Logits of the last verified row and of `places` - 1 masked ones, [places, V']; float64."""
    w = {name.removesuffix(".weight"): tensor.astype(np.float64) for name, tensor in tensors.items()}
    masked, size = places - 1, len(token) + places - 1
    embedded = w["embed_tokens"][[*token, *[MASK] * masked]]
    states = np.concatenate([states.astype(np.float64), np.repeat(w["mask_hidden"].reshape(1, -1), masked, axis=0)])
    if "input_norm" in w:
        states = normed(states, w["input_norm"])
    if "fc_norm.0" in w:
        parts = np.split(states, folders.STATES, axis=1)
        states = np.concatenate([normed(part, w[f"fc_norm.{i}"]) for i, part in enumerate(parts)], axis=1)
    fused, row, key = states @ w["fc"].T, np.arange(size)[:, None], np.arange(size)[None]
    seen = (key <= row) if window is None else (key <= row) & (row - key < window)
    x = fused
    for index in range(LAYERS):
        layer = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"layers.{index}.")}
        h = normed(x if index else embedded, layer["input_layernorm"])
        if index == 0:
            second = normed(fused, layer["hidden_norm"])
            h, x = np.concatenate([h, second], axis=1), second if before_residual else fused
        q = rotate((h @ layer["self_attn.q_proj"].T).reshape(size, HEADS, HD))
        k = rotate((h @ layer["self_attn.k_proj"].T).reshape(size, KV, HD))
        v = (h @ layer["self_attn.v_proj"].T).reshape(size, KV, HD)
        mixed = np.zeros((size, HEADS, HD))
        for head in range(HEADS):
            scores = q[:, head] @ k[:, head // (HEADS // KV)].T / np.sqrt(HD)
            weights = np.where(seen, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
            mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // (HEADS // KV)]
        x = x + mixed.reshape(size, -1) @ layer["self_attn.o_proj"].T
        h = normed(x, layer["post_attention_layernorm"])
        gate = h @ layer["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    return normed(x[len(token) - 1 :], w["norm"]) @ w["lm_head"].T


def write_flat(path, tensors, **changes):
    settings = {"parallel_drafting": True, "ptd_token_id": MASK, "num_hidden_layers": LAYERS}
    return folders.write_folder(path, tensors, **(settings | changes))


def write_nested(path, tensors, layer=None, **changes):
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}]}
    settings = {
        "speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": MASK,
        "speculators_config": proposals,
    }  # fmt: skip
    return folders.write_speculators(
        path, tensors, {"num_hidden_layers": LAYERS} | (layer or {}), **settings, **changes
    )


SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * LAYERS}
# How each folder is written, how its states are normed, the places of a block, and what else the reference knows.
CASES = {
    "flat": (write_flat, None, 8, {}),
    "flat, another name of the mask": (
        lambda path, tensors: write_flat(path, tensors, ptd_token_id=None, pard_token=MASK), None, 8, {},
    ),
    "speculators": (write_nested, None, 5, {}),
    "window": (lambda path, tensors: write_nested(path, tensors, SLIDING), None, 5, {"window": WINDOW}),
    "norms": (
        lambda path, tensors: write_nested(path, tensors, fc_norm=True, norm_before_residual=True), "each", 5,
        {"before_residual": True},
    ),
    "one norm": (lambda path, tensors: write_nested(path, tensors, norm_before_fc=True), "whole", 5, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_numpy_in_chunks_and_over_rounds(case, tmp_path):
    """A prompt in chunks, the last one short, then rounds of random acceptance: masked rows never survive."""
    write, fc_norm, places, known_to_reference = CASES[case]
    rng, total, prompt = np.random.default_rng(10), 64, 17
    tensors = folders.random_tensors(layers=LAYERS, first="layers.0", embedding=True, fc_norm=fc_norm)
    tensors["mask_hidden"] = rng.normal(size=(1, 1, WIDTH)).astype(np.float32)
    source, tensors = open_feature_draft(write(tmp_path, tensors)), load_file(tmp_path / "model.safetensors")
    cfg, params = source.config, load_foreign(source, plan_mesh(1), "float32")
    assert (cfg.features.kind, cfg.features.places) == ("eagle3", places)
    token = rng.integers(0, folders.VOCAB, total).astype(np.int32)
    states = (rng.normal(size=(total, WIDTH)) * 3).astype(np.float32)  # of the token before each

    @on_one_device
    def fill(params, token, states, count, cache):
        return prefill_draft(params, cfg, token, fuse(params, cfg, states), count, cache)

    @on_one_device
    def go_on(params, cache, seen, token, states, count):
        verified = Verified(token, count, token, np.zeros(ROWS, np.float32), states=states)
        hidden, _, after = run_verified(params, cfg, SequenceState(cache, seen=seen), verified, places - 1)
        return vocab_logits(params, cfg, hidden), after.cache, after.seen

    cache, known = empty_cache(cfg, SLOTS), 0
    while known < prompt:
        count = min(CHUNK, prompt - known)
        rows = slice(known, known + CHUNK)
        cache, known = fill(params, token[rows], states[rows], np.int32(count), cache), known + count
    # The first token of a text has no row.
    seen, rounds = np.int32(prompt + 1), 0
    while known + ROWS <= total:
        count, rows = int(rng.integers(1, ROWS + 1)), slice(known, known + ROWS)
        logits, cache, seen = go_on(params, cache, seen, token[rows], states[rows], np.int32(count))
        known, rounds = known + count, rounds + 1
        expected = reference(tensors, token[:known], states[:known], places, **known_to_reference)
        np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=1e-5)
    assert rounds >= 10
