"""A mixture of experts left to XLA."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.linear.blocks import Blocks, Weight
from pallas_kernels.linear.reference import PRECISION, as_numbers, linear_in_tiles

# What the scores of a row's experts are; see `api.experts`.
Scores = Literal["all", "renormalised", "chosen"]
Biases = tuple[jax.Array | None, jax.Array | None]  # of the gate and up projections, and of the down projection


@dataclasses.dataclass(frozen=True)
class Clamp:
    """gpt-oss' activation `(u + 1) g sigmoid(alpha g)` of gate g and up u.

    g is at most `limit`, which is positive, and u lies within it on both sides.
    """

    limit: float
    alpha: float


# Of an expert's gate, times its up projection: None is silu, and "gelu" its approximation by tanh.
Activation = Clamp | Literal["gelu"] | None


def choose_experts_by_xla(
    logits: jax.Array, per_token: int, scores: Scores
) -> tuple[jax.Array, jax.Array]:  # float32 [T, E] -> int32 [T, k], float32 [T, k]
    """The best experts of each row, best first, the lower one first where two are alike; and their scores."""
    if scores == "chosen":
        best, choice = jax.lax.top_k(logits, per_token)
        return choice, jax.nn.softmax(best, axis=-1)
    score, choice = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), per_token)
    return choice, score / score.sum(-1, keepdims=True) if scores == "renormalised" else score


def experts_by_xla(
    x: jax.Array, logits: jax.Array, gate_up: Weight, down: Weight, per_token: int, scores: Scores,
    first: jax.Array | int, biases: Biases, activation: Activation,
) -> jax.Array:  # fmt: skip
    """The operation, with the contract of `api.experts`; every row is computed.

    A few rows gather the weights of their experts; for more, each expert multiplies all rows, of which those count that
    are sent to it. Either way the shapes depend on the number of rows alone, and a row's result on no other row.
    """
    choice, score = choose_experts_by_xla(logits, per_token, scores)
    own = choice - first
    mine = (own >= 0) & (own < gate_up.shape[0])
    return _mix(x, own, mine, score, None, gate_up, down, biases, activation)


def chosen_experts_by_xla(
    x: jax.Array, choice: jax.Array, score: jax.Array, places: jax.Array, gate_up: Weight, down: Weight,
    biases: Biases, activation: Activation,
) -> jax.Array:  # fmt: skip
    """The operation, with the contract of `api.chosen_experts`."""
    mine = (choice >= 0) & (places[jnp.clip(choice, 0)] >= 0)
    return _mix(x, choice, mine, score, places, gate_up, down, biases, activation)


def _mix(
    x: jax.Array, choice: jax.Array, mine: jax.Array, score: jax.Array, places: jax.Array | None, gate_up: Weight,
    down: Weight, biases: Biases, activation: Activation,
) -> jax.Array:  # fmt: skip
    """Rows through those of their experts that are `mine`; the weights of expert i lie at `places[i]`, None is at i."""
    count = gate_up.shape[0] if places is None else places.shape[0]
    choice, score = jnp.clip(choice, 0, count - 1), jnp.where(mine, score, 0.0)
    at = jnp.arange(count, dtype=jnp.int32) if places is None else jnp.clip(places, 0)
    if registry.current().platform != "cpu" and isinstance(gate_up, Blocks) and isinstance(down, Blocks):
        return _in_tiles(x, choice, mine, score, at, gate_up, down, biases, activation)
    if x.shape[0] * choice.shape[1] <= count:
        return _by_choices(x, choice, score, at, gate_up, down, biases, activation)
    weight = jnp.zeros((x.shape[0], count), jnp.float32)
    weight = weight.at[jnp.arange(x.shape[0])[:, None], jnp.where(mine, choice, count)].add(score, mode="drop")
    return _by_experts(x, weight, at, gate_up, down, biases, activation)


def _by_choices(x, choice, score, at, gate_up, down, biases, activation):  # [T, D], int32 [T, k], [T, k], [e]
    """Each row times the gathered weights of its experts."""
    place = at[choice]
    up = _numbers(gate_up, place)  # [T, k, 2F, D]
    hidden = _activate(_add(_product("tkoi,ti->tko", up, x.astype(up.dtype)), biases[0], choice), activation)
    weight = _numbers(down, place)  # [T, k, D, F]
    result = _add(_product("tkoi,tki->tko", weight, hidden.astype(weight.dtype)), biases[1], choice)
    return jnp.where(score[..., None] != 0, result * score[..., None], 0.0).sum(1)


def _by_experts(x, weight, at, gate_up, down, biases, activation):  # [T, D], [T, e], [e] -> [T, D]
    """One expert after the other, its weights times all rows."""

    def add_expert(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        up, out = _numbers(gate_up, at[index]), _numbers(down, at[index])
        hidden = _activate(_add(_product("oi,ti->to", up, x.astype(up.dtype)), biases[0], index), activation)
        result = _add(_product("oi,ti->to", out, hidden.astype(out.dtype)), biases[1], index)
        return total + jnp.where(weight[:, index, None] != 0, weight[:, index, None] * result, 0.0), None

    total, _ = jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), jnp.arange(at.shape[0]))
    return total


def _activate(hidden: jax.Array, activation: Activation) -> jax.Array:  # [..., 2F] -> [..., F]
    gate, up = jnp.split(hidden, 2, axis=-1)
    if activation is None:
        return jax.nn.silu(gate) * up
    if activation == "gelu":
        return jax.nn.gelu(gate, approximate=True) * up
    assert isinstance(activation, Clamp)
    gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    return (up + 1) * (gate * jax.nn.sigmoid(activation.alpha * gate))


def _add(result: jax.Array, bias: jax.Array | None, index: jax.Array) -> jax.Array:
    """The results of some experts with their biases."""
    return result if bias is None else result + bias[index]


def _in_tiles(x, choice, mine, score, at, gate_up: Blocks, down: Blocks, biases, activation):  # [T, D], [T, k] x3, [e]
    """On accelerators: an expert's weights stay packed, and a tile of them at a time becomes numbers.

    A few rows pass each of their own experts; for more, each expert multiplies all rows.
    """
    platform, (T, k) = registry.current().platform, choice.shape
    experts, outputs = at.shape[0], gate_up.shape[1]

    def flat(weight: Blocks) -> Blocks:
        return Blocks(weight.data.reshape(-1, *weight.shape[2:]), weight.format)

    def mix(rows: jax.Array, index: jax.Array) -> jax.Array:
        hidden = linear_in_tiles(rows, flat(gate_up), platform, at[index] * outputs, outputs)
        hidden = _activate(_add(hidden, biases[0], index), activation)
        return _add(linear_in_tiles(hidden, flat(down), platform, at[index] * x.shape[1], x.shape[1]), biases[1], index)

    if T * k <= experts:
        pairs = jnp.repeat(x, k, axis=0)[:, None], choice.reshape(-1)
        mixed = jax.lax.map(lambda pair: mix(*pair)[0], pairs).reshape(T, k, -1)
        return jnp.where(score[..., None] != 0, mixed * score[..., None], 0.0).sum(1)

    def add_expert(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        weight = jnp.where(mine & (choice == index), score, 0.0).sum(1)[:, None]
        return total + jnp.where(weight != 0, weight * mix(x, index), 0.0), None

    total, _ = jax.lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), jnp.arange(experts))
    return total


def _numbers(weight: Weight, index: jax.Array) -> jax.Array:
    """The weights of some experts, in numbers."""
    return as_numbers(Blocks(weight.data[index], weight.format)) if isinstance(weight, Blocks) else weight[index]


def _product(indices: str, weight: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.einsum(indices, weight, rows, precision=PRECISION, preferred_element_type=jnp.float32)
