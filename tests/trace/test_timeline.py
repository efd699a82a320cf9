"""The timeline: its arithmetic by hand, its trace of real rounds, and growth that happens during verification."""

import dataclasses
import itertools
import json
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import FAMILIES, RandomSource, place, tiny_params

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core import executor
from jaxspec.methods.core.round import DraftCounts, ModelParams, Models, StepOutput
from jaxspec.methods.swiftspec import draft_tree
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.runtime import trace as recording
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.trace.events import Event, summarise
from jaxspec.trace.timeline import Timeline

PROMPT = [5, 0, 17, 3, 0, 42]
TOKENS = 24
# Turns of a loop: work of some tenths of a second for one core, longer than what a busy machine adds to a round.
VERIFY_TURNS, GROW_TURNS = 4_000_000, 4_000_000
DEVICE_NAMES = {"expand", "expand once", "advance", "advance and expand", "verify", "draft", "decode"}
NAMES = DEVICE_NAMES | {"target->draft", "draft->target", "dispatch", "wait", "read"}


# By hand.


def counts(token_hit, evaluated_hit, kept=3, dropped=4, exposed=0):
    return DraftCounts(2, exposed, 6, 1 - evaluated_hit, kept, 1, dropped, token_hit, evaluated_hit, 9)


def hand_made_round(number, at, generation=0):
    """Turn 1 s, its batch 0.5 s on the way, verification 4 s, growth 3 s of which 2.5 lie within, 0.5 s back."""

    def event(row, name, start, length):
        return Event(row, name, at + start, at + start + length, number, generation)

    return [
        event("transfers", "target->draft", 0, 0.5),
        event("draft", "advance", 0.5, 1),
        event("draft", "expand", 1.5, 3),
        event("transfers", "draft->target", 1.5, 0.5),
        event("target", "verify", 2, 4),
        event("host", "dispatch", 0, 0.25),
        event("host", "wait", 1, 5),
        event("host", "read", 6, 0.125),
    ]


def test_summary_by_hand():
    events = [e for n in range(3) for e in hand_made_round(n, 6.5 * n)]
    events += [e for e in hand_made_round(3, 19.5) if e.name != "read"]  # in flight when the text ended
    summary = summarise(events[::-1])
    assert summary.rounds == summary.passes == 3
    assert summary.overlap == pytest.approx(2.5 / 3)
    span = 2 * 6.5 + 6
    assert summary.idle == pytest.approx({"target": 1 - 12 / span, "draft": 1 - 12 / span})
    assert summary.round_s == pytest.approx(6.5)
    expected = {"advance": 1, "expand": 3, "verify": 4, "target->draft": 0.5, "draft->target": 0.5}
    assert summary.program_s == pytest.approx(expected)
    assert summary.transfer_s == pytest.approx(1) and summary.pass_s == pytest.approx(4)
    assert summary.sync_s == pytest.approx(2)
    # From one read to the next, 5 of 6.5 seconds are waiting.
    assert summary.host_s == pytest.approx(1.5)
    assert summary.dispatch_s == pytest.approx(0.25) and summary.read_s == pytest.approx(0.125)
    assert summary.draft_tree is None


def test_time_between_generations_is_not_counted():
    one = summarise(hand_made_round(0, 0.0))
    two = summarise([*hand_made_round(0, 0.0), *hand_made_round(1, 1000.0, generation=1)])
    assert two.rounds == 2 and two.round_s is None and two.host_s is None
    assert two.overlap == one.overlap and two.idle == pytest.approx(one.idle)


def test_rounds_of_several_passes():
    """One pass of 2 s, three of 1 s each in one program, and one of 3 s."""
    events, start = [], 0.0
    for number, length in enumerate((2, 3, 3)):
        events += [Event("devices", "lookup", start, start + 0.5, number)]
        events += [Event("devices", "verify", start + 0.5, start + 0.5 + length, number)]
        events += [Event("host", "read", start + 0.5 + length, start + 1 + length, number)]
        start += 1 + length
    summary = summarise(events, passes={1: 3, 7: 5})
    assert (summary.rounds, summary.passes) == (3, 5)
    assert summary.pass_s == pytest.approx(2) and summary.program_s["verify"] == pytest.approx(3)
    assert summary.sync_s is None


# Real rounds.


class Traced(NamedTuple):
    """A generation under a timeline."""

    timeline: Timeline
    rounds: list[StepOutput]


def make_engine(method, draft_device):
    """The tiny model with itself as the draft, on a device of its own or on the target's; parameters too."""
    cfg, plan = FAMILIES["llama"], plan_mesh(1, draft_device)
    draft = Placement(cfg, plan, np.dtype("float32"))
    engine = Engine(Models(place(cfg), draft), method, 100)
    engine.prepare()
    return engine, ModelParams(tiny_params("llama"), load_foreign(RandomSource(cfg), plan, draft.dtype))


def decode(engine, params, tokens=TOKENS):
    """The rounds of a generation, one after another."""
    with engine.open(params, PROMPT, SamplingParams(max_tokens=tokens), 0) as session:
        while not session.done:
            yield session.step()


def trace(engine, params, tokens=TOKENS):
    with Timeline(engine.models) as timeline:
        rounds = list(decode(engine, params, tokens))
    return Traced(timeline, rounds)


def after_work(value, turns):
    """`value`, an integer in a program, after a loop that XLA cannot leave out."""
    end = jax.lax.fori_loop(0, turns, lambda _, x: x * jnp.float32(0.999999) + jnp.float32(1e-6), jnp.float32(2))
    return value + (end < 0).astype(value.dtype)


