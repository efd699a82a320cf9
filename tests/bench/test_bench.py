"""The benchmark on invented methods, whose numbers can be worked out by hand, and its parts on real weights."""

import dataclasses
import io
import json

import bench_fakes
import numpy as np
import pytest
from bench_fakes import METHODS, FakeLLM, Sampled, Tree
from rich.console import Console
from tiny_models import ALL_FAMILIES, tiny_params

from jaxspec import SamplingParams
from jaxspec.bench import run as bench
from jaxspec.bench.columns import default_methods, loading_method, make_columns
from jaxspec.bench.microbench import roofline_pass, weight_bytes
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.report import bootstrap_interval, make_report
from jaxspec.bench.run import measure
from jaxspec.bench.tables import GLOSSARY, print_report
from jaxspec.errors import ConfigError
from jaxspec.llm import internals
from pallas_kernels.registry import Kernels
from pallas_kernels.selection import choose

PROMPTS = [
    BenchPrompt("a", "chat", ("a" * 50,)),
    BenchPrompt("b", "chat", ("b" * 60, "and then?")),
    BenchPrompt("c", "code", ("c" * 5,)),
]
GREEDY = SamplingParams(max_tokens=40, seed=0)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    bench_fakes.install(monkeypatch)


def columns(*names, **options):
    return make_columns(names, **options)


def run(names=("lookup", "specexec"), prompts=PROMPTS, sampling=GREEDY, repeats=2, llm=None, **options):
    return measure(llm or FakeLLM(), columns(*names, **options), prompts, sampling, repeats)


def shown(report, glossary=False):
    console = Console(width=160, file=io.StringIO(), record=True)
    print_report(report, console, glossary)
    return console.export_text()


def report_of(measured):
    return make_report(measured, "jaxspec-bench --methods x", "fake", None)


def test_columns():
    assert [c.label for c in columns("specexec", "ar", "specexec")] == ["ar", "specexec"]
    swept = columns("lookup", "specexec", settings={"specexec": {"width": 9}}, budgets=[2, 16, 2])
    assert [c.label for c in swept] == ["ar", "lookup", "specexec[num_draft_tokens=2]", "specexec[num_draft_tokens=16]"]
    assert swept[3].method == Tree(num_draft_tokens=16, width=9)
    assert columns("specexec", budgets=[16])[1].method.width == 64


def test_drafts_are_used_or_refused():
    assert default_methods(False) == ["ar", "lookup"]
    assert default_methods(True) == list(METHODS)
    assert loading_method(columns("lookup"), False).name == "ar"
    assert loading_method(columns("lookup", "specexec"), True).name == "specexec"
    with pytest.raises(ConfigError, match="specexec needs a draft model"):
        loading_method(columns("specexec"), False)
    with pytest.raises(ConfigError, match="none of the methods ar, lookup uses a draft"):
        loading_method(columns("lookup"), True)


def test_everything_is_warm_and_every_column_begins_in_turn():
    calls, seen = [], []
    llm = FakeLLM(calls=calls)
    three = columns("lookup", "specexec")
    measured = measure(llm, three, PROMPTS, GREEDY, 2, lambda *progress: seen.append(progress))
    # The longest conversation: 60 + 9 characters and two answers of 40 tokens.
    assert internals(llm).engine.prepared == [60 + 9 + 2 * 40]
    assert measured.compile_s == {"ar": 0.5, "lookup": 0.5, "specexec": 0.5}
    assert [call[2].max_tokens for call in calls[:6]] == [16] * 6  # two turns per column
    orders = [[a.label for a in measured.answers[i : i + 3]] for i in range(0, 18, 3)]
    assert all(sorted(order) == ["ar", "lookup", "specexec"] for order in orders)
    assert [order[0] for order in orders] == ["ar", "lookup", "specexec", "lookup", "specexec", "ar"]
    assert [a.prompt.question_id for a in measured.answers[::3]] == ["a", "b", "c"] * 2
    assert len(measured.roofline_s) == 6
    assert seen[0] == ("warming up ar", 0, 18) and seen[-1] == ("single passes of specexec", 18, 18)


def test_turns_follow_the_models_own_answers():
    calls = []
    run(["ar"], [PROMPTS[1]], repeats=1, llm=FakeLLM(calls=calls))
    assert [call[1] for call in calls[-2:]] == [("b" * 60,), ("b" * 60, "answer 1", "and then?")]


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs():
    calls = []
    long = BenchPrompt("long", "chat", ("x" * 970,))
    with pytest.raises(
        ConfigError, match="prompt 'long' comes to 1010 tokens with answers of 40, the context holds 1000"
    ):
        run(["ar"], [*PROMPTS, long], llm=FakeLLM(calls=calls))
    assert calls == []


