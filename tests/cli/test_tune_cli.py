"""`jaxspec-tune`: its words, its arithmetic by hand, and one real run whose preset `jaxspec-decode` takes."""

import dataclasses
import json
import signal
import sys
import tomllib
from types import SimpleNamespace

import pytest
from native_models import without_kernel_note
from tiny_models import quick_compilation

from jaxspec.bench.prompts import BenchPrompt
from jaxspec.cli import decode
from jaxspec.cli import tune as command
from jaxspec.config import SamplingParams
from jaxspec.engine import StepOutput
from jaxspec.methods.auto import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.registry import make_method
from jaxspec.methods.specexec import SpecExec
from jaxspec.tune import run as tuning
from jaxspec.tune.run import (
    BUDGETS,
    DEFAULT,
    LONGEST_CHAIN,
    TUNED,
    Candidate,
    StepCosts,
    Tuning,
    measure_acceptance,
    measure_rounds,
    predict,
    time_rounds,
)

COSTS = StepCosts({1: 0.01, 2: 0.011, 4: 0.013, 8: 0.0125, 16: 0.033}, 0.002, 0.25, 0.1)


@pytest.fixture
def call(monkeypatch, capsys, tiny_model):
    """Run a command in this process; returns its status and output."""
    before = signal.getsignal(signal.SIGINT)

    def call(main, *arguments):
        monkeypatch.setattr(sys, "argv", [main.__name__, *arguments])
        with pytest.raises(SystemExit) as left, quick_compilation():
            main.main()
        return left.value.code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "words", "turns": [f"w1 w2 w{i} w1 w2"]} for i in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temprature", "1"], "--temperature"),
        (["-n", "7"], "--max-tokens"),
        (["-n", "many"], "--max-tokens"),
        (["--repeats", "0"], "--repeats"),
        (["--max-prompts", "0"], "--max-prompts"),
        (["a.toml", "b.toml"], "b.toml"),
        (["-"], "the preset needs a file of its own"),
        (["no/such/folder/preset.toml"], "the preset no/such/folder/preset.toml cannot be written"),
        (["--json", "no/such/folder/out.json"], "--json no/such/folder/out.json cannot be written"),
        (["--prompts", "no/such.jsonl"], "prompt file no/such.jsonl cannot be read"),
        (["--temperature", "-1"], "temperature must lie between"),
        (["--top-p", "0"], "top_p"),
        (["--dtype", "int4"], "dtype 'int4' is not supported"),
        (["--kernels", "mosaic"], "kernels 'mosaic' run on NVIDIA GPUs, not on cpu"),
        (["--target-devices", "64"], "64 devices asked for"),
        (["--draft-model", ""], "draft must be the path of a checkpoint"),
    ],
)
def test_wrong_words_exit_with_2_and_one_line(call, tiny_model, arguments, message):
    status, out, err = call(command, "--model", tiny_model, *arguments)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_a_checkpoint_that_is_not_there_exits_with_1(call, tiny_model):
    for words in (["--model", "no/such/model"], ["--model", tiny_model, "--draft-model", "no/such/draft"]):
        status, _, err = call(command, *words)
        assert status == 1 and "no/such" in err and "Traceback" not in err


