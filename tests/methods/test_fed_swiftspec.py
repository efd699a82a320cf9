"""SwiftSpec with feature drafts: exact, and its prefix stands on true states.

The tree below a new root is kept (`reuse`), though it stands on guesses, or dropped and grown anew from true states.
"""

import dataclasses

import numpy as np
import pytest
from marks import fast_part
from method_cases import LONG_PROMPT, PROMPT, SAMPLINGS, logprobs_of, plain, run, tokens_of
from swiftspec_cases import Case, Rounds, decode, engine_of, params_of
from test_draft_cache import assert_prefix
from test_fed_drafts import KINDS, good_params
from test_prefix_reuse import answer
from tiny_models import FAMILIES
from tiny_pairs import FLOAT32, count_on, counting

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.core.round import Models, read_rounds
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

pytestmark = pytest.mark.thorough

KEEP = Case("llama", 1, 1, "fed", SwiftSpec(7, 4, depth=3))
REPLACE = Case("llama", 1, 1, "fed", SwiftSpec(7, 4, depth=2, reuse=False, refill=2))
SPLIT = Case("llama", 4, 4, "fed", SwiftSpec(3, 2, depth=3))
CASES = {
    "keep": KEEP,
    "replace": REPLACE,
    "tp4": SPLIT,
    "replace tp4": Case("qwen3", 4, 2, "fed", SwiftSpec(3, 4, depth=2, reuse=False)),
    "together": Case("mistral", 1, 0, "fed own", SwiftSpec(5, 3, depth=2)),
    "together tp4": Case("llama", 4, 0, "fed", SwiftSpec(3, 2, depth=2)),
    "added": Case("llama", 1, 1, "fed added", SwiftSpec(7, 4, depth=2)),
    "added tp4": Case("llama", 4, 2, "fed added", SwiftSpec(3, 2, depth=2, reuse=False)),
    "nodes only": Case("llama", 1, 1, "fed own", SwiftSpec(3, 2, depth=3, leaves=False)),
    "chain": Case("llama", 1, 1, "fed eagle1", SwiftSpec(5, 1, branch=1, depth=4)),
    "mtp": Case("qwen3.5", 1, 1, "fed mtp", SwiftSpec(7, 4, depth=2)),
    "mtp tp2": Case("qwen3.5", 2, 1, "fed mtp", SwiftSpec(5, 3, depth=3, reuse=False)),
    "mtp tp4": Case("qwen3.5", 4, 2, "fed mtp", SwiftSpec(3, 2, depth=2)),
    "assistant": Case("gemma4", 1, 1, "fed assistant", SwiftSpec(7, 4, depth=2)),
    "assistant tp2": Case("gemma4-two", 2, 1, "fed assistant", SwiftSpec(5, 3, depth=3, reuse=False)),
    "adaptive": Case("llama", 3, 1, "fed", SwiftSpec(7, 8, depth=1, adaptive=True, survivors=9)),
    "smallest": Case("llama", 1, 1, "fed", SwiftSpec(1, 1, branch=1, depth=1)),
}
FAST = ("keep",)
NAMES = fast_part(CASES, lambda name: name in FAST)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_plain_decoding(name):
    case, samplings = CASES[name], list(SAMPLINGS)
    for index, draft in enumerate(KINDS):
        for sampling in {samplings[0], samplings[1], samplings[index]}:
            prompt = (PROMPT, LONG_PROMPT, PROMPT[:1], PROMPT[:2])[index % 4]
            rounds = decode(case, prompt, 20, draft, index, **SAMPLINGS[sampling])
            expected = plain(case.family, prompt, 20, index, **SAMPLINGS[sampling])
            assert tokens_of(rounds) == tokens_of(expected), (draft, sampling)
            np.testing.assert_allclose(logprobs_of(rounds), logprobs_of(expected), atol=1e-3)


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("name", NAMES)
def test_caches_and_states_equal_a_fresh_prefill_of_the_verified_text(name, sampling):
    case = CASES[name]
    for index, draft in enumerate(("copy", "random", "adversarial")):
        prompt = (PROMPT, LONG_PROMPT, PROMPT[:1])[index]
        steps = Rounds(case, draft, prompt, index, **SAMPLINGS[sampling])
        for _ in range(6):
            known = len(steps.text)
            steps.step()
        draft_side, runner = steps.state.draft, engine_of(case).runner
        assert int(draft_side.sequence.seen) == known
        length = int(draft_side.sequence.cache.length)
        assert length == max(known - 2 + name.startswith("assistant"), 0)
        fresh = runner.resume(steps.params, runner.start(0, None), np.array(steps.text, np.int32), 0)
        rows = known - 1
        assert_prefix(dataclasses.replace(draft_side.sequence.cache, length=rows), fresh.draft.sequence.cache, rows)
        assert_prefix(steps.state.target.cache, fresh.target.cache, len(steps.text) - 1)
        packed, states = steps.state.verified
        count = int(np.asarray(packed)[0])
        np.testing.assert_allclose(
            np.asarray(states)[count - 1], np.asarray(fresh.verified[1])[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["keep", "replace"])
def test_a_conversation_gives_the_tokens_of_cold_runs(name, monkeypatch):
    case = CASES[name]
    engine, params, prompt = engine_of(case), params_of(case, "copy"), list(PROMPT)
    for turn in range(2):
        monkeypatch.setattr(engine, "session_memory", 0)
        cold, cached = answer(engine, params, prompt, 12, turn, temperature=1.0)
        assert cached == 0
        monkeypatch.setattr(engine, "session_memory", None)
        answer(engine, params, prompt[:-3], 5, turn)
        warm, cached = answer(engine, params, prompt, 12, turn, temperature=1.0)
        assert len(prompt) - 12 <= cached < len(prompt) - 1
        assert tokens_of(warm) == tokens_of(cold)
        prompt += [*tokens_of(warm), *PROMPT[turn : turn + 4]]


def good_engine(method, wrong=(), heeds=0.0):
    """An engine of a target that counts but after `wrong` tokens, and of a draft that counts: see `good_params`."""
    placement, params = good_params(wrong, heeds)
    engine = Engine(Models(Placement(FAMILIES["llama"], plan_mesh(1), FLOAT32), placement), method, 150)
    engine.prepare()
    return engine, params


def nodes_of(known, side):
    """Own state, and key in the cache, of each node by the tokens up to it; `known` end with the root."""
    tree, states, length = side.tree, np.asarray(side.states), int(side.sequence.cache.length)
    ancestors, depth, token = np.asarray(tree.ancestors), np.asarray(tree.depth), np.asarray(tree.token)
    keys = np.asarray(side.sequence.cache.key[0])
    found = {}
    for row in range(int(tree.size)):
        path = sorted(np.flatnonzero(ancestors[row]), key=lambda above: depth[above])
        assert path[-1] == row and depth[row] == len(path) - 1
        found[(*known, *token[path[1:]].tolist())] = states[row].copy(), keys[:, length + row].copy()
    return found


def root_proposals(side):
    """Scores of the root's proposals by their tokens, and which of these are nodes."""
    tree = side.tree
    tokens, scores = np.asarray(tree.child_token[0]).tolist(), np.asarray(tree.child_score[0]).tolist()
    return dict(zip(tokens, scores, strict=True)), set(
        np.asarray(tree.child_token[0])[np.asarray(tree.child_row[0]) >= 0]
    )


@pytest.mark.thorough
def test_nodes_survive_with_their_states_and_keys():
    """A node below the new root is what it was; the root has the state and the proposals that a fresh run gives it."""
    engine, params = good_engine(SwiftSpec(2, 3, depth=6), wrong=(20, 29, 41), heeds=0.05)
    runner, text = engine.runner, [5, 6, 7]
    request = runner.place_request(SamplingParams(), 0)

    def begin(text):
        return runner.resume(params, runner.start(0, None), np.array(text, np.int32), 0)

    state, before, survived, missed = begin(text), {}, 0, 0
    for _ in range(14):
        known = tuple(text)
        state, round_, _ = runner.round(params, state, request, 1)
        text += read_rounds(round_)[0].tokens
        after = nodes_of(known, state.draft)
        for path in (before.keys() & after.keys()) - {known}:
            for one, other in zip(before[path], after[path], strict=True):
                np.testing.assert_array_equal(one, other)
            survived += 1
        fresh, _, _ = runner.round(params, begin(known), request, 1)
        anew = nodes_of(known, fresh.draft)
        for one, other in zip(after[known], anew[known], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        (proposed, nodes), (fresh_ones, _) = root_proposals(state.draft), root_proposals(fresh.draft)
        for token in proposed.keys() & fresh_ones.keys():
            assert proposed[token] == pytest.approx(fresh_ones[token], abs=1e-3)
        # A node that is no longer proposed takes the place of the worst.
        best = sorted(fresh_ones, key=fresh_ones.get, reverse=True)[: len(fresh_ones) - len(nodes - fresh_ones.keys())]
        assert set(best) <= proposed.keys()
        missed += known not in before
        before = after
    assert survived and missed > 1
    expected = tokens_of(run(engine, params, [5, 6, 7], len(text) - 3))
    plain_tokens = plain("llama", [5, 6, 7], len(text) - 3, params=counting((20, 29, 41)))
    assert text[3:] == expected == tokens_of(plain_tokens)


GOOD = [SwiftSpec(5, 1, branch=1, depth=6), SwiftSpec(5, 2, depth=4, reuse=False)]


@pytest.mark.thorough
@pytest.mark.parametrize("method", fast_part(GOOD, lambda method: method.reuse))
def test_a_good_draft_is_accepted(method):
    engine, params = good_engine(method)
    rounds = run(engine, params, [5, 6, 7], 60)
    assert tokens_of(rounds) == count_on(7, 60)
    assert [one.accepted for one in rounds[2:-1]] == [method.num_draft_tokens] * (len(rounds) - 3)
