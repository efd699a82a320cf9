"""The cost of a token and of a round outside the native operations: methods interleaved in one run on CPU.

    python tools/bench_overhead.py [--model M] [--methods ar,chain,specexec] [--tokens 256] [--repeats 5] [--skip]

A library that forwards to the real one times every native operation within the process. The rest of the wall time is
XLA's own: small operations, the calls themselves, waiting for dispatch. The main thread's CPU time overlaps with passes
where there is a free core. With --skip operations return at once, so CPU time is that of all the rest, also while other
processes run. Tokens are arbitrary then: use it for `ar`. `jaxspec-bench` gives a round's time outside its passes.
"""

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import environment_line, make_parser, make_table, write_report

import jaxspec
import pallas_kernels.native.library as native
from jaxspec.methods.registry import make_method

PROMPT_TOKENS = 64
# Rounds at the end of an answer that are not timed: fewer are in flight.
LAST_TOKENS = 40
COLUMNS = ("wall ms", "within operations", "operations", "main thread's CPU ms", "CPU ms")


def main() -> None:
    """Measure, and print a row for a token and one for a round of each method."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="a checkpoint [the default model]")
    parser.add_argument("--methods", default="ar,chain,specexec")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", action="store_true", help="native operations return at once")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stopwatch = time_operations(Path(folder))
        names = arguments.methods.split(",")
        drafts = any(make_method(name, {}).needs_draft for name in names)
        llm = jaxspec.LLM(arguments.model, method="chain" if drafts else "ar", session_memory=0)
        runs = {name: llm.with_method(name) for name in names}
        for each in runs.values():
            measure(each, stopwatch, arguments.tokens)  # warms up
        if arguments.skip:
            stopwatch.skip_operations()
        samples = [
            {name: measure(each, stopwatch, arguments.tokens) for name, each in runs.items()}
            for _ in range(arguments.repeats)
        ]
    rows = []
    for name in names:
        for unit in ("token", "round"):
            values = zip(*(sample[name][unit] for sample in samples), strict=True)
            # Other processes lengthen times; a CPU time is closest to its own at its least.
            reduce = (statistics.median, statistics.median, min, min, min)
            rows.append([f"{name}: a {unit}", *(f"{f(list(v)):.3f}" for f, v in zip(reduce, values, strict=True))])
    print(f"{environment_line()}\nmedians of {arguments.repeats}; of CPU times the least\n")
    print(make_table(["", *COLUMNS], rows))
    write_report(arguments.json, columns=COLUMNS, samples=samples)


def time_operations(folder: Path) -> ctypes.CDLL:
    """Put a stopwatch between XLA and the native library; to be called before anything loads that."""
    import jaxlib

    source, library = Path(__file__).parent / "stopwatch.cc", folder / "stopwatch.so"
    operations = " ".join(f"OPERATION({native.TARGET_PREFIX}{target})" for target in native.TARGETS)
    headers = Path(jaxlib.__file__).parent / "include"
    command = ["c++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{headers}", f"-DOPERATIONS={operations}"]
    subprocess.run([*command, str(source), "-o", str(library), "-ldl"], check=True)
    register = native._register

    def register_timed(level: str, path: Path) -> native.Library:
        os.environ["JAXSPEC_TIMED"] = str(path)
        return register(level, library)

    native._register = register_timed
    native.load()
    return ctypes.CDLL(str(library))


def measure(llm: jaxspec.LLM, stopwatch: ctypes.CDLL, tokens: int) -> dict[str, tuple[float, ...]]:
    """The `COLUMNS` of a token and of a round."""
    prompt = (np.arange(PROMPT_TOKENS) * 97 % 10_000 + 100).tolist()
    sampling = jaxspec.SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.engine.prepare(PROMPT_TOKENS + tokens, sampling)
    with llm.engine.open(llm.model_params, prompt, sampling, seed=0) as session:
        session.step()
        session.step()
        while session.ready:
            session.step()
        read(stopwatch)
        wall, host, cpu, new, rounds = time.perf_counter(), time.thread_time(), time.process_time(), 0, 0
        while session.ready or session.limit - session.num_emitted > LAST_TOKENS:
            new += len(session.step().tokens)
            rounds += 1
        wall, host, cpu = time.perf_counter() - wall, time.thread_time() - host, time.process_time() - cpu
        nanoseconds, calls = read(stopwatch)
    sums = (1e3 * wall, nanoseconds / 1e6, float(calls), 1e3 * host, 1e3 * cpu)
    return {unit: tuple(x / n for x in sums) for unit, n in (("token", new), ("round", rounds))}


def read(stopwatch: ctypes.CDLL) -> tuple[int, int]:
    """Nanoseconds and calls since the last time."""
    values = (ctypes.c_int64 * 2)()
    stopwatch.read_stopwatch(values)
    return values[0], values[1]


if __name__ == "__main__":
    main()
