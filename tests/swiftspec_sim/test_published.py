"""The table of published rows: what is refused, and what each kind of row rests on."""

import tomllib

import numpy as np
import pytest
import simulate_published as published
from swiftspec_sim.clock import Setting, Steps, check_length, longest_length
from swiftspec_sim.synthetic import synthetic_traces
from swiftspec_sim.times import Split

from jaxspec import SwiftSpec
from jaxspec.errors import ConfigError

FIGURES = tomllib.loads(published.FIGURES.read_text(encoding="utf-8"))
BESIDE, IN_TURN = Split(6, 2), Split(8, None)


@pytest.mark.parametrize(
    ("split", "settings", "most"),
    [
        (BESIDE, {"depth": 3}, 3),
        (BESIDE, {"depth": 1}, 2),
        (BESIDE, {"depth": 3, "refill": 2}, 4),
        (BESIDE, {"depth": 20}, 8),
        (BESIDE, {"depth": 2, "leaves": False}, 8),
        (IN_TURN, {"depth": 2, "overlap": False, "reuse": False, "leaves": False}, 8),
        (IN_TURN, {"depth": 2, "overlap": False, "reuse": False}, 4),
        (IN_TURN, {"depth": 20, "overlap": False, "reuse": False}, 8),
    ],
)
def test_a_length_above_the_bound_is_refused(split, settings, most):
    setting = Setting(split, SwiftSpec(7, 8, **settings))
    assert longest_length(setting) == most
    check_length(setting, most)
    with pytest.raises(ConfigError, match=f"no draft exceeds {most} tokens"):
        check_length(setting, most + 0.01)


def test_the_published_lengths_need_the_hypothesis():
    """With one expansion in a printed draft time, the paper's own rule gives a depth that cannot have its length."""
    parallel = FIGURES["swiftspec"]["qwen"]["parallel"]
    for expansions, possible in ((1, False), (published.EXPANSIONS, True)):
        depth = int(parallel["target_ms"] / (parallel["draft_ms"] / expansions))
        setting = Setting(BESIDE, SwiftSpec(7, 8, depth=depth))
        assert (parallel["lengths"][-1] <= longest_length(setting)) == possible


def test_a_synthetic_draft_is_as_sure_as_it_says():
    for sureness in (0.4, 0.8):
        (trace,) = synthetic_traces(sureness, texts=1)
        first = np.exp(trace.child_logprob[:-1, 0])
        assert abs((trace.text == 0).mean() - first.mean()) < 0.06, "calibrated"
        assert (np.diff(trace.child_logprob, axis=1) <= 0).all()
        assert (np.exp(trace.child_logprob).sum(axis=1) < 1 + 1e-5).all()


def test_passes_follow_the_published_ones():
    times = published.PassTimes(FIGURES["swiftspec"]["passes"])
    assert times.worst < 0.1
    for model in FIGURES["swiftspec"]["passes"]:
        for devices, ms in model["ms"].items():
            assert times(model, int(devices)) == pytest.approx(ms, rel=0.1)


def test_offloaded_and_self_drafted_rows():
    rows = [*published.specexec_rows(FIGURES["specexec"]), *published.swift_rows(FIGURES["swift"])]
    assert len(rows) == len(FIGURES["specexec"]["rows"]) + len(FIGURES["swift"]["rows"])
    for row in rows:
        assert row.kind in ("predicted", "fitted") and row.modelled > 0
        assert row.kind != "fitted" or abs(row.error) < 1e-9
        assert len(published.cells_of(row)) == len(published.HEAD)
    # A draft that costs half a pass and is always right gains less than twice.
    assert all(
        row.modelled < 2 * plain for row, (*_, plain, _) in zip(rows[-2:], FIGURES["swift"]["rows"], strict=True)
    )


def test_a_predicted_row_does_not_rest_on_its_own_speed():
    figures = FIGURES["specexec"]
    for place, row in enumerate(published.specexec_rows(figures)):
        *rest, speed, gain = figures["rows"][place]
        other = [*figures["rows"][:place], [*rest, 2 * speed, gain], *figures["rows"][place + 1 :]]
        again = [*published.specexec_rows({"rows": other})][place]
        assert (again.modelled == row.modelled) == (row.kind == "predicted"), row.what


def test_a_host_that_is_late_delays_every_round():
    from swiftspec_sim.clock import Clocks

    found = []
    for host in (0.0, 2.0):
        clocks, steps = Clocks(), Steps(10.0, 1.0, 1.0, 0.0, 0.0, 0.5, host)
        for _ in range(3):
            clocks.turn(steps, 0, 0)
            clocks.grow(steps, 4)
        found.append(clocks.rounds)
    assert found[0] == [10.5] * 3 and found[1] == [12.5] * 3