def test_numbers():
    overall = report_of(run(["specexec"], settings={"specexec": {"num_draft_tokens": 3}}))["overall"]
    # Prompt c has five tokens: too few to rate. The others have answers of 40: 10 rounds of four.
    assert (overall["prompts"], overall["rated_prompts"]) == (3, 2)
    plain, tree = overall["columns"]["ar"], overall["columns"]["specexec"]
    assert plain["tokens_per_s"]["mean"] == pytest.approx(100)
    assert plain["tokens_per_s"]["repeat_std"] == pytest.approx(0)
    assert plain["speedup"] == dict.fromkeys(("mean", "geometric_mean", "low", "high"), pytest.approx(1))
    assert plain["acceptance_length"] == 1 and plain["draft_acceptance_rate"] is None
    assert plain["gb_per_s"] == pytest.approx(100) and plain["of_roofline"] == pytest.approx(0.8)
    # 36 tokens after the first round, in nine rounds of 15 ms.
    assert tree["tokens_per_s"]["mean"] == pytest.approx(4 / 0.015)
    assert tree["speedup"]["mean"] == pytest.approx(4 / 0.015 / 100)
    assert tree["ttft_s"]["mean"] == pytest.approx(0.1)
    # a and c once, b twice: 125 tokens in 32 rounds (c: four and one).
    assert tree["acceptance_length"] == pytest.approx((3 * 40 + 5) / 32)
    assert tree["draft_acceptance_rate"] == pytest.approx((3 * 30 + 3) / (32 * 6))
    # A round of 15 ms holds one target pass of 9 ms and three draft passes of 1 ms.
    assert tree["split"] == pytest.approx({"pass_s": 0.015, "target_s": 0.009, "draft_s": 0.003, "rest_s": 0.003})
    a, b, c = (0.1 + 0.39) / (0.1 + 0.135), (0.2 + 0.78) / (0.2 + 0.27), (0.1 + 0.04) / (0.1 + 0.015)
    assert tree["call_speedup"]["mean"] == pytest.approx((a + b + c) / 3)


def test_the_ratio_is_taken_within_a_repeat():
    measured = run(["lookup"], [PROMPTS[0]], repeats=3)
    answers = []
    for answer in measured.answers:
        # A machine that gets slower and slower; the ratio must not see it, nor one disturbed answer.
        slow = 10.0**answer.repeat * (7 if (answer.label, answer.repeat) == ("lookup", 1) else 1)
        stats = tuple(dataclasses.replace(s, decode_s=s.decode_s * slow, ttft_s=s.ttft_s * slow) for s in answer.stats)
        answers.append(dataclasses.replace(answer, stats=stats))
    row = report_of(dataclasses.replace(measured, answers=tuple(answers)))["overall"]["columns"]["lookup"]
    assert row["speedup"]["mean"] == pytest.approx(10 / 15)
    assert row["speedup"]["low"] is None  # one prompt has no spread


def test_an_interrupted_run_keeps_complete_groups():
    answered = []
    llm = FakeLLM()

    def stop_after(count):
        return measure(
            llm, columns("lookup"), PROMPTS, GREEDY, 2, lambda what, done, total: answered.append(done),
            lambda: bool(answered) and answered[-1] >= count,
        )  # fmt: skip

    measured = stop_after(4)
    assert [a.prompt.question_id for a in measured.answers] == ["a", "a", "b", "b"] and measured.interrupted
    assert [p.question_id for p in measured.prompts] == ["a", "b"] and measured.pass_times == {}
    report = report_of(measured)
    assert report["interrupted"] and report["overall"]["columns"]["lookup"]["speedup"]["mean"] == pytest.approx(10 / 15)
    assert "interrupted: the numbers are of the 4 answers" in shown(report)
    # A second repeat of some prompts only.
    answered.clear()
    assert report_of(stop_after(8))["overall"]["columns"]["ar"]["tokens_per_s"]["repeat_std"] is None
    answered.clear()
    with pytest.raises(KeyboardInterrupt):
        stop_after(0)


def test_the_first_dispatch_is_in_no_rate():
    """Plain decoding in blocks of four tokens: forty tokens in ten dispatches, nine of which are timed."""
    measured = run(["lookup"], [PROMPTS[0]], repeats=1)
    blocks = []
    for answer in measured.answers:
        stats = tuple(dataclasses.replace(s, decode_s=0.36, tokens_per_s=100.0) for s in answer.stats)
        blocks.append(dataclasses.replace(answer, stats=stats))
    assert [(a.timed_tokens, a.timed_passes) for a in blocks] == [(36, 36)] * 2
    assert [a.tokens_per_s for a in blocks] == pytest.approx([100.0] * 2)


def test_exactness():
    report = report_of(run(["lookup", "specexec"], llm=FakeLLM(wrong=["lookup"])))
    exact = {label: row["exact"] for label, row in report["overall"]["columns"].items()}
    assert exact["ar"] == exact["specexec"] == {"promise": "tokens", "equal": 3, "prompts": 3}
    assert exact["lookup"]["equal"] == 0
    assert {"label": "lookup", "question_id": "b", "repeat": 1, "turn": 0, "token": 3} in report["differences"]
    assert report["categories"]["code"]["columns"]["lookup"]["exact"]["prompts"] == 1


