"""The day of a TPU: do kernels and tokens agree, and are passes as fast as bounds written before? Ten minutes.

    python tools/tpu_bench.py [--minutes 10] [--json FILE] [--smoke]

No TPU has run jaxspec yet (docs/results/tpu-compile.md). Each part is a process of its own, so that a kernel that hangs
takes nothing else with it. `BOUNDS` are the bounds; the exit status is 1 unless all are met.

  check   the attention for TPUs beside numpy, on the device
  tokens  greedy texts of methods beside plain decoding's, with random weights: XLA's attention, then the kernel
  steps   passes of half of Llama-3-8B with random weights, T rows after 512 and 8,192 tokens, by both

With `--smoke` tiny shapes run in this process on any device, the kernel in its interpreter: that the tool works.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kernel_bench.parts import divide_slice, run_child, run_rows, write_whole

SHARES = {"check": 0.15, "tokens": 0.35, "steps": 0.5}
KERNELS = ("xla", "mosaic-tpu")
METHODS = {"chain": {}, "lookup": {}, "specexec": {"num_draft_tokens": 16}}
ROWS, PREFIXES = (1, 2, 8, 64), (512, 8192)
# Bytes per second by JAX's name of the TPU, as published.
BANDWIDTH = {"TPU v4": 1.228e12, "TPU v5 lite": 0.819e12, "TPU v5": 2.765e12, "TPU v6 lite": 1.64e12, "TPU7x": 7.37e12}
# Least share of the bandwidth of one row; most time of 64 rows over that of one, and of the kernel over XLA's.
BOUNDS = {"bandwidth": 0.6, "64 rows": 1.3, "kernel": 1.0}


def main() -> None:
    """Run the parts, judge, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all parts together [10]")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in this process, on any device")
    parser.add_argument("--part", choices=SHARES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run_rows(arguments.part, PARTS[arguments.part], arguments.json, arguments.minutes * 60)
        return
    parts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, share in SHARES.items():
            file = Path(folder) / f"{name}.json"
            budget, grace = divide_slice(arguments.minutes * 60 * share)
            if arguments.smoke:
                parts[name] = run_rows(name, lambda name=name: PARTS[name](smoke=True), file, budget)
            else:
                words = [sys.executable, __file__, "--part", name, "--json", str(file), "--minutes", str(budget / 60)]
                parts[name] = run_child(name, words, file, budget, grace)
            print(json.dumps(parts[name]), flush=True)
    verdicts = judge(parts)
    for bound, found, met in verdicts:
        print(f"{'met' if met else 'missing' if met is None else 'NOT MET'}: {bound}: {found}")
    if arguments.json:
        result = {"parts": parts, "verdicts": verdicts}
        write_whole(arguments.json, json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(met for *_, met in verdicts) else 1)


def judge(parts: dict[str, dict[str, Any]]) -> list[tuple[str, Any, bool | None]]:
    """Each bound with what was found and whether it is met; None where it was not measured."""
    rows = {name: [row for row in part["rows"] if "error" not in row] for name, part in parts.items()}
    wrong, tokens = [row["difference"] for row in rows["check"]], rows["tokens"]
    seconds = {(row["kernels"], row["rows"], row["prefix"]): row["seconds"] for row in rows["steps"]}
    one = next((row for row in rows["steps"] if (row["kernels"], row["rows"], row["prefix"]) == ("xla", 1, 512)), None)
    share = one["bytes"] / one["seconds"] / one["bandwidth"] if one and one["bandwidth"] else None
    wide = _divide(seconds, ("xla", 64, 512), ("xla", 1, 512))
    kernel = _divide(seconds, ("mosaic-tpu", 64, 8192), ("xla", 64, 8192))
    differing = [row["name"] for row in tokens if not row["equal"]]
    narrow = None if wide is None else wide <= BOUNDS["64 rows"]
    faster = None if kernel is None else kernel <= BOUNDS["kernel"]
    full = None if share is None else share >= BOUNDS["bandwidth"]
    return [
        ("the kernel passes its check", wrong, wrong == [None] if wrong else None),
        ("all texts are those of plain decoding", differing, not differing if tokens else None),
        (f"one row at {BOUNDS['bandwidth']:.0%} of the bandwidth", share, full),
        (f"64 rows within {BOUNDS['64 rows']} of one", wide, narrow),
        (f"the kernel within {BOUNDS['kernel']} of XLA's attention", kernel, faster),
    ]  # fmt: skip


def _divide(seconds: dict[Any, float], above: Any, below: Any) -> float | None:
    return seconds[above] / seconds[below] if above in seconds and below in seconds else None


def _plan(name: str, smoke: bool) -> Any:
    """A mesh of one device; of `smoke` on any device, whose kernel is interpreted."""
    from jaxspec.runtime.mesh import plan_mesh
    from pallas_kernels.registry import Kernels

    if not smoke or name == "xla":
        return plan_mesh(kernels=name)
    made = Kernels(name, "tpu", implementations=(("tree_attention", "mosaic_tpu"),), interpret=True)
    return dataclasses.replace(plan_mesh(kernels="xla"), kernels=made)


def check_kernel(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """One row: what is wrong with the kernel, or None."""
    from pallas_kernels.kernel_check import find_kernel_difference

    plan = _plan("mosaic-tpu" if smoke else "xla", smoke)
    found = find_kernel_difference("tree_attention", "mosaic_tpu", plan.kernels, plan.devices[0])
    yield {"name": "check", "device": plan.devices[0].device_kind, "difference": found}


def compare_tokens(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each method and kernels: whether its text is plain decoding's."""
    import jax
    import jax.numpy as jnp

    from jaxspec.config import SamplingParams
    from jaxspec.engine import Engine
    from jaxspec.methods.core.round import ModelParams, Models
    from jaxspec.methods.registry import make_method
    from jaxspec.models.config import ModelConfig
    from jaxspec.runtime.placement import Placement

    cfg = ModelConfig("llama", 2, 256, 512, 4, 2, 128, 512, 1024)
    count, texts = 16 if smoke else 128, {}
    for kernels in KERNELS[: 1 if smoke else 2]:
        target = Placement(cfg, _plan(kernels, smoke), jnp.dtype(jnp.float32 if smoke else jnp.bfloat16))
        leaves, tree = jax.tree.flatten(target.params())
        keys = jax.random.split(jax.random.key(0), len(leaves))
        filled = [jax.device_put((0.06 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype) + (leaf.ndim == 1),
                                 leaf.sharding) for key, leaf in zip(keys, leaves, strict=True)]  # fmt: skip
        params = jax.tree.unflatten(tree, filled)
        for name, settings in {"ar": {}, **(METHODS if not smoke else {"chain": {}})}.items():
            method = make_method(name, settings)
            drafts = method.drafts
            engine = Engine(Models(target, target if drafts else None), method, 512)
            engine.prepare()
            tokens: list[int] = []
            sampling = SamplingParams(max_tokens=count, ignore_eos=True)
            with engine.open(
                ModelParams(params, params if drafts else None), list(range(1, 40)), sampling, 0
            ) as session:
                while len(tokens) < count:
                    tokens += session.step().tokens
            texts[name] = tokens[:count]
            yield {"name": f"{name}, {kernels}", "equal": texts[name] == texts["ar"]}


def measure_steps(smoke: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each kernels, rows and prefix: seconds of a pass, and the bytes that it must read."""
    import jax.numpy as jnp
    from kernel_bench.parts import describe_error
    from kernel_bench.steps import TINY, random_params
    from kernel_bench.timing import median_step

    from jaxspec.bench.microbench import time_target_pass, weight_bytes
    from jaxspec.models.presets import load_preset
    from jaxspec.runtime.placement import Placement

    cfg = TINY if smoke else dataclasses.replace(load_preset("llama-3-8b"), num_layers=16)
    steps = [(name, T, prefix) for prefix in PREFIXES for name in KERNELS for T in ROWS]
    params = None
    for name, rows, prefix in [("xla", 1, 40)] if smoke else steps:
        placement = Placement(cfg, _plan(name, smoke), jnp.dtype(jnp.bfloat16))
        params = random_params(placement) if params is None else params
        cached = 4 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * prefix
        kind = placement.plan.devices[0].device_kind
        row = {"name": f"{name}, T={rows}, prefix {prefix}", "kernels": name, "rows": rows, "prefix": prefix,
               "bytes": weight_bytes(params) + cached, "bandwidth": BANDWIDTH.get(kind)}  # fmt: skip
        try:
            yield row | {"seconds": median_step(time_target_pass(placement, params, rows, prefix), 2 if smoke else 8)}
        except Exception as error:
            yield row | {"error": describe_error(error)}


PARTS: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {
    "check": check_kernel, "tokens": compare_tokens, "steps": measure_steps,
}  # fmt: skip

if __name__ == "__main__":
    main()
