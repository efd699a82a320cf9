"""Acceptance lengths of many settings, with a stand-in for the model."""

from types import SimpleNamespace

import bench_fakes
import bench_lengths
import pytest

from jaxspec.bench.prompts import BenchPrompt

PROMPTS = [BenchPrompt("one", "chat", ("a" * 12,)), BenchPrompt("two", "code", ("b" * 30,))]


@pytest.fixture
def opened(monkeypatch):
    """Models that the tool opens, and their calls."""
    bench_fakes.install(monkeypatch)
    calls = []
    monkeypatch.setattr("jaxspec.LLM", lambda model, method, **options: bench_fakes.FakeLLM(draft=None, calls=calls))
    return calls


def test_lengths_are_pooled_by_category_and_compared_with_plain_decoding(tmp_path):
    path = tmp_path / "log.jsonl"
    llm = bench_fakes.FakeLLM()
    [row] = bench_lengths.count_methods(llm, {"tree": bench_fakes.Tree(2)}, PROMPTS, [0.0], 24, path)
    # Three tokens a round, 24 of the second prompt's.
    assert (row.tokens, row.passes) == ([12, 24], [4, 8]) and row.length == 3.0
    assert row.categories == {"chat": 3.0, "code": 3.0} and row.equal and row.exposed is None
    llm.calls.clear()
    [again] = bench_lengths.count_methods(llm, {"tree": bench_fakes.Tree(2)}, PROMPTS, [0.0], 24, path)
    assert again == row and not llm.calls
    wrong = bench_fakes.FakeLLM(wrong=("specexec",))
    [row] = bench_lengths.count_methods(wrong, {"tree": bench_fakes.Tree(2)}, PROMPTS, [0.0], 24)
    assert not row.equal and "NO" in bench_lengths.length_table([row])


@pytest.mark.parametrize("dropped", [False, True])
def test_speeds_by_depth(opened, capsys, dropped):
    words = ["depths", "--depths", "2,3", "--refills", "0", "--timed", "--max-prompts", "1", "--max-tokens", "12"]
    bench_lengths.main([*words, *["--drop"] * dropped])
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    expected = ["ar", "default", "in turn, depth 2", "in turn, depth 3"]
    expected += [f"beside, depth {depth}, refill 0" for depth in (2, 3)]
    assert rows == expected + [f"beside, dropped, depth {depth}, refill 0" for depth in (2, 3)] * dropped
    used = {(m.depth, m.refill, m.overlap, m.reuse) for m, *_ in opened if m.name == "swiftspec"}
    asked = {(None, None, True, True)} | {(depth, None, False, False) for depth in (2, 3)}
    asked |= {(depth, 0, True, keep) for depth in (2, 3) for keep in (True, not dropped)}
    assert used == asked


def test_lengths_are_not_kept_beside_speeds(capsys):
    with pytest.raises(SystemExit):
        bench_lengths.main(["depths", "--timed", "--log", "lengths.jsonl"])
    assert "leave them out with --timed" in capsys.readouterr().err


def test_the_other_suites_have_settings_that_can_be_made():
    options = SimpleNamespace(largest=64, timed=True)
    sizes = {f"specexec {n}" for n in (1, 4, 16, 64)} | {f"specinfer {n}" for n in (1, 4, 16, 60)}
    assert set(bench_lengths.budgets(options)) == sizes
    ranked = bench_lengths.rankings(options)
    assert ranked["in turn probability"].ranking == "probability" and ranked["specexec noise"].ranking == "noise"
