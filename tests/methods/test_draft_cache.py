"""Caches after many rounds: the committed prefix is that of a fresh prefill, and nothing else was touched.

And what becomes of them between generations: growth on demand, garbage after the prefix.
"""

import dataclasses

import numpy as np
import pytest
from marks import fast_part
from method_cases import (
    BASIC,
    CASES,
    CHAIN_TP4,
    LADDER,
    LARGE_REJECTION,
    LLAMA_AUTO,
    LLAMA_AUTO_LONG,
    LLAMA_CHAIN,
    LLAMA_LOOKUP,
    LLAMA_SPECEXEC,
    LLAMA_SPECINFER,
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    SHORT_CHAIN,
    SHORT_REJECTION,
    SPECINFER_TP4,
    Steps,
    arrays,
    case_id,
    check_written_slots,
    run,
    tokens_of,
    with_garbage,
)
from tiny_models import FAMILIES
from tiny_pairs import FLOAT32, place_edited, sharpen

from jaxspec import engine as engine_module
from jaxspec.engine import Engine
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.core.tree_round import FIRST_PATIENCE, SYNC_ROWS
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

AUTO_TP4 = next(case for case in CASES if isinstance(case.method, Auto) and case.degree == 4)
ROUNDS = 8
DRAFTING = [
    LLAMA_SPECEXEC,
    LLAMA_CHAIN,
    LARGE_REJECTION,
    LLAMA_SPECINFER,
    LADDER[1],
    CHAIN_TP4,
    SPECINFER_TP4,
    SHORT_CHAIN,
    SHORT_REJECTION,
]
# One of each kind of drafter, and one on a mesh.
FAST = [LLAMA_SPECEXEC, LLAMA_CHAIN, LLAMA_SPECINFER, CHAIN_TP4]


