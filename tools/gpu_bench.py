"""GPU kernels: their tests, their times beside XLA's and the memory roofline, steps and decoding. One command.

    python tools/gpu_bench.py [--json docs/results/gpu-DEVICE.json] [--minutes 10] [--parts steps,decode] [--smoke]

Ten minutes, no network. It writes one JSON object, and the same as tables into a Markdown file beside it.

  device          the GPU, and what a copy reaches of its bandwidth
  tests           tests/gpu: every kernel against its reference on the device, small decodes through each `--kernels`
  tree_attention  each implementation beside XLA's, by the profiler's device time; see tools/kernel_bench/timing.py
  swiglu          likewise
  steps           passes of the Llama-3-8B geometry with random weights, T = 1 to 256 behind 512 and 8192 tokens
  decode          the default model with every method, as `jaxspec-bench` measures it

Each part is a process of its own with a share of the time: what crashes, hangs or is late is recorded by name, and the
rest still runs. With `--smoke` tiny shapes run in this process on any device, Pallas kernels in their interpreter: that
the tool works, in seconds, with times that say nothing.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernel_bench.parts import GRACE, describe_error, run_child, run_rows
from kernel_bench.report import render
from kernel_bench.targets import judge

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

# Shares of the time, in the order of the parts.
SHARES = {"device": 0.04, "tests": 0.22, "tree_attention": 0.2, "swiglu": 0.12, "steps": 0.24, "decode": 0.18}


def main() -> None:
    """Run the parts, judge, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result; the tables go beside it [docs/results/gpu-DEVICE.json]")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all parts together [10]")
    parser.add_argument("--parts", default=",".join(SHARES), help="parts to run, by comma [all]")
    parser.add_argument("--model", help="checkpoint to decode with [the default model]")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on any device, in seconds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if unknown := [name for name in chosen if name not in SHARES]:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(SHARES)}")
    if arguments.child:
        rows = make_parts(arguments.model, arguments.smoke)[chosen[0]]
        run_rows(chosen[0], rows, Path(arguments.child), 60 * arguments.minutes)
        return
    result = run_all(chosen, arguments)
    path = arguments.json or RESULTS / f"gpu-{slug(result['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    page = render(result)
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


def make_parts(model: str | None, smoke: bool) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """What makes the rows of each part; nothing is imported before it is called."""

    def measure_operation(operation: str) -> Iterator[dict[str, Any]]:
        from kernel_bench.kernels import measure_operation

        return measure_operation(operation, smoke)

    def measure_steps() -> Iterator[dict[str, Any]]:
        from kernel_bench.steps import measure_steps

        return measure_steps(smoke)

    def measure_decoding() -> Iterator[dict[str, Any]]:
        from kernel_bench.decode import measure_decoding

        return measure_decoding(model, smoke)

    return {
        "device": lambda: describe_device(smoke),
        "tests": lambda: run_tests(smoke),
        "tree_attention": lambda: measure_operation("tree_attention"),
        "swiglu": lambda: measure_operation("swiglu"),
        "steps": measure_steps,
        "decode": measure_decoding,
    }


def run_all(chosen: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Every chosen part, and what follows from their results."""
    start = time.monotonic()
    seconds = 60 * arguments.minutes
    parts: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in SHARES if name in chosen):
            # What earlier parts left over goes to the later ones.
            ahead = sum(SHARES[other] for other in SHARES if other in chosen and other not in parts)
            left = seconds - (time.monotonic() - start)
            budget = max(left * SHARES[name] / ahead - GRACE, 5.0)
            path = Path(folder) / f"{name}.json"
            print(f"{name}: up to {budget:.0f} s", file=sys.stderr, flush=True)
            if arguments.smoke:
                parts[name] = run_rows(name, make_parts(arguments.model, True)[name], path, budget)
            else:
                parts[name] = run_child(name, child_command(name, path, budget, arguments), path, budget)
            if not arguments.smoke and any(row.get("platform") == "cpu" for row in parts[name]["rows"]):
                sys.exit("JAX finds no GPU here; --smoke runs tiny shapes on any device")
    device = next(iter(parts.get("device", {}).get("rows", ())), {})
    published, measured = device.get("published_bandwidth"), device.get("measured_bandwidth")
    bandwidth = {"published": published, "measured": measured, "used": published or measured}
    return {
        "command": shlex.join(["python", "tools/gpu_bench.py", *sys.argv[1:]]),
        "device": device.get("device", "unknown device"),
        "environment": device.get("environment"),
        "smoke": arguments.smoke,
        "seconds": time.monotonic() - start,
        "bandwidth": bandwidth,
        "targets": judge(parts, bandwidth["used"]),
        "parts": parts,
    }


def child_command(name: str, path: Path, budget: float, arguments: argparse.Namespace) -> list[str]:
    """This tool, for one part."""
    command = [sys.executable, __file__, "--parts", name, "--child", str(path), "--minutes", str(budget / 60)]
    return command if arguments.model is None else [*command, "--model", arguments.model]


def describe_device(smoke: bool) -> Iterator[dict[str, Any]]:
    """One row: the device, and its bandwidth as published and as a copy reaches it."""
    import jax
    from kernel_bench.device import measure_bandwidth, name_device, published_bandwidth

    from jaxspec.measure.report import describe_environment

    kind = name_device()
    row = {"name": "device", "device": kind, "platform": jax.default_backend(), "environment": describe_environment()}
    row["published_bandwidth"] = published_bandwidth(kind)
    try:
        row["measured_bandwidth"] = measure_bandwidth(1 << (20 if smoke else 30))
    except Exception as error:
        row["error"] = describe_error(error)
    yield row


def run_tests(smoke: bool) -> Iterator[dict[str, Any]]:
    """One row for each file of tests/gpu: what pytest says of it; `--smoke` only collects them."""
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py"), reverse=True):  # kernels before decoding
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        if smoke:
            command.append("--collect-only")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        name = str(file.relative_to(ROOT))
        row: dict[str, Any] = {"name": name, "status": done.returncode, "output": done.stdout[-4000:]}
        if done.returncode:
            row["error"] = f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}"
        yield row


def slug(device: str) -> str:
    """A device's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


if __name__ == "__main__":
    main()
