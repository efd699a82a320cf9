"""A numerical check of the native CPU operations on one tiny input, before any program uses them.

The expected results come from numpy and from the `gguf` package. Compiling XLA's references would take a second.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import registry
from pallas_kernels.add_norm import add_norm
from pallas_kernels.delta_rule import DeltaRows, KeptRows, delta_fold, delta_rule, short_conv
from pallas_kernels.experts import Activation, Clamp, choose_experts, chosen_experts, experts
from pallas_kernels.linear import Blocks, linear, take_rows
from pallas_kernels.linear.blocks import ACTIVATIONS, FORMATS, GROUP_FORMATS, PACKED, packed_name
from pallas_kernels.linear.groups import decode_groups
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope import rope_tables
from pallas_kernels.row_top import row_top
from pallas_kernels.swiglu import swiglu
from pallas_kernels.tree_attention import tree_attention

# Packed formats that are also multiplied by more rows, for which some levels have other code.
TILED = tuple(packed_name("q4_1", activations) for activations in ACTIVATIONS)
# Relative to the largest number of a result. Wrong code is off by far more.
TOLERANCE = 1e-4

ROWS, HEADS, GROUP, WIDTH, SLOTS, LENGTH = 3, 2, 2, 24, 160, 140
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
POSITION = np.array([LENGTH, LENGTH + 1, LENGTH + 1], np.int32)
TAKEN = np.array([4, 0], np.int32)
NUMBERS = ("float32", "bfloat16", "float16")
# Of the delta rule: widths, rows that are folded, and which rows find them in their state; rows before each one.
DELTA_KEY, DELTA_VALUE, FOLDED = 20, 18, 32
LATE = np.array([False, False, True])
BEFORE = np.array([[-1, LENGTH - 1, LENGTH - 2], [LENGTH - 1, LENGTH, LENGTH]], np.int32)
EPSILON = 1e-5
CLAMP = Clamp(1.0, 1.702)
# Largest code of rounded activations.
MOST_CODES = {"int8": 127.0, "int16": 127.0 * 256}


def find_difference() -> str | None:
    """Run every operation. Return the name of one whose result is wrong, and by how much, or None.

    The caller's own JAX settings (64-bit types, guards, no jit) change nothing, as in compiled programs.

    Raises:
      JaxRuntimeError: the library refuses a call.
      ValueError: the library refuses a call, and JAX says so when a result is read.
    """
    operands = _make_operands()
    with as_in_programs(registry.Kernels("cpu", "cpu", 2), jax.local_devices(backend="cpu")[0]):
        results = jax.tree.map(np.asarray, jax.jit(_run)(operands))
    return compare(results, _expect(operands), TOLERANCE)


@contextlib.contextmanager
def as_in_programs(kernels: registry.Kernels, device: Any) -> Iterator[None]:
    """Run calls with `kernels` on `device`, under JAX's default settings whatever the caller set."""
    with (
        registry.using(kernels),
        jax.default_device(device),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
    ):
        yield


