"""SwiftSpec's losslessness: the tokens of plain decoding, however the tree grew and wherever draft and target live.

The sample: `CASES` lists engines such that every split and every size of a tree occurs, and every two of the method's
switches meet in every combination that exists (a test counts them). Each engine runs all drafts, each with one way of
sampling, taken in turn, so that over all engines every draft meets every way of sampling.
"""

import copy
import dataclasses
import gc
import itertools
import logging
import time

import jax
import numpy as np
import pytest
from method_cases import LONG_PROMPT, PROMPT, SAMPLINGS, logprobs_of, plain, rounds_of, run, tokens_of
from native_models import LLAMA, write_model
from swiftspec_cases import (
    ADAPTIVE,
    BASIC,
    CASES,
    CHAIN,
    CONTEXT,
    LARGE_BATCH,
    NODES,
    SHORT_CHAIN,
    TIGHT,
    TOGETHER,
    WIDE,
    case_id,
    check_rounds,
    decode,
    engine_of,
    expected_tokens,
    overlaps,
    params_of,
    quick,
)
from tiny_models import FAMILIES
from tiny_pairs import DRAFTS, FLOAT32, SMALL, VOCAB, flat_params

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.runtime.mesh import MeshPlan, plan_mesh
from jaxspec.runtime.placement import Placement


def runs_of(index):
    """(draft, sampling, prompt) of an engine."""
    names = list(SAMPLINGS)
    return [
        (draft, names[(index + place) % len(names)], (PROMPT, LONG_PROMPT)[(index + place) % 2])
        for place, draft in enumerate(DRAFTS)
    ]


def switches(case):
    """Settings with two values each."""
    method = case.method
    return {
        "in turn": not overlaps(case),
        "reuse": method.reuse,
        "leaves": method.leaves,
        "adaptive": method.adaptive,
        "tight": method.reuse and method.survivors < 8 * method.width,
    }


