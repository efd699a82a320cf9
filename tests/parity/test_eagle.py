"""Tiny random EAGLE drafts against a reference in PyTorch, written from the papers and the published layouts.

The reference keeps no cache: it runs all rows of a draft again for every step, as a training step would.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from eagle_folders import (
    DIM,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    STATES,
    TARGET_DIM,
    VOCAB,
    random_eagle1,
    random_tensors,
    write_folder,
    write_speculators,
)
from marks import fast_part
from tiny_models import on_one_device, relative_error

from jaxspec.checkpoint.load import open_weights
from jaxspec.models.feature_draft import forward_draft, fuse, prefill_draft
from jaxspec.models.features import NORMED
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.transformer import forward_with_states, prefill_with_states, vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

LENGTH, STEPS, SLOTS = 20, 5, 64
TOLERANCE = 2e-5
EPS = 1e-5


def rms(x, scale, eps=EPS):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale


def rotate(x, position, theta):  # [T, heads, H]
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    angle = (position[:, None].double() * frequency).float()[:, None]
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Reference:
    """An EAGLE draft as the papers describe it; `tensors` by published name."""

    def __init__(self, tensors, *, layers=1, theta=10000.0, before_residual=False, output=False, window=None):
        self.t = {name: torch.from_numpy(np.asarray(tensor)) for name, tensor in tensors.items()}
        self.layers, self.theta, self.window = layers, theta, window
        self.before_residual, self.output = before_residual, output
        self.eagle1 = not any(name.endswith("hidden_norm.weight") for name in tensors)

    def fuse(self, states):
        if self.eagle1:
            return states
        if "input_norm.weight" in self.t:
            states = rms(states, self.t["input_norm.weight"])
        if "fc_norm.0.weight" in self.t:
            parts = states.split(TARGET_DIM, dim=-1)
            states = torch.cat([rms(part, self.t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return states @ self.t["fc.weight"].T

    def attend(self, prefix, x):
        t, T = self.t, len(x)
        q = rotate((x @ t[f"{prefix}.self_attn.q_proj.weight"].T).view(T, HEADS, HEAD_DIM), torch.arange(T), self.theta)
        k = (x @ t[f"{prefix}.self_attn.k_proj.weight"].T).view(T, KV_HEADS, HEAD_DIM)
        k = rotate(k, torch.arange(T), self.theta).repeat_interleave(HEADS // KV_HEADS, 1)
        v = (x @ t[f"{prefix}.self_attn.v_proj.weight"].T).view(T, KV_HEADS, HEAD_DIM)
        v = v.repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5
        i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
        seen = (j <= i) if self.window is None else (j <= i) & (j > i - self.window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, v).reshape(T, -1)
        return mixed @ t[f"{prefix}.self_attn.o_proj.weight"].T

    def mlp(self, prefix, x):
        t = self.t
        gate = torch.nn.functional.silu(x @ t[f"{prefix}.mlp.gate_proj.weight"].T)
        return (gate * (x @ t[f"{prefix}.mlp.up_proj.weight"].T)) @ t[f"{prefix}.mlp.down_proj.weight"].T

    def run(self, embedded, states):
        """Logits' inputs and own states of all rows: row i has token i + 1 and the state of token i."""
        t = self.t
        for index in range(self.layers):
            prefix = f"layers.{index}" if f"layers.{index}.mlp.up_proj.weight" in t else "midlayer"
            if index == 0 and self.eagle1:
                x = torch.cat([embedded, states], -1) @ t["fc.weight"].T + t["fc.bias"]
                inputs, residual = x, x
            elif index == 0:
                normed = rms(states, t[f"{prefix}.hidden_norm.weight"])
                inputs = torch.cat([rms(embedded, t[f"{prefix}.input_layernorm.weight"]), normed], -1)
                residual = normed if self.before_residual else states
            else:
                inputs, residual = rms(x, t[f"{prefix}.input_layernorm.weight"]), x
            x = residual + self.attend(prefix, inputs)
            x = x + self.mlp(prefix, rms(x, t[f"{prefix}.post_attention_layernorm.weight"]))
        if self.eagle1:
            return x, x
        normed = rms(x, t["norm.weight"])
        return normed, normed if self.output else x

    def logits(self, embedding, head, tokens, states, drafted):
        """Logits after the text and after each drafted token: one row for each, each fed its predecessor's state."""
        fed, out = self.fuse(states), []
        for step in range(len(drafted) + 1):
            text = torch.tensor([*tokens[1:], *drafted[:step]])
            hidden, own = self.run(embedding[text], fed)
            out.append(hidden[-1] @ head.T)
            fed = torch.cat([fed, own[-1:]])
        return torch.stack(out)


