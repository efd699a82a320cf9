"""The loop of the tuner on invented measurements: what is run, what is chosen, and its preset."""

import json
import tomllib
import weakref
from types import SimpleNamespace

import pytest

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.auto import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.registry import make_method
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.tune import run as tuning
from jaxspec.tune import swiftspec as splits
from jaxspec.tune.costs import Costs
from jaxspec.tune.run import CONFIRMED, DEFAULT, TUNED, Candidate, Trial, Tuning, list_candidates, tune
from jaxspec.tune.swiftspec import DEEPEST, SplitTimes, split_devices

COSTS = Costs({1: 0.01, 2: 0.011, 4: 0.013, 8: 0.0125, 16: 0.033}, 0.002, 0.25, 0.1)
PROMPTS = [BenchPrompt(1, "words", ("w1",))]
PLAIN = SimpleNamespace(draft=None)
PAIR = SimpleNamespace(draft=object())


class Model(SimpleNamespace):
    """Stands for a loaded model; can be weakly referenced."""


def model(**known):
    target = SimpleNamespace(plan=SimpleNamespace(tensor=1))
    return Model(draft_path=None, model_path="m", engine=SimpleNamespace(target=target, models=PLAIN), **known)


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
                speedup = {"mean": 1.0, "geometric_mean": speedups.get(label, 0.25), "low": None}
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
    assert labels == [DEFAULT, "lookup", TUNED]
    found = {c.label: c for c in list_candidates(PAIR, None, COSTS, (0.9, 0.8) + (0.0,) * 6)}
    assert {"chain 2", "chain 8", "specexec 8", "specexec 16"} <= set(found)
    assert found["chain 2"].method == Chain(2) and found["chain 2"].predicted > 1
    assert found[DEFAULT].method == Auto() and found[TUNED].method == COSTS.auto()
    assert {label for label, c in found.items() if c.predicted is not None} == {
        label for label in found if label.startswith("chain")
    }
    assert [c.label for c in list_candidates(PLAIN, "lookup", COSTS, ())] == ["lookup"]


@pytest.mark.parametrize("speedups", [{"lookup": 0.8, TUNED: 0.99}, {"lookup": 1.019, DEFAULT: 1.01}])
def test_where_nothing_gains_the_preset_says_plain_decoding(tune_on, speedups):
    """A gain within the noise is none."""
    found, run = tune_on([trial()], {DEFAULT: 0.5, **speedups})
    assert run == [["ar", DEFAULT, "lookup", TUNED]]
    assert (found.best.label, found.best.method, found.best.score) == ("ar", Autoregressive(), 1.0)
    text = found.preset({}, "jaxspec-tune preset.toml")
    assert tomllib.loads(text) == {"method": "ar"}
    assert text.startswith("# jaxspec-tune preset.toml\n# plain decoding is the fastest here")


def test_the_fastest_that_was_measured_wins_whatever_was_predicted(tune_on):
    acceptance = (0.9, 0.8, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0)
    speedups = {DEFAULT: 0.5, "chain 2": 1.4, "chain 3": 1.2, "specexec 8": 1.5}
    found, [run] = tune_on([trial(acceptance, PAIR)], speedups)
    # Candidates without a prediction, and the best predictions.
    assert set(run[1:-CONFIRMED]) == {"lookup", DEFAULT, TUNED, "specexec 8", "specexec 16"}
    assert set(run[-CONFIRMED:]) == {"chain 2", "chain 3", "chain 4"}
    assert [(c.label, c.score) for c in found.candidates[:4]] == [
        ("specexec 8", 1.5), ("chain 2", 1.4), ("chain 3", 1.2), ("ar", 1.0),
    ]  # fmt: skip
    assert found.best.label == "specexec 8"
    assert [c.label for c in found.candidates if c.score is None] == ["chain 1", "chain 6", "chain 8"]


@pytest.mark.parametrize("speedups", [{DEFAULT: 1.5, TUNED: 1.25}, {DEFAULT: 1.5, TUNED: 1.52, "lookup": 1.51}])
def test_where_nothing_gains_on_auto_the_preset_says_so(tune_on, speedups):
    """The measured figures may make it slower than it is without a preset, or no faster than noise does."""
    found, _ = tune_on([trial()], speedups)
    assert (found.best.label, found.best.score) == (DEFAULT, 1.5)
    text = found.preset({"model": "m"}, "jaxspec-tune preset.toml")
    assert tomllib.loads(text) == {"method": "auto", "model": "m"}
    assert "auto without a preset is the fastest here, 1.50 times plain decoding" in text.splitlines()[1]


