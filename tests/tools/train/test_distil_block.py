"""Training drafts that fill a block: what is trained is what decodes, and the tool from text to draft."""

import json

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
from distil_cases import PREFIX, SAMPLE, make_conversations, succeed
from native_models import LLAMA
from tiny_models import empty_cache, init_params, on_one_device, relative_error
from train.batches import Packer
from train.block import STRIDE, block_config, block_loss, fill_blocks, init_block

from jaxspec import LLM, SamplingParams
from jaxspec.checkpoint.load import open_weights
from jaxspec.methods.specexec import SpecExec
from jaxspec.models.feature_draft import forward_block, fuse, prefill_draft
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

HEAD = np.arange(6, 46, 2, dtype=np.int32)
LENGTH, PLACES, RANK = 40, 4, 8
CFG = block_config(LLAMA, (0, 1), (0, 1, 2), HEAD.tolist(), PLACES, RANK)
PACKER = Packer(PREFIX, LENGTH, HEAD, LLAMA.vocab_size)


def noisy(params):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return jax.tree.unflatten(tree, [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in pairs])


def make_batch():
    conversations = make_conversations([12, 20, 14, 17], vocab=LLAMA.vocab_size)
    rows = PACKER.pack([conversations[:2], conversations[2:]])
    states = jax.random.normal(jax.random.key(2), (*rows.token.shape, 3 * LLAMA.embed_dim))
    return rows, states.astype(jnp.bfloat16)


def test_a_block_is_what_decoding_computes():
    """At every anchor, of the text before it alone; and a loss that all its weights follow."""
    target = init_params(jax.random.key(0), LLAMA, scale=0.2)
    params, (rows, states) = noisy(init_block(target, CFG, (0, 1))), make_batch()
    blocks = jax.jit(lambda params: fill_blocks(params, CFG, target["embed"], states, rows))(params)

    @on_one_device
    def decode(params, token, states, count, root):
        cache = prefill_draft(params, CFG, token, fuse(params, CFG, states), count, empty_cache(CFG, 2 * LENGTH))
        return forward_block(params, CFG, root, cache)[0]

    compared, whole = 0, params | {"embed": target["embed"]}
    for r, a in np.ndindex(blocks.place.shape[:2]):
        first = int(blocks.place[r, a, 0])
        if not np.asarray(blocks.counts)[r, a].all():
            continue
        begin = int(np.flatnonzero(rows.segment[r] == rows.segment[r, first])[0])
        token, own = np.zeros(LENGTH, np.int32), np.zeros((LENGTH, states.shape[2]), np.float32)
        token[: first - begin], own[: first - begin] = rows.token[r, begin:first], np.asarray(states[r, begin:first])
        expected = decode(whole, token, own, np.int32(first - begin), rows.token[r, first])
        assert relative_error(np.asarray(blocks.hidden[r, a]), expected) < 3e-5
        compared += 1
    assert compared > 2 and (np.diff(np.asarray(blocks.place)[:, :, 0]) <= STRIDE).all()

    def loss(params):
        total, weight = block_loss(params, CFG, target["embed"], target["embed"][HEAD], states, rows)
        return total / weight

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert value > 0 and all(np.abs(np.asarray(leaf)).max() > 0 for leaf in jax.tree.leaves(gradient))


BLOCK = "--kind block --layers 0,1 --states 0,1,2 --head 24 --steps 4 --rows 2 --length 40 --block 4 --markov 8".split()
BLOCK += "--measure-every 4 --dtype float32 --learning-rate 1e-3".split()


def test_a_trained_block_loads_and_decodes(command, chat_model, chat_llm, tmp_path):
    succeed(command("sample", tmp_path / "data", *SAMPLE, "--states", "0,1,2"))
    succeed(command("train", tmp_path / "data", tmp_path / "run", *BLOCK))
    assert "MB" in succeed(command("export", tmp_path / "run", tmp_path / "draft"))
    opened = open_weights(tmp_path / "draft")
    cfg = opened.config
    assert (cfg.features.kind, cfg.features.places, len(cfg.head_ids)) == ("block", 4, 24)
    params = opened.load(Placement(cfg, plan_mesh(1), np.dtype("float32")))
    assert np.abs(np.asarray(params["markov_out"])).max() > 0
    prompt, sampling = [0, 10, 11, 1, 20, 2, 3], SamplingParams(max_tokens=12)
    expected = chat_llm.generate(prompt, sampling).token_ids
    for method in ("chain", "auto", SpecExec(6)):
        drafted = LLM(chat_model, draft=tmp_path / "draft", method=method, dtype="float32")
        assert drafted.generate(prompt, sampling).token_ids == expected
    succeed(command("sample", tmp_path / "fresh", *SAMPLE[:-3], 3, *SAMPLE[-2:]))
    found = json.loads(succeed(command("measure", tmp_path / "draft", tmp_path / "fresh")))
    assert found["positions"] > 0 and len(found["by_depth"]) == 4
