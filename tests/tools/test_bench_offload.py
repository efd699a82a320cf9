"""The table of streamed targets: its questions, that a stopped run goes on, and its arithmetic."""

from types import SimpleNamespace

import bench_offload
import pytest
from bench_offload import PLAIN, Counts, list_methods, summarise


class FakeModel:
    """Stands for a loaded model: ten tokens a second, and a pass for each of them."""

    def __init__(self, **options):
        self.model_path = type("Path", (), {"name": "m"})()
        self._internals = SimpleNamespace(offload_plan=SimpleNamespace(pass_bytes=100))


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Run the tool with invented answers; gives the keys that were answered in each run."""
    ran = []

    def run(llm, methods, prompts, missing, log, max_tokens):
        ran.append(list(missing))
        for key in missing:
            seconds = key.pass_seconds if key.method == PLAIN else key.pass_seconds / 2
            log.add(key, Counts(10, 10 * seconds, 12, 12 * key.pass_seconds))

    monkeypatch.setattr(bench_offload.jaxspec, "LLM", FakeModel)
    monkeypatch.setattr(bench_offload, "run", run)

    def call(*words):
        bench_offload.main(["--log", str(tmp_path / "answers.jsonl"), *words])
        return ran

    return call


def test_the_defaults_are_the_whole_table(table, capsys):
    [asked] = table("--limit", "100000")
    methods = {key.method for key in asked}
    assert {f"specexec {n}" for n in (1, 4, 16, 64, 256, 1024)} < methods and PLAIN in methods
    assert sum(name.startswith("specinfer") for name in methods) == 6
    assert {key.pass_seconds for key in asked} == {0.25, 1.0, 4.0} and {key.temperature for key in asked} == {0.0, 0.6}
    assert len({key.prompt for key in asked}) == 12
    assert len(asked) == len(set(asked)) == len(methods) * 3 * 2 * 12
    assert "| specexec 64 | 1.0 | 0.0 | 2.00 | 2.00 to 2.00 | 2.00 |" in capsys.readouterr().out


def test_a_run_that_was_stopped_goes_on(table, capsys):
    words = ("--budgets", "4", "--overlapped", "--pass-seconds", "1", "--temperatures", "0", "--max-prompts", "2")
    first = table(*words, "--limit", "3")[0]
    assert "0 of 6 answers are there" in capsys.readouterr().out
    second = table(*words)[1]
    assert len(first) == 3 and len(second) == 3 and not set(first) & set(second)
    assert "3 of 6 answers are there" in capsys.readouterr().out
    assert table(*words)[2] == []


def test_speed_ups_are_over_plain_decoding_at_the_same_bandwidth():
    slow = summarise(PLAIN, 4.0, 0.0, [Counts(4, 16.0, 6, 24.0)] * 2, [])
    plain = summarise(PLAIN, 1.0, 0.0, [Counts(4, 4.0, 6, 6.0)] * 2, [])
    tree = summarise("specexec 4", 1.0, 0.0, [Counts(8, 4.0, 6, 6.6)] * 2, [slow, plain])
    assert plain["speed_up"] == 1.0 and tree["speed_up"] == pytest.approx(2.0)
    assert tree["tokens_per_pass"] == 2.0 and tree["measured_pass_s"] == pytest.approx(1.1)
    assert summarise("specexec 4", 0.25, 0.0, [Counts(8, 4.0, 6, 6.6)] * 2, [slow, plain])["speed_up"] is None


def test_every_method_of_the_table_can_be_made():
    made = list_methods([1, 1024], [16, 256])
    assert made["swiftspec 256"].overlap and made["swiftspec 256"].num_draft_tokens == 256