def test_a_run_writes_a_preset_that_decodes(call, monkeypatch, tiny_model, prompts, tmp_path):
    monkeypatch.setattr(tuning, "ROWS", (1, 2, 16))
    monkeypatch.setattr(tuning, "PASS_REPEATS", 2)
    preset, report = tmp_path / "preset.toml", tmp_path / "out.json"
    prompts = prompts.rename(tmp_path / "a\nmethod = 'b'\u2028.jsonl")
    words = ["--model", tiny_model, "--draft-model", "none", "--prompts", str(prompts), "--max-prompts", "1"]
    status, out, err = call(command, str(preset), *words, "-n", "8", "--repeats", "1", "--json", str(report))
    assert status == 0, err
    assert "target pass in ms by rows: 1: " in out and "draft pass" not in out and "speed-up" in out
    assert "a round besides its passes, in one-row passes: plain " in out
    assert "wrote" in err and "jaxspec-decode --config" in err

    found = json.loads(report.read_text())
    assert set(found["costs"]["target_s"]) == {"1", "2", "16"} and found["costs"]["draft_s"] == 0
    assert {row["method"] for row in found["candidates"]} == {"ar", "lookup", "auto"} and found["acceptance"] == []
    assert all(row["measured"] > 0 for row in found["candidates"])
    default, auto = (next(row for row in found["candidates"] if row["label"] == label) for label in (DEFAULT, TUNED))
    assert default["settings"] == {}
    measured = found["costs"]["round_cost"]
    assert auto["settings"].get("round_cost") == (None if measured is None else max(0, measured))
    assert len(auto["settings"]["pass_cost"]) == 16 and auto["settings"]["pass_cost"][0] == 1
    assert found["confirmation"]["overall"]["prompts"] == 1 and found["confirmation"]["draft"] is None

    assert preset.read_text().startswith("# jaxspec-tune ") and "?method = " in preset.read_text().splitlines()[0]
    written = tomllib.loads(preset.read_text())
    assert (written.pop("model"), written.pop("draft_model")) == (tiny_model, "none")
    assert written.pop("method") == found["best"]["method"] and written == found["best"]["settings"]
    status, out, err = call(decode, "--config", str(preset), "--raw", "-n", "4", "--ignore-eos", "--json", "w1 w2")
    assert (status, without_kernel_note(err)) == (0, "")
    answer = json.loads(out)
    assert answer["method"] == found["best"]["method"] and len(answer["token_ids"]) == 4


def test_figures_of_auto_are_words_that_decode_takes(call, tiny_model, tmp_path):
    auto = Candidate(TUNED, COSTS.auto(), None, 1.5)
    preset = tmp_path / "preset.toml"
    given = {"model": tiny_model, "draft_model": "none"}
    preset.write_text(command._preset(Tuning(COSTS, (), (auto,), auto, {}), given, "jaxspec-tune x"))
    status, out, err = call(decode, "--config", str(preset), "--raw", "-n", "4", "--json", "w1 w2")
    assert (status, without_kernel_note(err)) == (0, "")
    choice = json.loads(out)["stats"]["choice"]
    assert choice["figures"] == "given" and choice["round_cost"] == COSTS.round_cost
    assert choice["pass_cost"] == pytest.approx(list(COSTS.pass_cost()), abs=2e-3)


# By hand


def test_costs_between_the_rows_that_were_timed():
    """Straight lines between them, and never less for more rows: 8 rows were timed below 4 by chance."""
    expected = [1, 1.1, 1.2, 1.3, 1.3, 1.3, 1.3, 1.3, *(1.3 + 0.25 * n for n in range(1, 9))]
    assert COSTS.pass_cost() == pytest.approx(expected)
    assert COSTS.draft_cost == 0.2
    assert StepCosts({1: 0.01, 2: 0.02}, 0.0).draft_cost == 0
    assert len(StepCosts(dict.fromkeys(tuning.ROWS, 0.5), 0.0).pass_cost()) == 16
    assert COSTS.auto() == Auto(pass_cost=COSTS.pass_cost(), draft_cost=0.2, round_cost=0.25)
    unseen = dataclasses.replace(COSTS, round_cost=None)
    assert unseen.auto() == Auto(pass_cost=COSTS.pass_cost(), draft_cost=0.2)


