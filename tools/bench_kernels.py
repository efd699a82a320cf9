"""Native kernels against XLA's products, and against llama.cpp where it is installed: interleaved in one run on CPU.

    python tools/bench_kernels.py [--contexts 256,2000] [--repeats 9] [--json FILE]

The default model, one sequence, two dtypes of weights: float32, and the blocks that its file holds. Each repeat runs
every measurement once, in turn; ratios are taken within a repeat and their median is reported.

  pure pass W      the chain of products of a one-row pass, attention and everything else left out, with weights W
  KERNELS W T @ C  one target pass over T rows, head included, at C tokens of context: plain decoding is T = 1
  KERNELS W decode a token of plain decoding as a user gets it, after the first context: the mean of 64 greedy tokens
                   without those of the first dispatch
  llama.cpp W @ C  the same step of llama-cpp-python (`pip install llama-cpp-python`), two threads
"""

import argparse
import functools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import numpy as np
from bench_rounds import divide, print_tables, spread
from gguf.quants import dequantize
from rich.progress import track

import jaxspec
from jaxspec.bench.microbench import roofline_pass, time_target_pass
from jaxspec.checkpoint.shipped import default_model_path

STEPS = 8  # per sample
ROWS = (1, 2, 4, 8, 16, 32)
MODELS = {
    "native float32": {"dtype": "float32", "kernels": "cpu"},
    "native blocks": {"dtype": "auto", "kernels": "cpu"},
    "xla float32": {"dtype": "float32", "kernels": "xla"},
}


def main() -> None:
    """Measure, print a table, and write the numbers if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="256,2000")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all samples and medians here")
    arguments = parser.parse_args()
    contexts = [int(context) for context in arguments.contexts.split(",")]

    with tempfile.TemporaryDirectory() as folder:
        runs = {**make_passes(contexts), **make_peers(contexts, Path(folder))}
        samples = measure(runs, arguments.repeats)
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"jax": jax.__version__, "llama.cpp": llama_version()},
        "seconds": {name: spread(values) for name, values in samples.items()},
        "ratios": {name: spread(values) for name, values in make_ratios(samples, contexts).items()},
    }
    print_tables(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def make_passes(contexts: list[int]) -> dict[str, Callable[[], float]]:
    """Our own measurements: each gives the seconds of one pass."""
    runs: dict[str, Callable[[], float]] = {}
    for name, options in MODELS.items():
        llm = jaxspec.LLM(**options, session_memory=0)  # pyright: ignore[reportArgumentType]
        if name != "xla float32":
            runs[f"pure pass {name.split()[1]}"] = roofline_pass(llm.params, llm.kernels, STEPS)
        runs[f"{name} decode"] = functools.partial(decode, llm, contexts[0])
        for context in contexts:
            for rows in ROWS:
                run = time_target_pass(llm.engine.target, llm.params, rows, context)
                runs[f"{name} {rows} @ {context}"] = functools.partial(lambda run: run(STEPS) / STEPS, run)
    return runs


def decode(llm: jaxspec.LLM, context: int) -> float:
    """Seconds per token of a generation after random tokens."""
    prompt = np.random.default_rng(0).integers(5, 40_000, context).tolist()
    out = llm.generate(prompt, jaxspec.SamplingParams(max_tokens=64, ignore_eos=True))
    assert isinstance(out, jaxspec.Completion) and out.stats.tokens_per_s
    return 1 / out.stats.tokens_per_s


def make_peers(contexts: list[int], folder: Path) -> dict[str, Callable[[], float]]:
    """llama.cpp's step on the model's file, and on a float32 copy of it; nothing where it is not installed."""
    if llama_version() is None:
        return {}
    import llama_cpp  # pyright: ignore[reportMissingImports]

    files = {"blocks": default_model_path(), "float32": write_float32(folder / "float32.gguf")}
    runs: dict[str, Callable[[], float]] = {}
    for weights, file in files.items():
        peer = llama_cpp.Llama(
            str(file), n_ctx=max(contexts) + 256, n_threads=2, n_threads_batch=2, logits_all=False, verbose=False
        )
        for context in contexts:

            def run(peer=peer, context=context) -> float:
                if peer.n_tokens < context or peer.n_tokens > context + 64:
                    peer.reset()
                    peer.eval(np.random.default_rng(0).integers(5, 40_000, context).tolist())
                start = time.perf_counter()
                for step in range(STEPS):
                    peer.eval([1000 + step])
                return (time.perf_counter() - start) / STEPS

            runs[f"llama.cpp {weights} 1 @ {context}"] = run
    return runs


def write_float32(path: Path) -> Path:
    """The default model's file with every tensor as float32."""
    reader = gguf.GGUFReader(default_model_path())
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_version() -> str | None:
    """Version of llama-cpp-python, None where it is not installed."""
    try:
        import llama_cpp  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return llama_cpp.__version__


def measure(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Samples of every measurement, in seconds, the first of each thrown away."""
    for run in track(runs.values(), "Warming up"):
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(repeats), "Measuring"):
        for name, run in runs.items():
            samples[name].append(run())
    return samples


def make_ratios(samples: dict[str, list[float]], contexts: list[int]) -> dict[str, list[float]]:
    """What the numbers are compared for."""
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
        for weights, own in (("float32", step), ("blocks", blocks)):
            pairs[f"{weights} @ {c}: llama.cpp / native"] = f"llama.cpp {weights} 1 @ {c}", own
        for name in MODELS:
            for rows in ROWS[1:]:
                pairs[f"{name} @ {c}: {rows} rows / 1 row"] = f"{name} {rows} @ {c}", f"{name} 1 @ {c}"
    known = {name: pair for name, pair in pairs.items() if all(part in samples for part in pair)}
    return {name: divide(samples[above], samples[below]) for name, (above, below) in known.items()}


if __name__ == "__main__":
    main()