def test_sample_holds_every_pair():
    assert {(case.target, case.draft) for case in CASES} >= {(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (7, 1), (1, 0)}
    for name, values in {"num_rows": {2, 4, 8, 16}, "width": {1, 2, 4, 8, 16}, "depth": {1, 2, 3, 4, 8}}.items():
        assert {getattr(case.method, name) for case in CASES} == values
    for one, other in itertools.combinations(switches(BASIC), 2):
        found = {(switches(case)[one], switches(case)[other]) for case in CASES}
        missing = set(itertools.product((False, True), repeat=2)) - found
        # What grows as long as the target verifies does not grow in turn; what is dropped needs no room.
        impossible = {("in turn", "adaptive"): {(True, True)}, ("reuse", "tight"): {(False, True)}}
        assert missing == impossible.get((one, other), set()), (one, other)
    runs = {(draft, sampling) for index in range(len(CASES)) for draft, sampling, _ in runs_of(index)}
    assert runs == set(itertools.product(DRAFTS, SAMPLINGS))
    assert len({case.family for case in CASES}) >= 3
    assert {case.geometry for case in CASES} == {"same", "layer", "foreign", "small", "large", "shared"}


@pytest.mark.parametrize("case", quick(CASES), ids=case_id)
def test_tokens_are_those_of_plain_decoding(case):
    index = CASES.index(case)
    for draft, sampling, prompt in runs_of(index):
        rounds = decode(case, prompt, 20, draft, index, **SAMPLINGS[sampling])
        expected = plain(case.family, prompt, 20, index, **SAMPLINGS[sampling])
        assert tokens_of(rounds) == tokens_of(expected), (draft, sampling)
        np.testing.assert_allclose(logprobs_of(rounds), logprobs_of(expected), atol=1e-3, err_msg=f"{draft} {sampling}")
        check_rounds(case, rounds)


@pytest.mark.parametrize("case", quick(CASES), ids=case_id)
def test_a_second_generation_compiles_nothing(case, compilations):
    decode(case, PROMPT, 1)
    compilations.clear()
    decode(case, LONG_PROMPT, 4, "random", 5, **SAMPLINGS["cuts"])
    decode(case, PROMPT[:1], 2, "broken", **SAMPLINGS["greedy penalties"])
    assert compilations == []


@pytest.mark.parametrize("case", quick([BASIC, SHORT_CHAIN]), ids=case_id)
def test_tokens_do_not_depend_on_where_generation_stops(case):
    expected = expected_tokens(case, PROMPT, 13, 3, temperature=1.0)
    for count in range(1, 13):
        rounds = decode(case, PROMPT, count, "copy", 3, temperature=1.0)
        assert tokens_of(rounds) == expected[:count]
        assert all(emitted.tokens for emitted in rounds)


@pytest.mark.parametrize("case", quick([BASIC, WIDE, CHAIN, LARGE_BATCH]), ids=case_id)
def test_the_last_token_of_the_context_can_be_decoded(case):
    """Good drafts overshoot the most, bad ones run the most rounds."""
    prompt = (LONG_PROMPT + PROMPT)[:90]
    expected = expected_tokens(case, prompt, CONTEXT - 90, 1)
    for draft in ("copy", "random"):
        assert tokens_of(decode(case, prompt, CONTEXT - 90, draft, 1)) == expected
    prompt = (prompt * 2)[: CONTEXT - 1]
    assert tokens_of(decode(case, prompt, 1, "copy", 1)) == expected_tokens(case, prompt, 1, 1)


# What a caller does in the middle of a generation, and what breaks.


@pytest.mark.parametrize("case", quick([BASIC, NODES, ADAPTIVE, TOGETHER]), ids=case_id)
def test_generations_may_be_closed_after_any_round(case):
    """As a stop string or an EOS token does: the round in flight is dropped with all that the draft grew for it."""
    engine, options = engine_of(case), SamplingParams(max_tokens=60)
    params = {draft: params_of(case, draft) for draft in ("copy", "random")}
    expected = expected_tokens(case, LONG_PROMPT, 8)
    for count in range(5):
        draft = ("copy", "random")[count % 2]
        with engine.open(params[draft], PROMPT, options, count) as session:
            rounds = rounds_of(session)
            assert len(list(itertools.islice(rounds, count))) == count
        assert tokens_of(decode(case, LONG_PROMPT, 8, draft)) == expected


@pytest.fixture(scope="module")
def pair_and_plain(tmp_path_factory):
    """A tiny checkpoint that drafts for itself, and plain decoding of it."""
    folder = tmp_path_factory.mktemp("swiftspec") / "model"
    write_model(folder, LLAMA)
    return LLM(folder, draft=folder, method=SwiftSpec(7, 4, depth=3, ranking="probability")), LLM(folder, method="ar")


@pytest.mark.thorough
def test_an_end_token_may_fall_anywhere_on_an_accepted_path(pair_and_plain):
    """It is the last token, and what was accepted after it is neither emitted nor counted."""
    (pair, plain_model), places, inside = pair_and_plain, set(), set()
    for seed in range(6):
        sampling = SamplingParams(max_tokens=16, temperature=0.5, seed=seed, ignore_eos=True)
        tokens = plain_model.generate("w1 w2 w3", sampling).token_ids
        sampling = dataclasses.replace(sampling, ignore_eos=False)
        for place in range(16):
            if tokens[place] in tokens[:place]:
                continue
            other = copy.copy(pair)
            other.eos_ids = (tokens[place],)
            out = other.generate("w1 w2 w3", sampling)
            assert out.token_ids == tokens[: place + 1] and out.finish_reason == "stop"
            accepted = out.stats.speculative_decoding.per_step_accepted
            last = place + 1 - sum(n + 1 for n in accepted[:-1])
            assert last >= 1 and accepted[-1] in (last, last - 1)
            places.add(place)
            inside.add((last, accepted[-1]))
    assert places == set(range(16))
    # A drafted token of either place of a path, and the bonus token after none, one, and two.
    assert inside >= {(1, 1), (2, 2), (1, 0), (2, 1), (3, 2)}


@pytest.mark.parametrize("owner", ["verify", "advance", "expand"])
def test_exceptions_on_either_side(owner, monkeypatch):
    """A device that fails in the third round: the error comes out, and the next generation is sound."""
    engine = engine_of(BASIC)
    holder = engine.runner.executor if owner == "verify" else engine.runner.drafter
    program, calls = getattr(holder, owner), []

    def fail(*args):
        calls.append(owner)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return program(*args)

    with monkeypatch.context() as patch:
        patch.setattr(holder, owner, fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            decode(BASIC, PROMPT, 40, "random")
    assert tokens_of(decode(BASIC, LONG_PROMPT, 8)) == expected_tokens(BASIC, LONG_PROMPT, 8)


def test_the_draft_has_its_work_before_the_target_may_block(monkeypatch):
    """`verify` keeps the only thread until the target is done, as it does where a loop on the device waits for it."""
    runner, done = engine_of(BASIC).runner, []
    verify, expand = runner.executor.verify, runner.drafter.expand

    def block(*args):
        time.sleep(0.02)
        result = jax.block_until_ready(verify(*args))
        done.append("verify")
        return result

    def grow(*args):
        done.append("expand")
        return expand(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner.executor, "verify", block)
        patch.setattr(runner.drafter, "expand", grow)
        assert tokens_of(decode(BASIC, LONG_PROMPT, 8)) == expected_tokens(BASIC, LONG_PROMPT, 8)
    assert len(done) >= 4 and done == ["expand", "verify"] * (len(done) // 2)


@pytest.mark.parametrize("case", quick([BASIC, WIDE, TOGETHER]), ids=case_id)
def test_interleaved_generations_do_not_disturb_each_other(case):
    options, params = SamplingParams(max_tokens=20), params_of(case, "first layer")
    alone = [decode(case, prompt, 20, "first layer") for prompt in (PROMPT, LONG_PROMPT)]
    with (
        engine_of(case).open(params, PROMPT, options, 0) as one,
        engine_of(case).open(params, LONG_PROMPT, options, 0) as other,
    ):
        mixed = list(itertools.zip_longest(rounds_of(one), rounds_of(other)))
    assert [[emitted for emitted in column if emitted] for column in zip(*mixed, strict=True)] == alone


@pytest.mark.slow
def test_many_generations_leave_nothing_behind():
    """Texts have any length and are closed or end; with fixed depth every one of a kind counts the same as well."""
    engine, params = engine_of(BASIC), params_of(BASIC, "first layer")
    first, sizes = {}, []
    for turn in range(1000):
        options = SamplingParams(max_tokens=1 + turn % 5)
        with engine.open(params, PROMPT, options, turn % 2) as session:
            emitted = tuple(itertools.islice(rounds_of(session), 1 + turn % 3))
        assert emitted == first.setdefault((turn % 5, turn % 2, turn % 3), emitted)
        if turn % 100 == 99:
            engine.settle()
            del session
            gc.collect()
            sizes.append((len(arrays := jax.live_arrays()), sum(array.nbytes for array in arrays)))
            del arrays
    assert len(first) == 30
    assert len(set(sizes[1:])) == 1, sizes


@pytest.mark.parametrize("case", quick([BASIC, WIDE, CHAIN]), ids=case_id)
def test_ties_go_to_the_lowest_id(case):
    """Target and draft find all tokens alike: greedy output is id 0 for ever."""
    params = ModelParams(flat_params(case.family), params_of(case, "constant").draft)
    assert tokens_of(run(engine_of(case), params, [5, 7, 5], 20)) == [0] * 20
    expected = tokens_of(plain(case.family, [5, 7, 5], 20, params=params.target, temperature=1.0))
    assert tokens_of(run(engine_of(case), params, [5, 7, 5], 20, temperature=1.0)) == expected


# A draft that does not have all of the target's tokens.


@pytest.mark.thorough
def test_a_bias_may_name_what_the_draft_does_not_have():
    for bias in ({VOCAB - 1: 3.0}, {SMALL: -np.inf}, dict.fromkeys(range(SMALL), -np.inf)):
        sampling = {"logit_bias": bias, "temperature": 1.0}
        rounds = decode(TIGHT, PROMPT, 12, "copy", 1, **sampling)
        assert tokens_of(rounds) == expected_tokens(TIGHT, PROMPT, 12, 1, **sampling)


def test_a_smaller_vocabulary_proposes_only_its_own_tokens():
    accepted = []
    for draft, sampling in itertools.product(("copy", "constant", "random"), ("greedy", "T=1")):
        for emitted in decode(TIGHT, [70, 100, 60, 99], 20, draft, 1, **SAMPLINGS[sampling]):
            accepted += emitted.tokens[: emitted.accepted]
    assert accepted and max(accepted) < SMALL


# What is refused.

TARGET = Placement(FAMILIES["llama"], plan_mesh(1), FLOAT32)
BESIDE = Placement(FAMILIES["llama"], plan_mesh(1, 1), FLOAT32)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1"),
        ({"num_draft_tokens": 1024}, "num_draft_tokens must be at most 1023"),
        ({"num_draft_tokens": 8.0}, "num_draft_tokens must be an integer"),
        ({"width": 0}, "width must be at least 1"),
        ({"width": True}, "width must be an integer"),
        ({"width": 1025}, "width must be at most 1024"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"depth": 129}, "depth must be at most 128"),
        ({"branch": 0}, "branch must be at least 1"),
        ({"branch": 4097}, "branch must be at most 4096"),
        ({"survivors": 1}, "survivors must be at least 2"),
        ({"survivors": "all"}, "survivors must be an integer"),
        ({"overlap": 1}, "overlap must be true or false"),
        ({"reuse": None}, "reuse must be true or false"),
        ({"leaves": "yes"}, "leaves must be true or false"),
        ({"adaptive": 0}, "adaptive must be true or false"),
        ({"adaptive": True, "overlap": False}, "needs overlap"),
        ({"width": 64, "depth": 64}, "draft tree of 4608 rows, at most 4096"),
        ({"width": 64, "depth": 16, "adaptive": True}, "draft tree of 4608 rows"),
    ],
)
def test_settings_out_of_range(settings, word):
    with pytest.raises(ConfigError, match=word):
        SwiftSpec(**settings)


