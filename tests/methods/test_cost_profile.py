"""Costs of rounds on this machine: measured with a clock of the test, kept, read again, and used by `auto`."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from method_cases import LLAMA_AUTO_LONG, PROMPT, Case, models_of, params_of, plain, run, tokens_of

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.auto import costs as cost_profile
from jaxspec.methods.auto import profiles
from jaxspec.methods.auto.costs import spare_slots
from jaxspec.methods.auto.profiles import (
    RoundTimes,
    find_costs,
    load_costs,
    load_learned,
    measured_rows,
    save_costs,
    save_learned,
)
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.base import Store
from jaxspec.methods.core.cost_model import KINDS, LAWS, CostModel, fill_rows
from jaxspec.methods.core.round import read_rounds
from jaxspec.methods.core.timing import HOPE
from jaxspec.runtime import hosts
from jaxspec.runtime.store import limit, program_files

CASE = LLAMA_AUTO_LONG._replace(method=Auto())
TIMES = RoundTimes(0.01, {1: 0.011, 2: 0.012, 4: 0.018, 16: 0.041}, round_s=0.003, draft_s=0.001)
# Seconds of a plain token, of each further row, of a round apart from its passes, of a draft pass, and of a draft apart
# from these.
PLAIN_S, ROW_S, ROUND_S, DRAFT_S, OVERHEAD_S = 0.004, 0.001, 0.0015, 0.0004, 0.0003


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(program_files, "disabled", False)
    monkeypatch.setattr(program_files, "_folder", tmp_path / "ready")
    monkeypatch.setattr(profiles, "surroundings", lambda: "this machine")
    return Store(cache_folder=tmp_path)


class SlowClock:
    """A clock by which rounds take as long as the test says, one after another: the host waits for each it reads."""

    def __init__(self):
        self.seconds, self.samples, self.slow, self.passes, self.outputs = 0.0, 0, 0.3, set(), []

    def __call__(self):
        return self.seconds

    def read(self, rounds):
        self.samples += 1
        outputs = read_rounds(rounds)
        self.outputs.append(outputs)
        self.run(outputs)
        return outputs

    def run(self, outputs):
        for output in outputs:
            plain, drafts = 1 if output.drafted else len(output.tokens), output.draft_passes > 0
            self.passes.add(output.draft_passes)
            spent = ROUND_S + PLAIN_S * plain + ROW_S * output.drafted
            self.seconds += self.slow * (spent + DRAFT_S * output.draft_passes + OVERHEAD_S * drafts)

    def times(self, runner):
        """Give the rounds of texts these times, too."""
        runner.timer.now, observe = self, runner.observe

        def run_and_observe(state, outputs):
            self.run(outputs)
            observe(state, outputs)

        runner.observe = run_and_observe


def make_engine(store, case=CASE):
    engine = Engine(models_of(case), case.method, None, store)
    engine.prepare()
    return engine


@pytest.fixture
def clock(monkeypatch):
    """The clock of what is measured."""
    clock, measure = SlowClock(), cost_profile.measure_rounds
    monkeypatch.setattr(cost_profile, "read_rounds", clock.read)
    monkeypatch.setattr(cost_profile, "measure_rounds", lambda *arguments: measure(*arguments, now=clock))
    return clock


@pytest.fixture
def clocked(store, clock):
    """An engine whose rounds take what the test says."""
    return make_engine(store), clock


def assert_measured(report, rel=0.2):
    """What typical rounds cost by a report is nearly what they take, and so is what a draft costs in them.

    In the process that measured, drafts and rows are believed a little cheaper than is most likely.
    """
    draft, overhead = report.draft_cost, report.draft_overhead or 0.0
    found = CostModel(np.array(report.pass_cost), draft=draft, draft_overhead=overhead, round=report.round_cost)
    rows, draft, overhead, round_ = (x / PLAIN_S for x in (ROW_S * np.arange(16), DRAFT_S, OVERHEAD_S, ROUND_S))
    true = CostModel(1 + rows, draft=draft, draft_overhead=overhead, round=round_)
    for tokens, passes in ((1, 0), (3, 0), (7, 0), (15, 0), (1, 1), (2, 1)):
        assert found.spent(tokens, passes) == pytest.approx(true.spent(tokens, passes), rel=rel), (tokens, passes)
    assert found.round == pytest.approx(true.round, abs=0.15)
    # It begins at 1, since this draft is as large as its target.
    assert found.draft_overhead + found.draft == pytest.approx(overhead + draft, abs=0.15)


def test_the_figures_are_those_of_the_times():
    figures = TIMES.figures()
    assert figures["pass_cost"][:5] == pytest.approx((1.0, 1.1, 1.4, 1.7, 1.892), abs=1e-3)
    assert len(figures["pass_cost"]) == 16 and figures["pass_cost"][-1] == pytest.approx(4.0)
    assert figures["round_cost"] == pytest.approx(0.3) and figures["draft_cost"] == pytest.approx(0.1)
    assert "draft_cost" not in dataclasses.replace(TIMES, draft_s=0.0).figures()
    # Fewer rows that seem to cost more than further ones cost as much.
    odd = RoundTimes(0.01, {1: 0.005, 2: 0.008, 4: 0.007}, 0.0, 0.0).figures()
    assert odd == {"pass_cost": (1.0, 1.2, 1.2, 1.2), "round_cost": 0.0}
    assert fill_rows({1: 1.0, 3: 2.0}) == (1.0, 1.5, 2.0)


def test_what_rounds_showed_of_rows_that_were_not_timed_is_kept(tmp_path):
    costs = CostModel(1 + 0.2 * np.arange(16), draft=0.1, round=0.2)
    save_costs(tmp_path / "costs.json", RoundTimes.of(costs, 0.01))
    kept = load_costs(tmp_path / "costs.json")
    np.testing.assert_allclose(kept.figures()["pass_cost"], costs.passes, rtol=1e-3)


@pytest.fixture
def drafts_were_long(store):
    """An earlier process made long drafts; what it measured is gone."""
    save_learned(find(store), counts_of(2.0, 1.0, [100.0, 150.0, 600.0, 500.0]))


def counts_of(tried, accepted, asked):
    """What was learned of drafts, the same of greedy and of sampled texts."""
    kinds = np.ones((LAWS, KINDS), np.float32)
    return {"tried": tried * kinds, "accepted": accepted * kinds, "asked": np.tile(np.float32(asked), (LAWS, 1))}


@pytest.mark.thorough
def test_what_was_learned_does_not_change_what_is_measured(drafts_were_long, clocked):
    engine, _ = clocked
    assert engine.runner.drafter.learned is not None
    engine.calibrate(params_of(CASE, "copy"))
    assert_measured(engine.runner.report())


@pytest.mark.thorough
def test_rounds_are_measured_once_and_kept(clocked, store):
    engine, clock = clocked
    params = params_of(CASE, "copy")
    assert engine.runner.measures and engine.runner.report().figures == "built in"
    engine.calibrate(params)
    samples = clock.samples
    assert not engine.runner.measures and samples > cost_profile.MOST_SAMPLES
    # Plain decoding is timed after another round: a processor is slower just after a rest. Drafts share dispatches.
    tokens = [[len(output.tokens) for output in outputs] for outputs in clock.outputs]
    assert tokens[2:4] == [[1], [engine.runner.steps]]
    assert {len(outputs) for outputs in clock.outputs if outputs[0].draft_passes} == {1, 3}
    report = engine.runner.report()
    assert report.figures == "measured" and clock.passes == {0, 1}
    assert_measured(report)
    # The device weighs with what the report says, not with what measuring needed.
    costs = engine.runner.costs
    np.testing.assert_allclose(engine.runner.drafter.operands.rounds[1], costs.rounds[1], rtol=1e-3)
    assert report.pass_cost[1] == pytest.approx(costs.passes[1], abs=1e-3)
    engine.calibrate(params)
    assert clock.samples == samples, "once"
    for worth, rate in zip(engine.runner.worths, cost_profile.FIRST_RATES, strict=True):
        assert worth.gain == pytest.approx(HOPE * costs.gain(*costs.best_chain(rate, 8)), rel=1e-3)
    # The next process begins with what is most likely.
    again = make_engine(store)
    assert not again.runner.measures and load_costs(find(store)) == again.runner.times == engine.runner.times
    assert_measured(again.runner.report(), 0.12)
    # Figures of one's own come first, and nothing is measured where all are given.
    own = make_engine(store, CASE._replace(method=Auto(round_cost=0.5))).runner.report()
    assert own.figures == "given, rest measured" and own.round_cost == 0.5
    assert own.pass_cost == again.runner.report().pass_cost


@pytest.mark.thorough
def test_the_tokens_are_plain_decodings_after_a_measurement(clocked):
    engine, _ = clocked
    params = params_of(CASE, "copy")
    engine.calibrate(params)
    rounds = run(engine, params, PROMPT, 40, seed=3)
    assert engine.runner.report().figures == "measured"
    assert tokens_of(rounds)[:40] == tokens_of(plain(CASE.family, PROMPT, 40, 3))[:40]
    assert engine.runner.timer.gain is None or engine.runner.timer.gain > 0


@pytest.mark.thorough
def test_two_programs_a_round_are_measured_as_one(clocked, monkeypatch):
    """As with a larger target, whose rounds do not share dispatches."""
    engine, _ = clocked
    monkeypatch.setattr(engine.runner, "shared_rounds", None)
    engine.calibrate(params_of(CASE, "copy"))
    assert_measured(engine.runner.report())


@pytest.mark.thorough
def test_measuring_takes_half_a_second_in_all(store, clock):
    """A slow machine, or a large model, leaves the kinds of rounds out for which there is no time."""
    engine, profile = make_engine(store), find(store)
    expected = CostModel(1 + ROW_S / PLAIN_S * np.arange(16), draft=DRAFT_S / PLAIN_S, round=ROUND_S / PLAIN_S)
    most = float("inf")
    for slow in (0.3, 4.0, 15.0, 100.0):
        clock.slow, clock.samples, begun = slow, 0, clock.seconds
        found = cost_profile.measure_rounds(engine.runner, params_of(CASE, "copy"), None, 8, expected)
        assert clock.seconds - begun < max(0.5, 1.01 * slow * (PLAIN_S + ROUND_S)), "or one round"
        assert clock.samples < most
        most = clock.samples
        costs = found.costs()
        assert found.plain_s * float(costs.rounds[0]) == pytest.approx(slow * (PLAIN_S + ROUND_S), rel=0.4)
        times = RoundTimes.of(costs, found.plain_s)
        save_costs(profile, times)
        assert load_costs(profile) == times


@pytest.mark.thorough
def test_no_request_waits_for_a_measurement(clocked, monkeypatch):
    """Where it was left out before the first request, it stays out."""
    engine, clock = clocked
    engine.open(params_of(CASE, "copy"), PROMPT, SamplingParams(max_tokens=2), 0).close()
    assert engine.runner.measures and engine.runner.report().figures == "built in"


@pytest.mark.thorough
def test_what_was_learned_is_kept_for_the_next_process(clocked, store):
    engine, clock = clocked
    clock.slow = 1e-3  # texts take longer
    params = params_of(CASE, "copy")
    run(engine, params, PROMPT, 8, seed=3)
    run(engine, params, PROMPT, 200, seed=4)
    again = make_engine(store)
    kept = again.runner.drafter.learned
    assert kept["accepted"][0].sum() > 0 and kept["tried"][0].sum() > 0
    assert not any(counts[1].any() for counts in kept.values()), "nothing was sampled"
    run(engine, params, PROMPT, 300, seed=4, temperature=1.0)
    sampled = load_learned(find(store))
    assert sampled["accepted"][1].sum() > 0
    np.testing.assert_allclose(sampled["accepted"][0], kept["accepted"][0], rtol=1e-5)
    # The buffers of `prepare` begin once more, with the first text, which changes nothing.
    allocated = again.runner.start(0, None)
    begun = again.runner.start(0, allocated)
    assert not begun.draft.stats.tried.any()
    np.testing.assert_allclose(begun.draft.stats.usual_tried, kept["tried"])
    assert tokens_of(run(again, params, PROMPT, 40, seed=3))[:40] == tokens_of(plain(CASE.family, PROMPT, 40, 3))[:40]


@pytest.mark.thorough
def test_costs_are_corrected_by_rounds_and_kept(clocked, store):
    """Texts run on a machine of other costs than were measured: later processes begin with what rounds took."""
    engine, _ = clocked
    params = params_of(CASE, "copy")
    engine.calibrate(params)
    measured = engine.runner.times
    engine.runner.timer.now = itertools.count(0, 0.05).__next__
    run(engine, params, PROMPT, 200, seed=3)
    again = make_engine(store)
    assert not again.runner.measures and again.runner.report().figures == "measured"
    assert again.runner.times.plain_s > 2 * measured.plain_s
    assert list(again.runner.times.verify_s) == list(measured.verify_s)
    grown = CASE.method.bind(models_of(CASE), 120, store, engine.runner)
    assert grown.times.plain_s > 2 * measured.plain_s


@pytest.mark.thorough
def test_costs_of_a_busy_machine_are_corrected(store):
    """By them nothing pays: plain rounds show what rounds cost, and drafts that are made all the same what these do."""
    save_costs(find(store), dataclasses.replace(TIMES, round_s=0.031, draft_s=0.001))
    engine = make_engine(store)
    begun = engine.runner.report()
    assert (begun.figures, begun.round_cost, begun.draft_cost) == ("measured", 3.1, 0.1)
    SlowClock().times(engine.runner)
    drafted = 0
    for _ in range(4):
        rounds = run(engine, params_of(CASE, "copy"), PROMPT, 200, seed=3)
        assert tokens_of(rounds)[:200] == tokens_of(plain(CASE.family, PROMPT, 200, 3))[:200]
        drafted += sum(one.draft_passes > 0 for one in rounds)
    assert drafted > 1
    assert engine.runner.report().round_cost < 1.5
    assert make_engine(store).runner.report().round_cost < 1.5
    # A draft that is known to be dear is left alone.
    dear = make_engine(store, CASE._replace(method=Auto(draft_cost=1.0)))
    assert dear.runner.report().draft_cost == 1.0


@pytest.mark.thorough
def test_a_draft_of_one_token_is_measured(store):
    engine = Engine(models_of(CASE), Auto(length=1), 300, store)
    engine.prepare()
    engine.calibrate(params_of(CASE))
    assert engine.runner.times.draft_s > 0


def test_damaged_learned_rates_are_no_rates(store):
    profile = find(store)
    learned = counts_of(2.0, 1.0, [3.0] * 4)
    save_learned(profile, learned)
    jax.tree.map(np.testing.assert_array_equal, load_learned(profile), learned)
    (path,) = profile.parent.iterdir()
    good = json.loads(path.read_text())
    # Of the first two, 32 bits would make infinity.
    huge = [{**good, "tried": [[count] * KINDS] * LAWS} for count in (1e300, 10**400, float("nan"))]
    few = [{**good, "asked": [good["asked"][0], counts]} for counts in ([3.0], [0.0, 1.0, 1.0, 1.0], [-1.0] * 4)]
    share = [{**good, "accepted": [good["accepted"][0], [count] * KINDS]} for count in (-1.0, 2.5)]
    for damaged in ("{", {**good, "tried": [1.0]}, {**good, "tried": good["tried"][0]}, *share, *few, *huge):
        path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
        assert load_learned(profile) is None, damaged


def find(store, case=CASE, rows=16):
    return find_costs(store.cache_folder, models_of(case), rows)


def test_a_damaged_file_is_written_again(store):
    profile = find(store)
    assert profile is not None and load_costs(profile) is None
    save_costs(profile, TIMES)
    assert load_costs(profile) == TIMES
    good = json.loads(profile.read_text())
    damages = [
        "{", "[]", "", '{"format": "other"}', json.dumps({**good, "plain_s": 0}), json.dumps({**good, "draft_s": None}),
        json.dumps({**good, "verify_s": {}}), json.dumps({**good, "verify_s": {"2": 1.0, "4": 2.0}}),
        json.dumps({**good, "verify_s": [1.0]}), json.dumps({**good, "round_s": "x"}),
        json.dumps(good).replace("0.012", "NaN"), json.dumps({**good, "plain_s": -1.0}),
        json.dumps({**good, "plain_s": 10**400}), json.dumps({**good, "plain_s": 1e-320}),
        json.dumps({**good, "round_s": 1e308}), json.dumps({**good, "verify_s": {"1": 1.0, "100000000": 2.0}}),
    ]  # fmt: skip
    for damaged in damages:
        profile.write_text(damaged)
        assert load_costs(profile) is None, damaged
    save_costs(profile, TIMES)
    assert load_costs(profile) == TIMES
    assert [path.name for path in profile.parent.iterdir()] == [profile.name], "nothing else is left"


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, store):
    (tmp_path / limit.PROFILES).write_text("no folder")
    profile = find(store)
    assert profile is not None
    save_costs(profile, TIMES)
    assert load_costs(profile) is None


def test_a_profile_holds_for_one_machine_and_one_pair(store, monkeypatch):
    paths = {find(store), find(store, rows=32), find(store, Case("llama", 1, "none", Auto()))}
    monkeypatch.setattr(profiles, "surroundings", lambda: "another machine")
    paths.add(find(store))
    models = models_of(CASE)
    other = models._replace(target=dataclasses.replace(models.target, cache_dtype=np.dtype("float16")))
    paths.add(find_costs(store.cache_folder, other, 16))
    assert len(paths) == 5


@pytest.mark.thorough
def test_where_nothing_is_measured(store, monkeypatch):
    assert find_costs(None, models_of(CASE), 16) is None
    models = models_of(CASE)
    streamed = models._replace(target=dataclasses.replace(models.target, resident_layers=1))
    assert find_costs(store.cache_folder, streamed, 16) is None
    assert find(store, CASE._replace(degree=4)) is None
    assert spare_slots(64, 16, 8) < 0 <= spare_slots(1024, 16, 8) and measured_rows(3) == [1, 2, 3]
    assert measured_rows(1024)[-1] == 64
    given = CASE._replace(method=Auto(draft_cost=0.1, pass_cost=(1.0, 1.1), round_cost=0.1))
    engine = make_engine(store, given)
    assert not engine.runner.measures
    # What is learned of drafts is kept all the same.
    run(engine, params_of(given, "copy"), PROMPT, 100, seed=3)
    assert load_learned(find(store)) is not None and load_costs(find(store)) is None
    monkeypatch.setattr(hosts, "several", lambda: True)
    assert find(store) is None
    monkeypatch.setattr(hosts, "several", lambda: False)
    monkeypatch.setattr(program_files, "disabled", True)
    assert find(store) is None


@pytest.mark.thorough
def test_without_a_draft_verifications_are_measured(store):
    case = Case("llama", 1, "none", Auto())
    engine = make_engine(store, case)
    engine.calibrate(params_of(case, "copy"))
    report = engine.runner.report()
    assert report.figures == "measured" and report.draft_cost is None
