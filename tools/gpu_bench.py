"""GPU kernels: their tests, their times beside XLA's and the memory roofline, steps and decoding. One command.

    python tools/gpu_bench.py [--json FILE] [--minutes 10] [--parts steps,decode] [--smoke]

Ten minutes, no network. It writes one JSON object, and the same as tables into a Markdown file beside it; both anew
after each part, so that what is cut off leaves what it has measured. The device's part runs whatever `--parts` says.

JAX, numpy and a checkout are enough. Without pytest the part `tests` runs the kernels' own checks; `decode` needs an
installation.

  device          the GPU, and what a copy reaches of its bandwidth
  tests           tests/gpu: every kernel against its reference on the device, small decodes through each `--kernels`
  steps           passes of the Llama-3-8B geometry with random weights, T = 1 to 256 after 512 and 8192 tokens: in
                  bfloat16, with packed weights, and with exact numerics
  rounds          whole rounds of methods on that geometry and a 1B draft, which has the CPU in one of them; see
                  tools/kernel_bench/rounds.py
  offload         streamed layers of that geometry: their share of what the link from pinned memory gives
  tree_attention  each implementation beside XLA's, by the profiler's device time; see tools/kernel_bench/timing.py
  linear          likewise: a few rows times packed weights
  swiglu          likewise
  decode          the default model with every method, as `jaxspec-bench` measures it: only if asked for

Each part is a process of its own with a share of the time: what crashes, hangs or is late is recorded by name, and the
rest still runs. With `--smoke` tiny shapes run in this process on any device, Pallas kernels in their interpreter: that
the tool works, in seconds, with times that say nothing; they are only written where `--json` says.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_bench.bare import find_missing, stand_in
from kernel_bench.device import published_bandwidth
from kernel_bench.parts import describe_error, divide_slice, read_part, run_child, run_rows, write_whole
from kernel_bench.report import render
from kernel_bench.targets import judge

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

# Shares of the time, in the order of the parts.
SHARES = {
    "device": 0.04, "tests": 0.2, "steps": 0.2, "rounds": 0.35, "offload": 0.1, "tree_attention": 0.15, "linear": 0.08,
    "swiglu": 0.04, "decode": 0.16,
}  # fmt: skip
# `decode` needs a model's weights, which a bare machine has not.
DEFAULT_PARTS = tuple(name for name in SHARES if name != "decode")
# Seconds of the whole time that no part gets: for the start of this process, and for its end.
RESERVE = 15.0
# Of the tests, these come before all others: without them no time says anything.
FIRST_TESTS = ("test_kernels.py", "test_decode.py")
TAIL_LINES = 40  # of what pytest says that are kept if it fails
# Processes that run tests at the same time. Each takes half a gigabyte of the GPU's memory before its first array.
MOST_WORKERS = 15
# What pytest says of a test: "NAME OUTCOME", and with pytest-xdist "[worker] [share] OUTCOME NAME".
_OUTCOME = "PASSED|FAILED|ERROR|SKIPPED"
TEST_LINE = re.compile(
    rf"(?P<first>\S+::.*) (?P<after>{_OUTCOME})\b|\[gw\d+\] \[ *\d+%\] (?P<before>{_OUTCOME}) (?P<last>\S+::.*?)\s*$"
)


def main() -> None:
    """Run the parts, judge, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result; the tables go beside it [docs/results/gpu-DEVICE.json]")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all parts together [10]")
    parser.add_argument("--parts", default=",".join(DEFAULT_PARTS), help="by comma [all but decode]")
    parser.add_argument("--model", help="checkpoint to decode with [the default model]")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on any device, in seconds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if unknown := [name for name in chosen if name not in SHARES]:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(SHARES)}")
    stand_in()
    for name in chosen:
        if problem := find_missing(name):
            parser.error(f"part {name!r} is not possible here: {problem}")
    if arguments.child:
        budget = 60 * arguments.minutes
        rows = make_parts(arguments.model, arguments.smoke, budget)[chosen[0]]
        run_rows(chosen[0], rows, Path(arguments.child), budget)
        return
    if not arguments.smoke:
        # What ends this tool must end the part that runs too: by default Python would leave without a word.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    output = Output(arguments.json, arguments.smoke)
    run_all(chosen, arguments, output.save)
    print(output.page)


