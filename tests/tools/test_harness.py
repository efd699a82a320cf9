"""The parts that the benchmarks share: intervals, ratios, files of answers."""

import json

import numpy as np
import pytest
from harness import AnswerLog, digest_of, interleave, make_ratios, make_table, pooled_interval

COUNTS = [(48, 12), (48, 40), (9, 9), (48, 24), (30, 10), (2, 1)]


def test_the_interval_is_of_the_pooled_rate():
    rng = np.random.default_rng(7)
    rates = []
    for _ in range(4000):
        drawn = [COUNTS[i] for i in rng.integers(0, len(COUNTS), len(COUNTS))]
        rates.append(sum(tokens for tokens, _ in drawn) / sum(passes for _, passes in drawn))
    assert pooled_interval(COUNTS) == pytest.approx(np.percentile(rates, [2.5, 97.5]), abs=0.06)
    assert pooled_interval(COUNTS) == pooled_interval(COUNTS)
    # A long answer counts for more: the mean of the prompts' rates would be 1.2.
    low, high = pooled_interval([(1000, 1000)] * 9 + [(30, 10)])
    assert low == 1.0 and 1.003 < high < 1.02
    assert pooled_interval([(40, 10)] * 5) == (4.0, 4.0) and pooled_interval([(40, 10)]) is None


def test_runs_take_turns_after_a_warm_up_that_does_not_count():
    order = []
    seconds = {"a": iter([9.0, 2.0, 4.0]), "b": iter([9.0, 1.0, 8.0])}
    samples = interleave({name: lambda name=name: order.append(name) or next(seconds[name]) for name in "ab"}, 2)
    assert order == list("ababab") and samples == {"a": [2.0, 4.0], "b": [1.0, 8.0]}
    # A ratio is taken within a repeat; one of a run that was not measured is left out.
    assert make_ratios(samples, {"a / b": ("a", "b"), "c / b": ("c", "b")}) == {"a / b": [2.0, 0.5]}


def test_a_table_is_markdown():
    assert make_table(["name", "ms"], [["a", 1]]).splitlines() == ["| name | ms |", "| --- | ---: |", "| a | 1 |"]


def test_a_log_goes_on_after_a_line_that_was_being_written(tmp_path):
    path, settings = tmp_path / "log.jsonl", {"model": "m", "max_tokens": 8}
    AnswerLog(path, settings).add(("ar", 0.0, "1"), {"tokens": [4]})
    path.write_text(path.read_text() + '{"key": ["ar", 0.0')
    log = AnswerLog(path, settings)
    assert log.known == {("ar", 0.0, "1"): {"tokens": [4]}}
    log.add(("ar", 0.0, "2"), {"tokens": []})
    assert [json.loads(line) for line in path.read_text().splitlines()][2]["key"] == ["ar", 0.0, "2"]
    kept = path.read_bytes()
    with pytest.raises(SystemExit, match="answers of other settings"):
        AnswerLog(path, {**settings, "max_tokens": 9})
    assert path.read_bytes() == kept


def test_a_replaced_draft_has_another_digest_and_another_page_has_not(tmp_path):
    (tmp_path / "weights").write_bytes(b"first")
    first = digest_of(tmp_path)
    (tmp_path / "README.md").write_text("no weights")
    assert digest_of(tmp_path) == first and digest_of(None) is None
    (tmp_path / "weights").write_bytes(b"other")
    assert digest_of(tmp_path) != first
