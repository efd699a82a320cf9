"""The GPU benchmark and the tuner on a CPU: every part runs at tiny shapes, and what fails does not end the rest."""

import dataclasses
import json
import sys
import types

import gpu_bench
import jax
import jax.numpy as jnp
import pytest
import tune_kernels
from kernel_bench import kernels, parts, targets, timing
from kernel_bench.cases import list_cases
from kernel_bench.device import published_bandwidth
from native_models import LLAMA, write_native, write_tokenizer

from pallas_kernels import registry


def call(monkeypatch, tool, *arguments):
    monkeypatch.setattr(sys, "argv", [tool.__file__, *map(str, arguments)])
    tool.main()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "model"
    write_native(folder, dataclasses.replace(LLAMA, max_context=1024))
    write_tokenizer(folder, LLAMA.vocab_size)
    return folder


def test_smoke(monkeypatch, capsys, tmp_path, model):
    """All parts but the tests of the device, which begin with a process of their own."""
    path = tmp_path / "out.json"
    chosen = "device,tree_attention,swiglu,steps,decode"
    call(monkeypatch, gpu_bench, "--smoke", "--json", path, "--parts", chosen, "--model", model)
    result = json.loads(path.read_text())
    assert list(result["parts"]) == chosen.split(",")
    for part in result["parts"].values():
        assert part["error"] is None and part["stopped"] is None
        assert not [row for row in part["rows"] if row.get("error") or row.get("errors")]
    for operation in ("tree_attention", "swiglu"):
        assert set(result["parts"][operation]["rows"][1]["times"]) == {"xla", "pallas-triton"}
    assert [verdict["met"] for verdict in result["targets"]] == [None, None, None]
    page = path.with_suffix(".md").read_text()
    assert page == capsys.readouterr().out.removesuffix("\n")
    assert "## Norm and SwiGLU" in page and "## Steps" in page and "| ar |" in page and "not measured" in page


def test_tuner_writes_a_table_that_holds_only_winners(monkeypatch, tmp_path):
    monkeypatch.setattr(
        tune_kernels, "time_calls", lambda function, copies, calls: timing.Timing(next(seconds), "loop")
    )
    seconds = iter([2.0, 1.0])
    call(monkeypatch, tune_kernels, "--smoke", "--folder", tmp_path, "--operations", "swiglu")
    (kind, rows), = json.loads((tmp_path / "swiglu.json").read_text()).items()  # fmt: skip
    assert kind == jax.devices()[0].device_kind and list(rows) == ["T16 D64 F96 x4"]
    won = rows["T16 D64 F96 x4"]
    assert set(won) == {"block_f", "block_k", "warps", "stages"}
    seconds = iter([1.0, 0.99])  # within the margin
    call(monkeypatch, tune_kernels, "--smoke", "--folder", tmp_path, "--operations", "swiglu")
    assert json.loads((tmp_path / "swiglu.json").read_text()) == {kind: {"T16 D64 F96 x4": won}}


def test_tuner_passes_over_what_fails(monkeypatch, capsys, tmp_path):
    def fail(*_):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(tune_kernels, "time_calls", fail)
    call(monkeypatch, tune_kernels, "--smoke", "--folder", tmp_path)
    for operation in ("swiglu", "tree_attention_triton"):
        assert list(json.loads((tmp_path / f"{operation}.json").read_text()).values()) == [{}]
    assert "out of shared memory" in capsys.readouterr().err


def test_a_failing_kernel_leaves_the_others_alone(monkeypatch):
    (case,) = list_cases("swiglu", smoke=True)
    usable = {
        "xla": registry.Kernels("xla", "cpu"),
        "absent": registry.Kernels("x", "gpu", implementations=(("swiglu", "nothing"),)),
        "idle": registry.Kernels("x", "gpu"),
    }
    monkeypatch.setattr(kernels, "time_calls", lambda *_, **__: timing.Timing(1.0, "loop"))
    row = kernels.measure_case(case, usable, smoke=True)
    assert set(row["times"]) == {"xla"}
    assert "ModuleNotFoundError" in row["errors"]["absent"] and "XLA would be measured" in row["errors"]["idle"]


