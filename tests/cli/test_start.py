"""How commands begin and end: interrupts at any time, and standard streams that are closed or full."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PYTHON = [sys.executable, "-m", "jaxspec"]


@pytest.mark.parametrize("command", ["decode", "convert", "bench", "check", "tune", "serve"])
def test_an_interrupt_before_anything_is_imported(command):
    """A signal in the first tenths of a second falls into imports, in which an exception would get lost."""
    for delay in (0, 0.02):
        assert interrupt_after(delay, command) == (130, "", "")


def interrupt_after(delay, command):
    # Before the first line of jaxspec runs, Python has a handler of its own. The dot tells that it has run.
    code = f"import os; from jaxspec.cli import start; start.begin(); os.write(1, b'.'); start.run({command!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "x", "y"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(1) == b"."
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode().strip()


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ('"$@" decode --help >/dev/full', 1, "No space left on device"),
        ('"$@" decode --help >&-', 0, ""),
        ('"$@" decode --help 2>&- >/dev/full', 1, ""),
        ('"$@" decode --nothing 2>/dev/full', 1, ""),
        ('"$@" decode <&-', 2, "give one prompt"),
        ('"$@" decode --help | true; exit ${PIPESTATUS[0]}', 0, ""),
        ("\"$@\" decode --config $'\\xff'", 2, "is no file and no name"),
        ('"$@" decode x --set seed=' + "9" * 5000, 2, "seed must be of type int"),
        ('"$@" decode x --set "seed=' + "[" * 3000 + '"', 2, "seed must be of type int"),
    ],
)
def test_streams_that_are_closed_or_full(line, status, says):
    done = subprocess.run(["bash", "-c", line, "bash", *PYTHON], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr
    assert done.returncode in (status, 1 if "PIPESTATUS" in line else status), done.stderr
    assert says in done.stderr and done.stderr.count("\n") <= 1


def test_help_needs_no_heavy_import():
    code = """
import importlib, sys
for name in ("bench", "check", "convert", "decode", "serve", "tune"):
    importlib.import_module(f"jaxspec.cli.{name}").app(["--help"], standalone_mode=False)
assert not {"jax", "numpy", "orbax", "tensorstore", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == 6


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """A library that prints an error would write it into that file."""
    code = (
        "from jaxspec.cli import start; start.begin()\n"
        f"file = open({str(tmp_path / 'weights')!r}, 'w'); assert file.fileno() > 2\n"
        "import os; os.write(2, b'a library says something')"
    )
    done = subprocess.run(["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code], timeout=60)
    assert done.returncode == 0 and (tmp_path / "weights").read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device on this system")
def test_a_full_output_is_named(tiny_model):
    words = (
        sys.executable,
        "-m",
        "jaxspec",
        "decode",
        "--model",
        tiny_model,
        "--method",
        "ar",
        "--raw",
        "-n",
        "2",
        "w1",
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1 and "standard output cannot be written: No space left" in done.stderr
