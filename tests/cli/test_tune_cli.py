"""`jaxspec-tune`: its options, and one run of each of its three parts whose presets `jaxspec-decode` takes."""

import dataclasses
import importlib.util
import json
import tomllib

import pytest
from native_models import LLAMA, without_kernel_note, write_model

from jaxspec.methods.swift.search import LayerSearch, SearchSettings
from jaxspec.tune import swift
from jaxspec.tune import swiftspec as splits


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers") / "model"
    cfg = dataclasses.replace(LLAMA, num_layers=5, max_context=256)
    return write_model(folder, cfg)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "7"], "--max-tokens"),
        (["a.toml", "b.toml"], "b.toml"),
        (["-"], "the preset needs a file of its own"),
        (["no/such/folder/preset.toml"], "the preset no/such/folder/preset.toml cannot be written"),
        (["--draft-model", ""], "draft must be a path"),
        (["--method", "ar"], "--method 'ar' cannot be tuned"),
        (["--method", "chain"], "method 'chain' needs a draft model"),
        (["--method", "swift", "--ratios", "0,0.5"], "must lie between 0 and 1"),
        (["--method", "swift", "--ratios", "0.01"], "ratio 0.01 leaves nothing to choose in 2 layers"),
        (["--method", "swift", "--draft-model", "x"], "needs no draft model"),
        (["--method", "swift", "--devices", "2"], "--devices are split by --method swiftspec"),
        (["--ratios", "0.3"], "--ratios are for --method swift"),
        (["--quick"], "--quick examines a draft model: give one with --draft-model"),
        (["--quick", "a.toml"], "it does not go with a preset"),
        (["--method", "swiftspec", "--task", "code"], "--task are for --method swift"),
        (["--method", "swiftspec", "--target-devices", "2"], "leave --target-devices out"),
        (["--plan"], "--plan and --device-memory are for --method swiftspec"),
        (["--method", "swiftspec", "--plan", "--device-memory", "0"], "--device-memory must be at least 1"),
        (["--method", "swiftspec", "--plan", "--device-memory", "24"], "write 24GiB for gibibytes"),
        (["--method", "swiftspec", "--offload", "host"], "--method swiftspec is not tuned with --offload"),
        (
            ["--method", "swiftspec", "--plan", "--json", "-"],
            "--plan prints a plan and ends: it does not go with --json",
        ),
        (["--method", "swiftspec", "--plan", "preset.toml"], "it does not go with a preset"),
        (["--method", "swiftspec", "--devices", "9"], "splits at least 2 devices and at most the 8 there are"),
    ],
)
def test_wrong_words_exit_with_2_and_one_line(command, tiny_model, arguments, message):
    status, out, err = command("tune", "--model", tiny_model, *arguments)
    assert (status, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_a_plot_needs_matplotlib(command, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = command("tune", "--method", "swift", "--plot", str(tmp_path / "plot.png"))
    assert status == 2 and "--plot needs matplotlib" in err


def test_a_checkpoint_that_is_not_there_exits_with_1(command, tiny_model):
    for words in (["--model", "no/such/model"], ["--model", tiny_model, "--draft-model", "no/such/draft"]):
        status, _, err = command("tune", *words)
        assert status == 1 and "no/such" in err and "Traceback" not in err


@pytest.mark.slow
def test_a_run_writes_a_preset_that_decodes(command, tiny_model, prompts, tmp_path):
    preset, report = tmp_path / "preset.toml", tmp_path / "out.json"
    prompts = prompts.rename(tmp_path / "a\nmethod = 'b'\u2028.jsonl")
    words = ["--model", tiny_model, "--draft-model", "none", "--prompts", str(prompts), "--max-prompts", "1"]
    status, out, err = command("tune", str(preset), *words, "-n", "12", "--repeats", "1", "--json", str(report))
    assert status == 0, err
    assert "in one-row passes: target pass by rows 1.00, " in out and "draft pass" not in out and "speed-up" in out
    assert "wrote" in err and "jaxspec-decode --config" in err

    found = json.loads(report.read_text())
    [trial] = found["trials"]
    assert len(trial["costs"]["pass_cost"]) == 16 and "draft_cost" not in trial["costs"]
    assert {row["method"] for row in found["candidates"]} == {"ar", "lookup", "auto"} and trial["acceptance"] == []
    assert all(row["score"] > 0 for row in found["candidates"])
    assert all(row["settings"] == {} for row in found["candidates"])
    assert trial["report"]["overall"]["prompts"] == 1 and trial["report"]["draft"] is None

    assert preset.read_text().startswith("# tune ") or preset.read_text().startswith("# jaxspec-tune ")
    assert "?method = " in preset.read_text().splitlines()[0]
    written = tomllib.loads(preset.read_text())
    assert (written.pop("model"), written.pop("draft_model")) == (tiny_model, "none")
    assert written.pop("method") == found["best"]["method"] and written == found["best"]["settings"]
    status, out, err = command("decode", "--config", str(preset), "--raw", "-n", "4", "--ignore-eos", "--json", "w1 w2")
    assert (status, without_kernel_note(err)) == (0, "")
    answer = json.loads(out)
    assert answer["method"] == found["best"]["method"] and len(answer["token_ids"]) == 4


@pytest.mark.slow
def test_layer_sets_and_a_preset_that_decodes(command, deep_model, prompts, tmp_path):
    preset, report, sets = (tmp_path / name for name in ("preset.toml", "out.json", "sets.json"))
    status, out, err = command(
        "tune", str(preset), "--method", "swift", "--model", deep_model, "--prompts", str(prompts), "-n", "80",
        "--temperature", "1", "--ratios", "0.34,0.5", "--steps", "12", "--repeats", "1", "--task", "words",
        "--swift-layers", str(sets), "--json", str(report),
    )  # fmt: skip
    assert status == 0, err
    assert "predicted" in out and "plain decoding" in out and f"the layer sets are in {sets}" in err
    found = json.loads(report.read_text())
    rows = found["trials"][0]["results"]
    assert [(row["ratio"], row["num_skipped"]) for row in rows] == [(0.34, 2), (0.5, 3)]
    assert all(row["steps"] == 12 and 0 <= row["matchness"] <= 1 for row in rows)
    assert {"0.34", "0.5", "words"} <= set(json.dumps(json.loads(sets.read_text())).replace('"', " ").split(" "))

    written = tomllib.loads(preset.read_text())
    assert written["method"] == found["best"]["method"] and written["model"] == deep_model
    words = ["--method", "swift", "--set", "ratio=0.5", "--set", "task=words", "--swift-layers", str(sets)]
    status, out, err = command(
        "decode", "-m", deep_model, *words, "--raw", "-n", "4", "--ignore-eos", "--json", "w1 w2"
    )
    assert (status, without_kernel_note(err)) == (0, "")
    assert json.loads(out)["stats"]["choice"]["layers"] == rows[1]["layers"]


def search_of(ratio):
    search = LayerSearch(6, SearchSettings(ratio=ratio, steps=20))
    while search.stopped is None:
        search.tell(search.propose(), (search.steps + 1) / 40)
    return {"ratio": ratio, "history": search.history, "matchness": 0.5}


def test_a_plot_of_matchness_against_steps(tmp_path):
    pytest.importorskip("matplotlib")
    swift.plot_layers({"results": [search_of(0.2), search_of(0.4)], "uniform": 0.1}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_profile_of_two_devices(command, monkeypatch, tiny_model, prompts, tmp_path):
    monkeypatch.setattr(splits, "ROWS", (4,))
    monkeypatch.setattr(splits, "WIDTHS", (8,))
    monkeypatch.setattr(splits, "BUDGETS", (4,))
    monkeypatch.setattr(splits, "CHAINS", (2,))
    monkeypatch.setattr(splits, "PASS_REPEATS", 2)
    preset, report = tmp_path / "preset.toml", tmp_path / "out.json"
    words = ["--method", "swiftspec", "--model", tiny_model, "--draft-model", tiny_model, "--devices", "2"]
    monkeypatch.setenv("JAXSPEC_COMPILE_CACHE", str(tmp_path / "cache"))
    words += ["--prompts", str(prompts), "--max-prompts", "1", "-n", "12", "--repeats", "1", "--json", str(report)]
    status, out, err = command("tune", str(preset), *words)
    assert status == 0, err
    assert "tokens/s" in out and "over the fastest plain" in out and "target 1, draft 1: verify 4 rows" in out
    rows = json.loads(report.read_text())["candidates"]
    labels = {row["label"] for row in rows}
    assert labels >= {"ar (2 shared)", "chain 2 (2 shared)", "specexec 4 (2 shared)", "ar (target 1, draft 1)"}
    for where in ("(2 shared)", "(target 1, draft 1)"):
        assert any(label.startswith("bs 4, w 8, d ") and label.endswith(where) for label in labels)
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    written = tomllib.loads(preset.read_text())
    assert written["model"] == tiny_model and written["method"] in ("ar", "swiftspec", "chain", "specexec")
    assert ("draft_model" in written) == (written["method"] in ("swiftspec", "chain", "specexec"))
    assert len([*(tmp_path / "cache" / "profiles").iterdir()]) == 1


@pytest.mark.slow
def test_a_quick_run_says_whether_the_draft_fits(command, deep_model, prompts, tmp_path):
    report = tmp_path / "out.json"
    words = ["--draft-model", "self:attention=2;mlp=2", "-n", "12", "--prompts", str(prompts), "--json", str(report)]
    status, out, err = command("tune", "--quick", "--model", deep_model, *words)
    assert status == 0, err
    assert "tokens accepted on average" in out and "typical of draft models" in out
    fit = json.loads(report.read_text())["trials"][0]["fit"]
    assert len(fit["chats"]) == 8 and not fit["reads_states"]