def compare(results: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> str | None:
    """The name of a result that is off by more than `tolerance` of its largest number, and by how much, or None."""
    for name, exact in expected.items():
        error = float(np.max(np.abs(results[name].astype(np.float32) - exact), initial=0.0))
        if not error <= tolerance * float(np.max(np.abs(exact), initial=0.0)):
            return f"{name} is off by {error:.2g}"
    return None


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:  # [T, ..., H], [T, H / 2] x2
    """Rotary embedding in numpy."""
    cos, sin = (table.reshape(len(x), *[1] * (x.ndim - 2), -1) for table in (cos, sin))
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _make_operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "x": (ROWS, 256),
        "dense": (6, 256),
        "scale": (256,),
        "qkv": (ROWS, HEADS, GROUP + 2, WIDTH),
        "key": (HEADS, SLOTS, WIDTH),
        "value": (HEADS, SLOTS, WIDTH),
        "frequency": (WIDTH // 2,),
        "logits": (ROWS, 3),
        "expert_up": (3, 6, 256),
        "expert_down": (3, 256, 3),
        "up_bias": (3, 6),
        "down_bias": (3, 256),
        "sinks": (HEADS, GROUP),
        "conv": (HEADS, DELTA_KEY, 3),
        "inputs": (HEADS, SLOTS, DELTA_KEY),
        "delta_query": (ROWS, HEADS, DELTA_KEY),
        "delta_key": (ROWS, HEADS, DELTA_KEY),
        "delta_value": (ROWS, HEADS, GROUP, DELTA_VALUE),
        "kept_key": (HEADS, SLOTS, DELTA_KEY),
        "kept_value": (HEADS, SLOTS, GROUP * DELTA_VALUE),
        "state": (HEADS, DELTA_KEY, GROUP * DELTA_VALUE),
    }
    operands = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("delta_query", "delta_key", "kept_key"):
        operands[name] /= np.float32(DELTA_KEY**0.5)
    rates = {
        "delta_decay": (ROWS, HEADS, GROUP),
        "delta_rate": (ROWS, HEADS, GROUP),
        "kept_decay": (HEADS, SLOTS, GROUP),
    }
    operands |= {name: rng.uniform(0.1, 1, shape).astype(np.float32) for name, shape in rates.items()}
    for name, block_format in FORMATS.items():
        data = rng.integers(0, 256, (6, 256 // block_format.values, block_format.nbytes), np.uint8)
        # Scales are float16 numbers at the start or the end of a block, or float32 ones at the start. This mask keeps
        # them finite and small.
        data[..., [1, 3, -1]] &= 0x3B
        if name == "mxfp4":
            data[..., 0] = 0x7C
        if name == "int4_g32":
            data[..., 2] &= 0x3B
        if name.startswith("fp8"):
            data[..., 4:] &= 0xBF
        operands[name] = data
        for activations in ACTIVATIONS if block_format.has_integers else ():
            operands[packed_name(name, activations)] = pack_blocks(data, name, len(data))
    return operands


def _run(o):
    cos, sin = rope_tables(jnp.asarray(POSITION), o["frequency"])
    window = jnp.asarray(TREE), jnp.asarray(POSITION)
    heads, key, value = tree_attention(o["qkv"], cos, sin, o["key"], o["value"], jnp.int32(LENGTH), *window)
    operands = o["x"], o["logits"], o["expert_up"], o["expert_down"]
    biases = {"gate_up_bias": jnp.asarray(o["up_bias"]), "down_bias": jnp.asarray(o["down_bias"])}
    best, column, total = row_top(o["x"], 3, with_total=True)
    summed, normed = add_norm(jnp.asarray(o["x"]), jnp.stack([o["x"], -3 * o["x"]]), jnp.asarray(o["scale"]), EPSILON)
    new = DeltaRows(*(o[f"delta_{name}"] for name in DeltaRows._fields))
    kept = KeptRows(o["kept_key"], o["kept_value"], o["kept_decay"], o["state"])
    out = {
        "short_conv": short_conv(
            o["conv"], o["inputs"], o["delta_key"], jnp.asarray(BEFORE), jnp.int32(LENGTH), silu=True
        ),
        "delta_fold": delta_fold(kept, jnp.int32(0), block=FOLDED),
        "linear": linear(o["x"], o["dense"]),
        "swiglu": swiglu(o["x"], o["dense"]),
        "experts": experts(*operands, 2, scores="renormalised"),
        "experts with biases": experts(*operands, 2, scores="chosen", activation=CLAMP, **biases),
        "experts with gelu": experts(*operands, 2, scores="renormalised", activation="gelu"),
        "chosen_experts after choose_experts": _choose_and_mix(o),
        "rms_norm": rms_norm(o["x"], o["scale"], EPSILON),
        "sum of add_norm": summed,
        "norm of add_norm": normed,
        "rope_tables": jnp.concatenate([cos, sin]),
        "row_top": best,
        "columns of row_top": column,
        "totals of row_top": total,
        "tree_attention": heads,
        "the cache's keys": key,
        "the cache's values": value,
        "tree_attention with sinks": tree_attention(
            o["qkv"], cos, sin, o["key"], o["value"], jnp.int32(LENGTH), *window, sinks=jnp.asarray(o["sinks"])
        )[0],
    }
    out["delta_rule"], kept = delta_rule(new, kept, jnp.int32(LENGTH), window[0], jnp.asarray(LATE), block=FOLDED)
    out["the values of delta_rule"] = kept.value
    for name in FORMATS:
        out[f"linear of {name}"] = linear(o["x"], Blocks(o[name], name))
        out[f"take_rows of {name}"] = take_rows(Blocks(o[name], name), jnp.asarray(TAKEN), alone=True)
    for name in NUMBERS:
        out[f"take_rows of {name}"] = take_rows(jnp.asarray(o["dense"], name), jnp.asarray(TAKEN), alone=True)
    for name in PACKED:
        out[f"linear of {name}"] = linear(o["x"], Blocks(o[name], name))
    for name in TILED:
        out[f"linear of {name}, many rows"] = linear(jnp.tile(o["x"], (5, 1)), Blocks(o[name], name))[-ROWS:]
    return out


def _choose_and_mix(o: dict[str, np.ndarray]) -> jax.Array:
    """The mixture in two steps, the weights of its three experts in another order."""
    choice, score = choose_experts(jnp.asarray(o["logits"]), 2, scores="renormalised")
    moved = [jnp.roll(o[name], -1, axis=0) for name in ("expert_up", "expert_down")]
    return chosen_experts(jnp.asarray(o["x"]), choice, score, jnp.array([2, 0, 1], jnp.int32), *moved)


def _expect(o: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x, hidden = o["x"], o["x"] @ o["dense"].T
    angle = POSITION[:, None] * o["frequency"]
    cos, sin = np.cos(angle), np.sin(angle)
    key, value = o["key"].copy(), o["value"].copy()
    key[:, LENGTH : LENGTH + ROWS] = rotate(o["qkv"][:, :, -2], cos, sin).swapaxes(0, 1)
    value[:, LENGTH : LENGTH + ROWS] = o["qkv"][:, :, -1].swapaxes(0, 1)
    result, values = _walk_delta(o)
    out = {
        "short_conv": _convolve(o),
        "delta_fold": _fold_delta(o, FOLDED),
        "delta_rule": result,
        "the values of delta_rule": values,
        "linear": hidden,
        "swiglu": hidden[:, :3] / (1 + np.exp(-hidden[:, :3])) * hidden[:, 3:],
        "experts": _mix(x, o["logits"], o["expert_up"], o["expert_down"]),
        "experts with biases": _mix(
            x, o["logits"], o["expert_up"], o["expert_down"], (o["up_bias"], o["down_bias"]), CLAMP
        ),
        "experts with gelu": _mix(x, o["logits"], o["expert_up"], o["expert_down"], activation="gelu"),
        "chosen_experts after choose_experts": _mix(x, o["logits"], o["expert_up"], o["expert_down"]),
        "rms_norm": x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPSILON) * o["scale"],
        "sum of add_norm": -x,
        "norm of add_norm": -x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPSILON) * o["scale"],
        "rope_tables": np.concatenate([cos, sin]),
        "row_top": np.sort(x)[:, :-4:-1],
        "columns of row_top": np.argsort(x)[:, :-4:-1],
        "totals of row_top": np.log(np.exp(x).sum(1)),
        "tree_attention": _attend(rotate(o["qkv"][:, :, :-2], cos, sin), key, value),
        "the cache's keys": key,
        "the cache's values": value,
        "tree_attention with sinks": _attend(rotate(o["qkv"][:, :, :-2], cos, sin), key, value, o["sinks"]),
    }
    # Imported where it is needed: the checks of GPU kernels import this file, also where there is no such package.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    out |= {f"take_rows of {name}": o["dense"].astype(name).astype(np.float32)[TAKEN] for name in NUMBERS}
    for name in FORMATS:
        if name in GROUP_FORMATS:
            weight = decode_groups(o[name], name)
        else:
            weight = dequantize(o[name].reshape(6, -1), GGMLQuantizationType[name.upper()])
        out[f"linear of {name}"] = x @ weight.T
        out[f"take_rows of {name}"] = weight[TAKEN]
        for activations, most in MOST_CODES.items() if FORMATS[name].has_integers else ():
            out[f"linear of {packed_name(name, activations)}"] = _round(x, most) @ weight.T
    for name in TILED:
        out[f"linear of {name}, many rows"] = out[f"linear of {name}"]
    return out


def _mix(
    x: np.ndarray, logits: np.ndarray, up: np.ndarray, down: np.ndarray, biases: tuple[Any, Any] = (0, 0),
    activation: Activation = None,
) -> np.ndarray:  # fmt: skip
    """Each row through all experts but its worst."""
    score = np.exp(logits)
    score[np.arange(len(x)), logits.argmin(1)] = 0
    hidden = np.einsum("ti,eoi->teo", x, up) + biases[0]
    gate, linear_part = hidden[..., :3], hidden[..., 3:]
    turn = gate
    if isinstance(activation, Clamp):
        limit = activation.limit
        gate, linear_part = np.minimum(gate, limit), np.clip(linear_part, -limit, limit) + 1
        turn = activation.alpha * gate
    elif activation == "gelu":
        turn = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    # 1 / (1 + exp(-turn)), without overflow.
    hidden = gate * (1 + np.tanh(turn / 2)) / 2 * linear_part
    result = np.einsum("tec,eic->tei", hidden, down) + biases[1]
    return np.einsum("te,tei->ti", score / score.sum(1, keepdims=True), result)


def _convolve(o: dict[str, np.ndarray]) -> np.ndarray:
    rows = np.concatenate([o["inputs"][:, :LENGTH].swapaxes(0, 1), o["delta_key"]])
    places = np.concatenate([BEFORE, LENGTH + np.arange(ROWS)[None]])
    taken = np.where((places >= 0)[..., None, None], rows[places], 0)
    total = np.einsum("pthn,hnp->thn", taken, o["conv"])
    return total / (1 + np.exp(-total))


def _fold_delta(o: dict[str, np.ndarray], count: int) -> np.ndarray:
    state = o["state"].reshape(HEADS, DELTA_KEY, GROUP, DELTA_VALUE).astype(np.float64)
    for row in range(count):
        value = o["kept_value"][:, row].reshape(HEADS, 1, GROUP, DELTA_VALUE)
        state = o["kept_decay"][:, row, None, :, None] * state + o["kept_key"][:, row, :, None, None] * value
    return state.reshape(o["state"].shape)


def _walk_delta(o: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence over each row's path, on whole states; results, and the kept rows' corrected values."""
    values, results = o["kept_value"].copy(), []
    after = {-1: _fold_delta(o, LENGTH).reshape(HEADS, DELTA_KEY, GROUP, DELTA_VALUE)}
    for row in range(ROWS):
        parent = max(map(int, np.flatnonzero(TREE[row, :row])), default=-1)
        key, decay = o["delta_key"][row], o["delta_decay"][row]
        state = decay[:, None, :, None] * after[parent]
        u = o["delta_rate"][row][..., None] * (o["delta_value"][row] - np.einsum("hkgv,hk->hgv", state, key))
        after[row] = state + key[:, :, None, None] * u[:, None]
        results.append(np.einsum("hkgv,hk->hgv", after[row], o["delta_query"][row]))
        values[:, LENGTH + row] = u.reshape(HEADS, -1)
    return np.stack(results), values


def _round(x: np.ndarray, most: float) -> np.ndarray:
    """Rows as integer products see them: 32 inputs share a scale."""
    units = x.reshape(len(x), -1, 32)
    scale = np.abs(units).max(-1, keepdims=True) / most
    return (np.rint(units / scale) * scale).reshape(x.shape)


def _attend(query: np.ndarray, key: np.ndarray, value: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    slots, width = key.shape[1:]
    scores = np.einsum("tkgh,ksh->tkgs", query, key) / np.sqrt(width)
    seen = np.concatenate([np.ones((ROWS, LENGTH), bool), TREE, np.zeros((ROWS, slots - LENGTH - ROWS), bool)], axis=1)
    weights = np.where(seen[:, None, None], np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[..., None])
    return np.einsum("tkgs,ksh->tkgh", weights / total, value)
