"""The GPU benchmark and the tuner on a CPU: every part runs at tiny shapes, and what fails does not end the rest."""

import dataclasses
import json
import math
import subprocess
import sys
import time
import types

import gpu_bench
import jax
import jax.numpy as jnp
import pytest
import tune_kernels
from kernel_bench import kernels, parts, rounds, targets, timing
from kernel_bench.cases import attention_case, list_cases
from kernel_bench.device import published_bandwidth
from native_models import LLAMA, write_model

from jaxspec.models.config import ModelConfig
from pallas_kernels import registry


def call(monkeypatch, tool, *arguments):
    monkeypatch.setattr(sys, "argv", [tool.__file__, *map(str, arguments)])
    tool.main()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "model"
    write_model(folder, dataclasses.replace(LLAMA, max_context=1024))
    return folder


@pytest.mark.slow
def test_smoke(monkeypatch, capsys, tmp_path, model):
    """All parts but the tests of the device, which begin with a process of their own."""
    path = tmp_path / "out.json"
    chosen = "steps,offload,tree_attention,linear,swiglu,decode"
    call(monkeypatch, gpu_bench, "--smoke", "--json", path, "--parts", chosen, "--model", model, "--minutes", 1000)
    result = json.loads(path.read_text())
    assert list(result["parts"]) == ["device", *chosen.split(",")] and result["error"] is None
    assert result["device"] == jax.devices()[0].device_kind and result["environment"]
    for part in result["parts"].values():
        assert part["error"] is None and part["stopped"] is None
        assert not [row for row in part["rows"] if row.get("error") or row.get("errors")]
    for operation in ("tree_attention", "linear"):
        row = result["parts"][operation]["rows"][1]
        assert set(row["times"]) == {"xla", "pallas-triton"} and row["auto"] == "pallas-triton"
    assert set(result["parts"]["swiglu"]["rows"][1]["times"]) == {"xla"}
    assert {verdict["met"] for verdict in result["targets"] if "link" not in verdict["target"]} == {None}
    assert next(verdict for verdict in result["targets"] if "link" in verdict["target"])["measured"] > 0
    page = path.with_suffix(".md").read_text()
    assert page == capsys.readouterr().out.removesuffix("\n")
    assert "## Not measured" not in page and "## What failed" not in page
    assert "## Norm and SwiGLU" in page and "## Steps" in page and "| ar |" in page and "not measured" in page


def fake_parts(monkeypatch, **rows):
    """Parts in the place of all real ones; the names that run, in their order."""
    ran = []

    def make(name, found):
        def part():
            ran.append(name)
            for row in found:
                if isinstance(row, BaseException):
                    raise row
                yield row

        return part

    monkeypatch.setattr(gpu_bench, "make_parts", lambda *_: {name: make(name, found) for name, found in rows.items()})
    return ran


DEVICE = {"name": "device", "device": "NVIDIA H200", "platform": "gpu", "environment": "e", "measured_bandwidth": 4e12}