def make_parts(model: str | None, smoke: bool, budget_s: float) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """The functions that make the rows of each part; nothing is imported before it is called."""

    def measure_operation(operation: str) -> Iterator[dict[str, Any]]:
        from kernel_bench.kernels import measure_operation

        return measure_operation(operation, smoke)

    def measure_steps() -> Iterator[dict[str, Any]]:
        from kernel_bench.steps import measure_steps

        return measure_steps(smoke)

    def measure_rounds() -> Iterator[dict[str, Any]]:
        from kernel_bench.rounds import measure_rounds

        return measure_rounds(smoke)

    def measure_offload() -> Iterator[dict[str, Any]]:
        from kernel_bench.offload import measure_offload

        return measure_offload(smoke)

    def measure_decoding() -> Iterator[dict[str, Any]]:
        from kernel_bench.decode import measure_decoding

        return measure_decoding(model, smoke)

    return {
        "device": lambda: describe_device(smoke),
        "tests": lambda: run_tests(smoke, budget_s),
        "tree_attention": lambda: measure_operation("tree_attention"),
        "swiglu": lambda: measure_operation("swiglu"),
        "linear": lambda: measure_operation("linear"),
        "steps": measure_steps,
        "rounds": measure_rounds,
        "offload": measure_offload,
        "decode": measure_decoding,
    }


