"""Native kernels against XLA's products, and against llama.cpp where it is installed: interleaved in one run on CPU.

    python tools/bench_kernels.py [--contexts 256,2000] [--repeats 9] [--json FILE]

The default model, one sequence, two dtypes of weights: float32, and the blocks that its file holds. Each repeat runs
every measurement once, in turn; ratios are taken within a repeat and their median is reported.

  pure pass W      the chain of products of a one-row pass, attention and everything else left out, with weights W
  KERNELS W T @ C  one target pass over T rows, head included, at C tokens of context: plain decoding is T = 1
  KERNELS W decode a token of plain decoding as a user gets it, after the first context: the mean of 64 greedy tokens
                   without those of the first dispatch
  llama.cpp 1 @ C  the same step of llama-cpp-python (`pip install llama-cpp-python`) on the file's blocks, two threads
"""

import functools
import importlib.util
import time
from collections.abc import Callable

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


def main() -> None:
    """Measure, print a table, and write the numbers if asked to."""
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", type=numbers, default=[256, 2000])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    samples = interleave(make_passes(arguments.contexts) | make_peers(arguments.contexts), arguments.repeats)
    ratios = make_ratios(samples, list_pairs(arguments.contexts))
    print(environment_line() + "\n")
    print(make_table(["ms", "median", "min", "max"], spread_rows(samples, 1e3)) + "\n")
    print(make_table(["ratio", "median", "min", "max"], spread_rows(ratios)))
    write_report(arguments.json, seconds=samples, ratios=ratios)


def make_passes(contexts: list[int]) -> dict[str, Callable[[], float]]:
    """Our own measurements: each gives the seconds of one pass."""
    runs: dict[str, Callable[[], float]] = {}
    for name, options in MODELS.items():
        llm = jaxspec.LLM(**options, session_memory=0)  # pyright: ignore[reportArgumentType]
        if name != "xla float32":
            inner = internals(llm)
            runs[f"pure pass {name.split()[1]}"] = roofline_pass(inner.params.target, inner.kernels, STEPS)
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


def make_peers(contexts: list[int]) -> dict[str, Callable[[], float]]:
    """llama.cpp's step on the model's file; nothing where it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return {}
    import llama_cpp  # pyright: ignore[reportMissingImports]

    peer = llama_cpp.Llama(
        str(default_model_path()), n_ctx=max(contexts) + 256, n_threads=2, n_threads_batch=2, verbose=False
    )

    def run(context: int) -> float:
        if peer.n_tokens < context or peer.n_tokens > context + 64:
            peer.reset()
            peer.eval(np.random.default_rng(0).integers(5, 40_000, context).tolist())
        start = time.perf_counter()
        for step in range(STEPS):
            peer.eval([1000 + step])
        return (time.perf_counter() - start) / STEPS

    return {f"llama.cpp 1 @ {context}": functools.partial(run, context) for context in contexts}


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


if __name__ == "__main__":
    main()
