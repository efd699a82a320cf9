"""Drafts that fill a block in one pass: a NumPy forward pass without a cache, the folders, and the tree of a table."""

import dataclasses
import heapq
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_folders import (
    CONFIG,
    DSPARK,
    HD,
    HEADS,
    KV,
    LAYERS,
    MASK,
    RANK,
    SLIDING,
    STATES,
    TABLES,
    THETA,
    TOP,
    B,
    H,
    V,
    dflash2_tensors,
    inner,
    markov_tensors,
    random_tensors,
    write_deepspec,
    write_dflash2,
    write_folder,
    write_speculators,
)
from safetensors.numpy import load_file
from tiny_models import empty_cache, on_one_device

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.eagle import open_feature_draft
from jaxspec.checkpoint.load import load_foreign, open_weights
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.methods.core.block import Block, make_table
from jaxspec.methods.core.draft_passes import DraftModel
from jaxspec.models.feature_draft import forward_block, fuse, logits_after, prefill_draft
from jaxspec.models.vocab import VocabShard
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.tree.table import best_prefixes, num_prefixes, pick_distinct


def normed(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x, position):  # [T, heads, HD]
    angle = position[:, None] / THETA ** (np.arange(0, HD, 2) / HD)
    cos, sin = (np.concatenate([f(angle)] * 2, axis=1)[:, None] for f in (np.cos, np.sin))
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def convolved(w, name, normed, rows, side):
    """DFlash2's convolution over the rows of a block, entry by entry."""
    own = w[f"{name}.base_kernel"]
    taps = own.shape[1]
    said = (normed @ w[f"{name}.kernel_projection.weight"].T).reshape(len(rows), 2, taps, -1)
    out = np.zeros_like(rows)
    for i in range(len(rows)):
        for t in range(min(taps, i + 1)):
            for c in range(H):
                out[i, c] += (own[side, t, c] + said[i, side, t, c // (H // said.shape[-1])]) * rows[i - t, c]
    return out


def reference(tensors, embed, states, root, causal, first=1, window=None, from_root=False, sliding=LAYERS):
    """What the head sees of the places after a root whose text before it has `states`, [t, n * H]; float64.

    Layers after the first `sliding` ones have no window, and all rows of their blocks see each other.
    """
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    known = len(states)
    context = normed(states @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, position = embed[[root] + [MASK] * (B - 1)].astype(np.float64), np.arange(known + B)
    mask = np.ones((B, known + B), bool)
    if causal:
        mask[:, known:] = np.tril(mask[:, known:])
    if window is not None:
        far = known - position[None] <= window if from_root else position[known:, None] - position[None] < window
        mask &= far
    for index in range(LAYERS):
        layer = {n.split(".", 2)[2].removesuffix(".weight"): t for n, t in w.items() if n.startswith(f"layers.{index}")}
        named = {f"{n}.weight" if n.endswith("projection") else n: t for n, t in layer.items()}
        convolves = "attention_conv.base_kernel" in layer
        before = h = normed(x, layer["input_layernorm"])
        if convolves:
            h = convolved(named, "attention_conv", before, h, 0)
        both = np.concatenate([context, h])
        q = normed((h @ layer["self_attn.q_proj"].T).reshape(B, HEADS, HD), layer["self_attn.q_norm"])
        k = normed((both @ layer["self_attn.k_proj"].T).reshape(-1, KV, HD), layer["self_attn.k_norm"])
        v = (both @ layer["self_attn.v_proj"].T).reshape(-1, KV, HD)
        q, k = rotate(q, position[known:]), rotate(k, position)
        k, v = (np.repeat(t, HEADS // KV, axis=1) for t in (k, v))
        seen = mask if index < sliding else np.ones_like(mask)
        scores = np.where(seen[None], np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HD), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(B, -1) @ layer["self_attn.o_proj"].T
        x = x + (convolved(named, "attention_conv", before, out, 1) if convolves else out)
        before = h = normed(x, layer["post_attention_layernorm"])
        if convolves:
            h = convolved(named, "mlp_conv", before, h, 0)
        gate, up = h @ layer["mlp.gate_proj"].T, h @ layer["mlp.up_proj"].T
        out = (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj"].T
        x = x + (convolved(named, "mlp_conv", before, out, 1) if convolves else out)
    return normed(x, w["norm.weight"])[first:]


MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
# Layouts of folders: how each is written, whether its block is causal, the first row that proposes, its window.
FOLDERS = {
    "dflash": (lambda path: write_folder(path, random_tensors(), **inner(causal_head=False)), False, 1, None),
    "jetspec": (lambda path: write_folder(path, random_tensors(), **inner(causal_head=True)), True, 1, None),
    "sliding": (lambda path: write_folder(path, random_tensors(), **SLIDING), True, 1, 6),
    "sliding, all": (lambda path: write_folder(path, random_tensors(), is_causal=False, **SLIDING), False, 1, 6),
    "deepspec": (lambda path: write_deepspec(path, markov_tensors()), False, 0, None),
    "dflash2": (lambda path: write_dflash2(path, dflash2_tensors(), is_causal=False, **SLIDING), False, 1, 6),
    "speculators": (lambda path: write_sliding(path, sliding_window_non_causal=True), False, 1, 6),
    "speculators, causal": (lambda path: write_sliding(path), True, 1, 6),
    "mixed": (lambda path: write_folder(path, random_tensors(), **(SLIDING | MIXED)), True, 1, 6),
    "speculators, mixed": (lambda path: write_sliding(path, MIXED), True, 1, 6),
}  # fmt: skip


def write_sliding(path, layer=None, **changes):
    plain = {key: value for key, value in CONFIG.items() if key not in ("architectures", "dflash_config", "block_size")}
    layers = {
        key: value
        for key, value in (plain | SLIDING | (layer or {})).items()
        if key not in ("num_target_layers", "torch_dtype")
    }
    tensors = random_tensors() | TABLES
    return write_speculators(path, tensors, draft_vocab_size=V, transformer_layer_config=layers, **changes)


@pytest.mark.parametrize("layout", FOLDERS)
def test_places_equal_those_of_numpy_in_chunks_and_over_rounds(layout, tmp_path):
    write, causal, first, window = FOLDERS[layout]
    rng = np.random.default_rng(1)
    source = open_feature_draft(write(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    cfg = source.config
    embed = rng.normal(size=(V, H)).astype(np.float32)
    params = load_foreign(source, plan_mesh(1), "float32") | {"embed": jnp.asarray(embed)}
    from_root, sliding = layout.startswith("speculators"), 1 if "mixed" in layout else LAYERS
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
        expected = reference(tensors, embed, states[:known], root, causal, first, window, from_root, sliding)
        np.testing.assert_allclose(hidden, expected, atol=2e-5, rtol=1e-5)


def after(tensors, kind, logits, hidden, token):
    """Logits of one place after a token, [V]; float64."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    if kind == "dflash2":
        best = np.argsort(-logits, kind="stable")[:TOP]
        out = np.full(V, -np.inf)
        said = w["candidate_selector.hidden_projection.weight"] @ hidden
        for b in best:
            product = w["candidate_selector.predecessor_codebook"][token] * said
            out[b] = logits[b] + (product * w["candidate_selector.successor_codebook"][b]).sum()
        return out
    before = w["markov_head.markov_w1.weight"][token]
    if kind == "gated":
        gate = w["markov_head.gate_proj.weight"] @ np.concatenate([hidden, before]) + w["markov_head.gate_proj.bias"]
        before = before / (1 + np.exp(-gate))
    return logits + w["markov_head.markov_w2.weight"] @ before


def open_first_order(kind, tmp_path):
    if kind == "dflash2":
        folder = write_dflash2(tmp_path, dflash2_tensors())
    else:
        folder = write_deepspec(tmp_path, markov_tensors(kind), markov_head_type=kind)
    source, tensors = open_feature_draft(folder), load_file(folder / "model.safetensors")
    params = load_foreign(source, plan_mesh(1), "float32")
    return source, tensors, params


@pytest.mark.parametrize("kind", ["vanilla", "gated", "dflash2"])
def test_logits_after_a_token_are_those_of_the_published_heads(kind, tmp_path):
    rng = np.random.default_rng(7)
    source, tensors, params = open_first_order(kind, tmp_path)
    vocab, hidden, token = VocabShard(V, V), rng.normal(size=(1, H)), np.array([3, 50, 3, 100])
    logits = rng.normal(size=(1, V)) * 3

    @on_one_device
    def found(params, logits, hidden, token):
        return logits_after(params, source.config, vocab, logits, hidden, token)

    made = found(params, logits.astype(np.float32), hidden.astype(np.float32), token.astype(np.int32))
    for row, before in zip(np.asarray(made), token, strict=True):
        np.testing.assert_allclose(row, after(tensors, kind, logits[0], hidden[0], before), atol=2e-5, rtol=1e-5)


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


@pytest.mark.parametrize("kind", ["vanilla", "gated", "dflash2"])
@pytest.mark.parametrize("branch", [1, 4])
def test_a_table_of_first_order_is_the_walk_over_its_places(branch, kind, tmp_path):
    rng, places, root = np.random.default_rng(9), 4, 17
    source, tensors, params = open_first_order(kind, tmp_path)
    placement: Any = SimpleNamespace(cfg=source.config, vocab=VocabShard(V, V))
    hidden = rng.normal(size=(places, H)).astype(np.float32)
    logits = (rng.normal(size=(places, V)) * 3).astype(np.float32)
    nothing: Any = None

    def propose(logits, paths, request, position):
        best, token = jax.lax.top_k(jax.nn.log_softmax(logits), branch)
        return token.astype(jnp.int32), best

    @on_one_device
    def table(params, hidden, logits):
        model = DraftModel(params, placement, propose, nothing)
        return make_table(model, Block(hidden, logits), jnp.int32(root), nothing, jnp.int32(0))

    token, logprob = map(np.asarray, table(params, hidden, logits))
    before, reach = [root], np.zeros(1)
    for place in range(places):
        rows = []
        for one in before:
            row = after(tensors, kind, logits[place].astype(np.float64), hidden[place].astype(np.float64), one)
            rows.append(row - np.log(np.exp(row - row.max()).sum()) - row.max())
        best = [sorted(row)[-branch] for row in rows]
        for p, row in enumerate(rows):
            for c, one in enumerate(token[place]):
                if logprob[place, p, c] > -np.inf:
                    np.testing.assert_allclose(logprob[place, p, c], row[one], atol=1e-4)
                else:  # none of this parent's likeliest ones
                    assert row[one] <= best[p] + 1e-4
        # The likeliest continuation of the best prefix is there, and it is first where there is one candidate.
        scores = np.array([r + row for r, row in zip(reach, rows, strict=True)]).max(axis=0)
        assert token[place][0] == np.argmax(scores)
        before, reach = token[place].tolist(), scores[token[place]]


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
    anchor = open_weights(write_speculators(tmp_path / "anchor", tensors | tables, sample_from_anchor=True)).config
    assert (anchor.features.first_row, anchor.features.places) == (0, B)


def test_dspark_is_the_same_draft_in_three_layouts(tmp_path):
    tensors = markov_tensors()
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence")}
    deepspec = open_weights(write_deepspec(tmp_path / "deepspec", tensors)).config
    forge = inner(projector_type="dspark", **DSPARK) | {"architectures": ["DSparkDraftModel"]}
    spec_forge = open_weights(write_folder(tmp_path / "forge", plain, **forge)).config
    path = write_speculators(
        tmp_path / "speculators", tensors | TABLES, speculators_model_type="dspark", draft_vocab_size=V,
        architectures=["DSparkSpeculator"], **DSPARK,
    )  # fmt: skip
    speculators = open_weights(path).config
    first = deepspec.features
    assert (first.block, first.places, first.markov_rank, first.markov_gated) == (B, B, RANK, True)
    assert first.layers == spec_forge.features.layers == speculators.features.layers == (2, 5)
    assert dataclasses.replace(spec_forge.features, own_head=True) == first
    assert dataclasses.replace(speculators.features, target_layers=6) == first
    embedding = open_weights(write_deepspec(tmp_path / "embedding", tensors, target_layer_ids=[-1, 4])).config
    assert embedding.features.layers == (0, 5)
    later = dict(speculators_model_type="dspark", draft_vocab_size=V, sample_from_anchor=False, **DSPARK)
    shifted = open_weights(write_speculators(tmp_path / "later", tensors | TABLES, **later)).config
    assert shifted.features.places == B - 1


def test_scales_of_dflash2_are_its_own(tmp_path):
    own = {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    made = inner(conv_kernel_size=2, conv_group_size=16, selector_rank=RANK, selector_top_k=TOP, **own)
    cfg = open_weights(write_dflash2(tmp_path, dflash2_tensors(), **made)).config
    assert (cfg.embed_scale, cfg.logit_scale, cfg.logit_softcap) == (2.5, 0.5, 30.0)


@pytest.mark.parametrize("write", [write_deepspec, write_dflash2])
def test_a_native_checkpoint_keeps_a_head_of_first_order(write, tmp_path):
    folder = write(tmp_path / "own", markov_tensors() if write is write_deepspec else dflash2_tensors())
    convert(folder, tmp_path / "native")
    kept = open_weights(tmp_path / "native").config
    assert dataclasses.replace(kept, shares_embedding=False) == dataclasses.replace(
        open_weights(folder).config, shares_embedding=False
    )


REFUSED = {
    "no head": ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 8}, "missing"),
    "recurrent": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "markov_head_type": "rnn"}, "'rnn'; 'vanilla' and",
    ),
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, "conv_group_size"),
    "Domino": ({"architectures": ["DominoDraftModel"]}, "this architecture"),
    "another": ({"architectures": ["LlamaForCausalLMEagle3"]}, "DFlashDraftModel, .* are supported"),
    "speculators": ({"speculators_model_type": "muse"}, "speculators_model_type"),
    "no layers": ({"speculators_model_type": "dflash"}, "transformer_layer_config"),
    "projector": (inner(projector_type="domino"), "projector_type 'domino'"),
    "selector": (inner(selector_rank=256), "'selector_rank' is not supported"),
    "block": ({"block_size": None}, "block_size"),
    "two blocks": (inner(block_size=8), "block_size is 4.*8"),
    "mask": (inner(mask_token_id=V), "mask token 101"),
    "states": (inner(target_layer_ids=[1, 2, 4]), "3 states"),
    "causality": (inner(causal=True, causal_head=False), "contradict"),
    "convolutions": (
        inner(dspark_backbone_conv_enabled=True) | {"architectures": ["DSparkDraftModel"]}, "backbone_conv",
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
        made, _ = best_prefixes(jnp.asarray(token), jnp.asarray(logprob), count)
        assert made.score.shape == (num_prefixes(depths, branch, count),)
        # A table of transitions with equal rows says the same.
        rows = jnp.broadcast_to(jnp.asarray(logprob)[:, None], (depths, branch, branch))
        same, _ = best_prefixes(jnp.asarray(token), rows, count)
        for one, other in zip(jax.tree.leaves(same), jax.tree.leaves(made), strict=True):
            np.testing.assert_array_equal(one, other)
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


def walk_all(first, table, token, count):
    """The best prefixes of a table of transitions, by scoring all paths."""
    found = []
    for depth in range(1, len(token) + 1):
        for ranks in itertools.product(range(token.shape[1]), repeat=depth):
            steps = [table[d, ranks[d - 1], ranks[d]] for d in range(1, depth)]
            found.append((first[ranks[0]] + sum(steps), ranks))
    return sorted(found, reverse=True)[:count]


@pytest.mark.parametrize("ties", [False, True])
def test_the_tree_of_transitions_is_that_of_all_paths(ties):
    rng = np.random.default_rng(8)
    for depths, branch, count in itertools.product((1, 4), (1, 3), (4, 16)):
        shape = (depths, branch, branch)
        logprob = (-rng.integers(0, 3, shape) if ties else np.log(rng.random(shape))).astype(np.float32)
        token = np.arange(depths * branch, dtype=np.int32).reshape(depths, branch)
        made, _ = best_prefixes(jnp.asarray(token), jnp.asarray(logprob), count)
        score = np.asarray(made.score)
        best = np.argsort(-score, kind="stable")[:count]
        expected = walk_all(logprob[0, 0], logprob, token, count)
        np.testing.assert_allclose(score[best][: len(expected)], [s for s, _ in expected], atol=1e-5)
        if not ties:
            chosen = {(int(made.token[i]), int(made.depth[i])) for i in best}
            assert chosen == {(int(token[len(r) - 1, r[-1]]), len(r)) for _, r in expected}


def test_each_token_is_picked_once_by_its_best_score():
    token = jnp.array([5, 9, 5, 7, 9, 5], jnp.int32)
    score = jnp.array([-3.0, -1.0, -0.5, -4.0, -1.0, -0.5])
    picked, best = pick_distinct(token, score, 4)
    assert picked[:3].tolist() == [5, 9, 7]
    np.testing.assert_array_equal(best, np.array([-0.5, -1.0, -4.0, -np.inf], np.float32))
