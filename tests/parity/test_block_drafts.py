"""Drafts that fill a block in one pass: a NumPy forward pass without a cache, the folders, and the tree of a table."""

import dataclasses
import heapq
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import empty_cache, on_one_device

from jaxspec.checkpoint.eagle import open_feature_draft
from jaxspec.checkpoint.load import load_foreign, open_weights
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.feature_draft import forward_block, fuse, prefill_draft
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.tree.table import best_prefixes

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


def normed(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x, position):  # [T, heads, HD]
    angle = position[:, None] / THETA ** (np.arange(0, HD, 2) / HD)
    cos, sin = (np.concatenate([f(angle)] * 2, axis=1)[:, None] for f in (np.cos, np.sin))
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def reference(tensors, embed, states, root, causal):
    """What the head sees of the places after a root whose text before it has `states`, [t, n * H]; float64."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    known = len(states)
    context = normed(states @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, position = embed[[root] + [MASK] * (B - 1)].astype(np.float64), np.arange(known + B)
    mask = np.ones((B, known + B), bool)
    if causal:
        mask[:, known:] = np.tril(mask[:, known:])
    for index in range(LAYERS):
        layer = {n.split(".", 2)[2].removesuffix(".weight"): t for n, t in w.items() if n.startswith(f"layers.{index}")}
        h = normed(x, layer["input_layernorm"])
        both = np.concatenate([context, h])
        q = normed((h @ layer["self_attn.q_proj"].T).reshape(B, HEADS, HD), layer["self_attn.q_norm"])
        k = normed((both @ layer["self_attn.k_proj"].T).reshape(-1, KV, HD), layer["self_attn.k_norm"])
        v = (both @ layer["self_attn.v_proj"].T).reshape(-1, KV, HD)
        q, k = rotate(q, position[known:]), rotate(k, position)
        k, v = (np.repeat(t, HEADS // KV, axis=1) for t in (k, v))
        scores = np.where(mask[None], np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HD), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(B, -1) @ layer["self_attn.o_proj"].T
        h = normed(x, layer["post_attention_layernorm"])
        gate, up = h @ layer["mlp.gate_proj"].T, h @ layer["mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj"].T
    return normed(x, w["norm.weight"])[1:]


@pytest.mark.parametrize("causal", [False, True])
def test_places_equal_those_of_numpy_in_chunks_and_over_rounds(causal, tmp_path):
    tensors, rng = random_tensors(), np.random.default_rng(1)
    source = open_feature_draft(write_folder(tmp_path, tensors, **inner(causal_head=causal)))
    cfg = source.config
    embed = rng.normal(size=(V, H)).astype(np.float32)
    params = load_foreign(source, plan_mesh(1), "float32") | {"embed": jnp.asarray(embed)}
    states = (rng.normal(size=(80, STATES * H)) * 3).astype(np.float32)
    rows = 7

    @on_one_device
    def go_on(params, states, count, root, cache):
        token = jnp.zeros(rows, jnp.int32)
        cache = prefill_draft(params, cfg, token, fuse(params, cfg, states), count, cache)
        return *forward_block(params, cfg, root, cache), cache.length

    cache, known = empty_cache(cfg, 128), 0
    for step in range(14):
        # A first chunk of one row, full ones, then rounds that accept some; block rows of the round before are there.
        count = 1 if step == 0 else rows if step < 5 else int(rng.integers(1, B + 1))
        chunk, root = np.zeros((rows, STATES * H), np.float32), int(rng.integers(0, V))
        chunk[:count] = states[known : known + count]
        hidden, cache, length = go_on(params, chunk, np.int32(count), np.int32(root), cache)
        known += count
        assert int(length) == known
        np.testing.assert_allclose(hidden, reference(tensors, embed, states[:known], root, causal), atol=2e-5)


def test_settings_are_read_in_both_places_and_ids_leave_layers(tmp_path):
    for name, changes in {
        "top": {},
        "inside": inner(block_size=B) | {"block_size": None},
        "rule": {"dflash_config": {"mask_token_id": MASK}, "num_target_layers": 6},
    }.items():
        features = open_weights(write_folder(tmp_path / name, random_tensors(), **changes)).config.features
        assert (features.kind, features.block, features.mask_token, features.causal) == ("block", B, MASK, False)
        # By z-lab's rule for two states of six layers: 1 and 3.
        assert features.layers == ((2, 4) if name == "rule" else (2, 5)), name
        with pytest.raises(ConfigError, match="hidden state|made for 6 layers"):
            features.resolve(3)
        with pytest.raises(ConfigError, match="made for 6 layers, the target has 7"):
            features.resolve(7)
    unknown = open_weights(write_folder(tmp_path / "unknown", random_tensors(), num_target_layers=None)).config
    assert unknown.features.resolve(7).layers == (2, 5)


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


def test_the_layout_of_speculators_is_the_same_draft_with_its_own_tables(tmp_path):
    tensors, rng = random_tensors(), np.random.default_rng(2)
    ids = np.array([t for t in range(V) if t % 3 != 1])
    tables = {
        "embed_tokens.weight": rng.normal(size=(V, H)).astype(np.float32), "d2t": ids - np.arange(len(ids)),
        "lm_head.weight": rng.normal(size=(len(ids), H)).astype(np.float32), "t2d": np.isin(np.arange(V), ids),
    }  # fmt: skip
    source = open_feature_draft(write_speculators(tmp_path / "own", tensors | tables))
    cfg, plain = source.config, open_feature_draft(write_folder(tmp_path / "plain", tensors)).config
    features = dataclasses.replace(plain.features, own_head=True, target_layers=0)
    assert cfg == dataclasses.replace(plain, features=features, shares_embedding=False, head_ids=tuple(ids.tolist()))
    params = load_foreign(source, plan_mesh(1), "float32")
    np.testing.assert_array_equal(params["embed"], tables["embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], tables["lm_head.weight"])
    with pytest.raises(CheckpointError, match="first row proposes"):
        open_weights(write_speculators(tmp_path / "anchor", tensors | tables, sample_from_anchor=True))


REFUSED = {
    "DSpark": ({"architectures": ["Qwen3DSparkModel"]}, "this architecture"),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, "this architecture"),
    "another": ({"architectures": ["LlamaForCausalLMEagle3"]}, "DFlashDraftModel is supported"),
    "speculators": ({"speculators_model_type": "dspark"}, "speculators_model_type"),
    "no layers": ({"speculators_model_type": "dflash"}, "transformer_layer_config"),
    "projector": (inner(projector_type="domino"), "projector_type 'domino'"),
    "selector": (inner(selector_rank=256), "'selector_rank' is not supported"),
    "block": ({"block_size": None}, "block_size"),
    "two blocks": (inner(block_size=8), "block_size is 4.*8"),
    "mask": (inner(mask_token_id=V), "mask token 101"),
    "states": (inner(target_layer_ids=[1, 2, 4]), "3 states"),
    "causality": (inner(causal=True, causal_head=False), "contradict"),
    "sliding": (
        {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * LAYERS},
        "full attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(name, tmp_path):
    changes, message = REFUSED[name]
    with pytest.raises((CheckpointError, ConfigError), match=message):
        open_weights(write_folder(tmp_path, random_tensors(), **changes))


def test_tensors_of_relatives_are_refused(tmp_path):
    sinks = random_tensors() | {"layers.0.self_attn.attention_sink_bias": np.zeros(HEADS, np.float32)}
    with pytest.raises(CheckpointError, match="attention_sink_bias"):
        open_feature_draft(write_folder(tmp_path, sinks))


def heap_tree(logprob, count):
    """The best prefixes as DDTree finds them, each a tuple of ranks, with their scores."""
    heap, found = [(-logprob[0, 0], (0,))], []
    while heap and len(found) < count:
        score, ranks = heapq.heappop(heap)
        found.append((-score, ranks))
        depth, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < logprob.shape[1]:
            heapq.heappush(heap, (score + logprob[depth, rank] - logprob[depth, rank + 1], (*ranks[:-1], rank + 1)))
        if depth + 1 < len(logprob):
            heapq.heappush(heap, (score - logprob[depth + 1, 0], (*ranks, 0)))
    return found


@pytest.mark.parametrize("ties", [False, True])
def test_the_tree_of_a_table_is_that_of_a_heap(ties):
    rng = np.random.default_rng(3)
    for depths, branch, count in itertools.product((1, 4), (1, 3), (4, 16)):
        logprob = -rng.integers(0, 3, (depths, branch)) if ties else np.log(rng.random((depths, branch)))
        logprob = -np.sort(-logprob.astype(np.float32))
        token = np.arange(depths * branch, dtype=np.int32).reshape(depths, branch)
        made = best_prefixes(jnp.asarray(token), jnp.asarray(logprob), count)
        score, parent = np.asarray(made.score), np.asarray(made.parent)
        assert (parent < np.arange(len(parent))).all()

        def ranks_of(index, made=made, parent=parent, branch=branch):
            own = (int(made.token[index]) % branch,)
            return own if parent[index] < 0 else (*ranks_of(parent[index], made, parent, branch), *own)

        best = np.argsort(-score, kind="stable")[:count]
        expected = heap_tree(logprob, count)
        wanted = sorted((s for s, _ in expected), reverse=True)
        np.testing.assert_allclose(score[best][: len(wanted)], wanted, atol=1e-5)
        if not ties:
            assert {ranks_of(i) for i in best} == {ranks for _, ranks in expected}
        if branch == 1:
            np.testing.assert_allclose(np.sort(score)[::-1], np.cumsum(logprob[:, 0])[: len(score)], atol=1e-5)
