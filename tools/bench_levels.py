"""What products of several rows cost with each level of the native CPU kernels, in one interleaved run.

    JAXSPEC_BUILD_LEVELS=all python pallas_kernels/native/build.py
    python tools/bench_levels.py [--rows 1,2,4,8,16] [--levels avx2,vnni] [--repeats 9] [--threads 2]

Weights are random, with the shapes and formats of a model of 1.5B parameters (Qwen 2.5) in Q4_K_M: four layers of 28
and a seventh of the head, which are more than the caches hold. A layer and the head are timed by themselves, the
shortest time of all repeats counts, and a pass is 28 layers and the head. One thread (`--threads 1`) is timed by the
time that the processor gives this process, which other processes disturb less.
"""

import argparse
import ctypes
import itertools
import time
from typing import Any

import jax
import numpy as np

from pallas_kernels.linear import Blocks, linear
from pallas_kernels.linear.blocks import FORMATS, packed_name
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.native import library
from pallas_kernels.registry import Kernels, using
from pallas_kernels.swiglu import swiglu

WIDTH, MLP, KEYS, HEAD, LAYERS, PART = 1536, 8960, 256, 151936, 28, 7
SCALES = {"q4_k": (0, 2), "q6_k": (208,)}  # float16 numbers of a block begin at these bytes


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--levels", help="names with commas [all that were built and run here]")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    levels = arguments.levels.split(",") if arguments.levels else library.supported_levels(library.find())
    rows = [int(count) for count in arguments.rows.split(",")]
    library.load()
    weights: dict[str, list[Any]] = {"int8": [], "int16": []}
    for layer, (activations, own) in itertools.product(make_weights(np.random.default_rng(0)), weights.items()):
        own.append({key: Blocks(data, packed_name(name, activations)) for key, (name, data) in layer.items()})
    cases = [(level, activations) for level in levels for activations in weights]
    programs = {case: build_program(*case, arguments.threads) for case in cases}
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    times: dict[tuple[str, str, int, int], float] = {}
    for repeat in range(arguments.repeats + 1):
        for case, count, index in itertools.product(cases, rows, range(LAYERS // PART + 1)):
            x = np.ones((count, WIDTH), np.float32)
            start = clock()
            jax.block_until_ready(programs[case](x, weights[case[1]][index]))
            took = (clock() - start) * 1e3 * PART
            if repeat:
                times[*case, count, index] = min(took, times.get((*case, count, index), took))
    print(f"| level | activations | {' | '.join(f'{count} rows' for count in rows)} |")
    print("|---" * (2 + len(rows)) + "|")
    for case in cases:
        best = [sum(times[*case, count, index] for index in range(LAYERS // PART + 1)) for count in rows]
        cells = [f"{one:.1f} ({one / best[0]:.2f})" for one in best]
        print(f"| {case[0]} | {case[1]} | {' | '.join(cells)} |")


def make_weights(rng: np.random.Generator) -> list[dict[str, tuple[str, jax.Array]]]:
    """Formats and packed bytes of each layer's products, by name; the head comes last."""

    def packed(name, outputs, inputs):
        blocks = rng.integers(0, 256, (outputs, inputs // FORMATS[name].values, FORMATS[name].nbytes), np.uint8)
        for at in SCALES[name]:
            blocks[..., at : at + 2] = np.array([1e-3], np.float16).view(np.uint8)
        return name, jax.device_put(pack_blocks(blocks, name, outputs))

    layers = [
        {
            "qkv": packed("q4_k", WIDTH + 2 * KEYS, WIDTH),
            "out": packed("q4_k", WIDTH, WIDTH),
            "gate_up": packed("q4_k", 2 * MLP, WIDTH),
            "down": packed(("q4_k", "q6_k")[layer % 2], WIDTH, MLP),
        }
        for layer in range(LAYERS // PART)
    ]
    return [*layers, {"head": packed("q6_k", HEAD // PART // 16 * 16, WIDTH)}]


def build_program(level: str, activations: str, threads: int):
    """A compiled layer, or the head, with the kernels of a level: from rows `[T, D]` and its weights."""
    handlers = ctypes.CDLL(str(library.find()[level]))
    prefix = f"level_{level}_{activations}_"
    for target in ("linear", "swiglu"):
        handler = getattr(handlers, f"jaxspec_{target}")
        jax.ffi.register_ffi_target(prefix + target, jax.ffi.pycapsule(handler), platform="cpu")

    def run(x, layer):
        if "head" in layer:
            return linear(x, layer["head"])
        qkv = linear(x, layer["qkv"])
        x = x + linear(qkv[:, :WIDTH], layer["out"])
        return x + linear(swiglu(x, layer["gate_up"]), layer["down"])

    def traced(x, layer):
        own, library.TARGET_PREFIX = library.TARGET_PREFIX, prefix
        try:
            with using(Kernels("cpu", "cpu", threads)):
                return run(x, layer)
        finally:
            library.TARGET_PREFIX = own

    return jax.jit(traced)


if __name__ == "__main__":
    main()