CASES = {
    "reduced vocabulary": (dict(), dict(), dict()),
    "whole vocabulary": (dict(reduced=False), dict(), dict()),
    "own embedding": (dict(embedding=True), dict(), dict()),
    "norm before residual": (dict(), dict(norm_before_residual=True), dict(before_residual=True)),
    "one norm before fc": (dict(fc_norm="whole"), dict(norm_before_fc=True), dict()),
    "norms before fc": (dict(fc_norm="each"), dict(fc_norm=True), dict()),
    "theta": (dict(), dict(rope_theta=500.0), dict(theta=500.0)),
}
SPECULATORS = {
    "plain": (dict(), dict(), dict(), dict()),
    "norm of the output": (dict(), dict(norm_output=True), dict(), dict(output=True)),
    "two layers": (dict(layers=2), dict(), dict(num_hidden_layers=2), dict(layers=2)),
    "window": (
        dict(), dict(), dict(sliding_window=6, layer_types=["sliding_attention"]), dict(window=6)
    ),
    "all": (
        dict(layers=2, fc_norm="whole", embedding=True),
        dict(norm_output=True, norm_before_fc=True, norm_before_residual=True),
        dict(num_hidden_layers=2, rope_theta=300.0),
        dict(layers=2, output=True, before_residual=True, theta=300.0),
    ),
}  # fmt: skip


def run_jaxspec(path, embedding, head, tokens, states, drafted):
    """The same through the folder and a cache: a prefill, then one row at a time."""
    weights = open_weights(path)
    cfg = weights.config
    placement = Placement(cfg, plan_mesh(1), np.dtype("float32"))
    params = weights.load(placement)
    params = {"embed": jnp.asarray(embedding), "head": jnp.asarray(head)} | params

    def every(params, tokens, states, drafted):
        fed = fuse(params, cfg, states)
        cache = init_cache(cfg, cfg.num_kv_heads, SLOTS, jnp.dtype("float32"))
        cache = prefill_draft(params, cfg, tokens[1:-1], fed[:-1], jnp.int32(len(tokens) - 2), cache)
        state, out = fed[-1:], []
        for token in [tokens[-1], *drafted]:
            one = jnp.ones((1, 1), bool)
            hidden, state, cache = forward_draft(params, cfg, token[None], state, cache.length[None], cache, one)
            cache = dataclasses.replace(cache, length=cache.length + 1)
            out.append(vocab_logits(params, cfg, hidden)[0])
        return jnp.stack(out)

    return on_one_device(every)(params, jnp.asarray(tokens), jnp.asarray(states), jnp.asarray(drafted))


def compare(path, tensors, **settings):
    rng = np.random.default_rng(3)
    tokens, drafted = rng.integers(0, VOCAB, LENGTH), rng.integers(0, VOCAB, STEPS)
    width = TARGET_DIM if "midlayer.hidden_norm.weight" not in tensors and "norm.weight" not in tensors else 0
    states = rng.normal(size=(LENGTH - 1, width or STATES * TARGET_DIM)).astype(np.float32)
    embedding = tensors.get("embed_tokens.weight", rng.normal(size=(VOCAB, DIM)).astype(np.float32))
    head = tensors.get("lm_head.weight", (rng.normal(size=(VOCAB, DIM)) / DIM**0.5).astype(np.float32))
    got = run_jaxspec(path, embedding, head, tokens.astype(np.int32), states, drafted.astype(np.int32))
    reference = Reference(tensors, **settings)
    expected = reference.logits(
        torch.from_numpy(embedding), torch.from_numpy(head), tokens.tolist(), torch.from_numpy(states), drafted.tolist()
    )
    assert got.shape == expected.shape == (STEPS + 1, len(head))
    assert relative_error(got, expected.numpy()) < TOLERANCE