def test_predictions_of_chains():
    acceptance = (0.8, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    candidates = predict(COSTS, acceptance)
    by_label = {candidate.label: candidate for candidate in candidates}
    assert list(by_label) == [
        "lookup", DEFAULT, TUNED, *(f"chain {n}" for n in range(1, LONGEST_CHAIN + 1)),
        *(f"specexec {n}" for n in BUDGETS),
    ]  # fmt: skip
    assert by_label[DEFAULT].method == Auto() and by_label[TUNED].method == COSTS.auto()
    assert by_label["chain 3"].method == Chain(3)
    assert by_label[f"specexec {BUDGETS[0]}"].method == SpecExec(BUDGETS[0])
    # Expected length, 1 + 0.8 + 0.8 * 0.5 + ..., over a target pass, a draft pass for each token and the rest of a
    # round; plain decoding has a rest too.
    for tokens, length, cost in ((1, 1.8, 1.1 + 0.2), (2, 2.2, 1.2 + 0.4), (3, 2.6, 1.3 + 0.6), (8, 2.6, 1.55 + 1.6)):
        assert by_label[f"chain {tokens}"].predicted == pytest.approx(length * 1.1 / (cost + 0.25), abs=1e-3)
    assert {label for label, c in by_label.items() if c.predicted is None} == {
        "lookup", DEFAULT, TUNED, *(f"specexec {n}" for n in BUDGETS),
    }  # fmt: skip
    assert [c.label for c in predict(COSTS, ())] == ["lookup", DEFAULT, TUNED]


def emitted(tokens, drafted=0, passes=0):
    return StepOutput(tuple(tokens), (0.0,) * len(tokens), len(tokens) - 1 if drafted else 0, drafted, drafted, passes)


@pytest.mark.parametrize("enough", [True, False])
def test_what_rounds_cost_besides_their_passes(monkeypatch, enough):
    """On a machine that became half as fast since the passes were timed."""
    prompts = [BenchPrompt(n, "words", ("w1",)) for n in range(20)]
    methods, asked = [], []

    def with_method(method):
        methods.append(method)
        return SimpleNamespace(method=method, encode=lambda prompt: [1], tokenizer=SimpleNamespace(has_chat_template=0))

    def rounds(model, ids, sampling):
        asked.append(sampling.max_tokens)
        if model.method == Autoregressive():
            return [(emitted([1]), 0.02 * (1 + rest)) for rest in (0.1, 0.125, 3.0)]
        # Rounds without a draft are as long as several tokens, or take no time at all.
        plain = [(emitted([1]), seconds) for seconds in (0.1, 0.0, 0.0, 0.0)]
        drafted = [(emitted([1, 2], 3, 2), 0.02 * (1.3 + 2 * 0.2 + rest)) for rest in (0.5, 0.25)]
        copied = [(emitted([1, 2, 3], 15), 0.02 * (3.3 + rest)) for rest in (0.0, -1.0, 1.5)]
        return plain + drafted + (copied if enough else [])

    monkeypatch.setattr(tuning, "time_target_pass", lambda *_: lambda: 0.02)
    monkeypatch.setattr(tuning, "time_rounds", rounds)
    monkeypatch.setattr(tuning, "ROUND_PROMPTS", 2)
    llm = SimpleNamespace(with_method=with_method, params={}, engine=SimpleNamespace(models=SimpleNamespace(target=0)))
    before = StepCosts(COSTS.target_s, COSTS.draft_s)
    found = measure_rounds(llm, before, prompts, SamplingParams(max_tokens=20))
    assert methods == [Autoregressive(), dataclasses.replace(COSTS.auto(), round_cost=0.0)] and asked == [20] * 4
    # Two prompts: ten rounds with drafts, or four, which are too few.
    assert found == dataclasses.replace(before, plain_cost=0.125, round_cost=0.25 if enough else None)
    # Where passes are faster in a round than alone, predictions take that into account; `auto` has no negative costs.
    monkeypatch.setattr(tuning, "time_rounds", lambda *_: [(emitted([1, 2], 1), 0.01)] * 8)
    found = measure_rounds(llm, before, prompts, SamplingParams(max_tokens=200))
    assert (found.round_cost, found.plain_cost) == (-0.6, -0.6) and found.auto().round_cost == 0


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_rounds_are_timed_from_one_to_the_next(monkeypatch, ignore_eos):
    """Neither the first nor the last, which may be cut; nothing behind the end of a text."""
    answer = [emitted([1]), emitted([3, 4], 4, 2), emitted([5]), emitted([9, 6], 4, 2), emitted([7]), emitted([8])]
    times, settled = iter([10.0, 10.5, 11.5, 13.5, 17.5, 25.5]), []
    engine = SimpleNamespace(
        check_request=lambda ids, sampling: None, token_limit=lambda ids, sampling: sampling.max_tokens,
        prepare=settled.append, rounds=lambda *_: (round_ for round_ in answer), settle=lambda: settled.append("all"),
    )  # fmt: skip
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: next(times))
    llm = SimpleNamespace(engine=engine, model_params=None, eos_ids=(9,))
    found = list(time_rounds(llm, [1, 2], SamplingParams(max_tokens=8, ignore_eos=ignore_eos)))
    expected = list(zip(answer[1:5], (0.5, 1.0, 2.0, 4.0), strict=True))
    assert found == (expected if ignore_eos else expected[:2])
    assert settled == [10, "all"]


