"""The simulator's rounds are those of the real runner, and its clocks follow the formulas of the cost model."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import simulate_swiftspec
from method_cases import (
    FLOAT32,
    PROMPT,
    draft_params,
    draft_placement,
    plain,
    run,
    target_params,
    tokens_of,
)
from swiftspec_sim.clock import Clocks, Setting, Steps, replay, steps_of, summarise
from swiftspec_sim.record import Recorder, cover
from swiftspec_sim.replay import make_table
from swiftspec_sim.times import Published, Split, Times, load_times, parse_split
from swiftspec_sim.trace import UNPROPOSED, Trace, load_traces, save_traces
from tiny_models import FAMILIES
from typer.testing import CliRunner

from jaxspec import SwiftSpec
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

TIMES = Times("made up", {1: {1: 10.0, 8: 10.0, 16: 14.0}}, {1: {1: 2.0, 8: 2.0, 16: 3.0}}, 0.25, 0.125, 0.5, ())
SPLIT, SHARED = Split(1, 1), Split(1, None)
LENGTH, NODES, KEEP = 40, 1500, 12
# Passes that every tree has room for, so that all depths share their compiled functions.
ROOM = 8

# Overlapped and in turn, with and without every switch; the draft's devices are its own.
METHODS = {
    "overlap": (SwiftSpec(3, 2, depth=3, survivors=3, ranking="probability"), False),
    "serial": (SwiftSpec(7, 4, depth=2, overlap=False, reuse=False, ranking="probability"), False),
    "nodes only": (SwiftSpec(7, 4, branch=5, depth=2, leaves=False, ranking="probability"), False),
    "refill": (SwiftSpec(7, 4, depth=2, refill=2, ranking="probability"), False),
    "branch free": (SwiftSpec(7, 4, depth=2, branch_free=True, ranking="probability"), True),
}


@functools.cache
def engine_of(name):
    """A real engine of `METHODS`, each model on a device of its own."""
    draft = dataclasses.replace(draft_placement("llama", 1, "same"), plan=plan_mesh(1, 1))
    engine = Engine(Models(Placement(FAMILIES["llama"], plan_mesh(1), FLOAT32), draft), METHODS[name][0], 120)
    engine.prepare()
    return engine


@functools.cache
def pair(kind):
    """A draft of a kind, on the second device."""
    placement = dataclasses.replace(draft_placement("llama", 1, "same"), plan=plan_mesh(1, 1))
    # Same geometry, other device: numpy carries the weights over.
    params = draft_params("llama", 1, "same", kind)
    return ModelParams(target_params("llama"), place_on(placement, params))


def place_on(placement, params):
    return jax.tree.map(
        lambda leaf, shape: jax.device_put(np.asarray(leaf), shape.sharding), params, placement.params()
    )


@functools.cache
def recorded(kind, temperature=0.0):
    """A text of the tiny target and a complete table of what one kind of draft makes of it."""
    text = tokens_of(plain("llama", PROMPT, LENGTH, seed=3, temperature=temperature))
    recorder = Recorder(
        draft_placement("llama", 1, "same"), draft_params("llama", 1, "same", kind),
        keep=KEEP, nodes=NODES, context=len(PROMPT),
    )  # fmt: skip
    trace = recorder.begin("a", "b", PROMPT, text)
    for method, branch_free in METHODS.values():
        trace = cover(recorder, trace, method, NODES, ROOM, branch_free)
    assert not recorder.is_full(trace)
    return trace


def replayed(trace, setting, times=TIMES):
    """A replay and its sum."""
    steps = steps_of(times, setting)
    result = replay(make_table(trace, NODES, 64), len(trace.text), setting, steps, ROOM)
    return result, summarise([result], setting, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("kind", "temperature"), [("copy", 1.0), ("copy", 0.0), ("adversarial", 0.0)])
def test_rounds_are_those_of_the_real_runner(name, kind, temperature):
    method, branch_free = METHODS[name]
    real = run(engine_of(name), pair(kind), PROMPT, LENGTH, seed=3, temperature=temperature)
    trace = recorded(kind, temperature)
    assert tokens_of(real) == trace.text.tolist()
    result, summary = replayed(trace, Setting(SPLIT, method, branch_free))
    assert summary.stood_in == 0
    assert [r.verified for r in result.rounds] == [len(r.tokens) for r in real]
    assert [r.draft for r in result.rounds] == [r.draft for r in real]
    # The last round's is cut where the text ends.
    assert [r.drafted for r in result.rounds[:-1]] == [r.drafted for r in real[:-1]]


def made_up(length, perfect, keep=4):
    """A text whose draft is certain of it, or never proposes any of it; nothing off the text is recorded."""
    nodes, text = np.arange(length + 1, dtype=np.int32), np.arange(1, length + 1, dtype=np.int32)
    proposed = 1000 + np.arange(keep, dtype=np.int32) + keep * nodes[:, None]
    if perfect:
        proposed[:length, 0] = text
    logprob = np.array([-0.01, *-5.0 - np.arange(keep - 1)], np.float32)
    return Trace(
        "a", "b", text, nodes - 1, np.concatenate([[-1], text]).astype(np.int32), proposed,
        np.broadcast_to(logprob, proposed.shape).copy(),
    )  # fmt: skip


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_perfect_draft_is_ahead_by_what_it_grows(depth):
    # In turn: the root's proposal, one more with each pass, and the bonus token. Overlapped: as many as it grows.
    trace = made_up(60, True)
    serial = SwiftSpec(7, 1, branch=4, depth=depth, overlap=False, reuse=False)
    result, summary = replayed(trace, Setting(SHARED, serial))
    assert {r.verified for r in result.rounds[:-1]} == {depth + 2} and summary.exposed == 1 + depth
    result, summary = replayed(trace, Setting(SPLIT, SwiftSpec(7, 1, branch=4, depth=depth)))
    assert {r.verified for r in result.rounds[4:-1]} == {depth}
    assert {r.draft.exposed for r in result.rounds[4:]} == {0} and {r.draft.dropped for r in result.rounds[4:]} == {0}
    assert sum(r.verified for r in result.rounds) == 60


@pytest.mark.parametrize("reuse", [True, False])
def test_a_useless_draft_misses_in_every_round(reuse):
    trace = made_up(30, False, keep=8)
    for split in (SPLIT, SHARED):
        result, summary = replayed(trace, Setting(split, SwiftSpec(7, 4, depth=3, reuse=reuse)))
        assert [r.verified for r in result.rounds] == [1] * 30 and summary.length == 1
        assert summary.token_hit == summary.evaluated_hit == 0
        assert {r.draft.caught_up for r in result.rounds} == {1} and {r.drafted for r in result.rounds} == {7}


def test_models_in_turn_follow_the_plain_formula():
    for method in (SwiftSpec(7, 4, depth=3, reuse=False), SwiftSpec(15, 8, branch=12, depth=1, reuse=False)):
        setting = Setting(SHARED, method)
        steps = steps_of(TIMES, setting)
        result, summary = replayed(recorded("copy", 1.0), setting)
        # D draft passes, the first of which runs the new root (or a token more), and the target's: no messages.
        want = (1 + method.depth) * 2.0 + {8: 10.0, 16: 14.0}[method.num_rows] + 0.5 + 0.125
        np.testing.assert_allclose(result.clocks.rounds, want)
        assert summary.tokens_per_s == pytest.approx(1000 * summary.length / want)
        assert summary.steady_ms == pytest.approx(want) and summary.round_ms == pytest.approx(want)
        assert summary.target_idle == pytest.approx(1 - (steps.target + 0.125) / want)
        # One set of devices: what one side does not use, the other does.
        assert summary.target_idle + summary.draft_idle == pytest.approx(1)


@pytest.mark.parametrize(("depth", "branch_free"), [(1, False), (3, False), (7, False), (7, True)])
def test_overlapped_rounds_follow_the_formula(depth, branch_free):
    setting = Setting(SPLIT, SwiftSpec(7, 4, depth=depth), branch_free)
    result, summary = replayed(recorded("copy", 1.0), setting)
    there_and_back = 10.0 + 0.125 + 2 * 0.25
    exposed = [r.draft.exposed for r in result.rounds]
    assert (set(exposed) == {0, 1}) == (depth > 1 and not branch_free)
    want = [max(there_and_back, 2.0 * depth) + 2.0 * e + 0.5 for e in exposed]
    # The prompt need not be sent, and nothing has grown before it is there.
    want[0] = there_and_back - 0.25 + 2.0 + 0.5
    np.testing.assert_allclose(result.clocks.rounds, want)
    assert summary.steady_ms == pytest.approx(np.mean(want), rel=0.02)
    assert summary.round_ms == pytest.approx(sum(want) / len(want))


def test_a_growing_draft_is_not_interrupted():
    steps, clocks = Steps(10.0, 2.0, 2.0, 0.0, 0.0, 1.0), Clocks()
    clocks.turn(steps, 1, 0)
    assert (clocks.verified, clocks.free, clocks.rounds) == (13.0, 3.0, [13.0])
    clocks.grow(steps, 6)  # until 15
    clocks.turn(steps, 0, 0)
    assert (clocks.verified, clocks.free, clocks.rounds[-1]) == (26.0, 16.0, 13.0)
    assert (clocks.target_busy, clocks.draft_busy) == (20.0, 16.0)


def test_adaptive_growth_lasts_until_the_target_is_done():
    fixed = SwiftSpec(7, 4, depth=5)
    results = [
        replayed(recorded("copy", 1.0), Setting(SPLIT, method))[0]
        for method in (dataclasses.replace(fixed, depth=2, adaptive=True), fixed)
    ]
    # A pass takes 2, the target 10.375 with its message: the sixth is under way then, and is waited for.
    grown = [[r.draft.passes - r.draft.exposed for r in result.rounds[1:]] for result in results]
    assert set(grown[0]) == {6} and set(grown[1]) == {5}
    clocks = Clocks(verified=10.0, free=0.0)
    steps = Steps(10.0, 2.0, 2.0, 0.0, 0.0, 0.0)
    assert clocks.passes_until_verified(steps, 8) == 5 and clocks.passes_until_verified(steps, 4) == 4
    assert clocks.passes_until_verified(dataclasses.replace(steps, draft=30.0), 8) == 1


def test_what_was_not_recorded_is_approximated_and_counted():
    full, setting = recorded("copy", 1.0), Setting(SPLIT, METHODS["overlap"][0])
    on_text = len(full.text) + 1
    bare = dataclasses.replace(
        full, **{name: getattr(full, name)[:on_text] for name in ("parent", "token", "child_token", "child_logprob")}
    )
    result, summary = replayed(bare, setting)
    exact, exact_summary = replayed(full, setting)
    assert 0.2 < summary.stood_in < 1 and exact_summary.stood_in == 0
    # Nothing off the text is accepted, whatever stands in for it; and what is on it is known.
    assert sum(r.verified for r in result.rounds) == len(full.text)
    assert summary.length == pytest.approx(exact_summary.length, rel=0.3)
    assert result.rounds[0] == exact.rounds[0]


def test_stand_ins_are_siblings_or_the_parent():
    trace = made_up(3, True)
    # A node behind the second proposal of node 1, and one behind that one's third.
    tokens = [int(trace.child_token[1, 1]), 77]
    trace = dataclasses.replace(
        trace,
        parent=np.append(trace.parent, [1, 4]).astype(np.int32),
        token=np.append(trace.token, tokens).astype(np.int32),
        child_token=np.concatenate([trace.child_token, [[5, 6, 77, 8], [1, 2, 3, 4]]]).astype(np.int32),
        child_logprob=np.concatenate([trace.child_logprob, trace.child_logprob[:2]]),
    )
    assert trace.child_nodes()[[1, 4]].tolist() == [[2, 4, -1, -1], [-1, -1, 5, -1]]
    assert trace.stand_ins()[:, 0].tolist() == [1, 2, 3, 3, 5, 5]
    assert trace.truth().tolist() == [0, 4, 8]
    assert made_up(2, False).truth().tolist() == [UNPROPOSED, UNPROPOSED + 1]


def test_a_full_recorder_stops():
    recorder = Recorder(
        draft_placement("llama", 1, "same"), draft_params("llama", 1, "same", "copy"),
        keep=KEEP, nodes=LENGTH + 11, context=len(PROMPT),
    )  # fmt: skip
    text = recorded("copy", 1.0).text
    trace = cover(recorder, recorder.begin("a", "b", PROMPT, text.tolist()), METHODS["overlap"][0], NODES, ROOM)
    assert recorder.is_full(trace) and len(trace.parent) == LENGTH + 11
    with pytest.raises(ValueError, match="more than"):
        recorder.begin("a", "b", PROMPT, [*text.tolist(), *range(20)])


def test_traces_are_read_as_written(tmp_path):
    traces = [made_up(3, True), made_up(4, False)]
    save_traces(tmp_path / "a.npz", traces, {"model": "m"})
    read, about = load_traces(tmp_path / "a.npz")
    assert about == {"model": "m"}
    for got, want in zip(read, traces, strict=True):
        for name, value in dataclasses.asdict(want).items():
            np.testing.assert_array_equal(getattr(got, name), value)
    np.savez(tmp_path / "b.npz", x=np.zeros(1))
    with pytest.raises(ValueError, match="not a trace"):
        load_traces(tmp_path / "b.npz")


TABLES = Path(simulate_swiftspec.__file__).parent / "swiftspec_sim" / "times"


def test_the_papers_tables():
    qwen, llama = (load_times(TABLES / f"{name}-h800.toml") for name in ("qwen2-72b", "llama-3-70b"))
    assert [str(s) for s in qwen.splits()] == ["6/2", "8"] and [str(s) for s in llama.splits()] == ["4/4", "8"]
    rounds = [1000 * row.length / row.tokens_per_s for row in qwen.published if row.length]
    assert rounds == pytest.approx([12.19, 18.15], abs=0.005)
    assert llama.target_pass(parse_split("4/4"), 12) == pytest.approx((10.39 + 13.25) / 2)
    assert llama.target_pass(parse_split("4/4"), 1) == 10.32 and llama.draft_pass(parse_split("8"), 8) == 3.27
    with pytest.raises(ConfigError, match=re.escape("for 9 rows")):
        qwen.target_pass(parse_split("6/2"), 9)
    with pytest.raises(ConfigError, match="on 5 devices"):
        qwen.target_pass(parse_split("5/3"), 8)
    # Two passes in turn are what the overhead was fitted with; the other row follows from it.
    settings = simulate_swiftspec.published_settings(qwen)
    assert [(str(s.split), s.method.depth, s.method.reuse) for s in settings] == [
        ("6/2", 3, True), ("6/2", 4, True), ("8", 1, False), ("8", 1, True), ("8", 2, False),
    ]  # fmt: skip
    _, summary = replayed(made_up(40, False, keep=8), settings[2], qwen)
    assert 1000 * 3.63 / summary.round_ms == pytest.approx(200, rel=0.002)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[target.1]\n8 = 1", "no times of the draft"),
        ("[target.1]\n8 = -1\n[draft.1]\n8 = 1", "must be a time"),
        ("[target.x]\n8 = 1\n[draft.1]\n8 = 1", "by devices"),
        ("[target.1]\na = 1\n[draft.1]\n8 = 1", "no number of rows"),
        ("[target.1]\n8 = 1\n[draft.1]\n8 = 1\n[overhead]\nmesage = 1", "did you mean 'message'"),
        ("[target.1]\n8 = 1\n[draft.1]\n8 = 1\n[[published]]\nsplit = '1/1'\nbatch = 8", "no width"),
        ("[target", "Expected"),
    ],
)
def test_bad_tables_are_refused(tmp_path, text, message):
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_times(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_times(tmp_path / "nowhere.toml")


def invoke(*words):
    return CliRunner().invoke(simulate_swiftspec.app, [str(word) for word in words])


def test_the_command_prints_and_writes_what_it_found(tmp_path):
    traces = [dataclasses.replace(made_up(20, True, keep=8), category=c) for c in ("chat", "code")]
    save_traces(tmp_path / "t.npz", traces, {"model": "m", "draft": "d"})
    qwen = TABLES / "qwen2-72b-h800.toml"
    done = invoke("simulate", tmp_path / "t.npz", "--times", qwen, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    assert "beside what was published" in done.output and "overlap" in done.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(row["split"], row["depth"]) for row in report["grid"]] == [
        ("6/2", 3),
        ("6/2", 4),
        ("8", 1),
        ("8", 2),
        ("8", 3),
    ]
    assert {row["published"]["tokens_per_s"] for row in report["published"]} == {274, 200}
    assert set(report["published"][0]["lengths"]) == {"chat", "code"}
    for words, message in (
        (["--splits", "6:2"], "split '6:2'"),
        (["--splits", "4/4"], "on 4 devices"),
        (["--batch", "16"], "for 16 rows"),
        (["--branch", "9"], "holds 8 proposals"),
        (["--depth", "0"], "positive numbers"),
        (["--length-from", "paper"], "trace or published"),
    ):
        failed = invoke("simulate", tmp_path / "t.npz", "--times", qwen, *words)
        assert failed.exit_code == 2 and message in failed.output, failed.output


def test_lengths_that_were_published():
    row = Published(SPLIT, 8, 4, 100.0, 5.0)
    times = dataclasses.replace(TIMES, published=(row,))
    summary = replayed(made_up(30, False, keep=8), Setting(SPLIT, SwiftSpec(7, 4, depth=2)))[1]

    def rate(split, method):
        return simulate_swiftspec.rate_of(times, Setting(split, method), summary, "published")

    assert rate(SPLIT, SwiftSpec(7, 4, depth=2)) is None  # too shallow for five tokens
    assert rate(SPLIT, SwiftSpec(7, 4, depth=5)) == pytest.approx(5000 / summary.round_ms)
    # Nothing is known of other batches, nor of models that take turns.
    assert rate(SPLIT, SwiftSpec(3, 4, depth=5)) is None and rate(SHARED, SwiftSpec(7, 4, depth=5)) is None
