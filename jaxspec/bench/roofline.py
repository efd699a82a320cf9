"""The memory roofline: how long it takes to read every weight once and do nothing else with them."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxspec.models.attention import multiply_heads, project_out
from jaxspec.models.params import Params
from pallas_kernels import registry
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.registry import Kernels


def roofline_pass(params: Params, kernels: Kernels, passes: int = 8) -> Callable[[], float]:
    """A chain of matrix-vector products that reads every weight that a decoding step reads, once.

    On several devices each reads its own shard, and nothing is exchanged between them.

    Args:
      params: the target's parameters, placed.
      kernels: what multiplies.
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
            # Keys and values have no further use here, but a product that nobody uses is not computed.
            heads = multiply_heads(layer["qkv"], x, None)  # [1, K, G + 2, H]
            x = project_out(layer, heads[:, :, :-2], None) + jnp.sum(heads[:, :, -2:])
            gate_up = layer["gate_up"]
            hidden = linear(x, as_matrix(gate_up, 2 * gate_up.shape[1]))
            gate, up = jnp.split(hidden, 2, axis=1)
            x = linear(gate * up, as_matrix(layer["down"], width))
        head = params["head"] if "head" in params else params["embed"]
        return jnp.max(linear(x, as_matrix(head, head.shape[0])))[None]

    out_spec = PartitionSpec(mesh.axis_names)
    run_chain = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=out_spec, check_vma=False)
    )
    x = jnp.full((1, width), 1e-3, jnp.float32)

    def run() -> float:
        start = time.perf_counter()
        with registry.using(kernels):
            for _ in range(passes):
                jax.block_until_ready(run_chain(params, x))
        return (time.perf_counter() - start) / passes

    return run


def weight_bytes(params: Params) -> int:
    """Bytes that a decoding step reads: all weights but, where the output has a matrix of its own, the embedding."""
    read = {name: leaf for name, leaf in params.items() if name != "embed" or "head" not in params}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))
