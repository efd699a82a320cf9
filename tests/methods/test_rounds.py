"""Rounds that share a dispatch: those of single dispatches, as many as fit, and an end where the text ends."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    LLAMA_AUTO,
    LLAMA_CHAIN,
    LLAMA_LOOKUP,
    LLAMA_SPECEXEC,
    LLAMA_SPECINFER,
    PROMPT,
    SAMPLINGS,
    Case,
    Steps,
    Untimed,
    case_id,
    engine_of,
    forget_drafts,
    models_of,
    params_of,
    run,
    tokens_of,
)
from tiny_models import FAMILIES
from tiny_pairs import FLOAT32

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.chain import Chain
from jaxspec.methods.core import round as core_round
from jaxspec.methods.core.round import ROUND_HEADER, STEPS_OF_SMALL, Round, read_rounds
from jaxspec.methods.core.runner import MOST_ROWS, ROUNDS_PER_DISPATCH, share_dispatches
from jaxspec.methods.specexec import SpecExec
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.stream_events import count_speculation
from jaxspec.trace.timeline import Timeline

CASES = [LLAMA_CHAIN, LLAMA_LOOKUP, LLAMA_SPECEXEC, LLAMA_SPECINFER, LLAMA_AUTO]


def counting_dispatches(monkeypatch, runner):
    """The number of rounds that each dispatch asks for, as they come."""
    asked, dispatch = [], runner.shared_rounds

    def counted(*arguments):
        asked.append(int(arguments[-1]))
        return dispatch(*arguments)

    counted.is_coming = dispatch.is_coming
    monkeypatch.setattr(runner, "shared_rounds", counted)
    return asked


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_are_the_rounds_of_single_dispatches(case, sampling, monkeypatch):
    """All but the last, which the end of the text cuts; an answer takes about as many dispatches as a plain one."""
    asked = counting_dispatches(monkeypatch, engine_of(case).runner)
    together = run(engine_of(case), params_of(case, "first layer"), PROMPT, 40, 3, **SAMPLINGS[sampling])
    assert set(asked) <= set(range(1, ROUNDS_PER_DISPATCH + 1)) and len(asked) <= 40 / STEPS_OF_SMALL + 4
    assert case == LLAMA_AUTO or asked[0] == 1  # the first round of `auto` is a plain one
    steps, alone = Steps(case, "first layer", PROMPT, 3, **SAMPLINGS[sampling], max_tokens=40), []
    while sum(len(output.tokens) for output in alone) < 40:
        steps.step()
        assert steps.output is not None
        alone.append(dataclasses.replace(steps.output, top=None))
    if case not in (LLAMA_AUTO, LLAMA_LOOKUP):  # which carry what they learned over to the next text
        assert together[:-1] == alone[: len(together) - 1]
    tokens = tokens_of(alone)
    assert tokens_of(together) == tokens[:40] and len(tokens) < 40 + case.method.max_path


def test_a_dispatch_ends_with_its_tokens_and_the_text():
    case = LLAMA_CHAIN
    runner, params = engine_of(case).runner, params_of(case, "copy")  # every round brings five tokens
    request = runner.place_request(SamplingParams(max_tokens=12, ignore_eos=True), 0)
    state = runner.resume(params, runner.start(0, None), np.array(PROMPT, np.int32), 0)
    state, round_, least = runner.round(params, state, request, 12)
    assert least == ROUNDS_PER_DISPATCH
    assert [len(output.tokens) for output in read_rounds(round_)] == [5, 5]
    far = runner.place_request(SamplingParams(max_tokens=90, ignore_eos=True), 0)
    params = params_of(case, "first layer")  # few of whose drafts are right
    state = runner.resume(params, runner.start(0, state), np.array(PROMPT, np.int32), 0)
    for _ in range(8):
        state, round_, least = runner.round(params, state, far, 60)
        counts = [len(output.tokens) for output in read_rounds(round_)]
        assert sum(counts[:-1]) < STEPS_OF_SMALL <= sum(counts) or len(counts) == ROUNDS_PER_DISPATCH
        assert least <= sum(counts)
    near = runner.place_request(SamplingParams(max_tokens=1, ignore_eos=True), 0)
    state, round_, _ = runner.round(params, state, near, 4)
    assert len(read_rounds(round_)) == 1


def test_a_dispatch_that_may_not_draft_decodes_as_many_tokens_as_a_plain_one(monkeypatch):
    """Its time is that of plain decoding, if nothing was copied in it."""
    runner, timer, seen = engine_of(LLAMA_AUTO).runner, Untimed(), []
    forget_drafts(LLAMA_AUTO)
    timer.may_draft = itertools.cycle([True, True, False]).__next__
    timer.observe = lambda *outputs, allowed, delayed: seen.append((allowed, outputs))
    monkeypatch.setattr(runner, "timer", timer)
    run(engine_of(LLAMA_AUTO), params_of(LLAMA_AUTO, "copy"), PROMPT, 120, 3, temperature=1.5)
    plain = [outputs for allowed, outputs in seen[:-1] if not allowed and not any(one.drafted for one in outputs)]
    # One that ended where the text repeats itself goes on with another round.
    assert all(sum(len(one.tokens) for one in outputs) >= STEPS_OF_SMALL for outputs in plain)
    assert [STEPS_OF_SMALL] in [[len(one.tokens) for one in outputs] for outputs in plain]


def test_reads_as_many_rounds_as_ran():
    packed = np.zeros((4, ROUND_HEADER + 3), np.int32)
    packed[:2, :ROUND_HEADER] = (2, 1, 1, 1), (3, 0, 0, 0)
    packed[:2, ROUND_HEADER:] = (7, 8, 0), (4, 5, 6)
    one, other = read_rounds(Round(jnp.asarray(packed), jnp.ones((4, 3))))
    assert (one.tokens, one.accepted, one.draft_passes) == ((7, 8), 1, 1)
    assert (other.tokens, other.accepted, other.logprobs) == ((4, 5, 6), 0, (1.0,) * 3)


def test_where_a_dispatch_is_little_beside_a_round_each_has_its_own(monkeypatch):
    target, draft = models_of(LLAMA_CHAIN)
    assert share_dispatches(target, draft, MOST_ROWS) and share_dispatches(target, None, 2)
    assert not share_dispatches(target, draft, MOST_ROWS + 1)
    elsewhere = Placement(FAMILIES["llama"], plan_mesh(1, offset=1), FLOAT32)
    assert not share_dispatches(target, elsewhere, 4)
    monkeypatch.setattr(core_round, "SMALL_BYTES", 1000)
    assert not share_dispatches(target, draft, 4)
    case = Case("llama", 1, "same", Chain(4))
    runner = case.method.bind(models_of(case), 150)
    assert [program.name for program in runner.single] == ["draft", "verify"]
    assert set(runner.single) <= set(runner.programs) and runner.shared_rounds is None
    runner = Auto().bind(models_of(case), 150)
    assert [program.name for program in runner.single] == ["draft", "draft rest", "verify"]


def test_a_trace_shows_the_parts():
    case = LLAMA_CHAIN
    engine, params = engine_of(case), params_of(case, "copy")
    assert isinstance(engine, Engine)
    with Timeline(engine.models) as timeline:
        engine.prepare()
        assert all(program.is_ready() for program in engine.runner.single)
        found = run(engine, params, PROMPT, 20)
    names = {event.name for event in timeline.events}
    assert {"draft", "verify"} <= names and "rounds" not in names and timeline.rounds_read == len(found)


@pytest.mark.parametrize(("depth", "cut"), [pytest.param(2, True, marks=pytest.mark.thorough), (16, False)])
def test_a_search_that_its_depth_ends_is_counted(depth, cut):
    """Sixteen prefixes are certain once the sixteen best were evaluated, two in a pass."""
    case = Case("llama", 1, "same", SpecExec(16, width=2, depth=depth))
    rounds = run(engine_of(case), params_of(case, "first layer"), PROMPT, 16)
    drafted = [output for output in rounds if output.drafted]
    assert drafted and all(output.truncated == cut and output.draft_passes <= depth for output in drafted)
    counts = count_speculation(rounds, 16, 16)
    assert counts.tree_truncated == cut * counts.num_spec_steps