@pytest.mark.parametrize("name", fast_part(CASES, lambda name: name.endswith("vocabulary")))
def test_logits_equal_the_reference(name, tmp_path):
    made, config, settings = CASES[name]
    tensors = random_tensors(1, **made)
    compare(write_folder(tmp_path, tensors, **config), tensors, **settings)


@pytest.mark.parametrize("name", fast_part(SPECULATORS, lambda name: name == "all"))
def test_logits_of_speculators_layouts_equal_the_reference(name, tmp_path):
    made, config, layer, settings = SPECULATORS[name]
    tensors = random_tensors(2, first="layers.0", **made)
    compare(write_speculators(tmp_path, tensors, layer, **config), tensors, **settings)


@pytest.mark.parametrize("layers", fast_part([1, 2], lambda layers: layers == 1))
def test_logits_of_eagle1_equal_the_reference(layers, tmp_path):
    tensors = random_eagle1(4, layers)
    path = write_folder(tmp_path, tensors, num_hidden_layers=layers, draft_vocab_size=None)
    compare(path, tensors, layers=layers)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_pickle_is_read_without_torch(dtype, tmp_path):
    """The same numbers as torch itself reads, from a file that torch wrote."""
    tensors = {name: torch.from_numpy(np.asarray(t)) for name, t in random_tensors(5).items()}
    kept = {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in tensors.items()}
    write_folder(tmp_path, random_tensors(5))
    (tmp_path / "model.safetensors").unlink()
    torch.save(kept, tmp_path / "pytorch_model.bin")
    rounded = {n: t.float().numpy() if t.is_floating_point() else t.numpy() for n, t in kept.items()}
    if dtype == "float32":
        compare(tmp_path, rounded)
    weights = open_weights(tmp_path)
    assert str(weights.own_storage) == dtype
    params = weights.load(Placement(weights.config, plan_mesh(1), np.dtype("float32")))
    np.testing.assert_array_equal(np.asarray(params["fc"]), rounded["fc.weight"])


def test_the_targets_states_are_those_of_transformers(tmp_path):
    """State i enters layer i; the last one before its norm is what the final norm is taken of."""
    sizes = dict(
        vocab_size=VOCAB, hidden_size=TARGET_DIM, intermediate_size=70, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    model.save_pretrained(tmp_path)
    weights = open_weights(tmp_path)
    cfg, layers = weights.config, (2, 0, 1, 3, NORMED)
    params = weights.load(Placement(cfg, plan_mesh(1), np.dtype("float32")))
    tokens = np.random.default_rng(1).integers(0, VOCAB, LENGTH)
    with torch.no_grad():
        given = model(torch.tensor(tokens[None]), output_hidden_states=True).hidden_states
    expected = [given[i][0].numpy() for i in (2, 0, 1)]

    def every(params, tokens):
        cache = init_cache(cfg, cfg.num_kv_heads, SLOTS, jnp.dtype("float32"))
        filled, chunk = prefill_with_states(params, cfg, tokens, jnp.int32(LENGTH), cache, layers)
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        hidden, _, batch = forward_with_states(params, cfg, tokens, jnp.arange(LENGTH), cache, mask, layers)
        some = prefill_with_states(params, cfg, tokens, jnp.int32(LENGTH), cache, (1, 2))[1]
        return chunk, batch, hidden, some, filled.length

    chunk, batch, hidden, some, length = on_one_device(every)(params, jnp.asarray(tokens.astype(np.int32)))
    assert length == LENGTH
    for got in (np.asarray(chunk), np.asarray(batch)):
        parts = np.split(got, len(layers), axis=1)
        for part, reference in zip(parts, expected, strict=False):
            assert relative_error(part, reference) < TOLERANCE
        assert relative_error(parts[4], given[3][0].numpy()) < TOLERANCE
        scaled = rms(torch.tensor(parts[3]), torch.ones(TARGET_DIM), cfg.norm_eps).numpy()
        assert relative_error(scaled, given[3][0].numpy()) < TOLERANCE
    assert relative_error(hidden, given[3][0].numpy()) < TOLERANCE
    assert relative_error(some, np.concatenate([expected[2], expected[0]], axis=1)) < TOLERANCE