class FakeLLM(SimpleNamespace):
    """Answers with given counters."""

    def encode(self, prompt):
        return [1]

    def stream(self, prompt, sampling):
        stats = SimpleNamespace(speculative_decoding=self.counters)
        yield SimpleNamespace(completion=None)
        yield SimpleNamespace(completion=SimpleNamespace(stats=stats))


def test_acceptance_by_depth_counts_what_the_target_looked_at():
    counters = {"per_step_drafted": [3, 3, 0, 2], "per_step_accepted": [3, 1, 0, 0]}
    llm = FakeLLM(counters=counters, tokenizer=SimpleNamespace(has_chat_template=True))
    # Depth 1 was tried three times and accepted twice, depth 2 twice and once, depth 3 once.
    expected = [2 / 3, 1 / 2, 1.0, *[0.0] * (LONGEST_CHAIN - 3)]
    prompts = [BenchPrompt(1, "words", ("w1",)), BenchPrompt(2, "words", ("w2", "w3"))]
    assert measure_acceptance(llm, prompts, SamplingParams()) == pytest.approx(expected)


@pytest.fixture
def tune_on(monkeypatch):
    """Tune with invented times and speed-ups; also gives the columns that were run."""

    def tune_on(speedups, acceptance=(), costs=COSTS):
        speedups = {DEFAULT: 0.5, **speedups}
        run = []

        def measure(llm, columns, prompts, sampling, repeats, progress):
            run.extend(column.label for column in columns)
            progress("measuring", 1, 2)

        def report(measured, command, model, draft, devices):
            rows = {label: {"speedup": {"geometric_mean": speedups.get(label, 0.25)}} for label in run}
            return {"overall": {"columns": rows}}

        monkeypatch.setattr(tuning, "measure_steps", lambda llm: costs)
        monkeypatch.setattr(tuning, "measure_rounds", lambda llm, costs, prompts, sampling: costs)
        monkeypatch.setattr(tuning, "measure_acceptance", lambda *_: acceptance)
        monkeypatch.setattr(tuning, "measure", measure)
        monkeypatch.setattr(tuning, "make_report", report)
        target = SimpleNamespace(plan=SimpleNamespace(tensor=1))
        llm = SimpleNamespace(
            draft_params={} if acceptance else None, draft_path="d" if acceptance else None, model_path="m",
            engine=SimpleNamespace(target=target), with_method=lambda method: None,
        )  # fmt: skip
        return tuning.tune(llm, [], SamplingParams(), 1, "jaxspec-tune"), run

    return tune_on


@pytest.mark.parametrize("speedups", [{"lookup": 0.8, TUNED: 0.99}, {"lookup": 1.019, DEFAULT: 1.01}])
def test_where_nothing_gains_the_preset_says_plain_decoding(tune_on, speedups):
    """A gain within the noise is none."""
    found, run = tune_on(speedups)
    assert run == ["ar", "lookup", DEFAULT, TUNED]
    assert found.best == Candidate("ar", Autoregressive(), 1.0, 1.0)
    text = command._preset(found, {}, "jaxspec-tune preset.toml")
    assert tomllib.loads(text) == {"method": "ar"}
    assert text.startswith("# jaxspec-tune preset.toml\n# plain decoding is the fastest here")