def test_figures_of_this_machine_that_gain_are_all_saved(tune_on):
    found, _ = tune_on([trial()], {DEFAULT: 1.4, TUNED: 1.5})
    text = found.preset({}, "jaxspec-tune preset.toml")
    assert tomllib.loads(text) == {
        "method": "auto", "length": 8, "pass_cost": list(COSTS.pass_cost()), "draft_cost": 0.2, "round_cost": 0.25,
    }  # fmt: skip
    assert "the fastest here is auto, measured costs, 1.50 times" in text


def test_chains_that_are_predicted_to_lose_are_not_run(tune_on):
    _, [run] = tune_on([trial((0.01,) * 8, PAIR)], {})
    assert not [label for label in run if label.startswith("chain")]


def test_answers_that_are_too_short_are_refused(tune_on):
    with pytest.raises(ConfigError, match="no answer is long enough to be timed.*--max-tokens"):
        tune_on([trial()], {}, plain=lambda llm: None)
    with pytest.raises(ConfigError, match="no placement"):
        tune_on([], {})


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


def test_a_preset_names_any_path_and_its_comment_is_one_line():
    found = chosen(Candidate("ar", Autoregressive(), score=1.0))
    assert tomllib.loads(found.preset({"model": "models/🌊"}, "jaxspec-tune"))["model"] == "models/🌊"
    text = found.preset({}, "jaxspec-tune 'é\nmethod = 1\r\t\x00\x7f\x85\udc80 🌊'")
    assert text.splitlines()[0] == "# jaxspec-tune 'é?method = 1?????? 🌊'"
    assert tomllib.loads(text) == {"method": "ar"} and text.encode()


def test_the_report_is_json(tune_on):
    found, _ = tune_on([trial()], {TUNED: 1.25})
    report = json.loads(json.dumps(found.report(), allow_nan=False, default=str))
    assert report["best"]["method"] == "auto" and report["best"]["score"] == 1.25
    assert report["trials"][0]["costs"]["target_s"] == {str(rows): s for rows, s in COSTS.target_s.items()}


# Splits of devices.


@pytest.mark.parametrize(
    ("verify_s", "expand_s", "depths"),
    [
        (10, 3, (3, 4)),
        (9, 3, (3, 4)),
        (2, 3, (1, 2)),  # not even one fits
        (DEEPEST - 0.5, 1, (DEEPEST - 1, DEEPEST)),
        (DEEPEST, 1, (DEEPEST,)),
        (1000, 1, (DEEPEST,)),
    ],
)
def test_as_many_draft_passes_as_fit_and_one_more(verify_s, expand_s, depths):
    assert SplitTimes({8: verify_s, 16: 1.0}, expand_s).depths(8) == depths


@pytest.fixture
def split(monkeypatch):
    """Trials of three devices with invented times; one of them may not fit."""
    monkeypatch.setattr(splits, "ROWS", (8,))
    times = {1: SplitTimes({8: 0.010}, 0.003), 2: SplitTimes({8: 0.006}, 0.004), 3: SplitTimes({8: 0.005}, 0.004)}
    monkeypatch.setattr(splits, "time_split", lambda llm: times[llm.devices])
    loaded = []

    def split(too_large=(), seen=lambda *_: None):
        def load(target, draft):
            assert not any(ref() for ref in loaded), "the pair before is still held"
            if target in too_large:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            llm = model(devices=target)
            loaded.append(weakref.ref(llm))
            return llm

        return split_devices(load, 3, seen)

    return split


def test_every_split_is_measured_and_each_pair_is_released(tune_on, split):
    speedups = {"bs 8, w 8, d 3 (target 1, draft 2)": 2.0, "bs 8, w 8, d 1 (3 shared)": 1.2}
    found, run = tune_on(split(), speedups, plain=lambda llm: 10.0 * llm.devices)
    assert run == [
        ["ar", "bs 8, w 8, d 1 (3 shared)", "bs 8, w 8, d 2 (3 shared)"],
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
    assert make_method(written.pop("method"), written) == SwiftSpec(7, 8, depth=1, overlap=False)


@pytest.mark.parametrize(
    ("speedup", "method"), [(1.01, {"method": "ar", "target_devices": 2}), (1.5, {"method": "swiftspec"})]
)
def test_speculation_has_to_gain_on_the_fastest_plain_decoding(tune_on, split, speedup, method):
    speedups = {"bs 8, w 8, d 1 (target 2, draft 1)": speedup}
    found, _ = tune_on(split(), speedups, plain=lambda llm: 90.0 if llm.devices == 2 else 60.0)
    written = tomllib.loads(found.preset({"draft_model": "d"}, "x"))
    assert written.items() >= method.items() and ("draft_model" in written) == (speedup > 1.1)


def test_a_split_that_does_not_fit_is_left_out(tune_on, split):
    told = []
    found, run = tune_on(split({1}, lambda what, *_: told.append(what)), {})
    assert len(run) == 2 and "target 1, draft 2: out of memory, left out" in told