def slow_trace(method):
    """A trace of a model that verifies and grows for long."""
    verify, grow = executor.verify, draft_tree.expand_tree

    def slow_verify(*args, **settings):
        state, outcome, round_ = verify(*args, **settings)
        count = after_work(outcome.count, VERIFY_TURNS)
        round_ = dataclasses.replace(round_, packed=round_.packed.at[0].set(count))
        return state, dataclasses.replace(outcome, count=count), round_

    def slow_grow(*args):
        state = grow(*args)
        return dataclasses.replace(
            state, tree=dataclasses.replace(state.tree, size=after_work(state.tree.size, GROW_TURNS))
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "verify", slow_verify)
        patch.setattr(draft_tree, "expand_tree", slow_grow)
        engine = make_engine(method, draft_device=1)
    return trace(*engine)


@pytest.fixture(scope="module")
def parallel():
    return slow_trace(SwiftSpec(4, 2, depth=2))


@pytest.fixture(scope="module")
def serial():
    return slow_trace(SwiftSpec(4, 2, depth=2, overlap=False))


@pytest.fixture(scope="module")
def quick():
    """An engine as it is, and a trace of it."""
    engine = make_engine(SwiftSpec(4, 2, depth=2, adaptive=True), draft_device=1)
    return *engine, trace(*engine)


def check_trace(traced, tmp_path, per_round, rows):
    """The file is a trace-event file of these rows, whose events follow one another; every round has its events."""
    path = tmp_path / "out.json"
    traced.timeline.write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    told: dict[str, Any] = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"}
    assert [name.split()[0] for name in names.values()] == rows
    events = [e for e in told["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in events} <= NAMES and {e["cat"] for e in events} == set(rows)
    for tid, name in names.items():
        mine = sorted((e for e in events if e["tid"] == tid), key=lambda e: e["ts"])
        assert {e["cat"] for e in mine} == {name.split()[0]}
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in mine)
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 2e-3  # rounded to nanoseconds
    for number in range(len(traced.rounds)):
        found = {e["name"] for e in events if e["args"]["round"] == number}
        assert found == per_round | {"dispatch", "wait", "read"}
    reads = [e["args"] for e in events if e["name"] == "read"]
    # The last round is cut to the asked-for length after it was read.
    assert [e["tokens"] for e in reads][:-1] == [len(r.tokens) for r in traced.rounds][:-1]
    assert reads[-1]["tokens"] >= len(traced.rounds[-1].tokens)
    assert told["otherData"]["rounds"] == len(traced.rounds)
    return told


def by_name(timeline, name):
    return {e.round: e for e in timeline.events if e.name == name}


@pytest.mark.thorough
def test_growth_happens_during_verification(parallel, tmp_path):
    names = {"advance", "expand", "verify", "target->draft", "draft->target"}
    check_trace(parallel, tmp_path, names, ["target", "draft", "transfers", "host"])
    turns, grows, verifies = (by_name(parallel.timeline, name) for name in ("advance", "expand", "verify"))
    for number, verify in verifies.items():
        assert turns[number].end <= verify.start
        assert grows[number].start < verify.end and grows[number].end > verify.start
        if number + 1 in turns:
            assert verify.end <= turns[number + 1].start
    summary = parallel.timeline.summary()
    assert summary.rounds == len(parallel.rounds) and summary.overlap > 0.2
    assert summary.draft_tree.tokens_computed == sum(r.draft.computed for r in parallel.rounds)


@pytest.mark.thorough
def test_in_turn_nothing_overlaps(serial, tmp_path):
    names = {"advance and expand", "verify", "target->draft", "draft->target"}
    check_trace(serial, tmp_path, names, ["target", "draft", "transfers", "host"])
    assert serial.timeline.summary().overlap == 0
    assert [r.tokens for r in serial.rounds]


def test_a_trace_changes_nothing_and_leaves_nothing(quick):
    engine, params, traced = quick
    assert recording.active is None
    assert not [t.name for t in threading.enumerate() if t.name.startswith("trace")]
    again = list(decode(engine, params))
    flat = [[t for r in rounds for t in r.tokens] for rounds in (again, traced.rounds)]
    assert flat[0] == flat[1]


def test_two_generations_in_one_trace(quick):
    engine, params, _ = quick
    with Timeline(engine.models) as timeline:
        with pytest.raises(RuntimeError, match="one at a time"), Timeline(engine.models):
            pass
        first = list(decode(engine, params))
        next(stopped := decode(engine, params))
        stopped.close()
        last = list(decode(engine, params))
    assert timeline.summary().rounds == timeline.rounds_read == len(first) + 1 + len(last)
    assert {e.generation for e in timeline.events} == {0, 1, 2}


def test_an_error_within_ends_the_threads(quick):
    engine, params, _ = quick
    with pytest.raises(KeyboardInterrupt), Timeline(engine.models) as timeline:
        for index, _ in enumerate(decode(engine, params)):
            if index == 2:
                raise KeyboardInterrupt
    assert recording.active is None and timeline.summary().rounds == 3
    assert not [t.name for t in threading.enumerate() if t.name.startswith("trace")]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "names"), [(Autoregressive(), {"decode"}), (Chain(2), {"draft", "verify"})])
def test_other_methods_have_one_row(method, names, tmp_path):
    traced = trace(*make_engine(method, draft_device=0), tokens=9)
    check_trace(traced, tmp_path, names, ["devices", "host"])
    assert traced.timeline.summary().overlap is None


def test_a_failed_program_is_left_out():
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("it failed")

    target = place(FAMILIES["llama"])
    with Timeline(Models(target)) as timeline:
        results: Any = 0, Failed()
        launch, _ = timeline.generation((), lambda: timeline.program("verify", target.plan, lambda: results, ()), max)
        launch()
    assert [e.name for e in timeline.events] == ["dispatch"] and timeline.rounds_read == 0
