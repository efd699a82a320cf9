"""Several GPUs: passes over two to eight of them, each against a bound that was written down beforehand.

    python tools/gpus_bench.py [--devices 2,4,8] [--json FILE] [--smoke]

Run `tools/gpu_bench.py` on one of them first. Weights are random. In this order, a line for each with pass or fail:

  plain      a pass of one row of Llama-3-8B in bfloat16: as many times as fast as on one device as there are devices,
             times `EFFICIENCY`, or more
  verify     a pass of eight rows, of one row's time at most `VERIFY_RATIO`
  large      a verification of eight rows of Llama-3-70B in int4 on four: at most `LARGE_MS`, SwiftSpec's own
  exact      the same plain pass with exact numerics: at most `EXACT_RATIO` of its time
  sums       the same plain pass with `--kernels mosaic`, whose sums over devices are part of a product: at most its
             time. Until it passes, the default is XLA's all-reduces

With `--smoke` a tiny model runs on any devices, and the times say nothing.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernel_bench.bare import stand_in
from kernel_bench.parts import describe_error

EFFICIENCY, VERIFY_RATIO, LARGE_MS, EXACT_RATIO = 0.6, 1.15, 10.4, 1.10
PREFIX = 512


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4,8", help="numbers of them, by comma [2,4,8]")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on any devices")
    arguments = parser.parse_args()
    stand_in()
    rows = []
    for row in measure([int(count) for count in arguments.devices.split(",")], arguments.smoke):
        rows.append(row)
        said = (
            row.get("error") or f"{row['measured']:.3g}, bound {row['bound']:.3g}: {'pass' if row['met'] else 'FAIL'}"
        )
        print(f"{row['name']}: {said}", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if arguments.smoke or all(row.get("met") for row in rows) else 1)


def measure(counts: list[int], smoke: bool) -> Iterator[dict[str, Any]]:
    """A row for each question that the devices suffice for; what fails is a row with its error."""
    import jax
    import jax.numpy as jnp
    from kernel_bench.steps import TINY, place_form, random_params
    from kernel_bench.timing import median_step

    from jaxspec.bench.microbench import time_target_pass
    from jaxspec.models.presets import load_preset

    kernels = "xla" if smoke else "auto"
    prefix, passes = (40, 2) if smoke else (PREFIX, 8)

    def seconds(devices: int, rows: int, form: str = kernels, preset: str = "llama-3-8b") -> float:
        cfg = TINY if smoke else load_preset(preset)
        placement = place_form(form, cfg, jnp.dtype(jnp.float32 if smoke else jnp.bfloat16), devices)
        return median_step(time_target_pass(placement, random_params(placement), rows, prefix), passes)

    def judge(name: str, make: Any, bound: float, *, most: bool) -> dict[str, Any]:
        try:
            measured = make()
        except Exception as error:
            return {"name": name, "error": describe_error(error), "met": None}
        return {
            "name": name,
            "measured": measured,
            "bound": bound,
            "met": measured <= bound if most else measured >= bound,
        }

    alone = seconds(1, 1)
    packed = kernels if smoke else "pallas-triton int4_g128"
    for count in [count for count in counts if count <= len(jax.devices())]:
        plain, on = seconds(count, 1), f"{count} devices"
        yield judge(f"plain, {on}, speed-up", lambda p=plain: alone / p, EFFICIENCY * count, most=False)
        yield judge(f"verify, {on}, ratio", lambda c=count, p=plain: seconds(c, 8) / p, VERIFY_RATIO, most=True)
        if count == 4 or smoke:
            large = functools.partial(seconds, count, 8, packed, "llama-3-70b")
            yield judge(f"large, {on}, seconds", large, LARGE_MS / 1e3, most=True)
        exact = functools.partial(seconds, count, 1, f"{kernels} exact")
        yield judge(f"exact, {on}, ratio", lambda e=exact, p=plain: e() / p, EXACT_RATIO, most=True)
        sums = functools.partial(seconds, count, 1, kernels if smoke else "mosaic")
        yield judge(f"sums, {on}, ratio", lambda s=sums, p=plain: s() / p, 1.0, most=True)


if __name__ == "__main__":
    main()