def test_defaults():
    method = SwiftSpec()
    assert (method.num_rows, method.width, method.branch, method.survivors) == (8, 8, 8, 64)
    assert (SwiftSpec(15, 4).branch, SwiftSpec(63, 1).survivors, SwiftSpec(branch=1, width=1).branch) == (15, 64, 1)
    assert (method.num_rows, method.max_path, method.draft_rows) == (8, 8, 8)
    assert dataclasses.replace(method, overlap=False).overlap is False


@pytest.mark.parametrize(
    ("method", "draft", "word"),
    [
        (SwiftSpec(), None, "needs a draft model"),
        (SwiftSpec(branch=102), BESIDE, "branch 102 exceeds the 101 tokens"),
        (SwiftSpec(adaptive=True), TARGET, "needs a draft on devices of its own"),
        (SpecExec(4), BESIDE, "'specexec' runs the draft on the target's devices"),
        (Chain(), BESIDE, "'chain' runs the draft on the target's devices"),
        (SpecInfer((2, 2)), BESIDE, "'specinfer' runs the draft on the target's devices"),
        (Auto(), BESIDE, "'auto' runs the draft on the target's devices"),
    ],
)
def test_what_does_not_fit_the_models(method, draft, word):
    with pytest.raises(ConfigError, match=word):
        Engine(Models(TARGET, draft), method)


