"""Layers for multi-token prediction inside checkpoints against a NumPy pass without a cache."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from mtp_folders import FAMILIES, MtpReference, write_mtp
from tiny_models import empty_cache, on_one_device, relative_error

from jaxspec.checkpoint.load import open_weights
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.loading import OpenModels
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.draft_passes import run_verified
from jaxspec.methods.core.round import read_rounds
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.models.feature_draft import forward_draft, fuse, prefill_draft
from jaxspec.models.transformer import vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Verified

TOLERANCE = 2e-5
STEPS, PATH = 4, 5


@pytest.mark.parametrize(("family", "wrapped"), [*((family, False) for family in FAMILIES), ("dense", True)])
def test_logits_equal_those_of_numpy_in_chunks_and_over_rounds(family, wrapped, tmp_path):
    rng = np.random.default_rng(3)
    folder = write_mtp(tmp_path, family, wrapped=wrapped)
    weights = open_weights(folder).mtp()
    cfg, reference = weights.config, MtpReference(folder)
    embed, head = (jnp.asarray(each, jnp.float32) for each in (reference.embed, reference.head))
    params = weights.load(Placement(cfg, plan_mesh(1), np.dtype("float32"))) | {"embed": embed, "head": head}
    states = (rng.normal(size=(120, cfg.embed_dim)) * 2).astype(np.float32)

    @on_one_device
    def fill(params, following, states, count, cache):
        return prefill_draft(params, cfg, following, fuse(params, cfg, states), count, cache)

    @on_one_device
    def draft(params, cache, seen, token, states, count, drafted):
        """A round: everything verified runs with true states, then each drafted token with its parent's own."""
        verified = Verified(token, count, token, jnp.zeros(PATH), states=states)
        hidden, own, sequence = run_verified(params, cfg, SequenceState(cache, seen=seen), verified)
        cache, out = sequence.cache, [vocab_logits(params, cfg, hidden)[0]]
        for step in range(STEPS):
            # The root lies in window slot 0, the drafted tokens follow it.
            slot = jnp.int32(1 + step)
            mask = jnp.arange(1 + STEPS)[None] <= slot
            hidden, own, cache = forward_draft(
                params, cfg, drafted[step][None], own, (cache.length + slot)[None], cache, mask,
                cache.length + jnp.arange(1 + STEPS), slot,
            )  # fmt: skip
            out.append(vocab_logits(params, cfg, hidden)[0])
        return jnp.stack(out), dataclasses.replace(sequence, cache=cache)

    text = rng.integers(0, cfg.vocab_size, 120).astype(np.int32)
    cache, known = empty_cache(cfg, 192), 24
    for start, stop in ((0, 7), (7, 14), (14, 15), (15, known - 2)):  # rows of tokens 1 to 22, in chunks
        following, fed = np.zeros(8, np.int32), np.zeros((8, cfg.embed_dim), np.float32)
        following[: stop - start], fed[: stop - start] = text[start + 1 : stop + 1], states[start:stop]
        cache = fill(params, following, fed, np.int32(stop - start), cache)
    sequence, count = SequenceState(cache, seen=jnp.int32(known - 1)), 1
    worst = 0.0
    for _ in range(8):
        token, fed = np.zeros(PATH, np.int32), np.zeros((PATH, cfg.embed_dim), np.float32)
        token[:count], fed[:count] = text[known - count : known], states[known - count - 1 : known - 1]
        drafted = rng.integers(0, cfg.vocab_size, STEPS).astype(np.int32)
        seen = sequence.seen
        got, sequence = draft(params, sequence.cache, seen, token, fed, np.int32(count), drafted)
        expected = reference.logits(text[:known], states[: known - 1], drafted)
        worst = max(worst, relative_error(got, expected))
        assert int(sequence.seen) == known and int(sequence.cache.length) == known - 2
        count = int(rng.integers(1, PATH + 1))
        known += count
    assert worst < TOLERANCE


@pytest.mark.parametrize("family", ["dense", "next"])
def test_what_a_chain_drafts_follows_from_the_states_of_transformers(family, tmp_path):
    """From a folder to proposals: the layer is fed the target's states after the final norm, and then its own."""
    folder = write_mtp(tmp_path, family)
    reference, target = MtpReference(folder), open_weights(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    opened = OpenModels(target, target.mtp())
    models = opened.place(plan_mesh(1), plan_mesh(1), "float32", "float32")
    params, engine = opened.load(models), Engine(models, Chain(STEPS), 150)
    engine.prepare()
    runner, rng = engine.runner, np.random.default_rng(5)
    text = rng.integers(0, target.config.vocab_size, 70).tolist()
    state = runner.resume(params, runner.start(0, None), np.array(text, np.int32), 0)
    request, close = runner.place_request(SamplingParams(), 0), 0
    for _ in range(6):
        with torch.no_grad():
            states = model.model(torch.tensor([text])).last_hidden_state[0, :-1].numpy()
        expected: list[int] = []
        for step in range(STEPS):
            logits = reference.logits(text, states, expected)[step]
            second, first = np.sort(logits)[-2:]
            close += first - second < 1e-3
            expected.append(int(np.argmax(logits)))
        state, round_, _ = runner.round(params, state, request, 1)
        (output,) = read_rounds(round_)
        assert np.asarray(state.draft.tree.child_token)[:STEPS, 0].tolist() == expected
        text += output.tokens
    assert close == 0
