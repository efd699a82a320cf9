"""`kernels=` and `--kernels` decide what a tiny checkpoint is decoded with."""

import importlib
import json
import signal
import sys

import pytest
from tiny_models import quick_compilation

import jaxspec.llm
from jaxspec import LLM
from pallas_kernels.selection import choose

NATIVE = choose("auto", "cpu").native

needs_native = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")


@pytest.fixture
def call(monkeypatch, capsys, tiny_model):
    """Run a command by name in this process; the object that it prints."""
    before = signal.getsignal(signal.SIGINT)

    def call(name, *words):
        monkeypatch.setattr(sys, "argv", [f"jaxspec-{name}", "--model", tiny_model, "-n", "6", *words])
        with pytest.raises(SystemExit) as left, quick_compilation():
            importlib.import_module(f"jaxspec.cli.{name}").main()
        out, err = capsys.readouterr()
        assert left.value.code == 0, err
        return json.loads(out)

    yield call
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kernels", ["xla", pytest.param("cpu", marks=needs_native)])
def test_a_model(tiny_model, kernels):
    with quick_compilation():
        assert LLM(tiny_model, kernels=kernels).kernels.name == kernels


def test_decode(call, monkeypatch):
    used = []

    class Noted(LLM):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            used.append(self.kernels.name)

    monkeypatch.setattr(jaxspec.llm, "LLM", Noted)
    assert call("decode", "--kernels", "xla", "--json", "w1 w2")["text"]
    assert used == ["xla"]


def test_check(call):
    report = call("check", "--method", "ar", "--kernels", "xla", "--json", "-", "--raw", "w1 w2")
    assert (report["kernels"], report["weights"]) == ("xla", "float32")


def test_bench(call, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"question_id": 1, "category": "c", "turns": ["w1 w2"]}))
    words = ["--methods", "ar", "--prompts", str(file), "--repeats", "1", "--json", "-"]
    report = call("bench", *words, "--kernels", "xla")
    assert (report["kernels"], report["weights"]) == ("xla", "float32")
