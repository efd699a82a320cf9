"""Native kernels against XLA's products, and against llama.cpp where it is installed: interleaved in one run on CPU.

    python tools/bench_kernels.py [--contexts 256,2000] [--repeats 9] [--json FILE] [--model FILE.gguf --blocks]
    python tools/bench_kernels.py --prompts 16,64,256,1024,4000 [--model FILE.gguf]

The default model, one sequence, two dtypes of weights: float32, and the blocks that its file holds. With `--blocks`
blocks alone are measured, with rows of 16 and of 8 bits; with `--prompts` the time to the first token after prompts of
random tokens of these lengths, without what earlier prompts left, in milliseconds per prompt token. Each repeat runs
every measurement once, in turn; ratios are taken within a repeat and their median is reported.

  pure pass W      the chain of products of a one-row pass, attention and everything else left out, with weights W
  KERNELS W T @ C  one target pass over T rows, head included, at C tokens of context: plain decoding is T = 1
  KERNELS W decode a token of plain decoding as a user gets it, after the first context: the mean of 64 greedy tokens
                   without those of the first dispatch
  llama.cpp T @ C  the same pass of llama-cpp-python (`pip install llama-cpp-python`) on the file's blocks, with logits
                   of all rows and two threads
"""

import argparse
import functools
import importlib.util
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import (
    environment_line,
    interleave,
    make_parser,
    make_ratios,
    make_table,
    numbers,
    spread_rows,
    write_report,
)

import jaxspec
from jaxspec.bench.microbench import roofline_pass, time_target_pass
from jaxspec.checkpoint.shipped import default_model_path
from jaxspec.llm import internals

STEPS = 8  # per sample
ROWS = (1, 2, 4, 8, 16, 32)
MODELS = {
    "native float32": {"dtype": "float32", "kernels": "cpu"},
    "native blocks": {"dtype": "auto", "kernels": "cpu"},
    "xla float32": {"dtype": "float32", "kernels": "xla"},
}
BLOCKS = {f"native {name}": {"kernels": "cpu", "activations": name} for name in ("int16", "int8")}


def main() -> None:
    """Measure, print a table, and write the numbers if asked to."""
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", type=numbers, default=[256, 2000])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default=str(default_model_path()))
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--prompts", type=numbers)
    arguments = parser.parse_args()
    if arguments.prompts:
        measure_prompts(arguments)
        return
    models = BLOCKS if arguments.blocks else MODELS
    runs = make_passes(arguments.model, models, arguments.contexts) | make_peers(arguments.model, arguments.contexts)
    samples = interleave(runs, arguments.repeats)
    pairs = list_block_pairs if arguments.blocks else list_pairs
    ratios = make_ratios(samples, {n: p for n, p in pairs(arguments.contexts).items() if {*p} <= {*samples}})
    print(environment_line() + "\n")
    print(make_table(["ms", "median", "min", "max"], spread_rows(samples, 1e3)) + "\n")
    print(make_table(["ratio", "median", "min", "max"], spread_rows(ratios)))
    write_report(arguments.json, seconds=samples, ratios=ratios)


def measure_prompts(arguments: argparse.Namespace) -> None:
    """Measure prompts of several lengths, and print milliseconds per token and ratios to llama.cpp's."""
    lengths, rng = arguments.prompts, np.random.default_rng(0)
    prompts = {length: rng.integers(5, 40_000, length).tolist() for length in lengths}
    first = jaxspec.SamplingParams(max_tokens=1, ignore_eos=True)
    runs: dict[str, Callable[[], float]] = {}

    def read(llm: jaxspec.LLM, length: int) -> float:
        return llm.generate([prompts[length]], [first])[0].stats.ttft_s / length

    for name, options in BLOCKS.items():
        own: Any = {"draft": "none", "method": "ar", "session_memory": 0, "max_context": max(lengths) + 1, **options}
        llm = jaxspec.LLM(arguments.model, **own)
        runs |= {f"{name} {length}": functools.partial(read, llm, length) for length in lengths}
    if importlib.util.find_spec("llama_cpp") is not None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        peer = llama_cpp.Llama(arguments.model, n_ctx=max(lengths) + 1, n_threads=2, n_threads_batch=2, verbose=False)

        def read_peer(length: int) -> float:
            peer.reset()
            start = time.perf_counter()
            peer.eval(prompts[length])
            return (time.perf_counter() - start) / length

        runs |= {f"llama.cpp {length}": functools.partial(read_peer, length) for length in lengths}
    samples = interleave(runs, arguments.repeats)
    pairs = itertools.product(BLOCKS, lengths if f"llama.cpp {lengths[0]}" in runs else [])
    ratios = make_ratios(samples, {f"{n} / llama.cpp, {at}": (f"{n} {at}", f"llama.cpp {at}") for n, at in pairs})
    print(environment_line() + "\n")
    print(make_table(["ms per prompt token", "median", "min", "max"], spread_rows(samples, 1e3)) + "\n")
    print(make_table(["ratio", "median", "min", "max"], spread_rows(ratios)))
    write_report(arguments.json, seconds=samples, ratios=ratios)


