"""The options of streamed layers: every command that decodes takes them."""

import json
import tomllib

import pytest

from jaxspec.tune import run as tuning


@pytest.mark.parametrize("name", ["decode", "serve", "tune"])
def test_plans_are_printed(command, tiny_model, name):
    done = command(name, "-m", tiny_model, "--offload", "host", "--resident-layers", "1", "--plan")
    assert (done.status, done.err) == (0, "")
    assert "1 of 2 layers are streamed from host memory" in done.out and "caches, trees and texts" in done.out


@pytest.mark.parametrize("name", ["decode", "serve", "bench", "check", "tune"])
def test_settings_that_do_not_fit_are_refused(command, tiny_model, name):
    words = {"decode": ["w1"], "check": ["w1"]}.get(name, [])
    for given, message in (
        (["--resident-layers", "1"], "resident_layers is for streamed layers"),
        (["--offload", "tape"], "offload 'tape' is not supported"),
        (["--offload", "host", "--resident-layers", "3"], "resident_layers is 3, the model has 2 layers"),
        (["--offload", "host", "--device-memory", "1K"], "is less than what has to stay on a device"),
    ):
        done = command(name, *words, "-m", tiny_model, *given)
        assert done.status == 2 and message in done.err and "Traceback" not in done.err, done.err


@pytest.mark.parametrize("text", ["2X", "1 GiB GiB"])
def test_sizes_have_one_grammar_and_one_error(command, tiny_model, text):
    for words in (
        ("serve", "--session-memory", text),
        ("serve", "--max-body", text),
        ("decode", "w1", "--offload", "host", "--device-memory", text),
        ("tune", "--method", "swiftspec", "--plan", "--device-memory", text),
    ):
        done = command(*words, "-m", tiny_model)
        assert done.status == 2
        assert f"must be a number of bytes such as 6GiB, 512M or 1.5GB, got '{text}'" in done.err, done.err


@pytest.mark.thorough
def test_check_compares_a_streamed_target(command, tiny_model):
    words = ("w1 w2 w3", "-m", tiny_model, "--method", "lookup", "-n", "8", "--raw", "--json", "-")
    done = command("check", *words, "--offload", "disk")
    found, resident = json.loads(done.out), json.loads(command("check", *words).out)
    assert done.status == 0 and found["lossless"] and found["rows"] == resident["rows"]


def test_bench_measures_a_streamed_target(command, tiny_model, prompts):
    words = ("--methods", "lookup", "--prompts", prompts, "-n", "12", "--repeats", "1", "--ignore-eos", "--json", "-")
    done = command("bench", "-m", tiny_model, *words, "--offload", "host", "--resident-layers", "1")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["weight_bytes"] > 0 and found["roofline"]["gb_per_s"] > 0
    assert [column["label"] for column in found["columns"]] == ["ar", "lookup"]
    assert all(column["pass_s"]["target_s"] for column in found["columns"])
    assert all(sample["stats"][0]["offload"]["passes"] for sample in found["samples"])


@pytest.mark.slow
def test_tune_writes_a_preset_for_a_streamed_target(command, tiny_model, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "BUDGETS", (4, 16))
    preset, report = tmp_path / "preset.toml", tmp_path / "out.json"
    words = ("-m", tiny_model, "--draft-model", tiny_model, "--offload", "host", "--resident-layers", "1")
    measured = ("--prompts", prompts, "--max-prompts", "4", "-n", "12", "--repeats", "1", "--json", report)
    done = command("tune", preset, *words, *measured)
    assert done.status == 0, done.err
    assert "a streamed pass of one row takes" in done.out
    found, written = json.loads(report.read_text()), tomllib.loads(preset.read_text())
    assert {"auto", "ar"} <= {row["label"] for row in found["candidates"]}
    predicted = {row["label"]: row["predicted"] for row in found["candidates"]}
    assert predicted["specexec 4"] > 0 and predicted["specexec 16"] > 0
    assert (written["offload"], written["resident_layers"]) == ("host", 1)
    assert written["method"] == found["best"]["method"]
    done = command("decode", "--config", preset, "--raw", "-n", "4", "--ignore-eos", "--json", "w1 w2")
    assert done.status == 0, done.err
    assert json.loads(done.out)["stats"]["offload"]["passes"] >= 1
