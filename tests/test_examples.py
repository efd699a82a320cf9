"""Each example runs as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# What each prints, whatever the machine.
PRINTED = {
    "agent.py": "answer: ",
    "chat.py": "> Which of them is the colour of the sea?",
    "extract.py": "was born in",
    "check_lossless.py": "temperature 0.8, top-p 0.9: specexec 3 of 3 equal",
    "own_draft.py": "The three laws of motion are",
    "stream_drafted.py": "tokens per pass",
    "swiftspec_devices.py": "tokens per target pass",
}


def test_all_examples_are_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_example(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout
