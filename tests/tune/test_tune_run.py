"""The loop of the tuner on invented measurements: what is run, what is chosen, and its preset."""

import dataclasses
import math
import tomllib
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from native_models import LLAMA, write_model

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.cost_model import CostModel
from jaxspec.methods.core.round import STEPS_PER_DISPATCH
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.registry import make_method
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.models.params import declare_leaves
from jaxspec.tune import run as tuning
from jaxspec.tune import swiftspec as splits
from jaxspec.tune.plan import USABLE, PairFiles, list_splits, memory_limit, plan_lines
from jaxspec.tune.run import (
    CONFIRMED,
    DEFAULT,
    LONGEST_CHAIN,
    Candidate,
    Trial,
    Tuning,
    list_candidates,
    measure_acceptance,
    pick,
    predict_chain,
    tune,
)
from jaxspec.tune.swiftspec import SplitTimes, split_devices

COSTS = CostModel(np.array([1, 1.1, 1.2, 1.3, 1.3, 1.3, 1.3, 1.3, *(1.3 + 0.25 * n for n in range(1, 9))]), 0.2, 0.25)
PROMPTS = [BenchPrompt(1, "words", ("w1",))]
PLAIN = SimpleNamespace(draft=None)
PAIR = SimpleNamespace(draft=object())


class Model(SimpleNamespace):
    """Stands for a loaded model; can be weakly referenced."""


def model(**known):
    target = SimpleNamespace(plan=SimpleNamespace(tensor=1))
    return Model(draft_path=None, model_path="m", _internals=SimpleNamespace(target=target), **known)


@pytest.fixture
def tune_on(monkeypatch):
    """Tune with invented speed-ups and rates of plain decoding; also gives the columns that were run, by trial."""

    def tune_on(trials, speedups, plain=lambda llm: 100.0):
        run = []

        def measure(llm, columns, prompts, sampling, repeats, progress):
            run.append([column.label for column in columns])
            progress("measuring", 1, 2)
            return plain(llm)

        def report(rate, command, path, draft, devices):
            def row(label):
                gain = speedups.get(label, 0.25)
                speedup = {"mean": 1.0, "geometric_mean": gain, "low": gain - 0.001}
                if label == "ar":
                    speedup["geometric_mean"] = 1.0
                rates = rate and {"mean": rate * speedup["geometric_mean"]}
                return {"tokens_per_s": rates, "speedup": speedup, "call_speedup": speedup, "acceptance_length": 2.0}

            return {"overall": {"columns": {label: row(label) for label in run[-1]}}}

        monkeypatch.setattr(tuning, "measure", measure)
        monkeypatch.setattr(tuning, "make_report", report)
        return tune(iter(trials), PROMPTS, SamplingParams(), 1, "jaxspec-tune"), run

    return tune_on


def trial(acceptance=(), models=PLAIN, name=None):
    return Trial(model(), list_candidates(models, name, COSTS, acceptance), known={"costs": COSTS.report()})


def test_candidates_are_the_variants_of_methods_that_fit():
    labels = [c.label for c in list_candidates(PLAIN, None, COSTS, ())]
    assert labels == [DEFAULT, "lookup"]
    found = {c.label: c for c in list_candidates(PAIR, None, COSTS, (0.9, 0.8) + (0.0,) * 6)}
    assert {"chain 2", "chain 8", "specexec 8", "specexec 16"} <= set(found)
    assert found["chain 2"].method == Chain(2) and found["chain 2"].predicted > 1
    assert found[DEFAULT].method == Auto()
    assert {label for label, c in found.items() if c.predicted is not None} == {
        label for label in found if label.startswith("chain")
    }
    assert [c.label for c in list_candidates(PLAIN, "lookup", COSTS, ())] == ["lookup"]


@pytest.mark.thorough
@pytest.mark.parametrize("speedups", [{"lookup": 0.8}, {"lookup": 1.019, DEFAULT: 1.01}])
def test_where_nothing_gains_the_preset_says_plain_decoding(tune_on, speedups):
    """A gain within the noise is none."""
    found, run = tune_on([trial()], {DEFAULT: 0.5, **speedups})
    assert run == [["ar", DEFAULT, "lookup"]]
    assert (found.best.label, found.best.method, found.best.score) == ("ar", Autoregressive(), 1.0)
    text = found.preset({}, "jaxspec-tune preset.toml")
    assert tomllib.loads(text) == {"method": "ar"}
    assert text.startswith("# jaxspec-tune preset.toml\n# plain decoding is the fastest here")


