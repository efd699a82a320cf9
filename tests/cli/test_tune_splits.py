"""`jaxspec-tune --method swiftspec`: one real profile of two devices, whose preset decodes; and what it refuses."""

import json
import signal
import sys
import tomllib

import pytest
from tiny_models import quick_compilation

from jaxspec.cli import tune as command
from jaxspec.tune import swiftspec as splits


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command in this process; returns its status and output."""
    monkeypatch.setattr(splits, "BATCHES", (4,))
    monkeypatch.setattr(splits, "DEEPEST", 1)
    monkeypatch.setattr(splits, "PASS_REPEATS", 2)
    before = signal.getsignal(signal.SIGINT)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", [command.NAME, *arguments])
        with pytest.raises(SystemExit) as left, quick_compilation():
            command.main()
        return left.value.code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGINT, before)


def test_a_profile_of_two_devices(call, tiny_model, tmp_path):
    prompts, preset, report = (tmp_path / name for name in ("prompts.jsonl", "preset.toml", "out.json"))
    prompts.write_text(json.dumps({"question_id": 1, "category": "words", "turns": ["w1 w2 w0 w1 w2"]}) + "\n")
    words = ["--method", "swiftspec", "--model", tiny_model, "--draft-model", tiny_model, "--devices", "2"]
    words += ["--prompts", str(prompts), "--max-prompts", "1", "-n", "12", "--repeats", "1", "--json", str(report)]
    status, out, err = call(str(preset), *words)
    assert status == 0, err
    assert "tokens/s" in out and ("the fastest here is" in out or "no split gains on it" in out)

    rows = json.loads(report.read_text())["splits"]
    assert {row["method"] for row in rows} == {"ar", "bs 4, w 8, d 1"} and len(rows) == 2
    assert [row["tokens_per_s"] for row in rows] == sorted((row["tokens_per_s"] for row in rows), reverse=True)
    assert all(row["tokens_per_s"] > 0 and row["gain"] > 0 for row in rows)
    assert all(row["times"]["target_devices"] == row["times"]["draft_devices"] == 1 for row in rows)
    assert set(rows[0]["times"]["verify_s"]) == {"4"}

    written = tomllib.loads(preset.read_text())
    assert written["model"] == tiny_model and written["target_devices"] == 1
    if written["method"] == "swiftspec":
        assert (written["draft_devices"], written["batch"], written["width"]) == (1, 4, 8)
    else:
        assert written == {"method": "ar", "model": tiny_model, "target_devices": 1}


@pytest.mark.parametrize("devices", ["9", "64"])
def test_devices_that_are_not_there(call, tiny_model, devices):
    words = ("--method", "swiftspec", "--model", tiny_model, "--draft-model", tiny_model, "--devices", devices)
    status, out, err = call(*words)
    assert (status, out) == (2, "")
    assert "splits at least 2 devices and at most the 8 there are" in err and "Traceback" not in err
