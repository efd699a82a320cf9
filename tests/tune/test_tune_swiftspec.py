"""The placement profile: its arithmetic by hand, its verdict on invented times, and its preset."""

import tomllib
from types import SimpleNamespace

import pytest

from jaxspec.bench.microbench import PassTimes
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.run import BASELINE, Answer, Column, Measurement
from jaxspec.cli.tune_splits import _verdict, splits_preset, splits_report
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.registry import make_method
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.results import DecodeStats
from jaxspec.tune import swiftspec as splits
from jaxspec.tune.swiftspec import DEEPEST, SplitResult, SplitTimes, is_rated, pick, profile_splits
from pallas_kernels.registry import Kernels

ONE, OTHER = SplitTimes(1, 2, {8: 0.010, 16: 0.012}, 0.003), SplitTimes(2, 1, {8: 0.006, 16: 0.007}, 0.004)
PROMPTS = [BenchPrompt(index, "words", ("w1",)) for index in range(3)]


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
    assert SplitTimes(1, 1, {8: verify_s, 16: 1.0}, expand_s).depths(8) == depths


def result(times, method, rate, gain=1.0):
    return SplitResult(times, method, rate, 2.0, gain)


def ranked(*results):
    return sorted(results, key=lambda r: -r.tokens_per_s)


@pytest.mark.parametrize(
    ("plain", "drafted", "expected"),
    [
        # The fastest plain decoding is what counts, on whatever split.
        ((50, 80), (70, 81), (OTHER, "ar")),
        ((50, 80), (70, 82), (OTHER, "swiftspec")),
        ((50, 80), (90, 60), (ONE, "swiftspec")),
        ((80, 50), (79, 60), (ONE, "ar")),
    ],
)
def test_speculation_has_to_gain(plain, drafted, expected):
    both = (ONE, OTHER)
    results = [result(t, Autoregressive(), rate) for t, rate in zip(both, plain, strict=True)]
    results += [result(t, SwiftSpec(8, 8, depth=3), rate) for t, rate in zip(both, drafted, strict=True)]
    best = pick(ranked(*results))
    assert (best.times, best.method.name) == expected


def test_a_preset_makes_the_same_method_on_the_same_split():
    given = {"model": "m", "draft_model": "d", "dtype": "float32", "kernels": "auto"}
    drafted = ranked(result(ONE, SwiftSpec(16, 8, depth=4), 90), result(ONE, Autoregressive(), 50))
    text = splits_preset(drafted, given, "jaxspec-tune preset.toml")
    assert text.splitlines()[:2] == [
        "# jaxspec-tune preset.toml",
        "# the fastest here is bs 16, w 8, d 4 with 1 device for the target and 2 for the draft",
    ]
    written = tomllib.loads(text)
    options = [written.pop(n) for n in ("model", "draft_model", "dtype", "target_devices", "draft_devices")]
    assert options == ["m", "d", "float32", 1, 2]
    assert make_method(written.pop("method"), written) == SwiftSpec(16, 8, depth=4)

    plain = ranked(result(OTHER, SwiftSpec(8, 8, depth=1), 50.5), result(OTHER, Autoregressive(), 50))
    assert tomllib.loads(splits_preset(plain, given, "x")) == {
        "method": "ar", "target_devices": 2, "model": "m", "dtype": "float32",
    }  # fmt: skip
    assert _verdict(plain).startswith("plain decoding on 2 devices")
    assert [row["method"] for row in splits_report(plain)["splits"]] == ["bs 8, w 8, d 1", "ar"]


# Measurements that are made up.