CHILD = """
import pathlib, sys, time
sys.path.append({tools!r})
from kernel_bench.parts import run_rows
def rows():
    yield {{"name": "first"}}
    {then}
    yield {{"name": "second"}}
run_rows("part", rows, pathlib.Path({path!r}), {budget})
"""


@pytest.mark.parametrize(
    ("then", "budget", "rows", "error", "stopped"),
    [
        ("pass", 60, 2, None, None),
        ("raise ValueError('no such GPU')", 60, 1, "ValueError: no such GPU", None),
        ("import os; os._exit(11)", 60, 1, "ended with status 11", None),
        ("pass", 0, 1, None, "its 0 s were over after 1 rows"),
        ("time.sleep(60)", 60, 1, "did not end within 3 s and was killed", None),
    ],
)
def test_a_part_keeps_its_rows(monkeypatch, tmp_path, then, budget, rows, error, stopped):
    path = tmp_path / "part.json"
    tools = str(parts.__file__.removesuffix("/kernel_bench/parts.py"))
    script = CHILD.format(tools=tools, then=then, path=str(path), budget=budget)
    monkeypatch.setattr(parts, "GRACE", 3.0)
    allowed = 0.0 if "sleep" in then else 60.0
    result = parts.run_child("part", [sys.executable, "-c", script], path, allowed)
    assert len(result["rows"]) == rows and result["stopped"] == stopped
    assert (result["error"] is None) == (error is None) and (error or "") in (result["error"] or "")


def test_a_part_that_never_begins(tmp_path):
    result = parts.run_child("part", [sys.executable, "-c", "1/0"], tmp_path / "part.json", 30)
    assert result["rows"] == [] and "ZeroDivisionError" in result["error"]


def test_device_time_is_that_of_the_streams():
    def line(name, *durations):
        return types.SimpleNamespace(name=name, events=[types.SimpleNamespace(duration_ns=d) for d in durations])

    gpu = [line("Stream #14(Compute)", 1500, 500), line("XLA Ops", 2000), line("Stream #15(MemcpyD2D)", 1000)]
    planes = [
        types.SimpleNamespace(name="/host:CPU", lines=[line("Stream of words", 7)]),
        types.SimpleNamespace(name="/device:GPU:0", lines=gpu),
        types.SimpleNamespace(name="/device:GPU:1", lines=gpu),
    ]
    assert timing.sum_streams(planes) == (pytest.approx(3e-6), 3)
    x = jnp.ones(4)
    assert timing.trace_device(lambda: jax.block_until_ready(x + x)) == (0.0, 0)  # no GPU here


def test_targets():
    def timed(xla, kernel):
        return {"xla": {"seconds": xla}, "mosaic": {"seconds": kernel}, "pallas-triton": {"seconds": 9.0}}

    sizes = {"T": 8, "prefix": 1024}
    attention = [{"model": m, "sizes": sizes, "times": t} for m, t in (("a", timed(3.0, 2.0)), ("b", timed(2.0, 2.0)))]
    steps = [
        {"kernels": "auto", "prefix": 512, "rows": rows, "seconds": seconds, "bytes": 80}
        for rows, seconds in ((1, 1.0), (16, 1.2))
    ]
    results = {"tree_attention": {"rows": attention}, "steps": {"rows": steps}}
    verdicts = targets.judge(results, 100.0)
    assert [(v["measured"], v["met"]) for v in verdicts] == [(1.5, True), (1.0, False), (1.2, False), (0.8, True)]


@pytest.mark.parametrize(
    ("kind", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA GH200 480GB", 4.0e12),
        ("NVIDIA L40S", 0.864e12),
        ("NVIDIA L4", 0.3e12),
        ("cpu", None),
    ],
)
def test_bandwidths(kind, bandwidth):
    assert published_bandwidth(kind) == bandwidth