def test_what_is_cut_off_leaves_what_it_has(monkeypatch, tmp_path):
    """After every part there is a whole result, and an interrupted part keeps its rows."""
    path, seen = tmp_path / "out.json", []

    def look(result):
        seen.append([*json.loads(path.read_text())["parts"]] if path.exists() else [])
        return judge(result, None)

    judge = targets.judge
    monkeypatch.setattr(gpu_bench, "judge", lambda parts, _: look(parts))
    ran = fake_parts(monkeypatch, device=[DEVICE], steps=[{"name": "a"}], swiglu=[{"name": "b"}, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        call(monkeypatch, gpu_bench, "--smoke", "--json", path, "--parts", "steps,swiglu")
    assert ran == ["device", "steps", "swiglu"] and seen == [[], ["device"], ["device", "steps"]]
    parts = json.loads(path.read_text())["parts"]
    assert [row["name"] for row in parts["swiglu"]["rows"]] == ["b"] and parts["swiglu"]["error"] == "was interrupted"
    assert "| steps | 1 |" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", ["judge", "render"])
def test_errors_of_verdicts_and_tables_lose_nothing(monkeypatch, capsys, tmp_path, name):
    fake_parts(monkeypatch, device=[DEVICE], swiglu=[{"name": "a"}])
    monkeypatch.setattr(gpu_bench, name, lambda *_: 1 / 0)
    call(monkeypatch, gpu_bench, "--smoke", "--json", tmp_path / "out.json", "--parts", "swiglu")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["parts"]["swiglu"]["rows"] == [{"name": "a"}]
    assert "ZeroDivisionError" in (capsys.readouterr().out if name == "render" else result["error"])


def test_what_was_not_measured_is_named(monkeypatch, capsys, tmp_path):
    """And nothing is written unasked."""
    monkeypatch.setattr(gpu_bench, "RESULTS", tmp_path)
    planned = {"name": "steps", "planned": ["a, T=1", "a, T=16", "a, T=64"]}
    fake_parts(monkeypatch, device=[DEVICE], steps=[planned, {"name": "a, T=1"}, {"name": "a, T=16", "error": "no"}])
    call(monkeypatch, gpu_bench, "--smoke", "--parts", "steps")
    assert "## Not measured\n\n* steps: a, T=64\n" in capsys.readouterr().out and not [*tmp_path.iterdir()]


def test_models_that_share_a_case_are_measured_once():
    cases = list_cases("tree_attention")
    assert len({case.name for case in cases}) == len(cases) == 3 * 2 * 4
    assert [case.model for case in cases[:4]] == [
        "llama-3-8b TP1", "llama-3-70b TP4", "llama-3-70b TP8, qwen2-72b TP8", "smollm2-135m TP1"
    ]  # fmt: skip
    assert len(list_cases("swiglu")) == 3 * 5
    assert {case.sizes["T"] for case in list_cases("swiglu", rows=(2, 32))} == {2, 32}
    # Not even the operands of the least work fit into a cache.
    for case in [*list_cases("tree_attention"), *list_cases("swiglu")]:
        assert timing.count_copies(case.nbytes) * case.nbytes >= timing.COLD_BYTES


@pytest.mark.parametrize("implementation", ["triton", "mosaic", None])
def test_a_kernels_call_is_known(implementation):
    """By the program of it, in every dialect; what goes to XLA is none."""
    case = attention_case(ModelConfig("llama", 1, 64, 96, 4, 2, 64, 64, 256), "tiny", 1, 8, 100)
    implementations = (("tree_attention", implementation),) if implementation else ()
    chosen = registry.Kernels("one", "gpu", implementations=implementations, capability=(9, 0), multiprocessors=8)
    operands, state = case.copies(1)[0]
    assert kernels.calls_kernel(kernels.bind(case.function, chosen), operands, state) == bool(implementation)


def test_the_device_is_known_by_other_parts(monkeypatch, tmp_path):
    """Its own part died; the file is then renamed."""
    monkeypatch.setattr(gpu_bench, "RESULTS", tmp_path)
    output = gpu_bench.Output(None, smoke=False)
    arguments = types.SimpleNamespace(smoke=False)
    dead = {"part": "device", "rows": [], "error": "was killed", "stopped": None, "seconds": 1.0}
    output.save(gpu_bench.summarise({"device": dead}, arguments, 1.0))
    assert {path.name for path in tmp_path.iterdir()} == {"gpu-unknown-device.json", "gpu-unknown-device.md"}
    swiglu = dead | {"part": "swiglu", "rows": [{"name": "a", "device": "NVIDIA H200"}]}
    output.save(gpu_bench.summarise({"device": dead, "swiglu": swiglu}, arguments, 2.0))
    assert {path.name for path in tmp_path.iterdir()} == {"gpu-h200.json", "gpu-h200.md"}
    result = json.loads((tmp_path / "gpu-h200.json").read_text())
    assert result["bandwidth"] == {"published": 4.8e12, "measured": None, "used": 4.8e12}


@pytest.mark.parametrize("minutes", [10, 0.5])
def test_parts_that_are_all_late_end_in_time(monkeypatch, minutes):
    now, slices = [0.0], []

    def run_late(name, command, path, budget_s, grace_s):
        slices.append(budget_s)
        now[0] += budget_s + grace_s
        return parts.read_part(name, path)

    monkeypatch.setattr(gpu_bench, "run_child", run_late)
    monkeypatch.setattr(gpu_bench, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    arguments = types.SimpleNamespace(smoke=False, minutes=minutes, model=None)
    gpu_bench.run_all(list(gpu_bench.SHARES), arguments, lambda result: None)
    assert len(slices) == len(gpu_bench.SHARES) and min(slices) > 0
    assert now[0] == pytest.approx(60 * minutes - gpu_bench.RESERVE)


@pytest.fixture
def device_tests(monkeypatch, tmp_path):
    """A function that runs tests of the given text as those of a GPU, and a list of the limits that were set for them.

    No limit runs out by itself: how long pytest takes to begin depends on the machine.
    """
    limits = []

    def set_limit(seconds, end):
        limits.append(types.SimpleNamespace(end=end, start=lambda: None, cancel=lambda: None))
        return limits[-1]

    def run(text):
        file = tmp_path / "test_some.py"
        file.write_text(text)
        return gpu_bench.run_test_files([file], 5)

    monkeypatch.setattr(gpu_bench, "threading", types.SimpleNamespace(Timer=set_limit))
    monkeypatch.setattr(gpu_bench, "ROOT", tmp_path)
    return run, limits


def test_rows_of_tests(device_tests):
    run, _ = device_tests
    *tests, last = run(
        "import pytest\ndef test_a(): pass\n@pytest.mark.parametrize('x', ['b c'])\ndef test_b(x): assert 0\n"
        "@pytest.mark.skip\ndef test_c(): pass\n"
    )
    names = ["test_some.py::test_a", "test_some.py::test_b[b c]", "test_some.py::test_c"]
    outcomes = ["passed", "failed", "skipped"]
    assert [(row["name"], row["outcome"]) for row in tests] == [*zip(names, outcomes, strict=True)]
    assert [last[outcome] for outcome in outcomes] == [1, 1, 1] and "assert 0" in last["error"]
    # With pytest-xdist a line begins with the worker.
    found = gpu_bench.TEST_LINE.match("[gw11] [ 17%] FAILED tests/gpu/test_a.py::test_b[c d]")
    assert found is not None and (found["before"], found["last"]) == ("FAILED", "tests/gpu/test_a.py::test_b[c d]")
    assert gpu_bench.TEST_LINE.match("tests/gpu/test_a.py::test_b ") is None
    *_, last = run("import pytest\n@pytest.mark.skip\ndef test_c(): pass\n")
    assert last["status"] == 0 and last["error"] == "nothing was tested: 1 tests were skipped"


def test_tests_before_one_that_hangs(device_tests):
    run, limits = device_tests
    rows = run("import time\ndef test_a(): pass\ndef test_d():\n    while True: time.sleep(60)\n")
    first = next(rows)
    limits[0].end()
    (last,) = rows
    assert first["outcome"] == "passed" and last["passed"] == 1 and "(it had 5 s)" in last["error"]


def test_kernels_are_tested_before_decoding(monkeypatch):
    ran = []

    def run_test_files(files, seconds, smoke=False, workers=0):
        ran.append(([file.name for file in files], seconds, workers))
        return ()

    monkeypatch.setattr(gpu_bench, "run_test_files", run_test_files)
    monkeypatch.setattr(gpu_bench, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(gpu_bench.importlib.util, "find_spec", lambda name: None if name == "xdist" else object())
    ((_, planned),) = (row.values() for row in gpu_bench.run_tests(False, 90.0))
    names = [name for (name,), _, _ in ran]
    assert [name.rpartition("/")[2] for name in planned] == names
    assert names[:2] == ["test_kernels.py", "test_decode.py"]
    assert sorted(names) == sorted(path.name for path in (gpu_bench.ROOT / "tests" / "gpu").glob("test_*.py"))
    # What the first ones leave goes to the later ones.
    assert sum(seconds for _, seconds, _ in ran) >= 90.0 and ran[-1][1] == 90.0
    # With pytest-xdist all of them run at the same time.
    monkeypatch.setattr(gpu_bench.importlib.util, "find_spec", lambda name: object())
    list(gpu_bench.run_tests(False, 90.0))
    together, seconds, workers = ran[-1]
    assert together == names and seconds == 90.0 and workers > 0


def test_a_configuration_that_dies_is_named(monkeypatch):
    """And busy time of streams that overlap counts once. `test_dry_run` measures rounds."""
    assert rounds.measure_union([(0, 4), (2, 3), (3, 6), (8, 9)]) == 7
    broken = dataclasses.replace(rounds.CONFIGURATIONS["plain"], flags="--xla_no_such_flag=1")
    monkeypatch.setitem(rounds.CONFIGURATIONS, "plain", broken)
    *_, last = rounds.measure_rounds(smoke=True, names=["plain"])
    assert "ended with status" in last["error"]


def test_tuner_goes_downhill():
    """Each size by itself, from wherever the ones before have led; a few candidates of hundreds are timed."""
    operation, tried = tune_kernels.OPERATIONS["linear"], []
    case = list_cases("linear")[0]
    default = operation.default("kind", registry.Kernels("x", "gpu", multiprocessors=132), case)
    wanted = {"block_o": 32, "step": 64, "warps": 8}

    def measure(sizes):
        tried.append(sizes)
        if sizes.stages == default.stages + 1:
            return math.inf  # does not fit
        return 1.0 + sum(getattr(sizes, field) != value for field, value in wanted.items())

    assert not all(getattr(default, field) == value for field, value in wanted.items())
    best = tune_kernels.tune_case(operation, case, default, measure)
    assert best == dataclasses.replace(default, **wanted)
    assert tried[0] == default and len(set(tried)) == len(tried) <= 16
    # Within the margin nothing changes.
    slightly = iter([1.0] + [0.99] * 100)
    assert tune_kernels.tune_case(operation, case, default, lambda sizes: next(slightly)) == default
    # Where the heuristic's fail, whatever runs.
    other = tune_kernels.tune_case(operation, case, default, lambda sizes: math.inf if sizes == default else 5.0)
    assert other != default


@pytest.mark.parametrize("name", tune_kernels.OPERATIONS)
def test_tuner_times_each_row_of_the_table_once(monkeypatch, name):
    """And those that caches of a power of two of slots ask for; what does not end in time is named."""
    monkeypatch.setattr(tune_kernels, "tune_case", lambda operation, case, default, *_: dataclasses.replace(
        default, warps=2
    ))  # fmt: skip
    console, kernels_here = tune_kernels.Console(stderr=True), registry.Kernels("x", "gpu", interpret=True)
    found, failures = tune_kernels.tune(name, kernels_here, "kind", float("inf"), False, console)
    assert failures == []
    if name == "linear":
        assert "q4_0_planes T8 O4096 B7168" in found and "int4_g128_planes T64 O4096 B7168" in found
    else:
        assert len(found) == 4 * 2 * 7 and "T8 G4 H128 S1024 K8 x2" in found and "T8 G4 H128 S8192 K8 x2" in found
    monkeypatch.undo()
    found, (failure,) = tune_kernels.tune(name, kernels_here, "kind", -1.0, False, console)
    assert found == {} and failure.endswith("the time is up")


def test_tuner_writes_a_table_that_holds_only_winners(monkeypatch, tmp_path):
    monkeypatch.setattr(
        tune_kernels, "time_calls", lambda function, copies, calls: timing.Timing(next(seconds), "loop")
    )
    seconds = iter([2.0, 1.0])
    call(monkeypatch, tune_kernels, "--smoke", "--folder", tmp_path, "--operations", "linear")
    (kind, rows), = json.loads((tmp_path / "linear.json").read_text()).items()  # fmt: skip
    assert kind == jax.devices()[0].device_kind and len(rows) == 1
    ((row, won),) = rows.items()
    assert set(won) == {"block_o", "step", "splits", "warps", "stages"}
    seconds = iter([1.0, 0.99])  # within the margin
    call(monkeypatch, tune_kernels, "--smoke", "--folder", tmp_path, "--operations", "linear")
    assert json.loads((tmp_path / "linear.json").read_text()) == {kind: {row: won}}


def test_tuner_passes_over_what_fails(monkeypatch, capsys, tmp_path):
    cases, console = list_cases("linear", smoke=True), tune_kernels.Console(stderr=True)
    with monkeypatch.context() as patch:
        patch.setattr(tune_kernels, "list_cases", lambda *_: cases)
        patch.setattr(tune_kernels, "time_calls", lambda *_: timing.Timing(1.0, "loop"))
        kernels_here = registry.Kernels("x", "gpu", interpret=True)
        found, (failure,) = tune_kernels.tune("linear", kernels_here, "kind", float("inf"), False, console)
    assert found == {} and "nothing is tuned by a clock" in failure

    def fail(*_):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(tune_kernels, "time_calls", fail)
    call(monkeypatch, tune_kernels, "--smoke", "--folder", tmp_path)
    for operation in ("tree_attention_triton", "linear"):
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
    row = kernels.measure_case(case, usable, smoke=True, preferred=("idle", "absent"))
    assert set(row["times"]) == {"xla"}
    # What does not take a shape is passed over, what fails is what users would get.
    assert row["auto"] == "absent"
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


def child(then, path, budget):
    """A command that runs a part of two rows, with something between them."""
    tools = str(parts.__file__.removesuffix("/kernel_bench/parts.py"))
    return [sys.executable, "-c", CHILD.format(tools=tools, then=then, path=str(path), budget=budget)]


@pytest.mark.parametrize(
    ("then", "budget", "rows", "error", "stopped"),
    [
        ("1/0", 1e6, 1, "ZeroDivisionError", None),
        ("import os; os._exit(11)", 1e6, 1, "ended with status 11", None),
        ("pass", 0, 1, None, "its 0 s were over after 1 rows"),
    ],
)
def test_a_part_keeps_its_rows(tmp_path, then, budget, rows, error, stopped):
    path = tmp_path / "part.json"
    result = parts.run_child("part", child(then, path, budget), path, 1e6)
    assert len(result["rows"]) == rows and result["stopped"] == stopped
    assert (result["error"] is None) == (error is None) and (error or "") in (result["error"] or "")


def test_a_part_that_hangs_keeps_its_rows(monkeypatch, tmp_path):
    """Its time is up once it hangs: how long it takes to come there depends on the machine."""
    path = tmp_path / "part.json"

    class Late(subprocess.Popen):
        def communicate(self, input=None, timeout=None):
            while not path.is_file():
                time.sleep(0.05)
            return super().communicate(input, 0.05)

    monkeypatch.setattr(parts.subprocess, "Popen", Late)
    result = parts.run_child("part", child("while True: time.sleep(60)", path, 1e6), path, 2.0, 1.0)
    assert [row["name"] for row in result["rows"]] == ["first"]
    assert result["error"] == "did not end within 3 s and was killed"


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
    def timed(xla, kernel, method="trace"):
        # The other one is faster, and nobody gets it.
        seconds = {"xla": xla, "mosaic": kernel, "pallas-triton": 0.1}
        return {
            name: {"seconds": each, "method": method if name == "xla" else "trace"} for name, each in seconds.items()
        }

    sizes = {"T": 8, "prefix": 1024}
    attention = [
        {"model": m, "sizes": sizes, "times": t, "auto": "mosaic"}
        for m, t in (("a", timed(3.0, 2.0)), ("b", timed(2.0, 2.0)), ("c", timed(3.0, 2.0, "loop")))
    ]
    assert targets.best_kernel(attention[0]) == "pallas-triton"
    steps = [
        {"kernels": "auto", "prefix": 512, "rows": rows, "seconds": seconds, "bytes": 80}
        for rows, seconds in ((1, 1.0), (16, 1.2))
    ]
    forms = (("pallas-triton int4_g128", 0.4), ("pallas-triton q4_k", 0.5), ("auto exact", 1.2))
    steps += [{"kernels": form, "prefix": 512, "rows": 1, "seconds": seconds} for form, seconds in forms]
    rounds_ = [
        {"name": f"rounds, plain{more}, 0 accepted", "seconds": s} for more, s in (("", 3.0), (", pallas-triton", 2.0))
    ] + [{"name": f"rounds, specexec {k}, 4 accepted", "seconds": s} for k, s in ((128, 9.0), (512, 24.0))]
    link = [{"name": name, "bytes_per_s": rate} for name, rate in (("link", 20.0), ("streamed pass", 17.0))]
    results = {
        "tests": {"rows": [{"outcome": "passed"}, {"outcome": "failed"}]}, "tree_attention": {"rows": attention},
        "steps": {"rows": steps}, "rounds": {"rows": rounds_}, "offload": {"rows": link},
    }  # fmt: skip
    assert [published_bandwidth(kind) for kind in ("NVIDIA GH200 480GB", "NVIDIA L4", "cpu")] == [4.0e12, 0.3e12, None]
    verdicts = targets.judge(results, 100.0)
    assert [(v["measured"], v["met"]) for v in verdicts] == [
        (1.0, False), (2.5, True), (2.0, False), (1.2, False), (None, None), (1.5, True), (None, None), (3.0, True),
        (8.0, False), (None, None), (0.85, True), (1.5, True), (1.0, False), (None, None), (1.2, False), (0.8, True)
    ]  # fmt: skip
    assert verdicts[11]["target"].endswith("a (mosaic)")


@pytest.mark.slow
def test_several_devices_smoke(monkeypatch, capsys, tmp_path):
    import gpus_bench

    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, gpus_bench, "--smoke", "--devices", "2", "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"].split(",")[0] for row in rows] == ["plain", "verify", "large", "exact", "sums"]
    # A smoke run is too short to time: a difference of two medians may be negative.
    assert all("error" not in row and math.isfinite(row["measured"]) for row in rows)
    assert capsys.readouterr().out.count("bound") == 5
