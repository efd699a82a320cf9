"""Attention of one device by tensor-parallel degree: operations and cache bytes of compiled programs.

    JAX_NUM_CPU_DEVICES=8 python tools/count_attention.py

A layer that is nearly all attention (an MLP of 8 columns) is compiled for each degree, through XLA alone. Operations
are XLA's count for the program of one device; bytes are those of the device's part of the cache. Nothing is run.
"""

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxspec.models.config import ModelConfig
from jaxspec.models.transformer import forward
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.tune.plan import local_bytes

ROWS, SLOTS = 8, 256
# KV heads, query heads, width of a head, width of the model: as Llama-3-70B, SmolLM2-135M and Llama-3-8B have them in
# number; widths are small.
SHAPES = [(8, 64, 32, 512), (3, 9, 64, 576), (8, 32, 32, 512)]


def count(cfg: ModelConfig, degree: int) -> tuple[float, int, Placement]:
    """Operations and cache bytes of a device."""
    placement = Placement(cfg, plan_mesh(degree, kernels="xla"), jnp.dtype("float32"))

    def run(params, cache, token):
        place = jnp.arange(ROWS, dtype=jnp.int32)
        return forward(params, cfg, token, cache.length + place, cache, place[None] <= place[:, None])

    args = [placement.params(), placement.cache(SLOTS), placement.array((ROWS,), jnp.int32)]
    out = placement.array((ROWS, cfg.embed_dim), jnp.float32), args[1]
    compiled = Program("forward", run, placement.plan, args, out, donate=[1]).lower().compile()
    cache = sum(local_bytes(leaf) for leaf in jax.tree.leaves(args[1]) if leaf.ndim)
    return compiled.cost_analysis()["flops"], cache, placement


def main() -> None:
    """Print a table for each shape."""
    for kv_heads, heads, head_dim, width in SHAPES:
        cfg = ModelConfig("llama", 1, width, 8, heads, kv_heads, head_dim, 64, max_context=512)
        table = Table(title=f"{kv_heads} KV heads, {heads} query heads: one device's part")
        for name in ("devices", "operations", "of one device", "cache bytes", "query heads", "KV heads"):
            table.add_column(name, justify="right")
        first = None
        for degree in range(1, len(jax.devices()) + 1):
            operations, cache, placement = count(cfg, degree)
            first = first or operations
            layout = placement.heads
            table.add_row(
                str(degree), f"{operations:.0f}", f"{operations / first:.3f}", str(cache), str(layout.queries),
                str(sum(layout.slots)),
            )  # fmt: skip
        Console().print(table)


if __name__ == "__main__":
    main()
