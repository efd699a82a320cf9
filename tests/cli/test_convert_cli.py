"""`jaxspec-convert` as a user meets it."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
from native_models import QWEN3, write_model
from text_models import default_model

from jaxspec.checkpoint.native.manifest import open_native
from jaxspec.text.tokenizer import load_tokenizer


@pytest.fixture
def run(command):
    return lambda *words: command("convert", *words)


@pytest.fixture
def source(tmp_path):
    """Only the layers' rows of 64 are whole blocks."""
    write_model(tmp_path / "source", dataclasses.replace(QWEN3, mlp_dim=64))
    return tmp_path / "source"


def test_converts_and_says_where_and_how_much(run, source, tmp_path):
    (tmp_path / ".native.partial-1").mkdir()
    done = run(source, tmp_path / "native", "--dtype", "bfloat16")
    assert done.status == 0
    assert f"note: {tmp_path / '.native.partial-1'} is of a conversion that was killed" in done.err
    checkpoint = open_native(tmp_path / "native")
    assert done.out == f"{tmp_path / 'native'}: {checkpoint.num_bytes / 1e6:.1f} MB, bfloat16\n"
    assert load_tokenizer(tmp_path / "native").encode("w4") == [4]


def test_rounding_twice_and_growing_are_warned_of(run, source, tmp_path):
    done, checkpoint = run(source, tmp_path / "small", "--quantize", "q4_0"), open_native(tmp_path / "small")
    assert (done.status, done.err) == (0, "") and checkpoint.storage.type_of("layers.0.down") == "q4_0"
    assert done.out == f"{tmp_path / 'small'}: {checkpoint.num_bytes / 1e6:.1f} MB, float32 and q4_0\n"
    again = run(tmp_path / "small", tmp_path / "large", "--quantize", "q8_0")
    assert again.status == 0 and again.err.count("warning:") == 2
    assert "small holds weights in q4_0 blocks already: rounding them to q8_0 adds a second error" in again.err
    assert "MB: without --quantize it keeps the size of its source" in again.err
    # What is in the wanted blocks already stays as it is.
    assert run(tmp_path / "small", tmp_path / "same", "--quantize", "q4_0").err == ""


def test_failures_are_one_line(run, source, tmp_path):
    taken, new = tmp_path / "taken", tmp_path / "new"
    taken.mkdir()
    for words, status, message in [
        ((source, taken), 1, f"jaxspec-convert: error: {taken} exists already"),
        (("missing", new), 1, "jaxspec-convert: error: missing: no such"),
        ((source, new, "--dtyp", "float32"), 2, "--dtype"),
        ((source, new, "--dtype", "int8"), 2, "dtype 'int8' is not supported; use auto, float32 or bfloat16"),
        ((source, new, "--quantize", "q4_00"), 2, "cannot be quantised to 'q4_00'; did you mean 'q4_0'?"),
        ((source, new, "more"), 2, "unexpected extra argument"),
    ]:
        done = run(*words)
        assert (done.status, done.out) == (status, "") and message in done.err
        assert not new.exists() and (status == 2 or done.err.count("\n") == 1)


def test_ctrl_c_leaves_nothing(tmp_path):
    default_model()  # skips where it is not installed; it takes long enough to be interrupted
    words = [sys.executable, "-m", "jaxspec", "convert", "default", str(tmp_path / "native")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(tmp_path.glob(".native.partial-*/arrays*/layers.*")):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "")
    assert os.listdir(tmp_path) == []