@pytest.mark.parametrize("devices", [(0, 1), (1,), (1, 2), (1, 0)])
def test_devices_are_shared_wholly_or_not_at_all(devices):
    target = dataclasses.replace(TARGET, plan=plan_mesh(2))
    shared = MeshPlan(tuple(jax.devices()[i] for i in devices), target.plan.kernels)
    models = Models(target, dataclasses.replace(TARGET, plan=shared))
    if devices == (0, 1):
        SwiftSpec().check(models)
        return
    with pytest.raises(ConfigError, match="the same devices or none in common"):
        SwiftSpec().check(models)


def test_methods_without_a_draft_leave_it_aside():
    for method in (Autoregressive(), PromptLookup()):
        method.check(Models(TARGET, BESIDE))


def test_sharing_devices_is_said(caplog, monkeypatch):
    def note(method, models):
        return method.bind(models, 64).note

    assert "they take turns (load the model with method='swiftspec'" in note(SwiftSpec(), Models(TARGET, TARGET))
    for devices, why in ((2, "the target has all 2 devices: fewer target_devices"), (1, "there is one device only)")):
        every = Models(*[dataclasses.replace(TARGET, plan=plan_mesh(devices))] * 2)
        with monkeypatch.context() as patch:
            patch.setattr("jaxspec.methods.swiftspec.runner.jax.devices", lambda there=every.target.plan.devices: there)
            assert f"they take turns ({why}" in note(SwiftSpec(), every)
    assert note(SwiftSpec(), Models(TARGET, BESIDE)) is None
    assert note(SwiftSpec(overlap=False), Models(TARGET, TARGET)) is None
    runner = SwiftSpec(depth=2, refill=0).bind(Models(TARGET, TARGET), 64)
    with caplog.at_level(logging.WARNING):
        runner.calibrate(ModelParams({}, {}), None)
    assert runner.note in caplog.text