def test_the_fastest_that_was_measured_wins_whatever_was_predicted(tune_on):
    acceptance = (0.9, 0.8, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0)
    speedups = {DEFAULT: 0.5, "chain 2": 1.4, "chain 3": 1.2, "specexec 8": 1.5}
    found, [run] = tune_on([trial(acceptance, PAIR)], speedups)
    # Candidates without a prediction, and the best predictions.
    assert set(run[1:-CONFIRMED]) == {"lookup", DEFAULT, "specexec 8", "specexec 16"}
    assert set(run[-CONFIRMED:]) == {"chain 2", "chain 3", "chain 4"}
    assert [(c.label, c.score) for c in found.candidates[:4]] == [
        ("specexec 8", 1.5), ("chain 2", 1.4), ("chain 3", 1.2), ("ar", 1.0),
    ]  # fmt: skip
    assert found.best.label == "specexec 8"
    assert [c.label for c in found.candidates if c.score is None] == ["chain 1", "chain 6", "chain 8"]


def test_predictions_of_chains():
    """Expected length, 1 + 0.8 + 0.8 * 0.5 + ..., over a target pass, draft passes and the rest of a round."""
    acceptance = (0.8, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    plain = 1 + 0.25 / STEPS_PER_DISPATCH
    for tokens, length, cost in ((1, 1.8, 1.1 + 0.2), (2, 2.2, 1.2 + 0.4), (3, 2.6, 1.3 + 0.6), (8, 2.6, 1.55 + 1.6)):
        for costs in (COSTS, dataclasses.replace(COSTS, draft_overhead=0.5)):
            spent = cost + 0.25 + costs.draft_overhead
            assert predict_chain(costs, acceptance, tokens) == pytest.approx(length * plain / spent, abs=1e-3)


def test_acceptance_by_depth_counts_what_the_target_looked_at():
    counters = SimpleNamespace(per_step_drafted=[3, 3, 0, 2], per_step_accepted=[3, 1, 0, 0])
    completion = SimpleNamespace(stats=SimpleNamespace(speculative_decoding=counters))
    chain = SimpleNamespace(
        tokenizer=SimpleNamespace(has_chat_template=True), encode=lambda prompt: [1], generate=lambda *_: completion
    )
    # Depth 1 was tried three times and accepted twice, depth 2 twice and once, depth 3 once.
    expected = [2 / 3, 1 / 2, 1.0, *[0.0] * (LONGEST_CHAIN - 3)]
    prompts = [BenchPrompt(1, "words", ("w1",)), BenchPrompt(2, "words", ("w2", "w3"))]
    llm = SimpleNamespace(with_method=lambda method: chain)
    assert measure_acceptance(llm, prompts, SamplingParams(), lambda *_: None) == pytest.approx(expected)


def chosen(candidate):
    return Tuning((candidate,), candidate, (), ())


@pytest.mark.parametrize(
    "method",
    [Autoregressive(), Chain(3), PromptLookup(), SpecExec(15), SwiftSpec(15, 8, depth=4), Auto(pass_cost=(1, 1.25))],
)
def test_a_preset_makes_the_same_method_again(method):
    path = 'my "model"\\é\x7f\n'
    found = chosen(Candidate("it", method, score=1.25))
    written = tomllib.loads(found.preset({"model": path, "draft_model": "none"}, "jaxspec-tune"))
    assert (written.pop("model"), written.pop("draft_model")) == (path, "none")
    assert make_method(written.pop("method"), written) == method


# Splits of devices.


def times_of(verify_s, expand_s, more=2.0):
    """Passes of 8 rows and 8 leaves; more rows and wider passes cost `more` times as much."""
    return SplitTimes(
        {8: verify_s, 16: more * verify_s, 32: 2 * more * verify_s},
        {4: 0.9 * expand_s, 8: expand_s, 16: more * expand_s},
    )


@pytest.mark.parametrize(
    ("verify_s", "expand_s", "depths"),
    [
        (10, 3, (3, 4)),
        (2, 3, (1, 2)),  # not even one fits
        (8, 1, (8,)),  # more than a batch has rows is of no use
    ],
)
def test_as_many_draft_passes_as_fit_and_one_more(verify_s, expand_s, depths):
    assert times_of(verify_s, expand_s).depths(8, 8, shared=False) == depths


def test_sizes_follow_from_the_times():
    """Twice the rows where they cost little more; other widths where the difference is worth it."""
    dear = times_of(10, 3, more=2.0).settings(shared=False)
    assert [(s["num_draft_tokens"], s["width"], s["depth"]) for s in dear] == [(7, 8, 3), (7, 8, 4)]
    assert "refill" not in dear[0]
    cheap = times_of(10, 1, more=1.1).settings(shared=False)
    assert {(s["num_draft_tokens"] + 1, s["width"]) for s in cheap} == {(8, 8), (16, 8), (8, 16)}
    assert all(s["depth"] <= s["num_draft_tokens"] + 1 and s["refill"] == 1 for s in cheap)
    shared = times_of(10, 1).settings(shared=True)
    assert all(s["overlap"] is False and "refill" not in s for s in shared)


def test_the_budget_is_at_the_knee(monkeypatch):
    costs = {1: 1.0, 17: 1.1, 65: 1.6, 257: 2.4, 1025: 9.0, 4097: 30.0}
    timed = []
    monkeypatch.setattr(splits, "time_target_pass", lambda placement, params, rows, context: timed.append(rows))
    monkeypatch.setattr(splits, "median_times", lambda timers, repeats: {rows: costs[rows] for rows in timers})
    inner = SimpleNamespace(target=0, params=SimpleNamespace(target=0))
    times = splits.time_budgets(SimpleNamespace(_internals=inner))
    assert timed == [1, 17, 65, 257], "nothing beyond the knee is timed"
    assert splits.knee(times) == 64
    assert splits.knee({1: 1.0, 17: 3.0}) == 16


@pytest.fixture
def split(monkeypatch):
    """Trials of three devices with invented times; one of them may not fit."""
    times = {1: times_of(0.010, 0.003), 2: times_of(0.006, 0.004), 3: times_of(0.005, 0.004)}
    monkeypatch.setattr(splits, "time_split", lambda llm: times[llm.devices])
    monkeypatch.setattr(splits, "time_budgets", lambda llm: {1: 1.0, 17: 1.5, 65: 3.0})
    loaded = []

    def split(too_large=(), seen=lambda *_: None, refused=()):
        def load(target, draft):
            assert not any(ref() for ref in loaded), "the pair before is still held"
            assert target not in refused, "what cannot fit is not loaded"
            if target in too_large:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            llm = model(devices=target)
            loaded.append(weakref.ref(llm))
            return llm

        return split_devices(load, 3, seen, lambda target, draft: "needs 3 GiB" if target in refused else None)

    return split


SHARED_RUN = [
    "ar", "chain 2 (3 shared)", "chain 4 (3 shared)", "chain 8 (3 shared)", "specexec 16 (3 shared)",
    "bs 8, w 8, d 1 (3 shared)", "bs 8, w 8, d 2 (3 shared)",
]  # fmt: skip


@pytest.mark.thorough
def test_every_split_is_measured_and_each_pair_is_released(tune_on, split):
    speedups = {"bs 8, w 8, d 3 (target 1, draft 2)": 2.0, "bs 8, w 8, d 1 (3 shared)": 1.2}
    found, run = tune_on(split(), speedups, plain=lambda llm: 10.0 * llm.devices)
    assert run == [
        SHARED_RUN,
        ["ar", "bs 8, w 8, d 3 (target 1, draft 2)", "bs 8, w 8, d 4 (target 1, draft 2)"],
        ["ar", "bs 8, w 8, d 1 (target 2, draft 1)", "bs 8, w 8, d 2 (target 2, draft 1)"],
    ]
    # Twice plain decoding on one device is less than plain decoding on three.
    scores = {c.label: c.score for c in found.candidates}
    assert scores["bs 8, w 8, d 3 (target 1, draft 2)"] == pytest.approx(20 / 30)
    assert scores["ar (3 shared)"] == 1 and scores["ar (target 2, draft 1)"] == pytest.approx(20 / 30)
    assert found.best.label == "bs 8, w 8, d 1 (3 shared)" and found.best.score == pytest.approx(1.2)
    written = tomllib.loads(found.preset({"model": "m", "draft_model": "d", "dtype": "float32"}, "x"))
    options = [written.pop(name) for name in ("model", "draft_model", "dtype", "target_devices")]
    assert options == ["m", "d", "float32", 3] and "draft_devices" not in written
    assert make_method(written.pop("method"), written) == SwiftSpec(7, 8, depth=1, overlap=False, reuse=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("speedup", "method"),
    [
        (1.01, {"method": "ar", "target_devices": 2}),
        pytest.param(1.5, {"method": "swiftspec"}, marks=pytest.mark.slow),
    ],
)
def test_speculation_has_to_gain_on_the_fastest_plain_decoding(tune_on, split, speedup, method):
    speedups = {"bs 8, w 8, d 1 (target 2, draft 1)": speedup}
    found, _ = tune_on(split(), speedups, plain=lambda llm: 90.0 if llm.devices == 2 else 60.0)
    written = tomllib.loads(found.preset({"draft_model": "d"}, "x"))
    assert written.items() >= method.items() and ("draft_model" in written) == (speedup > 1.1)


@pytest.mark.thorough
def test_a_split_that_does_not_fit_is_left_out(tune_on, split):
    """By its bytes, before it is loaded; while it is loaded; or while it decodes."""
    told = []
    found, run = tune_on(split({1}, lambda what, *_: told.append(what), refused={3}), {})
    assert len(run) == 1 and "target 1, draft 2: out of memory, left out" in told
    assert "3 shared: needs 3 GiB, left out" in told

    def fail(llm):
        if llm.devices == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory for a program")
        return 100.0

    found, run = tune_on(split(), {}, plain=fail)
    assert len(run) == 3 and {c.placed["target_devices"] for c in found.candidates if c.row} == {1, 2}


def test_the_plan_is_made_from_headers(tmp_path):
    """Bytes and heads of every split, and which of them a device has room for."""
    cfg = dataclasses.replace(LLAMA, num_layers=2)
    write_model(tmp_path / "model", cfg)
    files = PairFiles(tmp_path / "model", tmp_path / "model", "float32", "auto")
    plans = {pair: files.plan(*pair) for pair in list_splits(8)}
    assert [*plans] == [(8, None), (4, 4), (3, 5), (5, 3), (2, 6), (6, 2), (1, 7), (7, 1)]
    sizes = [plans[n, 8 - n].target for n in range(1, 8)]
    assert sizes[0].weight_bytes == sum(math.prod(i.shape) * 4 for i in declare_leaves(cfg, "float32").values())
    for name in ("weight_bytes", "cache_bytes", "query_heads", "row_flops"):
        values = [getattr(size, name) for size in sizes]
        assert values == sorted(values, reverse=True) and values[-1] < values[0], name
    together = plans[8, None]
    assert together.most_bytes == together.target.total_bytes + together.draft.total_bytes
    limit = int(plans[4, 4].most_bytes / USABLE) + 1
    fitting = [pair for pair, plan in plans.items() if plan.fits(limit)]
    assert (4, 4) in fitting and (1, 7) not in fitting and (7, 1) not in fitting
    assert all(plan.fits(None) for plan in plans.values())
    assert len(plan_lines([*plans.values()], limit)) == 1 + 2 * len(plans)
    half = PairFiles(tmp_path / "model", tmp_path / "model", "float32", "auto", kv_dtype="bfloat16").plan(4, 4)
    assert 2 * half.target.cache_bytes == plans[4, 4].target.cache_bytes
    assert memory_limit(2**29) == 2**29 and memory_limit() is None
    with pytest.raises(ConfigError, match="write 24GiB"):
        memory_limit(24)


def test_of_trees_that_are_equally_fast_the_smallest_is_picked():
    """The knee of a streamed target's budgets; elsewhere the fastest is picked."""

    def at(budget, score):
        return Candidate(f"specexec {budget}", SpecExec(budget), score=score)

    plain = Candidate("ar", Autoregressive(), score=1.0)
    run = [at(256, 2.52), at(64, 2.51), at(16, 2.2), plain]
    assert pick(run, smallest=True).method == SpecExec(64)
    assert pick(run) is run[0]
    close = [at(256, 2.52), Candidate(DEFAULT, Auto(), score=2.5), at(16, 2.2), plain]
    assert pick(close, smallest=True).label == DEFAULT
    assert pick([at(16, 1.01), plain], smallest=True) is plain


def test_samples_that_separate_nothing_name_no_winner():
    """Neither one sample, nor an interval around 1, nor a gain without a drafted token."""
    plain = Candidate("ar", Autoregressive(), score=1.0)

    def at(low, length):
        row = {"speedup": {"low": low}, "call_speedup": None, "acceptance_length": length}
        return Candidate("auto", Auto(), score=1.77, row=row)

    for candidate in (at(None, 2.0), at(0.9, 2.0), at(1.2, 1.0)):
        run = (candidate, plain)
        assert pick(run) is plain
        assert "too few to tell auto" in Tuning(run, plain, (), ()).verdict
    assert pick((sure := at(1.2, 2.0), plain)) is sure