def answer(label, prompt, tokens, first=1, round_s=0.1, per_round=1):
    """`first` tokens at once, the rest at `per_round` per round."""
    rest = tokens - first
    rounds = -(-rest // per_round)
    accepted = [first - 1, *[per_round - 1] * rounds]
    counters = {
        "num_spec_steps": 1 + rounds, "per_step_accepted": accepted, "per_step_drafted": [7] * len(accepted),
        "num_draft_passes": 0, "num_draft_tokens": 7, "num_accepted_draft_tokens": 1,
    }  # fmt: skip
    stats = DecodeStats(
        5, tokens, 0.1, rounds * round_s, rest / (rounds * round_s) if rounds else None, 0.0, None,
        speculative_decoding=None if label == BASELINE else counters,
    )  # fmt: skip
    return Answer(label, prompt, 0, (tuple(range(tokens)),), ("length",), (stats,))


def measurement(columns, answers, max_tokens=40):
    pass_times = {c.label: PassTimes(dict.fromkeys(range(1, 17), 0.01), 0.0, 0.0) for c in columns}
    return Measurement(
        tuple(columns), tuple(PROMPTS), SamplingParams(max_tokens=max_tokens), 1, tuple(answers),
        {c.label: 0.0 for c in columns}, pass_times, 64, (0.01,), 10**6, "float32", Kernels("xla", "cpu"),
    )  # fmt: skip


@pytest.fixture
def profile(monkeypatch):
    """Profile three devices with invented answers: (target devices, depth or 0 for plain, prompt) -> arguments."""
    monkeypatch.setattr(splits, "BATCHES", (8,))
    monkeypatch.setattr(splits, "time_split", lambda llm: llm.times)

    def profile(answers_of, max_tokens=40):
        def load(target, draft):
            return SimpleNamespace(times={1: ONE, 2: OTHER}[target], model_path="m", draft_path="d")

        def measure(llm, columns, prompts, sampling, repeats, progress):
            progress("measuring", 0, 1)
            made = [
                answer(c.label, p, **answers_of(llm.times.target_devices, getattr(c.method, "depth", 0), p.question_id))
                for c in columns
                for p in prompts
            ]
            return measurement(columns, made, max_tokens)

        monkeypatch.setattr(splits, "measure", measure)
        return profile_splits(load, 3, PROMPTS, SamplingParams(max_tokens=max_tokens), 1, "jaxspec-tune")

    return profile


def test_every_split_is_decoded_with(profile):
    def answers_of(target, depth, prompt):
        return {"tokens": 40, "per_round": 1 + depth, "round_s": 0.1 / target}

    results = profile(answers_of)
    found = [(r.times.target_devices, getattr(r.method, "depth", 0)) for r in results]
    # The ratios of single passes are 3.3 and 1.5.
    assert set(found) == {(1, 0), (1, 3), (1, 4), (2, 0), (2, 1), (2, 2)}
    assert found[0] == (2, 2) and results[0].tokens_per_s == pytest.approx(60) and results[0].gain == pytest.approx(3)
    assert pick(results) is results[0]


def test_prompts_that_one_column_cannot_time_are_left_out_of_all(profile):
    """Plain decoding says little to prompt 0, and one setting of the other split says all of prompt 1 at once."""

    def answers_of(target, depth, prompt):
        if prompt == 0:
            return {"tokens": 5 if depth == 0 and target == 1 else 40, "round_s": 1e-3}
        if prompt == 1:
            return {"tokens": 8 if depth else 40, "first": 8 if depth == 2 else 1, "round_s": 1e-3}
        return {"tokens": 40, "round_s": 0.1}

    results = profile(answers_of)
    assert [r.tokens_per_s for r in results] == pytest.approx([10] * 6)
    assert [r.gain for r in results] == pytest.approx([1] * 6)
    assert pick(results).method.name == "ar"


@pytest.mark.parametrize("words", [{"tokens": 4}, {"tokens": 8, "first": 8}])
def test_answers_that_are_too_short_are_refused(profile, words):
    with pytest.raises(ConfigError, match="target 1, draft 2: no prompt has answers that can be timed.*--max-tokens"):
        profile(lambda target, depth, prompt: words if depth == 0 or "first" in words else {"tokens": 40})


@pytest.mark.parametrize(("most", "tokens", "rated"), [(40, 9, True), (40, 8, False), (8, 8, True), (8, 7, False)])
def test_plain_answers_have_to_be_long_enough(most, tokens, rated):
    columns = [Column(BASELINE, Autoregressive()), Column("x", SwiftSpec())]
    answers = [answer(BASELINE, PROMPTS[0], tokens), answer("x", PROMPTS[0], 3), answer("x", PROMPTS[1], 1)]
    assert is_rated(measurement(columns, answers, most), PROMPTS[0]) is rated
