"""Plain decoding against the memory roofline and against Hugging Face, interleaved in one run on CPU.

    python -m pip install -e '.[parity]'        (torch)
    python tools/bench_baseline.py [--repeats 9] [--json FILE]

Everything is the default model in float32, greedy, one sequence, as many threads as the machine has cores. Each repeat
runs every measurement once, in turn, so that a machine whose speed drifts slows all of them; ratios are taken within a
repeat and their median is reported. Nothing is compiled inside a measurement.

  roofline     one chain of matrix-vector products that reads every weight of the model once and does nothing else
  step C       a token of plain decoding with C tokens of context, until it is on the host
  decode       64 tokens after a 32-token prompt, whole call: jaxspec's `generate`, and transformers'
  prefill      the first token of a 512-token prompt, whole call, likewise
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from make_golden import load_reference
from rich.console import Console
from rich.table import Table

import jaxspec
from jaxspec.bench.microbench import roofline_pass, weight_bytes

CONTEXTS = (256, 2000)
DECODE_PROMPT, DECODE_TOKENS = 32, 64
PREFILL_TOKENS = 512
STEPS_PER_SAMPLE = 8


def main() -> None:
    """Measure, print a table, and write the numbers if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all samples and medians here")
    arguments = parser.parse_args()

    torch.set_num_threads(os.cpu_count() or 1)
    llm = jaxspec.LLM(dtype="float32")
    measurements = make_measurements(llm, load_reference(llm.model_path))
    for run in measurements.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(arguments.repeats):
        for name, run in measurements.items():
            samples[name].append(run())
    report = summarise(samples, weight_bytes(llm.params))
    print_report(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def make_measurements(llm: jaxspec.LLM, reference: Any) -> dict[str, Callable[[], float]]:
    """Functions by name; each runs once and returns seconds."""
    ids = np.random.default_rng(0).integers(5, 40_000, max(CONTEXTS)).tolist()
    measurements: dict[str, Callable[[], float]] = {
        "roofline": roofline_pass(llm.params, llm.kernels, STEPS_PER_SAMPLE)
    }
    for context in CONTEXTS:
        measurements[f"step {context}"] = decode_step(llm, ids[:context])
    for name, prompt, tokens in (
        ("decode", ids[:DECODE_PROMPT], DECODE_TOKENS),
        ("prefill", ids[:PREFILL_TOKENS], 1),
    ):
        measurements[f"{name} jaxspec"] = timed(generate_jaxspec(llm, prompt, tokens))
        measurements[f"{name} transformers"] = timed(generate_reference(reference, prompt, tokens))
    return measurements


def decode_step(llm: jaxspec.LLM, prompt: list[int]) -> Callable[[], float]:
    """Time of a token in rounds at about `len(prompt)` tokens of context: half of them before it, half after it."""
    sampling = jaxspec.SamplingParams(max_tokens=STEPS_PER_SAMPLE + 1)
    prompt = prompt[: len(prompt) - STEPS_PER_SAMPLE // 2]

    def run() -> float:
        with llm.engine.open(llm.model_params, prompt, sampling, seed=0) as session:
            session.step()
            start = time.perf_counter()
            while not session.done:
                session.step()
            return (time.perf_counter() - start) / STEPS_PER_SAMPLE

    return run


def generate_jaxspec(llm: jaxspec.LLM, prompt: list[int], tokens: int) -> Callable[[], int]:
    """A whole generation; returns the number of tokens that came."""
    sampling = jaxspec.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return lambda: sum(len(event.token_ids) for event in llm.stream(prompt, sampling))


def generate_reference(model: Any, prompt: list[int], tokens: int) -> Callable[[], int]:
    """The same call of transformers."""
    ids = torch.tensor([prompt])

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        return out.shape[1] - len(prompt)

    return run


def timed(call: Callable[[], int]) -> Callable[[], float]:
    """Seconds of a call."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run


def summarise(samples: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """Medians, rates and ratios, with the machine they were taken on."""

    def ratio(above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(samples[above], samples[below], strict=True)]

    ratios = {f"step {c} / roofline": ratio(f"step {c}", "roofline") for c in CONTEXTS}
    ratios["decode, jaxspec over transformers"] = ratio("decode transformers", "decode jaxspec")
    ratios["prefill, jaxspec over transformers"] = ratio("prefill transformers", "prefill jaxspec")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
        "weight_bytes": num_bytes,
        "roofline_gb_per_s": num_bytes / statistics.median(samples["roofline"]) / 1e9,
        "seconds": {name: _spread(values) for name, values in samples.items()},
        "tokens_per_s": {
            name: DECODE_TOKENS / statistics.median(samples[f"decode {name}"]) for name in ("jaxspec", "transformers")
        },
        "ratios": {name: _spread(values) for name, values in ratios.items()},
    }


def print_report(report: dict[str, Any]) -> None:
    """Tables for people."""
    console = Console()
    console.print(f"{report['machine']}; {report['versions']}")
    console.print(
        f"roofline {report['roofline_gb_per_s']:.1f} GB/s over {report['weight_bytes'] / 1e6:.0f} MB of weights"
    )
    for title, unit, scale in (("seconds", "ms", 1e3), ("ratios", "", 1.0)):
        table = Table(title=f"{title} {unit}".strip())
        for column in ("measurement", "median", "min", "max"):
            table.add_column(column, justify="left" if column == "measurement" else "right")
        for name, spread in report[title].items():
            table.add_row(name, *(f"{spread[key] * scale:.2f}" for key in ("median", "min", "max")))
        console.print(table)
    for name, rate in report["tokens_per_s"].items():
        console.print(f"decode {name}: {rate:.1f} tokens/s")


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
