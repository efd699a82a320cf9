"""The parts that the benchmarks share: turns, ratios, tables."""

from harness import interleave, make_ratios, make_table


def test_runs_take_turns_after_a_warm_up_that_does_not_count():
    order = []
    seconds = {"a": iter([9.0, 2.0, 4.0]), "b": iter([9.0, 1.0, 8.0])}
    samples = interleave({name: lambda name=name: order.append(name) or next(seconds[name]) for name in "ab"}, 2)
    assert order == list("ababab") and samples == {"a": [2.0, 4.0], "b": [1.0, 8.0]}
    # A ratio is taken within a repeat; one of a run that was not measured is left out.
    assert make_ratios(samples, {"a / b": ("a", "b"), "c / b": ("c", "b")}) == {"a / b": [2.0, 0.5]}


def test_a_table_is_markdown():
    assert make_table(["name", "ms"], [["a", 1]]).splitlines() == ["| name | ms |", "| --- | ---: |", "| a | 1 |"]
