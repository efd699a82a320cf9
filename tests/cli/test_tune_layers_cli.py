"""`jaxspec-tune --method swift`: its words, and one real run whose preset and layer file `jaxspec-decode` takes."""

import dataclasses
import importlib.util
import json
import signal
import sys
import tomllib

import pytest
from native_models import LLAMA, without_kernel_note, write_native, write_tokenizer
from tiny_models import quick_compilation

from jaxspec.cli import decode
from jaxspec.cli import tune as command
from jaxspec.cli.tune_layers import LayerOptions, layers_preset, plot_layers
from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.tune.swift import LEAST_GAIN, LayerTuning, RatioResult


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command in this process; returns its status and output."""
    before = signal.getsignal(signal.SIGINT)

    def call(main, *arguments):
        monkeypatch.setattr(sys, "argv", [main.__name__, *arguments])
        with pytest.raises(SystemExit) as left, quick_compilation():
            main.main()
        return left.value.code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers") / "model"
    cfg = dataclasses.replace(LLAMA, num_layers=5, max_context=256)
    write_native(folder, cfg)
    write_tokenizer(folder, cfg.vocab_size)
    return str(folder)


def result(ratio, measured=None):
    search = LayerSearch(6, SearchSettings(ratio=ratio, steps=20))
    search.open_window()
    while search.stopped is None:
        asked = search.next_sets(1)
        search.tell(asked, [asked.layers[0].num_skipped + search.steps])
    return RatioResult(ratio, search, 0.5, 1.1, measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "swfit"], "only swiftspec and swift have tuners"),
        (["--method", "swift", "--ratios", "0.2,much"], "--ratios '0.2,much' must be numbers"),
        (["--method", "swift", "--ratios", "0,0.5"], "must lie between 0 and 1"),
        (["--method", "swift", "--ratios", "0.01"], "ratio 0.01 leaves nothing to choose in 5 layers"),
        (["--method", "swift", "--steps", "0"], "--steps"),
        (["--method", "swift", "--task", ""], "--task must not be empty"),
        (["--method", "swift", "--plot", "no/such/plot.png"], "--plot no/such/plot.png cannot be written"),
        (["--method", "swift", "--swift-layers", "no/such/sets.json"], "no/such/sets.json cannot be written"),
        (["--method", "swift", "--draft-model", "x"], "needs no draft model"),
        (["--method", "swift", "--devices", "2"], "--devices are split by --method swiftspec"),
        (["--ratios", "0.3"], "are for --method swift"),
        (["--method", "swiftspec", "--task", "code"], "are for --method swift"),
    ],
)
def test_wrong_words_exit_with_2_and_one_line(call, deep_model, arguments, message):
    status, out, err = call(command, "--model", deep_model, *arguments)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_a_run_writes_sets_and_a_preset_that_decodes(call, deep_model, tmp_path):
    prompts, sets = tmp_path / "prompts.jsonl", tmp_path / "sets.json"
    lines = [{"question_id": i, "category": "words", "turns": [f"w1 w{i + 6} w9"]} for i in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    preset, report = tmp_path / "preset.toml", tmp_path / "out.json"
    status, out, err = call(
        command, str(preset), "--method", "swift", "--model", deep_model, "--prompts", str(prompts), "-n", "80",
        "--temperature", "1", "--ratios", "0.34,0.5", "--steps", "12", "--repeats", "1", "--task", "words",
        "--swift-layers", str(sets), "--json", str(report),
    )  # fmt: skip
    assert status == 0, err
    assert "predicted" in out and "plain decoding" in out and f"the layer sets are in {sets}" in err.replace("\n", "")
    found = json.loads(report.read_text())
    assert [(row["ratio"], row["num_skipped"]) for row in found["results"]] == [(0.34, 2), (0.5, 3)]
    assert sum(row["measured"] is not None for row in found["results"]) <= 1
    assert all(row["steps"] == 12 and 0 <= row["matchness"] <= 1 for row in found["results"])
    stored = json.loads(sets.read_text())["sets"]
    assert {(entry["task"], entry["ratio"]) for entry in stored} == {("words", "0.34"), ("words", "0.5")}

    written = tomllib.loads(preset.read_text())
    gained = any((row["measured"] or 0) >= LEAST_GAIN for row in found["results"])
    assert written["method"] == ("swift" if gained else "ar") and written["model"] == deep_model
    words = ["--method", "swift", "--set", "ratio=0.5", "--set", "task=words", "--swift-layers", str(sets)]
    status, out, err = call(decode, "-m", deep_model, *words, "--raw", "-n", "4", "--ignore-eos", "--json", "w1 w2")
    assert (status, without_kernel_note(err)) == (0, "")
    assert json.loads(out)["stats"]["choice"]["layers"] == found["results"][1]["layers"]
    status, out, err = call(decode, "--config", str(preset), "--raw", "-n", "4", "--ignore-eos", "w1 w2")
    assert (status, without_kernel_note(err)) == (0, "")


def test_the_preset_names_what_decoding_needs(tmp_path):
    options = LayerOptions(task="code", layers_file=tmp_path / "sets.json")
    best = result(0.4, 1.3)
    given = {"model": "m", "draft_model": None, "dtype": "auto", "kernels": "auto", "target_devices": 1}
    tuning = LayerTuning((result(0.2), best), 0.1, 64, best, {})
    assert tomllib.loads(layers_preset(tuning, given, options, "jaxspec-tune x")) == {
        "method": "swift", "ratio": 0.4, "task": "code", "swift_layers": str(options.layers_file), "model": "m",
    }  # fmt: skip
    plain = dataclasses.replace(tuning, best=None)
    assert tomllib.loads(layers_preset(plain, given, options, "x")) == {"method": "ar", "model": "m"}


def test_a_plot_of_matchness_against_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Exception, match="--plot needs matplotlib"):
        LayerOptions(plot=tmp_path / "plot.png").check()
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    plot_layers(LayerTuning((result(0.2), result(0.4)), 0.1, 64, None, {}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
