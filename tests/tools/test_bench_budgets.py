"""Rates over budgets: what a row holds, and its interval."""

import json

import bench_budgets
import numpy as np
import pytest

COUNTS = [(48, 12), (48, 40), (9, 9), (48, 24), (30, 10), (2, 1)]


def test_the_interval_is_of_the_pooled_rate():
    rng = np.random.default_rng(7)
    rates = []
    for _ in range(4000):
        drawn = [COUNTS[i] for i in rng.integers(0, len(COUNTS), len(COUNTS))]
        rates.append(sum(tokens for tokens, _ in drawn) / sum(passes for _, passes in drawn))
    row = bench_budgets.summarise("specexec", 4, 0.6, COUNTS)
    assert row["rate"] == 185 / 96
    assert row["interval"] == pytest.approx(np.percentile(rates, [2.5, 97.5]), abs=0.06)
    assert row["interval"][0] < row["rate"] < row["interval"][1]
    assert row == bench_budgets.summarise("specexec", 4, 0.6, COUNTS)


def test_a_long_answer_counts_for_more():
    """The mean of the prompts' rates would be 2, far from what a thousand passes say."""
    low, high = bench_budgets.pooled_interval([(1000, 1000), *[(3, 1)] * 1])
    assert (low, high) == pytest.approx((1.0, 3.0))
    low, high = bench_budgets.pooled_interval([(1000, 1000)] * 9 + [(30, 10)])
    assert low == 1.0 and 1.003 < high < 1.02


def test_a_row_holds_what_each_prompt_took():
    row = json.loads(json.dumps(bench_budgets.summarise("specinfer", 16, 0.0, COUNTS)))
    assert list(zip(row["tokens"], row["passes"], strict=True)) == COUNTS
    assert row["per_prompt"] == [tokens / passes for tokens, passes in COUNTS]


def test_prompts_that_agree_and_one_prompt_alone():
    assert bench_budgets.pooled_interval([(40, 10)] * 5) == (4.0, 4.0)
    assert bench_budgets.pooled_interval([(40, 10)]) is None
