"""Short runs of `tools/fuzz_hostile.py`, always of the same cases; and that it sees what it looks for."""

import os
import sys
import warnings

import fuzz_hostile
import pytest

from jaxspec.errors import ConfigError


@pytest.mark.parametrize(
    ("area", "cases"), [("templates", 60), ("tokenizers", 80), ("gguf", 200), ("native", 20), ("values", 150)]
)
def test_nothing_but_errors_of_jaxspec(area, cases, monkeypatch):
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    module = pytest.importorskip(fuzz_hostile.AREAS[area])
    refused = sum(fuzz_hostile.run_case(module, number) for number in range(cases))
    assert 0 < refused < cases


@pytest.mark.slow
def test_commands_that_are_interrupted_or_have_no_streams():
    assert fuzz_hostile.run_child("processes", 0, 12) >= 0


class Area:
    """A made-up area."""

    def __init__(self, run):
        self.run = lambda rng, folder: run()


def raise_error(error, *said):
    if said:
        error.args = said
    raise error


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: raise_error(ValueError("x")), "ValueError: x"),
        (lambda: raise_error(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: os.write(2, b"thread panicked"), "printed: thread panicked"),
        (lambda: print("x", file=sys.__stderr__), "printed: x"),
        (lambda: warnings.warn("odd", stacklevel=1), "UserWarning: odd"),
        (lambda: raise_error(ConfigError("x"), "a\nb"), "not one printable line"),
    ],
)
def test_findings(run, words):
    with pytest.raises(fuzz_hostile.CaseError, match=words):
        fuzz_hostile.run_case(Area(run), 0)
