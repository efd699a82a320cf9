"""Decoding speed of one geometry with weights in groups and in Q4_0 blocks, on the CPU, in turns.

    python tools/bench_groups.py [--geometry qwen2.5-1.5b] [--tokens 16] [--turns 5]

Weights are random and made in memory: the same embedding (float16) and head for all, linear layers in each format.
Prints milliseconds a token: the median of the turns, and the fastest.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.packing import pack_pair
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.models.params import Params
from jaxspec.models.presets import load_preset
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from pallas_kernels.linear.blocks import Blocks

FORMATS = ("q4_0", "int4_g128")
# Scales with which activations stay of ordinary size.
SCALE = 0.004


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen2.5-1.5b")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--activations", default="int16", choices=("float32", "int16", "int8"))
    arguments = parser.parse_args()
    cfg, plan = load_preset(arguments.geometry), plan_mesh(1)
    prompt, times = list(range(1, 9)), {name: [] for name in FORMATS}
    runs = {}
    for name in FORMATS:
        own = [("embed", "float16")] + ([] if cfg.tied else [("head", "float16")])
        placement = Placement(
            cfg, plan, np.dtype("float32"), storage=Storage(name, tuple(own)), activations=arguments.activations
        )
        params = pack_pair(make_params(placement), None, placement, None)[0]
        engine = Engine(Models(placement), Autoregressive())
        engine.prepare(len(prompt) + arguments.tokens)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
        print(f"{name}: layers of {size / 1e6:.0f} MB", flush=True)
        runs[name] = engine, params
    for turn in range(arguments.turns + 1):
        for name, (engine, params) in runs.items():
            ms = time_tokens(engine, params, prompt, arguments.tokens)
            if turn:  # the first one warms up
                times[name].append(ms)
    for name, each in times.items():
        print(f"{name}: {statistics.median(each):.1f} ms a token (fastest {min(each):.1f})")


def make_params(placement: Placement) -> Params:
    """Random weights on the devices, before anything is packed."""
    rng = np.random.default_rng(0)

    def make(shape: Any) -> Any:
        if not isinstance(shape, Blocks):
            numbers = (
                np.ones(shape.shape) if len(shape.shape) == 1 else rng.standard_normal(shape.shape, np.float32) / 50
            )
            return jax.device_put(numbers.astype(shape.dtype), shape.sharding)
        data = rng.integers(0, 256, shape.data.shape, np.uint8)
        if shape.format == "q4_0":
            data[..., :2] = np.array([SCALE], np.float16).view(np.uint8)
        else:
            data[..., :4] = np.array([SCALE], np.float32).view(np.uint8)
            data[..., 4] = rng.integers(-2, 3, data.shape[:-1], np.int8).view(np.uint8)
        return Blocks(jax.device_put(data, shape.data.sharding), shape.format)

    return jax.tree.map(make, placement.own_params(), is_leaf=lambda leaf: isinstance(leaf, Blocks))


def time_tokens(engine: Engine, params: Params, prompt: list[int], count: int) -> float:
    """Milliseconds a token, without the prompt's."""
    options = SamplingParams(max_tokens=count, ignore_eos=True)
    with engine.open(ModelParams(params), prompt, options, 0) as session:
        done = len(session.step().tokens)
        start = time.perf_counter()
        while not session.done:
            done += len(session.step().tokens)
    return 1000 * (time.perf_counter() - start) / max(1, count - 4)


if __name__ == "__main__":
    main()