def make_passes(model: str, models: dict, contexts: list[int]) -> dict[str, Callable[[], float]]:
    """Our own measurements: each gives the seconds of one pass."""
    runs: dict[str, Callable[[], float]] = {}
    for name, options in models.items():
        llm = jaxspec.LLM(model, draft="none", method="ar", session_memory=0, **options)
        if name in ("native float32", "native blocks"):
            inner = internals(llm)
            read_weights = roofline_pass(inner.params.target, inner.kernels, STEPS, inner.target.cfg.experts)
            if read_weights is not None:
                runs[f"pure pass {name.split()[1]}"] = read_weights
        runs[f"{name} decode"] = functools.partial(decode, llm, contexts[0])
        for context in contexts:
            for rows in ROWS:
                run = time_target_pass(internals(llm).target, internals(llm).params.target, rows, context)
                runs[f"{name} {rows} @ {context}"] = functools.partial(lambda run: run(STEPS) / STEPS, run)
    return runs


def decode(llm: jaxspec.LLM, context: int) -> float:
    """Seconds per token of a generation after random tokens."""
    prompt = np.random.default_rng(0).integers(5, 40_000, context).tolist()
    out = llm.generate(prompt, jaxspec.SamplingParams(max_tokens=64, ignore_eos=True))
    assert isinstance(out, jaxspec.Completion) and out.stats.tokens_per_s
    return 1 / out.stats.tokens_per_s


def make_peers(model: str, contexts: list[int]) -> dict[str, Callable[[], float]]:
    """llama.cpp's passes on the model's file; nothing where it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return {}
    import llama_cpp  # pyright: ignore[reportMissingImports]

    peer = llama_cpp.Llama(
        model, n_ctx=max(contexts) + 256, n_threads=2, n_threads_batch=2, logits_all=True, verbose=False
    )

    def run(rows: int, context: int) -> float:
        if peer.n_tokens < context or peer.n_tokens > context + 64:
            peer.reset()
            peer.eval(np.random.default_rng(0).integers(5, 40_000, context).tolist())
        seconds = []
        for step in range(STEPS):
            start = time.perf_counter()
            peer.eval([1000 + step] * rows)
            seconds.append(time.perf_counter() - start)
            peer.n_tokens -= rows  # the rows are dropped, as after a rejected draft
        return sum(seconds) / STEPS

    return {f"llama.cpp {t} @ {c}": functools.partial(run, t, c) for t in ROWS for c in contexts}


def list_pairs(contexts: list[int]) -> dict[str, tuple[str, str]]:
    """By name of a ratio, the measurements above and below the line."""
    pairs = {
        "float32, decode: xla / native": ("xla float32 decode", "native float32 decode"),
        "blocks, decode: xla float32 / native": ("xla float32 decode", "native blocks decode"),
    }
    for c in contexts:
        step, blocks = f"native float32 1 @ {c}", f"native blocks 1 @ {c}"
        pairs[f"float32 @ {c}: xla / native"] = f"xla float32 1 @ {c}", step
        pairs[f"float32 @ {c}: step / pure pass"] = step, "pure pass float32"
        pairs[f"blocks @ {c}: step / pure pass"] = blocks, "pure pass blocks"
        pairs[f"blocks @ {c}: xla float32 / native"] = f"xla float32 1 @ {c}", blocks
        pairs[f"blocks @ {c}: llama.cpp / native"] = f"llama.cpp 1 @ {c}", blocks
        for name in MODELS:
            for rows in ROWS[1:]:
                pairs[f"{name} @ {c}: {rows} rows / 1 row"] = f"{name} {rows} @ {c}", f"{name} 1 @ {c}"
    return pairs


def list_block_pairs(contexts: list[int]) -> dict[str, tuple[str, str]]:
    """The same of `BLOCKS`."""
    pairs = {}
    for context, rows, name in itertools.product(contexts, ROWS, (*BLOCKS, "llama.cpp")):
        own = f"{name} {rows} @ {context}"
        if rows > 1:
            pairs[f"{name} @ {context}: {rows} rows / 1 row"] = own, f"{name} 1 @ {context}"
        if name in BLOCKS:
            pairs[f"{rows} @ {context}: llama.cpp / {name}"] = f"llama.cpp {rows} @ {context}", own
    return pairs


if __name__ == "__main__":
    main()
