"""`kernels=` and `--kernels` decide what a tiny checkpoint is decoded with."""

import json

import pytest

import jaxspec.llm
from jaxspec import LLM
from pallas_kernels.selection import choose

NATIVE = choose("auto", "cpu").native

needs_native = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")


@pytest.fixture
def call(command, tiny_model):
    """Run a command by name in this process; the object that it prints."""

    def call(name, *words):
        done = command(name, "--model", tiny_model, "-n", "6", *words)
        assert done.status == 0, done.err
        return json.loads(done.out)

    return call


@pytest.mark.parametrize("kernels", ["xla", pytest.param("cpu", marks=needs_native)])
def test_a_model(tiny_model, kernels):
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
