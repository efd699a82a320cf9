"""The memory roofline: how long it takes to read every weight once and do nothing else with them."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.models.params import Params
from pallas_kernels.linear import linear


def roofline_pass(params: Params, passes: int = 8) -> Callable[[], float]:
    """A chain of matrix-vector products that reads every weight that a decoding step reads, once.

    On several devices each reads its own shard, and nothing is exchanged between them.

    Args:
      params: the target's parameters, placed.
      passes: passes per call, one after the other.

    Returns:
      A function that runs them and returns the seconds of one; its first call compiles.
    """
    leaves, treedef = jax.tree.flatten(params)
    specs = jax.tree.unflatten(treedef, [leaf.sharding.spec for leaf in leaves])
    mesh = leaves[0].sharding.mesh
    width = params["final_norm"].size

    def chain(params: Params, x: jax.Array) -> jax.Array:
        for layer in params["layers"]:
            qkv = _multiply(layer["qkv"].reshape(-1, width), x)
            out = layer["out"].reshape(width, -1)
            # Keys and values have no further use here, but a product that nobody uses is not computed.
            x = _multiply(out, qkv[: out.shape[1]]) + jnp.sum(qkv[out.shape[1] :])
            hidden = _multiply(layer["gate_up"].reshape(-1, width), x)
            columns = hidden.size // 2
            x = _multiply(layer["down"], hidden[:columns] * hidden[columns:])
        return jnp.max(_multiply(params["head"] if "head" in params else params["embed"], x))[None]

    out_spec = PartitionSpec(mesh.axis_names)
    run_chain = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=out_spec, check_vma=False)
    )
    x = jnp.full(width, 1e-3, jnp.float32)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(passes):
            jax.block_until_ready(run_chain(params, x))
        return (time.perf_counter() - start) / passes

    return run


def weight_bytes(params: Params) -> int:
    """Bytes that a decoding step reads: all weights but, where the output has a matrix of its own, the embedding."""
    read = {name: leaf for name, leaf in params.items() if name != "embed" or "head" not in params}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def _multiply(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[O, I]` times `[I]` in the form that the model itself uses for one row: the fastest one known."""
    return linear(x[None], weight)[0]
