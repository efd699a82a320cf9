"""Times of drafting with a head that fills a block in one pass, of random weights, beside the draft that ships.

    python tools/bench_block.py [--layers 1,2] [--rows 4,6,8,16] [--repeats 9]
    python tools/bench_block.py --bytes qwen3-8b

Weights do not change the time of a pass, so this says before any training whether such a head can pay: one pass of it
against as many passes of one row as a chain of the shipped draft takes. The heads have the geometry of the default
model's layers in the weights of the shipped draft (Q8_0), its four states and as many rows of the head. A pass takes in
four verified tokens, fills the block and finds the four likeliest tokens of each place. Nothing else should run.

`--bytes` times nothing: it counts the weights that a pass of a head with a published geometry reads, beside those that
verification reads, in bfloat16 and from shapes alone.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import environment_line, make_parser, make_table, numbers, write_report

from jaxspec.bench.microbench import median_times, time_pass
from jaxspec.models.config import ModelConfig
from jaxspec.models.feature_draft import forward_block, fuse, prefill_draft
from jaxspec.models.features import FeatureConfig
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.params import Params
from jaxspec.models.presets import load_preset
from jaxspec.models.quantization import Storage
from jaxspec.models.transformer import vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement, resolve_numbers
from jaxspec.runtime.program import Program

MODEL, SHIPPED_LAYERS, HEAD_ROWS, STATES = "smollm2-135m", 3, 8192, (8, 15, 22, 29)
CONTEXT, SLOTS, VERIFIED, BRANCH = 256, 320, 4, 4


def place(layers: int, block: int = 0) -> tuple[Placement, Params]:
    """A draft of so many layers with random weights; one that fills a block of so many rows, or an ordinary one."""
    base = load_preset(MODEL)
    features = FeatureConfig(base.embed_dim, STATES, "block", block=block, first_row=0) if block else None
    cfg: ModelConfig = dataclasses.replace(
        base, num_layers=layers, vocab_size=HEAD_ROWS, tied=False, features=features
    )  # fmt: skip
    placement = Placement(cfg, plan_mesh(1), np.dtype("float32"), storage=Storage("q8_0"))
    placement = resolve_numbers(placement, "auto", "auto", "int8")
    rng = np.random.default_rng(0)

    def fill(shape: Any) -> jax.Array:
        # Bytes of which every scale is a number near 1.
        whole = np.full(shape.shape, 0x3C, np.uint8) if shape.dtype == np.uint8 else rng.normal(size=shape.shape) / 50
        return jax.device_put(whole.astype(shape.dtype), shape.sharding)

    return placement, jax.tree.map(fill, placement.params())


def time_block(placement: Placement, params: Params) -> Callable[..., float]:
    """A timer of drafts, one after the other in one program: states are taken in and a block is filled."""
    cfg, features = placement.cfg, placement.cfg.features
    assert features is not None
    shapes, scalar = placement.cache(SLOTS), placement.array((), jnp.int32)

    def run(params: Any, cache: Any, count: Any) -> Any:
        def once(index: Any, carry: Any) -> Any:
            cache, largest = carry
            token = index + jnp.arange(VERIFIED, dtype=jnp.int32)
            states = jnp.full((VERIFIED, features.states_dim), 0.1) * (1 + index)
            cache = prefill_draft(params, cfg, token, fuse(params, cfg, states), jnp.int32(VERIFIED), cache)
            hidden, cache = forward_block(params, cfg, token[-1], cache)
            best, _ = placement.vocab.top_k(vocab_logits(params, cfg, hidden), BRANCH)
            return dataclasses.replace(cache, length=jnp.int32(CONTEXT)), jnp.maximum(largest, best.max())

        return jax.lax.fori_loop(0, count, once, (cache, jnp.float32(-jnp.inf)))[::-1]

    def create() -> Any:
        cache = init_cache(cfg, placement.local_kv_heads, SLOTS, placement.kv_dtype)
        return dataclasses.replace(cache, length=jnp.int32(CONTEXT))

    args, out = [placement.params(), shapes, scalar], (placement.array((), jnp.float32), shapes)
    program = Program("block", run, placement.plan, args, out, donate=[1])
    state = [Program("create", create, placement.plan, [], shapes)()]

    def sample(passes: int = 1) -> float:
        start = time.perf_counter()
        found, state[0] = program(params, state[0], np.int32(passes))
        np.asarray(jax.block_until_ready(found))
        return time.perf_counter() - start

    return sample


# Geometries of published heads for Qwen3: layers, states, rows of a block, rank of DSpark's correction, and rows of the
# head, 0 for the whole vocabulary.
PUBLISHED = {
    "DFlash, 16 rows": (5, 5, 16, 0, 0), "DFlash, 16 rows, a head of 32,000": (5, 5, 16, 0, 32_000),
    "DSpark, 7 rows, rank 256": (5, 5, 7, 256, 0),
}  # fmt: skip


def count_bytes(target: str) -> list[list[str]]:
    """Gigabytes of weights that a pass of each published head reads: layers and `fc`, head, correction, and the share.

    The correction's second matrix is read for each place, of the first one row.
    """
    base, plan = load_preset(target), plan_mesh(1)

    def params_of(cfg: ModelConfig) -> dict[str, float]:
        params = Placement(cfg, plan, np.dtype("bfloat16")).params()
        return {
            name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)) / 1e9
            for name, leaves in params.items()
        }

    whole = params_of(base)
    verified, rows = sum(size for name, size in whole.items() if name != "embed" or base.tied), []
    for name, (layers, states, block, rank, head) in PUBLISHED.items():
        first = 0 if rank else 1
        features = FeatureConfig(
            base.embed_dim, tuple(range(states)), "block", block=block, first_row=first, markov_rank=rank
        )  # fmt: skip
        cfg = dataclasses.replace(base, num_layers=layers, features=features, tied=False, head_ids=tuple(range(head)))
        parts = params_of(cfg)
        read = parts["layers"] + parts["fc"], parts["head"], features.places * parts.get("markov_out", 0.0)
        rows.append([name, *(f"{part:.2f}" for part in (*read, verified)), f"{100 * sum(read) / verified:.1f} %"])
    return rows


def main() -> None:
    """Time all heads in turn with the shipped draft, and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=numbers, default=[1, 2], help="of the heads [1,2]")
    parser.add_argument("--rows", type=numbers, default=[4, 6, 8, 16], help="of a block [4,6,8,16]")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bytes", metavar="MODEL", help="count the weights that heads for this model read instead")
    arguments = parser.parse_args()
    if arguments.bytes:
        rows = count_bytes(arguments.bytes)
        print(make_table(["head", "layers and fc, GB", "head", "correction", "verification", "share"], rows))
        return
    shipped = f"the shipped draft, one row, {SHIPPED_LAYERS} layers"
    timers = {shipped: time_pass(*place(SHIPPED_LAYERS), 1, CONTEXT)}
    for layers in arguments.layers:
        for rows in arguments.rows:
            timers[f"a block of {rows} rows, {layers} layers"] = time_block(*place(layers, rows))
    seconds = median_times(timers, arguments.repeats, passes=20)
    rows = [[name, f"{1e3 * value:.3f}", f"{value / seconds[shipped]:.1f}"] for name, value in seconds.items()]
    print(environment_line(), "", make_table(["pass", "ms", "passes of the shipped draft"], rows), sep="\n")
    write_report(arguments.json, seconds=seconds)


if __name__ == "__main__":
    main()