def assert_prefix(cache, fresh, length):
    assert int(cache.length) >= length
    for one, other in zip(arrays(cache), arrays(fresh), strict=True):
        np.testing.assert_allclose(one[:, :length], other[:, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("case", fast_part(DRAFTING, lambda case: case in FAST), ids=case_id)
def test_caches_equal_a_fresh_prefill_of_the_verified_text(case, sampling):
    for index, draft in enumerate(("copy", "first layer", "random", "adversarial")):
        steps = Steps(case, draft, (PROMPT, LONG_PROMPT)[index % 2], index, **SAMPLINGS[sampling])
        for _ in range(ROUNDS):
            # The draft commits what one round verified at the beginning of the next.
            known = len(steps.text)
            steps.step()
        caches = steps.caches()
        assert int(caches["target"].length) == len(steps.text) - 1
        assert int(caches["draft"].length) == known - 1
        fresh = steps.prefilled(steps.text)
        assert_prefix(caches["target"], fresh.target.cache, len(steps.text) - 1)
        # One slot more: the root was evaluated, and lies after the prefix.
        assert_prefix(dataclasses.replace(caches["draft"], length=known), fresh.draft.sequence.cache, known)


def assert_draft_cache(steps):
    """The committed prefix is that of a fresh prefill of the verified text."""
    cache = steps.caches()["draft"]
    assert int(cache.length) <= len(steps.text)
    assert_prefix(cache, steps.prefilled([*steps.text, 0]).draft.sequence.cache, int(cache.length))


@pytest.mark.thorough
@pytest.mark.parametrize("case", [LLAMA_AUTO, LLAMA_AUTO_LONG, AUTO_TP4], ids=case_id)
def test_the_drafts_cache_is_that_of_the_verified_text(case):
    for index, draft in enumerate(("copy", "first layer", "random", "constant")):
        for sampling in ("greedy", "T=1"):
            steps = Steps(case, draft, (PROMPT, LONG_PROMPT)[index % 2], index, **SAMPLINGS[sampling])
            for _ in range(10):
                known = len(steps.text)
                steps.step()
                # Up to the root where it was asked, else where it stopped.
                length = int(steps.caches()["draft"].length)
                assert (length == known - 1) if int(steps.state.draft.idle) == 0 else (length < known)
            assert_draft_cache(steps)


def test_the_drafts_cache_after_long_rests():
    steps = Steps(LLAMA_AUTO_LONG, "adversarial", LONG_PROMPT, 1, temperature=1.0)
    longest = caught_up = 0
    while len(steps.text) < 300:
        idle, known = int(steps.state.draft.idle), len(steps.text)
        lag = known - int(steps.caches()["draft"].length)
        steps.step()
        if int(steps.state.draft.idle) == 0 and lag > SYNC_ROWS:
            assert int(steps.caches()["draft"].length) == known - 1
            assert_draft_cache(steps)
            caught_up += 1
        longest = max(longest, idle)
    assert longest > 3 * FIRST_PATIENCE and caught_up
    assert_draft_cache(steps)


def test_lookup_holds_the_text():
    for draft, sampling in (("copy", "greedy"), ("copy", "T=1")):
        steps = Steps(LLAMA_LOOKUP, draft, LONG_PROMPT, 1, **SAMPLINGS[sampling])
        for _ in range(ROUNDS):
            known = list(steps.text)
            steps.step()
        text = steps.state.draft.text  # after answers of other tests, which share the engine
        assert np.asarray(text.token)[int(text.start) : int(text.length)].tolist() == known
        fresh = steps.prefilled(steps.text)
        assert_prefix(steps.caches()["target"], fresh.target.cache, len(steps.text) - 1)


def window_rows(case):
    """Slots after the prefix that a round may write, in the draft's cache."""
    method = case.method
    if isinstance(method, SpecExec):
        return max(1 + method.width * (method.depth - 1), method.max_path + 1)
    return max(method.num_rows + method.draft_rows, method.max_path + 1)


@pytest.mark.parametrize("case", FAST, ids=case_id)
def test_rounds_write_into_their_window_only(case):
    for draft in ("copy", "random", "broken"):
        steps = Steps(case, draft, PROMPT, 3, temperature=1.0)
        for _ in range(ROUNDS):
            check_written_slots(steps, window_rows(case))


@pytest.mark.parametrize("case", BASIC, ids=case_id)
def test_garbage_after_the_prefix_is_never_read(case):
    clean, spoiled = (Steps(case, "copy", PROMPT, 2, temperature=1.0) for _ in range(2))
    state = spoiled.state
    state = dataclasses.replace(state, target=dataclasses.replace(state.target, cache=with_garbage(state.target.cache)))
    if case.method.drafts:
        sequence = dataclasses.replace(state.draft.sequence, cache=with_garbage(state.draft.sequence.cache))
        state = dataclasses.replace(state, draft=dataclasses.replace(state.draft, sequence=sequence))
    else:
        text = state.draft.text
        token = np.array(text.token)
        token[int(text.length) :] = PROMPT[-1]
        text = dataclasses.replace(text, token=token)
        state = dataclasses.replace(state, draft=dataclasses.replace(state.draft, text=text))
    spoiled.state = state
    for _ in range(ROUNDS):
        assert spoiled.step() == clean.step()


@pytest.mark.thorough
@pytest.mark.parametrize("method", [SpecExec(4, width=2, depth=3), PromptLookup(num_draft_tokens=3)])
def test_capacity_grows_on_demand(method, monkeypatch, compilations):
    monkeypatch.setattr(engine_module, "FIRST_CAPACITY", 70)
    config = dataclasses.replace(FAMILIES["llama"], num_layers=1, max_context=280)
    placement = Placement(config, plan_mesh(1), FLOAT32)
    weights = place_edited(config, 1, 0, 0, sharpen)
    params = ModelParams(weights, weights if method.drafts else None)
    engine = Engine(Models(placement, placement if method.drafts else None), method)

    def decode(prompt, count):
        engine.prepare(len(prompt) + count)
        return tokens_of(run(engine, params, prompt, count))

    short = decode(PROMPT, 30)
    first = engine.runner
    assert first.slots < 280
    long_prompt = (LONG_PROMPT + PROMPT)[:90]
    long = decode(long_prompt, 60)
    grown = engine.runner
    assert grown.slots > first.slots
    compilations.clear()
    # Down to the last token of the model's context.
    assert decode(long_prompt, 190)[:60] == long
    assert decode(PROMPT, 30) == short
    assert engine.runner is grown and compilations == []
