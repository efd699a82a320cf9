#!/usr/bin/env python3
"""What a mixture of experts costs on this CPU by rows and by distinct experts, for docs/results/moe-cpu.md.

    tools/bench_experts.py [qwen3-30b-a3b|mixtral-8x7b|gpt-oss-20b] [--activations int16] [--format q4_0]

Weights are random blocks in the geometry of a published model, of which a few layers are built. The first table is the
experts of one layer alone, with rows sent to a given number of distinct experts. The second is a whole pass over a few
layers with random routing, beside what `pass_costs` says.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.microbench import median_times, time_target_pass
from jaxspec.methods.core.cost_model import pass_costs
from jaxspec.models.config import ModelConfig
from jaxspec.models.experts import ExpertsConfig, distinct_experts
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from pallas_kernels import registry
from pallas_kernels.experts import experts
from pallas_kernels.linear.blocks import FORMATS, Blocks, packed_name
from pallas_kernels.linear.packing import pack_blocks

MODELS = {
    # Layers as published, but few of them; the vocabulary is left small.
    "qwen3-30b-a3b": ModelConfig(
        "qwen3_moe", 3, 2048, 6144, 32, 4, 128, 4096, 4096, qk_norm=True, experts=ExpertsConfig(128, 8, 768)
    ),
    "mixtral-8x7b": ModelConfig(
        "mixtral", 2, 4096, 14336, 32, 8, 128, 4096, 4096, experts=ExpertsConfig(8, 2, 14336)
    ),
    "gpt-oss-20b": ModelConfig(
        "gpt_oss", 4, 2880, 2880, 64, 8, 64, 4096, 4096, qkv_bias=True, out_bias=True, attention_sinks=True,
        sliding_window=128, sliding_layers=(True, False) * 2,
        experts=ExpertsConfig(32, 4, 2880, chosen_scores=True, biases=True, limit=7.0),
    ),
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16)
# The first bytes of a block: a scale that makes its values about 0.02.
SCALES = {"q4_0": np.float16(0.005).tobytes(), "mxfp4": bytes([119])}


@functools.cache
def random_blocks(shape: tuple[int, ...], name: str, activations: str) -> Blocks:
    """A weight `[..., I]` of values about 0.02, packed where rows are rounded; equal shapes share one."""
    block, rng = FORMATS[name], np.random.default_rng(0)
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block.values, block.nbytes), np.uint8)
    data[..., : len(SCALES[name])] = np.frombuffer(SCALES[name], np.uint8)
    if activations == "float32":
        return Blocks(jnp.asarray(data), name)
    return Blocks(jnp.asarray(pack_blocks(data, name, int(np.prod(shape[:-1])))), packed_name(name, activations))


def route(rows: int, distinct: int, chosen: ExpertsConfig, seed: int) -> np.ndarray:
    """Logits that send `rows` rows to so many distinct experts."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(chosen.count)[:distinct]
    logits = np.zeros((rows, chosen.count), np.float32)
    for row in range(rows):
        # The next ones in turn, so that all are taken.
        own = some[(row * chosen.per_token + np.arange(chosen.per_token)) % distinct]
        logits[row, own] = 9 + rng.random(chosen.per_token)
    return logits


def time_experts(cfg: ModelConfig, name: str, activations: str, repeats: int = 9) -> dict[tuple[int, int], float]:
    """Median seconds of one layer's experts, by rows and distinct experts."""
    chosen, kernels = cfg.experts, plan_mesh(1).kernels
    assert chosen is not None
    up = random_blocks((chosen.count, 2 * chosen.dim, cfg.embed_dim), name, activations)
    down = random_blocks((chosen.count, cfg.embed_dim, chosen.dim), name, activations)

    @jax.jit
    def run(x: jax.Array, logits: jax.Array, up: Blocks, down: Blocks) -> jax.Array:
        return experts(x, logits, up, down, chosen.per_token, scores=chosen.scores)

    counts = sorted({min(chosen.count, chosen.per_token * n) for n in ROWS})
    cases = [(rows, d) for rows in ROWS for d in counts if d <= rows * chosen.per_token]
    samples: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    with registry.using(kernels):
        for repeat in range(repeats + 1):
            for rows, distinct in cases:
                x = np.random.default_rng(repeat).normal(size=(rows, cfg.embed_dim)).astype(np.float32)
                logits = route(rows, distinct, chosen, repeat)
                start = time.perf_counter()
                jax.block_until_ready(run(x, logits, up, down))
                # The first round compiles.
                if repeat:
                    samples[rows, distinct].append(time.perf_counter() - start)
    return {case: statistics.median(times) for case, times in samples.items()}


def random_params(placement: Placement, name: str) -> dict:
    """Parameters of a placement: random blocks, small numbers."""

    def make(leaf: object) -> object:
        if isinstance(leaf, Blocks):
            shape = (*leaf.data.shape[:-2], leaf.data.shape[-2] * FORMATS[name].values)
            return random_blocks(shape, name, placement.activations)
        # Norm scales of one, and a router that rows of other tokens leave for other experts.
        noise = jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype)  # pyright: ignore
        return noise * 0 + 1 if noise.ndim == 1 else noise

    return jax.tree.map(make, placement.params(), is_leaf=lambda leaf: isinstance(leaf, Blocks))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--activations", choices=("float32", "int16", "int8"), default="int16")
    parser.add_argument("--format", choices=SCALES, default="q4_0")
    options = parser.parse_args()
    cfg = MODELS[options.model]
    assert cfg.experts is not None
    times = time_experts(cfg, options.format, options.activations)
    counts = sorted({distinct for _, distinct in times})
    form = f"{options.format}, {options.activations}"
    print(f"experts of one layer of {options.model}, {form}: ms by rows and distinct experts")
    print("| rows | " + " | ".join(map(str, counts)) + " |")
    print("|---:|" + "---:|" * len(counts))
    for rows in ROWS:
        cells = [f"{1e3 * times[rows, d]:.2f}" if (rows, d) in times else "" for d in counts]
        print(f"| {rows} | " + " | ".join(cells) + " |")
    storage = Storage(options.format)
    placement = Placement(cfg, plan_mesh(1), np.dtype("float32"), storage=storage, activations=options.activations)
    params = random_params(placement, options.format)
    medians = median_times({n: time_target_pass(placement, params, n, 128) for n in ROWS}, 9)
    dense = dataclasses.replace(cfg, family="llama", experts=None, qk_norm=False)
    costs = pass_costs(placement, max(ROWS))
    alike = pass_costs(dataclasses.replace(placement, cfg=dense), max(ROWS))
    print(f"a pass of {cfg.num_layers} layers and the head")
    print("| rows | expected distinct experts | ms | over one row | built-in figure | of a dense model |")
    print("|---:|---:|---:|---:|---:|---:|")
    for n in ROWS:
        expected, ratio = distinct_experts(cfg.experts, n), medians[n] / medians[1]
        figures = f"{ratio:.2f} | {costs[n - 1]:.2f} | {alike[n - 1]:.2f}"
        print(f"| {n} | {expected:.1f} | {1e3 * medians[n]:.1f} | {figures} |")


if __name__ == "__main__":
    main()