def test_what_promises_the_distribution_is_not_held_to_tokens():
    warm = dataclasses.replace(GREEDY, temperature=1.0)
    for sampling, promise in [(warm, "distribution"), (GREEDY, "tokens")]:
        report = report_of(run(["specinfer"], sampling=sampling, llm=FakeLLM(wrong=["specinfer"])))
        assert report["overall"]["columns"]["specinfer"]["exact"]["promise"] == promise
        assert bool(report["differences"]) == (promise == "tokens")
    assert not bench.is_token_exact(Sampled(), warm) and bench.is_token_exact(Tree(), warm)


def test_answers_of_one_round_have_no_rate():
    report = report_of(run(["lookup", "specexec"], settings={"specexec": {"num_draft_tokens": 39}}))
    assert report["overall"]["rated_prompts"] == 2
    assert report["overall"]["columns"]["lookup"]["rated_prompts"] == 2
    row = report["overall"]["columns"]["specexec"]
    assert row["rated_prompts"] == 0
    assert (row["tokens_per_s"], row["speedup"], row["split"], row["gb_per_s"]) == (None, None, None, None)
    assert row["acceptance_length"] == 125 / 4 and row["call_speedup"]["mean"] > 1
    print_report(report, Console(quiet=True))


def test_report_is_json_and_tables_say_the_same():
    report = report_of(run(["lookup", "specexec"], budgets=[2, 4], llm=FakeLLM(wrong=["lookup"])))
    again = json.loads(json.dumps(report, allow_nan=False))
    assert (again["weights"], again["kernels"]) == ("float32", "xla")
    assert again["columns"][2]["settings"]["num_draft_tokens"] == 2
    assert len(again["samples"]) == 2 * 3 * 4
    assert again["samples"][0]["stats"][0]["completion_tokens"] == len(again["samples"][0]["token_ids"][0]) == 40
    text = shown(again)
    assert text.index("3 prompts, 2 rated") < text.index("by category") < text.index("parts of a target pass")
    for words in (
        "chat (2 prompts)", "code (1 prompt, 0 rated)", "greedy, 3 prompts, 2 rated", "specexec[num_draft_tokens=4]",
        "100.0 ± 0.0", "lookup is slower than plain decoding here: 0.67", 
        "lookup differs from plain decoding at token 3",
        "roofline 125.0 GB/s", "jax ", "jaxspec-bench --methods x", "end-of-sequence tokens respected", "greedy",
    ):  # fmt: skip
        assert words in text
    assert "rated prompts: " not in text
    explained = shown(again, glossary=True)
    assert all(f"{name}: " in explained for name in GLOSSARY)


def test_bootstrap_interval():
    assert bootstrap_interval([2.0]) is None and bootstrap_interval([2.0, 2.0]) == (2.0, 2.0)
    values = np.random.default_rng(1).normal(1.5, 0.4, 100).tolist()
    low, high = bootstrap_interval(values) or (0, 0)
    # The interval of the normal distribution: 1.96 standard errors to either side.
    assert (high - low) / 2 == pytest.approx(1.96 * np.std(values) / 10, rel=0.1)
    assert bootstrap_interval(values) == (low, high)


@pytest.mark.parametrize(
    ("family", "degree", "kernels"),
    [("qwen2", 1, choose("auto", "cpu", 1)), ("llama-tied", 2, Kernels("xla", "cpu"))],
    ids=["native", "xla"],
)
def test_roofline_reads_sharded_weights(family, degree, kernels):
    params = tiny_params(family, degree)
    run_pass = roofline_pass(params, kernels, 1)
    assert run_pass() > 0
    total = sum(leaf.nbytes for leaf in [params["embed"], params["final_norm"]])
    layers = sum(leaf.nbytes for layer in params["layers"] for leaf in layer.values())
    # A tied embedding is the output matrix; one beside an output matrix is not read.
    assert weight_bytes(params) == total + layers


@pytest.mark.parametrize(
    ("family", "degree", "kernels"),
    [(family, 1, choose("auto", "cpu", 1)) for family in ("qwen2-moe", "gemma4-large")]
    + [("gpt-oss", 2, Kernels("xla", "cpu"))],
    ids=["native", "beside", "xla"],
)
def test_the_roofline_of_a_mixture_counts_the_experts_of_one_row(family, degree, kernels):
    params, experts = tiny_params(family, degree), ALL_FAMILIES[family].experts
    run_pass = roofline_pass(params, kernels, 1, experts)
    assert run_pass() > 0
    routed = [
        leaf.nbytes for layer in params["layers"] if "router" in layer
        for name, leaf in layer.items() if name.startswith(("gate_up", "down"))
    ]  # fmt: skip
    left = sum(routed) * (experts.count - experts.per_token) / experts.count
    assert weight_bytes(params, experts) == weight_bytes(params) - left
