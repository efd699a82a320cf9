"""`jaxspec-decode --trace`: a file that is whole, or refused before anything is computed."""

import dataclasses
import json
import signal
import subprocess
import sys

import pytest
from native_models import LLAMA, write_native, write_tokenizer
from tiny_models import quick_compilation

from jaxspec.cli.decode import main


@pytest.fixture
def decode(monkeypatch, capsys):
    """Run the command in this process; its status, output and errors."""
    before = signal.getsignal(signal.SIGINT)

    def decode(*words):
        monkeypatch.setattr(sys, "argv", ["jaxspec-decode", *words])
        with pytest.raises(SystemExit) as left, quick_compilation():
            main()
        return left.value.code, *capsys.readouterr()

    yield decode
    signal.signal(signal.SIGINT, before)


def test_a_trace_and_its_summary(decode, tiny_model, tmp_path):
    path = tmp_path / "out.json"
    pair = ("--model", tiny_model, "--draft-model", tiny_model, "--method", "swiftspec", "--set", "batch=4")
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


def test_a_trace_counts_passes_as_the_counters_do(decode, tiny_model, tmp_path):
    words = ("--model", tiny_model, "--method", "lookup", "--temperature", "1", "--seed", "0", "--compile-cache", "")
    path = str(tmp_path / "out.json")
    status, out, err = decode(*words, "-n", "30", "--ignore-eos", "--trace", path, "--json", "--stats", "w1 w2")
    assert status == 0, err
    stats = json.loads(out)["stats"]
    assert stats["timeline"]["passes"] == stats["speculative_decoding"]["num_spec_steps"] > stats["timeline"]["rounds"]
    assert f"{stats['timeline']['rounds']} rounds of {stats['timeline']['passes']} passes" in err


def test_without_a_trace_there_is_no_timeline(decode, tiny_model):
    status, out, err = decode("--model", tiny_model, "--method", "ar", "-n", "4", "--json", "--stats", "w1 w2")
    assert status == 0, err
    stats = json.loads(out)["stats"]
    assert stats["timeline"] is None and stats["num_programs"] > 1
    assert f"{stats['num_programs']} programs" in err and "idle" not in err


@pytest.mark.parametrize("name", ["no/such/folder/out.json", ".", "-", "/proc/out.json"])
def test_what_cannot_be_written_is_refused_first(decode, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    status, out, err = decode("--model", "no/such/model", "--trace", name, "w1 w2")
    assert status == 2 and out == ""
    assert err.startswith("jaxspec-decode: error: --trace") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def interrupt_in_mid_text(*words):
    """Run the command in a process that is interrupted behind the fourth event of its text."""
    code = f"""
import itertools, os, signal, sys
from jaxspec.cli import decode

events = itertools.count()
# What the command asks at each event.
decode.raise_lost_interrupt = lambda: next(events) == 3 and os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["jaxspec-decode", *{words!r}, "-n", "30", "--ignore-eos", "--compile-cache", "", "w1 w2"]
decode.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr


def test_an_interrupt_keeps_the_rounds_so_far(tiny_model, tmp_path):
    interrupt_in_mid_text("--model", tiny_model, "--method", "ar", "--trace", str(tmp_path / "out.json"))
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert 4 <= json.loads((tmp_path / "out.json").read_text())["otherData"]["rounds"] < 30


def test_an_interrupt_keeps_what_swift_found(tmp_path):
    model, path = tmp_path / "model", tmp_path / "sets.json"
    write_native(model, dataclasses.replace(LLAMA, num_layers=5))
    write_tokenizer(model, LLAMA.vocab_size)
    interrupt_in_mid_text("--model", str(model), "--method", "swift", "--swift-layers", str(path))
    (found,) = json.loads(path.read_text())["models"].values()
    assert found["tasks"]
