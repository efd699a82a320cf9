"""Shared by the tests of commands."""

import io
import json
import signal
import subprocess
import sys
import warnings
from typing import NamedTuple

import pytest
from native_models import LLAMA, write_model

from jaxspec.cli import start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "model"
    return write_model(folder, LLAMA)


@pytest.fixture
def prompts(tmp_path):
    """A file of four prompts."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "words", "turns": [f"w1 w{i + 6} w9"]} for i in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


class Done(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command by name in this process."""
    interrupt, show = signal.getsignal(signal.SIGINT), warnings.showwarning

    def run(name, *words, stdin=""):
        monkeypatch.setattr(sys, "argv", [f"jaxspec-{name}", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as left:
            start.run(name)
        return Done(left.value.code or 0, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGINT, interrupt)
    warnings.showwarning = show


INTERRUPTED = """
import os, signal, sys
import jaxspec.llm
from jaxspec.cli import start
from jaxspec.results import Stream

class Interrupted(Stream):
    count = 0

    def __next__(self):
        event = super().__next__()
        self.count += 1
        if self.count == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return event

jaxspec.llm.Stream = Interrupted
sys.argv = ["jaxspec-decode", *sys.argv[1:]]
start.run("decode")
"""


@pytest.fixture
def interrupted():
    """Run `jaxspec-decode` in a process that is interrupted after the fifth event of its text."""

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, *map(str, words)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
        return done

    return run
