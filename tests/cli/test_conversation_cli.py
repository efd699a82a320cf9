"""`jaxspec-decode --interactive`: a conversation in the terminal."""

import dataclasses
import os
import pty
import select
import signal
import subprocess
import sys

import pytest

import jaxspec.llm
from jaxspec.cli import progress
from jaxspec.results import Stream


@pytest.fixture
def converse(command, tiny_model):
    """Hold a conversation with the tiny model in this process."""
    return lambda *words, lines: command(
        "decode", "--model", tiny_model, "--interactive", "-n", "8", *words, stdin="\n".join(lines)
    )


@pytest.fixture
def asked(monkeypatch):
    """The conversations that the model was given."""
    seen, stream = [], jaxspec.llm.LLM.stream

    def spy(self, messages, sampling):
        seen.append([message["content"] for message in messages])
        return stream(self, messages, sampling)

    monkeypatch.setattr(jaxspec.llm.LLM, "stream", spy)
    return seen


def test_questions_answers_and_commands(converse, asked):
    lines = ["w1 w2", "", "/stats", "w3", "/reset", "/stats", "w4", "/nothing", "/exit", "w5"]
    done = converse("--system", "w9", lines=lines)
    assert done.status == 0, done.err
    first, second, third = done.out.splitlines()
    assert asked == [["w9", "w1 w2"], ["w9", "w1 w2", first, "w3"], ["w9", "w4"]]
    assert second and third
    for text in ("tokens/s", "begins anew", "no answer yet", "unknown command /nothing"):
        assert text in done.err


def test_calls_ask_for_their_results(converse, tmp_path, monkeypatch):
    """A model that calls a tool gets what is typed, and goes on."""
    tools, said = tmp_path / "tools.json", []
    tools.write_text('[{"type": "function", "function": {"name": "add"}}]')
    stream = jaxspec.llm.LLM.stream

    def fake(self, messages, sampling, *, tools):
        said.append([message["content"] for message in messages])
        assert tools[0]["function"]["name"] == "add"
        *events, last = stream(self, "w1", sampling)
        message = {"role": "assistant", "content": "w5"}
        if len(said) == 1:
            call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        last = dataclasses.replace(last, completion=dataclasses.replace(last.completion, message=message))
        return Stream(lambda *asked: (event for event in (*events, last)))

    monkeypatch.setattr(jaxspec.llm.LLM, "stream", fake)
    done = converse("--tools", str(tools), lines=["w1 w2", "w7", "w8"])
    assert done.status == 0 and "result of add({})?" in done.err
    assert said == [["w1 w2"], ["w1 w2", None, "w7"], ["w1 w2", None, "w7", "w5", "w8"]]
    tools.write_text("{}")
    assert "tools must be a list" in converse("--tools", str(tools), lines=[]).err


@pytest.mark.thorough
def test_long_passes_over_streamed_weights_are_shown(converse, monkeypatch):
    monkeypatch.setattr(progress, "_LONG_PASS_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = converse("--offload", "host", lines=["w1 w2"])
    assert done.status == 0 and "1/2 layers, " in done.err, done.err


def test_an_interrupt_ends_the_answer_and_not_the_program(converse, asked, monkeypatch):
    class Interrupted(Stream):
        count = 0

        def __next__(self):
            event = super().__next__()
            self.count += 1
            if self.count == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return event

    monkeypatch.setattr(jaxspec.llm, "Stream", Interrupted)
    done = converse("--ignore-eos", "-n", "60", lines=["w1", "/stats", "w2"])
    assert done.status == 0 and "ended by abort" in done.err, done.err
    first, second = done.out.splitlines()
    assert asked == [["w1"], ["w1", first, "w2"]] and second


def test_a_question_that_does_not_fit_costs_itself_alone(converse, asked):
    done = converse(lines=["w1 " * 80, "w2"])
    assert "at most 63 leave room" in done.err and "/reset begins anew" in done.err
    assert asked[1] == ["w2"] and len(done.out.splitlines()) == 1


@pytest.mark.parametrize(("words", "message"), [(("w1",), "a prompt"), (("--json",), "--json"), (("--raw",), "--raw")])
def test_what_does_not_go_with_a_conversation(converse, words, message):
    done = converse(*words, lines=[])
    assert done.status == 2 and f"{message} does not go with it" in done.err


@pytest.mark.slow
def test_a_terminal_has_a_prompt_and_a_history(tiny_model, tmp_path):
    ours, theirs = pty.openpty()
    words = (sys.executable, "-m", "jaxspec", "decode", "--model", tiny_model, "-i", "-n", "4")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    try:
        shown = b""
        for typed in (b"w1 w2\n", b"\x04"):
            while not shown.endswith(b"> "):
                assert select.select([ours], [], [], 60)[0], shown
                shown += os.read(ours, 1000)
            os.write(ours, typed)
            shown = b""
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)
    assert "w1 w2" in (tmp_path / "jaxspec" / "history").read_text()
