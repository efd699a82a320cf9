"""`jaxspec-decode` as a user meets it: what it prints, where, and with which status it ends."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxspec
from jaxspec import ConfigError, SamplingParams, __version__
from jaxspec import __main__ as module_commands

COMMAND = str(Path(sys.executable).with_name("jaxspec-decode"))


@pytest.fixture
def decode(command, tiny_model):
    """Run `jaxspec-decode` with the tiny model in this process."""
    return lambda *words, **options: command("decode", "--model", tiny_model, *words, **options)


def test_text_streams_to_stdout_and_statistics_to_stderr(decode):
    done = decode("--stats", "-n", "8", "w1 w2")
    assert done.status == 0, done.err
    assert done.out.strip() and "tokens/s" not in done.out
    for word in ("prompt", "first token", "tokens/s", "compile", "method auto", "ended by"):
        assert word in done.err


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--temperature", "1"), marks=pytest.mark.thorough)], ids=["greedy", "T=1"]
)
def test_a_comparison_names_both_speeds_and_the_same_tokens(decode, words):
    """Drafted and plain text are equal, also where no seed was given: the second request has the first one's."""
    done = decode("--method", "lookup", "--compare", "--ignore-eos", "-n", "12", *words, "w1 w2")
    assert done.status == 0, done.err
    assert "lookup: " in done.err and " tokens/pass" in done.err
    assert "plain decoding: " in done.err and "the same tokens" in done.err and "times as fast" in done.err


def test_json_is_one_object(decode, tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text('max_tokens = 50\nseed = 3\nchat = false\nstop = ["."]\n')
    words = ("--config", preset, "--set", "temperature=0.5", "-n", "7", "--top-logprobs", "2", "--json", "-")
    done = decode(*words, stdin="w1 w2\n")
    assert done.status == 0, done.err
    result = json.loads(done.out)
    keys = {"text", "token_ids", "finish_reason", "prompt_tokens", "method", "stats", "logprobs", "top_logprobs"}
    assert set(result) == keys
    assert len(result["token_ids"]) <= 7 and result["stats"]["seed"] == 3
    assert {"ttft_s", "decode_s", "tokens_per_s", "compile_s", "speculative_decoding"} <= set(result["stats"])
    assert [len(top) for top in result["top_logprobs"]] == [2] * len(result["token_ids"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temprature", "1", "hi"], "--temperature"),
        ([], "give one prompt"),
        (["--compare", "--interactive"], "--compare decodes one prompt in one process"),
        (["hi", "there", "--stats", "Ann"], "the prompt is 3 arguments: quote it, jaxspec-decode 'hi there Ann'"),
        (["--prompt-file", "no/such/file.txt"], "no/such/file.txt cannot be read"),
        (["--temperature", "-1", "hi"], "temperature must be at least 0, got -1"),
        (["--method", "swfit", "hi"], "did you mean 'swift'"),
        (["--method", "swiftspec", "--draft-model", "none", "hi"], "method 'swiftspec' needs a draft model"),
        (["--method", "lookup", "--num-draft-tokens", "0", "hi"], "num_draft_tokens must be at least 1, got 0"),
        (["--method", "lookup", "--set", "width=4", "hi"], "method 'lookup' has no setting 'width'"),
        (["--method", "lookup", "--draft-model", "d", "hi"], "uses no draft"),
        (["--draft-devices", "2", "hi"], "method 'auto' runs the draft on the target's devices: draft_devices is for"),
        (["--offload", "host", "--method", "swift", "hi"], "method swift drafts with the target's own layers"),
        (["--plan"], "--plan tells what offload streams"),
        (["--plan", "--offload", "disk", "hi"], "--plan prints a plan and ends: it does not go with a prompt"),
        (["--kernels", "mosaic", "hi"], "kernels 'mosaic' run on NVIDIA GPUs, not on cpu; use auto or xla"),
        (["--set", "tempreature=1", "hi"], "did you mean 'temperature'"),
        (["--set", 'chat="false"', "hi"], "chat must be of type bool, got 'false'"),
        (["--set", "num_speculative_tokens=3", "hi"], "use 'num_draft_tokens'"),
        (["--config", "swiftspec", "hi"], "did you mean 'swiftspec-paper'"),
        (["--dtype", "int4", "hi"], "dtype 'int4' is not supported"),
        (["--target-devices", "64", "hi"], "64 devices asked for"),
        (["--logprobs", "hi"], "add --json"),
        # What llama.cpp, vLLM and others call it.
        (["--draft-max", "5", "hi"], "no such option: --draft-max; use --num-draft-tokens"),
        (["-ngl", "99", "hi"], "no such option: -ngl; all layers run on the devices"),
        (["--method", "ngram", "hi"], "unknown method 'ngram'; use 'lookup'"),
    ],
)
def test_usage_errors_exit_with_2_and_one_line(decode, arguments, message):
    done = decode(*arguments)
    assert done.status == 2
    assert message in done.err and "Traceback" not in done.err and done.out == ""


def test_presets_are_listed(command):
    done = command("decode", "--config", "list")
    assert (done.status, done.err) == (0, "")
    names = {line.split()[0] for line in done.out.splitlines()}
    assert {"swiftspec-paper", "specexec-paper", "specexec-repo", "swift-paper", "swift-repo", "no-draft"} <= names
    assert all(len(line.split()) > 5 for line in done.out.splitlines())


def test_every_command_has_a_version(command):
    for name in ("decode", "convert", "bench", "check", "tune"):
        assert command(name, "--version") == (0, f"jaxspec-{name} {__version__}\n", "")


def test_the_module_runs_and_lists_the_commands(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["python -m jaxspec", *words])
        module_commands.main()

    run()
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in ("decode", "convert", "bench", "check", "tune"))
    with pytest.raises(SystemExit):
        run("tune", "--version")
    assert capsys.readouterr().out == f"jaxspec-tune {__version__}\n"
    with pytest.raises(SystemExit) as left:
        run("decoed")
    assert left.value.code == 2 and "did you mean 'decode'" in capsys.readouterr().err


