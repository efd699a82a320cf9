"""`jaxspec-convert` as a user meets it: in a process of its own."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from native_models import QWEN3, write_native, write_tokenizer
from text_models import default_model

from jaxspec.checkpoint.native.manifest import open_native
from jaxspec.text.tokenizer import load_tokenizer

COMMAND = str(Path(sys.executable).with_name("jaxspec-convert"))


def run(*arguments, **options):
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def source(tmp_path):
    write_native(tmp_path / "source", QWEN3)
    write_tokenizer(tmp_path / "source", QWEN3.vocab_size)
    return tmp_path / "source"


def test_converts_and_says_where_and_how_much(source, tmp_path):
    done = run(source, tmp_path / "native", "--dtype", "bfloat16")
    assert (done.returncode, done.stderr) == (0, "")
    checkpoint = open_native(tmp_path / "native")
    assert done.stdout == f"{tmp_path / 'native'}: {checkpoint.num_bytes / 1e6:.1f} MB, bfloat16\n"
    assert load_tokenizer(tmp_path / "native").encode("w4") == [4]


def test_quantises_and_names_both_types(tmp_path):
    # Only the layers' rows of 64 are whole blocks.
    write_native(tmp_path / "source", dataclasses.replace(QWEN3, mlp_dim=64))
    write_tokenizer(tmp_path / "source", QWEN3.vocab_size)
    done = run(tmp_path / "source", tmp_path / "native", "--quantize", "q4_0")
    assert (done.returncode, done.stderr) == (0, "")
    checkpoint = open_native(tmp_path / "native")
    assert checkpoint.storage.type_of("layers.0.down") == "q4_0"
    assert done.stdout == f"{tmp_path / 'native'}: {checkpoint.num_bytes / 1e6:.1f} MB, float32 and q4_0\n"


def test_rounding_twice_and_growing_are_warned_of(tmp_path):
    write_native(tmp_path / "source", dataclasses.replace(QWEN3, mlp_dim=64))
    write_tokenizer(tmp_path / "source", QWEN3.vocab_size)
    assert run(tmp_path / "source", tmp_path / "small", "--quantize", "q4_0").stderr == ""
    again = run(tmp_path / "small", tmp_path / "large", "--quantize", "q8_0")
    assert again.returncode == 0 and again.stderr.count("warning:") == 2
    assert "small holds weights in q4_0 blocks already: rounding them to q8_0 adds a second error" in again.stderr
    assert "MB: without --quantize it keeps the size of its source" in again.stderr
    # What is in the wanted blocks already stays as it is.
    assert run(tmp_path / "small", tmp_path / "same", "--quantize", "q4_0").stderr == ""


def test_failures_are_one_line_and_status_1(source, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    for src, dst, message in [
        (source, taken, f"{taken} exists already"),
        ("missing", tmp_path / "new", "missing: no such"),
    ]:
        done = run(src, dst)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"jaxspec-convert: error: {message}") and done.stderr.count("\n") == 1


def test_leftovers_are_named(source, tmp_path):
    (tmp_path / ".native.partial-1").mkdir()
    done = run(source, tmp_path / "native")
    assert done.returncode == 0
    assert f"note: {tmp_path / '.native.partial-1'} is of a conversion that was killed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtyp", "float32"], "--dtype"),
        (["--dtype", "int8"], "dtype 'int8' is not supported; use auto, float32 or bfloat16"),
        (["--quantize", "q4_00"], "cannot be quantised to 'q4_00'; did you mean 'q4_0'?"),
        (["more"], "unexpected extra argument"),
    ],
)
def test_usage_errors_are_status_2(source, tmp_path, arguments, message):
    done = run(source, tmp_path / "native", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "native").exists()


def test_help_needs_no_heavy_import():
    code = (
        "import sys, jaxspec.cli.convert as c\n"
        "try: c.app(['--help'], standalone_mode=False)\n"
        "finally: assert not {'orbax', 'tensorstore', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--dtype" in done.stdout


def test_ctrl_c_leaves_nothing(tmp_path):
    default_model()  # skips where it is not installed; it takes long enough to be interrupted
    dst = tmp_path / "native"
    process = subprocess.Popen(
        [COMMAND, "default", str(dst)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not any(tmp_path.glob(".native.partial-*/arrays*/layers.*")):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err.strip()) == ("", "")
    assert os.listdir(tmp_path) == []