def test_the_fastest_that_was_measured_wins_whatever_was_predicted(tune_on):
    acceptance = (0.9, 0.8, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0)
    found, run = tune_on({"chain 2": 1.4, "chain 3": 1.2, "specexec 8": 1.5}, acceptance)
    # What cannot be predicted, and the three best predictions.
    unpredicted = {"lookup", DEFAULT, TUNED, *(f"specexec {n}" for n in BUDGETS)}
    assert set(run[1:]) == unpredicted | {"chain 2", "chain 3", "chain 4"}
    assert [(c.label, c.measured) for c in found.candidates[:4]] == [
        ("specexec 8", 1.5), ("chain 2", 1.4), ("chain 3", 1.2), ("ar", 1.0),
    ]  # fmt: skip
    assert found.best.label == "specexec 8" and found.acceptance == acceptance
    unrun = [c.label for c in found.candidates if c.measured is None]
    assert unrun == [f"chain {n}" for n in (1, 5, 6, 7, 8)]


@pytest.mark.parametrize("speedups", [{DEFAULT: 1.5, TUNED: 1.25}, {DEFAULT: 1.5, TUNED: 1.52, "lookup": 1.51}])
def test_where_nothing_gains_on_auto_as_it_is_the_preset_says_so(tune_on, speedups):
    """The measured figures may make it slower than it is without a preset, or no faster than noise does."""
    found, _ = tune_on(speedups)
    assert found.best == Candidate(DEFAULT, Auto(), None, 1.5)
    text = command._preset(found, {"model": "m"}, "jaxspec-tune preset.toml")
    assert tomllib.loads(text) == {"method": "auto", "model": "m"}
    assert "auto as it is without a preset is the fastest here, 1.50 times plain decoding" in text.splitlines()[1]


def test_figures_of_this_machine_that_gain_are_all_saved(tune_on):
    found, _ = tune_on({DEFAULT: 1.4, TUNED: 1.5})
    text = command._preset(found, {}, "jaxspec-tune preset.toml")
    assert tomllib.loads(text) == {
        "method": "auto", "length": 8, "pass_cost": list(COSTS.pass_cost()), "draft_cost": 0.2, "round_cost": 0.25,
    }  # fmt: skip
    assert "the fastest here is auto, measured costs, 1.50 times" in text


def test_chains_that_are_predicted_to_lose_are_not_run(tune_on):
    _, run = tune_on({}, (0.01,) * LONGEST_CHAIN)
    assert not [label for label in run if label.startswith("chain")]


@pytest.mark.parametrize(
    "method", [Autoregressive(), Chain(3), PromptLookup(), SpecExec(15), Auto(pass_cost=(1, 1.25), draft_cost=0.0625)]
)
def test_a_preset_makes_the_same_method_again(method):
    candidate = Candidate("it", method, None, 1.25)
    path = 'my "model"\\é\x7f\n'
    given = {"model": path, "draft_model": "none"}
    text = command._preset(Tuning(COSTS, (), (candidate,), candidate, {}), given, "jaxspec-tune")
    written = tomllib.loads(text)
    assert (written.pop("model"), written.pop("draft_model")) == (path, "none")
    assert make_method(written.pop("method"), written) == method


def test_a_preset_names_any_path():
    candidate = Candidate("ar", Autoregressive(), 1.0, 1.0)
    text = command._preset(Tuning(COSTS, (), (candidate,), candidate, {}), {"model": "models/🌊"}, "jaxspec-tune")
    assert tomllib.loads(text)["model"] == "models/🌊"


def test_a_command_is_one_line_of_comment():
    candidate = Candidate("ar", Autoregressive(), 1.0, 1.0)
    words = command._in_a_comment("jaxspec-tune 'é\nmethod = 1\r\t\x00\x7f\x85\udc80 🌊'")
    assert words == "jaxspec-tune 'é?method = 1?????? 🌊'"
    text = command._preset(Tuning(COSTS, (), (candidate,), candidate, {}), {}, words)
    assert tomllib.loads(text) == {"method": "ar"} and text.encode()


def test_the_report_is_json(tune_on):
    found, _ = tune_on({TUNED: 1.25})
    report = json.loads(json.dumps(command._report(found), allow_nan=False, default=str))
    assert report["best"]["method"] == "auto" and report["best"]["measured"] == 1.25
    assert report["costs"] == json.loads(json.dumps(dataclasses.asdict(COSTS)))
