"""Commands as processes: interrupted at random times, and with closed, full or broken standard streams."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from fuzz.native_files import make_source
from jaxspec.checkpoint.native.manifest import verify_native

LONGEST = 120.0  # seconds; a process that takes longer hangs, even on a busy machine
# Until the first lines of jaxspec have run, Python has a handler of interrupts of its own, which prints a traceback.
# The closed file tells that they have.
BEGUN = (
    "import os, sys; from jaxspec.cli import start; start.begin(); os.close(int(sys.argv.pop(1)));"
    "start.run(sys.argv.pop(1))"
)


def run(rng: random.Random, folder: Path) -> None:
    """One process."""
    source = make_source()[0]
    converting = rng.random() < 0.5
    words = (
        ["convert", str(rng.choice((source, source.parent / "model.gguf"))), str(folder / "out"),
         *rng.choice(([], ["--quantize", "q8_0"], ["--dtype", "bfloat16"], ["--layers", "1"]))]
        if converting
        else rng.choice(
            (
                ["decode", "-m", str(source), "-n", "8", "--method", "ar", "--raw", "a b"],
                ["decode", "-m", str(source), "-n", "8", "--method", "ar", "--json", "--stats", "--raw", "-"],
                ["decode", "--help"], ["decode", "--nothing"], ["bench", "--help"], ["check", "--version"],
                ["tune", "-h"],
                ["convert", "--verify", str(source)], ["convert", str(folder), str(folder / "out")],
            )
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "jaxspec", *words]
    environment = os.environ | {"JAXSPEC_COMPILE_CACHE": str(folder.parent / "jaxspec-fuzz-compiled")}
    if rng.random() < 0.6:
        _interrupt(rng, command, environment, folder)
    else:
        _close_streams(rng, command, environment)


def _interrupt(rng: random.Random, command: list[str], environment: dict[str, str], folder: Path) -> None:
    begun, begins = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", BEGUN, str(begins), *command[3:]], env=environment, pass_fds=[begins],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(begins)
    with open(begun, "rb") as file:
        file.read()
    time.sleep(rng.choice((0.1, 1.0, 4.0)) * rng.random())
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{command}: hangs after an interrupt") from None
    _check_end(command, process.returncode, err)
    left = sorted(os.listdir(folder))
    if process.returncode == 130:
        assert not [name for name in left if name.startswith(".")], f"{command}: an interrupt left {left}"
    if "out" in left:
        verify_native(folder / "out")


def _close_streams(rng: random.Random, command: list[str], environment: dict[str, str]) -> None:
    stream = {
        0: rng.choice(("", "<&-", "</dev/null", "<<< 'a b'")),
        1: rng.choice(("", ">&-", ">/dev/full", "| head -c 1", "| true")),
        2: rng.choice(("", "2>&-", "2>/dev/full")),
    }
    line = f'"$@" {stream[0]} {stream[2]} {stream[1]}'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command], env=environment, capture_output=True, text=True, timeout=LONGEST,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    _check_end([line, *command], done.returncode, done.stderr)


def _check_end(command: list[str], status: int, err: str) -> None:
    assert status in (0, 1, 2, 130), f"{command}: ends with {status}: {err}"
    assert "Traceback" not in err and "panicked" not in err and "Fatal" not in err, f"{command}: {err}"
    errors = [line for line in err.splitlines() if line.strip()]
    # Of usage errors typer prints a line of usage and a hint before the error.
    assert status in (0, 2) or len(errors) <= 2, f"{command}: {err}"
