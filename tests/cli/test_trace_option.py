"""`jaxspec-decode --trace`: a file that is whole, or refused before anything is computed."""

import dataclasses
import functools
import json

import pytest
from marks import quick_part
from native_models import LLAMA, write_model


@pytest.fixture
def decode(command):
    """Run `jaxspec-decode` in this process; its status, output and errors."""
    return functools.partial(command, "decode")


def test_a_trace_and_its_summary(decode, tiny_model, tmp_path):
    path = tmp_path / "out.json"
    pair = ("--model", tiny_model, "--draft-model", tiny_model, "--method", "swiftspec", "--num-draft-tokens", "3")
    status, out, err = decode(*pair, "-n", "16", "--ignore-eos", "--trace", str(path), "--json", "--stats", "w1 w2")
    assert status == 0, err
    trace, stats = json.loads(path.read_text()), json.loads(out)["stats"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert stats["timeline"] == trace["otherData"]
    assert stats["timeline"]["rounds"] == stats["speculative_decoding"]["num_spec_steps"]
    assert stats["timeline"]["passes"] == stats["timeline"]["rounds"] and stats["timeline"]["sync_s"] > 0
    assert stats["timeline"]["draft_tree"] == stats["speculative_decoding"]["draft_tree"]
    assert set(stats["timeline"]["idle"]) == {"target", "draft"}
    for word in (f"{stats['num_programs']} programs", "evaluated", "overlap", "target idle", "draft idle", "verify"):
        assert word in err


@pytest.mark.thorough
def test_a_trace_counts_passes_as_the_counters_do(decode, tiny_model, tmp_path):
    words = ("--model", tiny_model, "--method", "lookup", "--temperature", "1", "--seed", "0")
    path = str(tmp_path / "out.json")
    status, out, err = decode(*words, "-n", "30", "--ignore-eos", "--trace", path, "--json", "--stats", "w1 w2")
    assert status == 0, err
    stats = json.loads(out)["stats"]
    assert stats["timeline"]["passes"] == stats["speculative_decoding"]["num_spec_steps"] > stats["timeline"]["rounds"]
    assert f"{stats['timeline']['rounds']} rounds of {stats['timeline']['passes']} passes" in err


@pytest.mark.parametrize("method", quick_part(["ar", "specexec"], lambda method: method == "ar"))
def test_a_streamed_pass_shows_its_layers(decode, tiny_model, tmp_path, method):
    path = tmp_path / "out.json"
    words = ["--model", tiny_model, "--method", method, "--offload", "host", "-n", "12", "--ignore-eos"]
    words += ["--draft-model", tiny_model, "--num-draft-tokens", "4"] if method == "specexec" else []
    status, out, err = decode(*words, "--trace", str(path), "--json", "--stats", "w1 w2")
    assert status == 0, err
    stats, trace = json.loads(out)["stats"], json.loads(path.read_text())
    kind = "decode" if method == "ar" else "verify"
    rounds = stats["timeline"]["rounds"]
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    for name in (f"{kind} open", "layer 0", "layer 1", f"{kind} close"):
        assert names.count(name) == rounds, name
    ordered = [name for name in names if name.startswith((kind, "layer"))]
    assert ordered[:4] == [f"{kind} open", "layer 0", "layer 1", f"{kind} close"]
    assert stats["timeline"]["pass_s"] > 0 and stats["timeline"]["program_s"]["layer"] > 0


@pytest.mark.parametrize("name", ["no/such/folder/out.json", ".", "-", "/proc/out.json"])
def test_what_cannot_be_written_is_refused_first(decode, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    status, out, err = decode("--model", "no/such/model", "--trace", name, "w1 w2")
    assert status == 2 and out == ""
    assert err.startswith("jaxspec-decode: error: --trace") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_interrupt_keeps_the_rounds_so_far(interrupted, tiny_model, tmp_path):
    path = tmp_path / "out.json"
    words = ("--method", "ar", "--trace", path, "-n", "60", "--ignore-eos", "--stats", "w1 w2")
    done = interrupted("--model", tiny_model, *words)
    assert "ended by abort" in done.stderr and done.stdout.strip() and done.stdout.endswith("\n")
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert 4 <= json.loads((tmp_path / "out.json").read_text())["otherData"]["rounds"] < 60


@pytest.mark.slow
def test_an_interrupt_keeps_what_swift_found(interrupted, tmp_path):
    model, path = tmp_path / "model", tmp_path / "sets.json"
    write_model(model, dataclasses.replace(LLAMA, num_layers=5))
    words = ("--method", "swift", "--swift-layers", path, "-n", "60", "--ignore-eos", "--compile-cache", "")
    interrupted("--model", model, *words, "w1 w2")
    (found,) = json.loads(path.read_text())["sets"]
    assert found["task"] == "default" and found["search"]