def test_missing_checkpoint_exits_with_1(command):
    done = command("decode", "--model", "no/such/model", "hi")
    assert done.status == 1
    assert "no/such/model" in done.err and "Traceback" not in done.err


@pytest.mark.slow
def test_unwritable_home_costs_the_cache_not_the_answer(decode, start, monkeypatch):
    named = decode("--compile-cache", "/proc/nowhere", "hi")
    assert named.status == 2 and "/proc/nowhere cannot be written" in named.err
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("JAXSPEC_COMPILE_CACHE")
    with start("-n", "2", "hi") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "no compile cache" in err and "Traceback" not in err


@pytest.fixture
def start(tiny_model):
    """Start `jaxspec-decode` with the tiny model in a process of its own."""

    def start(*words, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        words = [COMMAND, "--model", tiny_model, "--method", "ar", *words]
        return subprocess.Popen(words, text=True, env=environment, **options)

    return start


def test_closed_pipe_ends_quietly(start):
    with start("-n", "60", "--ignore-eos", "w1") as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_interrupt_while_loading_ends_at_once(start):
    with start("--compile-cache", "", "-n", "60", "w1") as process:
        time.sleep(2.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and err.endswith("\n") and "\x1b" not in out + err


@pytest.mark.thorough
def test_interrupt_while_decoding_keeps_the_text(interrupted, tiny_model):
    done = interrupted("-m", tiny_model, "-n", "60", "--ignore-eos", "--stats", "--json", "w1")
    result = json.loads(done.stdout)
    assert result["finish_reason"] == "abort" and 5 <= len(result["token_ids"]) < 60
    assert result["stats"]["completion_tokens"] == len(result["token_ids"])


def test_a_terminal_sees_what_is_going_on_until_the_text_begins(tiny_model, start):
    ours, theirs = pty.openpty()
    with start("-n", "8", "--ignore-eos", "--stats", "w1", stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # how a pseudo terminal says that the other side has closed
                break
        out, _ = process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 0 and out.strip()
    assert b"loading the model and compiling its programs" in seen
    # The line is erased and the cursor is back before the statistics.
    assert seen.rindex(b"\x1b[?25h") < seen.rindex(b"first token")


def test_a_prompt_that_the_locale_does_not_know_is_refused(decode):
    """As Python gives the bytes of an argument under LC_ALL=C."""
    done = decode("\udce6\udc9d\udcb1")
    assert done.status == 2 and "LC_ALL=C.UTF-8" in done.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-n", "9000", "w1"), "exceed the context"),
        (("--stop-token-id", "999999", "w1"), "stop_token_ids names token 999999"),
        (("--regex", "(", "w1"), "unclosed group"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_compiled(words, problem, tiny_model, decode, monkeypatch):
    monkeypatch.setattr("jaxspec.engine.Engine.prepare", lambda *_: pytest.fail("it compiles"))
    done = decode("-m", tiny_model, "--method", "ar", *words)
    assert done.status == 2 and problem in done.err
    with pytest.raises(ConfigError, match="exceed the context"):
        jaxspec.generate([1], SamplingParams(max_tokens=9000), model=str(tiny_model), method="ar")


def test_two_words_for_numerics_agree(decode):
    done = decode("--exact", "--numerics", "fast", "w1")
    assert done.status == 2 and "--exact and --numerics fast exclude each other" in done.err
