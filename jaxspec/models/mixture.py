"""Rows of a layer through its mixture of experts, for one shard: at once, or in two steps with the choice between them.

A shard has a part of every expert, or, where it has fewer experts than there are, all of some. Results are partial sums
over shards.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.params import Params
from jaxspec.pytree import pytree
from pallas_kernels.experts import choose_experts, chosen_experts, experts
from pallas_kernels.linear import Blocks, as_matrix, linear
from pallas_kernels.linear_sum import all_reduce, linear_sum
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.swiglu import geglu, swiglu


@pytree
class Routed:
    """Rows that were sent to their experts and have not passed them yet."""

    x: jax.Array  # float32 [T, D], the residual stream before the block
    normed: jax.Array  # float32 [T, D], what the experts take
    choice: jax.Array  # int32 [T, k], -1 in rows that do not matter
    score: jax.Array  # float32 [T, k]

    def keep_first(self, count: jax.Array) -> "Routed":
        """Rows from `count` (int32 []) on are sent nowhere."""
        kept = jnp.arange(self.choice.shape[0]) < count
        return dataclasses.replace(self, choice=jnp.where(kept[:, None], self.choice, -1))


def mix_rows(layer: Params, mixture: ExpertsConfig, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:
    """Normed rows through their experts, [T, D] -> [T, D] float32."""
    gate_up = layer["gate_up"]
    is_whole = gate_up.shape[0] == mixture.count
    first = 0 if is_whole else jax.lax.axis_index(TENSOR_AXIS) * gate_up.shape[0]
    mixed = experts(
        x, _logits(layer, mixture, x, active_rows), _merge_gate_up(gate_up), layer["down"], mixture.per_token,
        scores=mixture.scores, first=first, active_rows=active_rows, activation=mixture.activation,
        **_biases(layer, mixture, is_whole),
    )  # fmt: skip
    return _add_shared(layer, mixture, x, mixed, active_rows)


def mix_beside(
    layer: Params, mixture: ExpertsConfig, x: jax.Array, eps: float, active_rows: jax.Array | None
) -> jax.Array:
    """Rows of the residual stream through an MLP and experts beside it, [T, D] -> [T, D] float32, over all shards."""
    gate_up = as_matrix(layer["shared_gate_up"], 2 * layer["shared_gate_up"].shape[1])
    hidden = geglu(rms_norm(x, layer["mlp_norm"], eps), gate_up, active_rows)
    dense = linear_sum(hidden, as_matrix(layer["shared_down"], x.shape[1]), TENSOR_AXIS, active_rows)
    logits = linear(rms_norm(x, jnp.ones(x.shape[1]), eps), layer["router"], active_rows)
    choice, score = choose_experts(logits, mixture.per_token, scores=mixture.scores, active_rows=active_rows)
    score = score * jnp.take(layer["router_scale"], choice, mode="clip")
    held = layer["gate_up"].shape[0]
    first = 0 if held == mixture.count else jax.lax.axis_index(TENSOR_AXIS) * held
    places = jnp.arange(mixture.count, dtype=jnp.int32) - first
    mixed = chosen_experts(
        rms_norm(x, layer["experts_norm"], eps), choice, score, jnp.where(places < held, places, -1),
        _merge_gate_up(layer["gate_up"]), layer["down"], activation=mixture.activation,
    )  # fmt: skip
    mixed = all_reduce(mixed, layer["down"], TENSOR_AXIS)
    return rms_norm(dense, layer["shared_post_norm"], eps) + rms_norm(mixed, layer["experts_post_norm"], eps)


def route_rows(
    layer: Params, mixture: ExpertsConfig, x: jax.Array, normed: jax.Array, active_rows: jax.Array | None
) -> Routed:
    """The first half of `mix_rows`, for which no expert is needed; `x` are the rows before the norm."""
    logits = _logits(layer, mixture, normed, active_rows)
    choice, score = choose_experts(logits, mixture.per_token, scores=mixture.scores, active_rows=active_rows)
    return Routed(x, normed, choice, score)


def mix_routed_rows(
    layer: Params, mixture: ExpertsConfig, routed: Routed, places: jax.Array, active_rows: jax.Array | None
) -> jax.Array:
    """The second half of `mix_rows`: `gate_up` and `down` hold a part of expert i at `places[i]`, int32 [E]."""
    mixed = chosen_experts(
        routed.normed, routed.choice, routed.score, places, _merge_gate_up(layer["gate_up"]), layer["down"],
        activation=mixture.activation, **_biases(layer, mixture, True),
    )  # fmt: skip
    return _add_shared(layer, mixture, routed.normed, mixed, active_rows)


def _logits(layer: Params, mixture: ExpertsConfig, x: jax.Array, active_rows: jax.Array | None) -> jax.Array:
    logits = linear(x, layer["router"], active_rows)
    return logits + layer["router_bias"] if mixture.biases else logits


def _biases(layer: Params, mixture: ExpertsConfig, is_whole: bool) -> dict[str, jax.Array]:
    if not mixture.biases:
        return {}
    down = layer["down_bias"]
    if is_whole and jax.lax.axis_size(TENSOR_AXIS) > 1:
        # Every shard has a part of each expert: one of them adds its bias.
        down = jnp.where(jax.lax.axis_index(TENSOR_AXIS) == 0, down, 0)
    return {"gate_up_bias": _merge_gate_up(layer["gate_up_bias"]), "down_bias": down}


def _add_shared(
    layer: Params, mixture: ExpertsConfig, x: jax.Array, mixed: jax.Array, active_rows: jax.Array | None
) -> jax.Array:
    """The results of the experts and of the one that all rows pass, where there is one."""
    if not mixture.shared_dim:
        return mixed
    hidden = swiglu(x, as_matrix(layer["shared_gate_up"], 2 * layer["shared_gate_up"].shape[1]), active_rows)
    shared = linear(hidden, as_matrix(layer["shared_down"], layer["shared_down"].shape[0]), active_rows)
    return mixed + jax.nn.sigmoid(linear(x, layer["shared_gate"], active_rows)) * shared


def _merge_gate_up(weight: Any) -> Any:
    """`[e, 2, F, ...]` as `[e, 2F, ...]`; nothing moves in memory."""
    if isinstance(weight, Blocks):
        return Blocks(_merge_gate_up(weight.data), weight.format)
    return weight.reshape(weight.shape[0], -1, *weight.shape[3:])