def run_all(chosen: Sequence[str], arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Every chosen part, the device's before all others; `save` is given the result after each."""
    start = time.monotonic()
    deadline = start + 60 * arguments.minutes - RESERVE
    names = [name for name in SHARES if name in chosen or name == "device"]
    parts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(names):
            # What earlier parts left over goes to the later ones.
            share = SHARES[name] / sum(SHARES[other] for other in names[index:])
            budget, grace = divide_slice(max(deadline - time.monotonic(), 0.0) * share)
            path = Path(folder) / f"{name}.json"
            print(f"{name}: up to {budget:.0f} s", file=sys.stderr, flush=True)
            try:
                if arguments.smoke:
                    rows = make_parts(arguments.model, True, budget)[name]
                    parts[name] = run_rows(name, rows, path, budget)
                else:
                    command = child_command(name, path, budget, arguments)
                    parts[name] = run_child(name, command, path, budget, grace)
            except BaseException:
                # If this process is ended, the rows so far are written.
                parts[name] = read_part(name, path) | {"error": "was interrupted"}
                save(summarise(parts, arguments, time.monotonic() - start))
                raise
            if not arguments.smoke and any(row.get("platform") == "cpu" for row in parts[name]["rows"]):
                sys.exit("JAX finds no GPU here; --smoke runs tiny shapes on any device")
            save(summarise(parts, arguments, time.monotonic() - start))


def summarise(parts: dict[str, dict[str, Any]], arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The result of the parts that there are, and what follows from them."""
    device = next(iter(parts["device"]["rows"]), {})
    # Where the device's own part failed, others know its name, and by that its bandwidth.
    name = next((row["device"] for part in parts.values() for row in part["rows"] if row.get("device")), None)
    published = published_bandwidth(name) if name else None
    measured = device.get("measured_bandwidth")
    bandwidth = {"published": published, "measured": measured, "used": published or measured}
    result = {
        "command": shlex.join(["python", "tools/gpu_bench.py", *sys.argv[1:]]),
        "device": name or "unknown device",
        "environment": device.get("environment"),
        "smoke": arguments.smoke,
        "seconds": seconds,
        "bandwidth": bandwidth,
        "targets": [],
        "error": None,
        "parts": parts,
    }
    try:
        result["targets"] = judge(parts, bandwidth["used"])
    except Exception as error:
        result["error"] = describe_error(error)
    return result


class Output:
    """Files of results: the JSON first, since tables can be made of it later."""

    def __init__(self, path: Path | None, smoke: bool):
        """`path`: of the JSON; None is by the device's name in docs/results, and nowhere where nothing is measured."""
        self._given, self._smoke = path, smoke
        self._written: Path | None = None
        self.page = ""

    def save(self, result: dict[str, Any]) -> None:
        """Write a result over the one before it."""
        path = self._given
        if path is None and not self._smoke:
            path = RESULTS / f"gpu-{slug(result['device'])}.json"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(result, indent=1, default=str) + "\n")
            if self._written not in (None, path):
                # A later part has found out the device's name.
                for suffix in (".json", ".md"):
                    self._written.with_suffix(suffix).unlink(missing_ok=True)
            self._written = path
        try:
            self.page = render(result)
        except Exception as error:
            self.page = f"The tables cannot be made: {describe_error(error)}\n"
        if path is not None:
            write_whole(path.with_suffix(".md"), self.page)


def child_command(name: str, path: Path, budget: float, arguments: argparse.Namespace) -> list[str]:
    """This tool, for one part."""
    command = [sys.executable, __file__, "--parts", name, "--child", str(path), "--minutes", str(budget / 60)]
    return command if arguments.model is None else [*command, "--model", arguments.model]


def describe_device(smoke: bool) -> Iterator[dict[str, Any]]:
    """One row: the device, and its bandwidth as published and as a copy reaches it."""
    import jax
    from kernel_bench.device import measure_bandwidth, name_device, published_bandwidth

    from jaxspec.bench.report import describe_environment

    kind = name_device()
    row = {"name": "device", "device": kind, "platform": jax.default_backend(), "environment": describe_environment()}
    row["published_bandwidth"] = published_bandwidth(kind)
    try:
        row["measured_bandwidth"] = measure_bandwidth(1 << (20 if smoke else 30))
    except Exception as error:
        row["error"] = describe_error(error)
    yield row


def run_tests(smoke: bool, budget_s: float) -> Iterator[dict[str, Any]]:
    """The files of tests/gpu, a row for each test as it ends, and one for each file; `--smoke` only collects them.

    With pytest-xdist they run at the same time, since most of the time goes to compiling. Without it each file gets
    half of the time that is left, the last one all of it, and is ended after it. Without pytest the kernels' own checks
    run.
    """
    folder = ROOT / "tests" / "gpu"
    files = [folder / name for name in FIRST_TESTS]
    files += sorted({*folder.glob("test_*.py")} - {*files})
    if importlib.util.find_spec("pytest") is None:
        from kernel_bench.checks import check_kernels

        yield from check_kernels(smoke)
        return
    yield {"name": "tests", "planned": [str(file.relative_to(ROOT)) for file in files]}
    if not smoke and importlib.util.find_spec("xdist"):
        yield from run_test_files(files, budget_s, workers=min(MOST_WORKERS, os.cpu_count() or 1))
        return
    start = time.monotonic()
    for index, file in enumerate(files):
        left = budget_s - (time.monotonic() - start)
        yield from run_test_files([file], max(left, 1.0) / (1 if index == len(files) - 1 else 2), smoke)


def run_test_files(
    files: Sequence[Path], seconds: float, smoke: bool = False, workers: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for each test of some files as pytest tells of it, then one for each file.

    Args:
      files: of tests.
      seconds: after which pytest is ended.
      smoke: the tests are only collected.
      workers: processes of pytest-xdist; 0 runs the tests one after the other without it.
    """
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-pno:cacheprovider", "-pno:benchmark"]
    command += ["-n", str(workers), "--dist=worksteal"] if workers else ["-pno:xdist"]
    command += ["--collect-only"] if smoke else []
    names = [str(file.relative_to(ROOT)) for file in files]
    nothing_yet: dict[str, int] = dict.fromkeys(("passed", "failed", "skipped"), 0)
    counts, tail = {name: dict(nothing_yet) for name in names}, []
    with subprocess.Popen(
        [*command, *map(str, files)], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
    ) as tests:  # fmt: skip
        timer = threading.Timer(seconds, tests.kill)
        timer.start()
        try:
            for line in tests.stdout or ():
                tail = [*tail[-TAIL_LINES:], line]
                if found := TEST_LINE.match(line):
                    name, word = (
                        (found["first"], found["after"]) if found["first"] else (found["last"], found["before"])
                    )
                    outcome = {"PASSED": "passed", "SKIPPED": "skipped"}.get(word, "failed")
                    counts.setdefault(name.partition("::")[0], dict(nothing_yet))[outcome] += 1
                    yield {"name": name, "outcome": outcome}
            status = tests.wait()
        finally:
            timer.cancel()
            tests.kill()
    late = f" (it had {seconds:.0f} s)" if status < 0 else ""
    problem = f"pytest ended with status {status}{late}: {''.join(tail)[-1500:]}" if status else None
    # Pytest's last words are about all files: they stand with the first one that failed.
    blamed = next((name for name, outcomes in counts.items() if outcomes["failed"]), names[0])
    for name, outcomes in counts.items():
        row: dict[str, Any] = {"name": name, "status": status, **outcomes}
        if problem and name == blamed:
            row["error"] = problem
        elif not status and not smoke and not outcomes["passed"]:
            row["error"] = f"nothing was tested: {outcomes['skipped']} tests were skipped"
        yield row


def slug(device: str) -> str:
    """A device's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


if __name__ == "__main__":
    main()
