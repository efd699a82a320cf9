"""A few rows times a weight in planes, as a Pallas kernel in the Triton dialect: NVIDIA GPUs from Ampere on.

One program computes outputs `[o, o + block_o)` of all rows from one part of the inputs. It reads codes and scales,
makes bfloat16 numbers of them in registers, and multiplies these by the rows on the matrix unit. The weight is read
once and nothing of it is written. XLA adds up the parts, in one order, where it can in whatever reads the result.

Two products that share rows, gate and up, are one program, which ends with the activation.

Letters: T rows, I inputs, O outputs, F output columns.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import registry
from pallas_kernels.linear.blocks import PLANES, Blocks, Weight
from pallas_kernels.linear.config import MAX_ROWS, Config, block_rows, choose
from pallas_kernels.linear.planes import Planes, find_planes, plane_starts, upper_bytes

NAME = "jaxspec_linear"


def supports(x: jax.Array, weight: Weight) -> bool:
    """Whether `linear` and `swiglu` take a call: few rows, and a weight in planes whose bytes 32 bits number."""
    in_planes = isinstance(weight, Blocks) and weight.format in PLANES
    return x.shape[0] <= MAX_ROWS and in_planes and math.prod(weight.shape) < 1 << 31


def linear(
    x: jax.Array,  # [T, I]
    weight: Blocks,  # [O, I]
    config: Config | None = None,
) -> jax.Array:  # [T, O] float32
    """`api.linear` of a weight in planes; every row is computed. `config` None takes what `config.choose` says."""
    return jnp.sum(linear_parts(x, weight, config), axis=0)


def linear_parts(
    x: jax.Array,  # [T, I]
    weight: Blocks,  # [O, I]
    config: Config | None = None,
) -> jax.Array:  # [splits, T, O] float32
    """`linear` before its parts are added up."""
    return _run(_describe(x, weight, config), x, weight)


def swiglu(
    x: jax.Array,  # [T, I]
    gate_up: Blocks,  # [2F, I]
    config: Config | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:  # [T, F]
    """`swiglu.api.swiglu` of a weight in planes, rounded to `dtype`; every row is computed."""
    call = _describe(x, gate_up, config)
    if call.config.splits == 1:
        return _run(call._replace(gated=True, dtype=jnp.dtype(dtype)), x, gate_up)[0]
    # The activation needs whole sums.
    hidden = jnp.sum(_run(call, x, gate_up), axis=0)
    columns = gate_up.shape[0] // 2
    return (jax.nn.silu(hidden[:, :columns]) * hidden[:, columns:]).astype(dtype)


class _Call(NamedTuple):
    """The static part of a call: the layout of the weight, groups of codes in a row and in a step, and block sizes.

    `dtype` is that of the result.
    """

    layout: Planes
    groups: int
    step: int
    config: Config
    gated: bool = False
    dtype: Any = jnp.dtype(jnp.float32)

    @property
    def steps(self) -> int:
        """Steps of a program."""
        return pl.cdiv(pl.cdiv(self.groups, self.step), self.config.splits)


def _describe(x: jax.Array, weight: Blocks, config: Config | None) -> _Call:
    layout = find_planes(weight.format)
    assert layout is not None
    code_bytes = weight.shape[1] * layout.codes
    device_kind = registry.current().device_kind
    config = config or choose(device_kind, weight.format, x.shape[0], weight.shape[0], code_bytes)
    # Whole blocks: planes may have a byte for several groups.
    step = max(config.step, layout.codes if max(layout.per) > 1 else layout.group)
    return _Call(layout, code_bytes // layout.group, step // layout.group, config)


def _run(call: _Call, x: jax.Array, weight: Blocks) -> jax.Array:  # -> [splits, T, O]
    T, outputs = x.shape[0], weight.shape[0] // (2 if call.gated else 1)
    config = call.config
    return pl.pallas_call(
        functools.partial(_run_program, call=call),
        out_shape=jax.ShapeDtypeStruct((config.splits, T, outputs), call.dtype),
        grid=(pl.cdiv(outputs, config.block_o), config.splits),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=registry.current().interpret,
        name=NAME,
    )(x.astype(jnp.bfloat16), weight.data.reshape(weight.shape[0], -1))


def _run_program(x_ref, weight_ref, out_ref, *, call: _Call):
    """One program: outputs `[o, o + block_o)`, gate and up of as many columns if `gated`, of one part of the inputs."""
    layout, config = call.layout, call.config
    T, outputs = x_ref.shape[0], out_ref.shape[2]
    block_t, block_o = block_rows(T), config.block_o
    first, split = pl.program_id(0) * block_o, pl.program_id(1)
    output, row = first + jnp.arange(block_o)[:, None], jnp.arange(block_t)[:, None]
    output_mask = None if outputs % block_o == 0 else output < outputs
    row_mask = None if T == block_t else row < T
    starts = plane_starts(layout, call.groups)
    # Every step lies within the row where steps and parts divide the groups.
    whole = call.groups % (call.step * call.steps * config.splits) == 0
    parts = (0, outputs) if call.gated else (0,)

    def step(index, sums):
        group = (split * call.steps + index) * call.step
        code = group * layout.group + jnp.arange(call.step * layout.group)[None, :]

        def read(column, end: int, first_output: int):
            """Bytes `[block_o, ...]` of each output, zeros after the last group."""
            mask = _both(output_mask, None if whole else column < end)
            return _load(weight_ref.at[first_output + output, column], mask, "evict_first")

        def decode(first_output: int):
            codes = read(code, starts[0], first_output).reshape(block_o, call.step, layout.group)
            planes, at = [], 0
            if layout.upper:
                # The byte of a group's upper bits for each byte of its codes.
                place = jnp.arange(call.step)[:, None] * layout.upper + upper_bytes(layout)[None, :]
                place = starts[0] + group * layout.upper + place.reshape(1, -1)
                planes.append(read(place, starts[1], first_output).reshape(codes.shape))
                at = 1
            for start, per in zip(starts[at:], layout.per, strict=True):
                count = call.step // per
                place = start + group // per + jnp.arange(count)[None, :]
                plane = read(place, start + call.groups // per, first_output)
                if per > 1:
                    plane = jnp.broadcast_to(plane[:, :, None], (block_o, count, per)).reshape(block_o, call.step)
                planes.append(plane)
            halves = layout.decode(codes, *planes)
            return [half.astype(jnp.bfloat16).reshape(block_o, call.step * layout.group) for half in halves]

        inputs = []
        for half in range(layout.halves):
            # Value of the row that stands beside a code.
            place = code // layout.width * (layout.halves * layout.width) + code % layout.width + half * layout.width
            mask = _both(row_mask, None if whole else place < x_ref.shape[1])
            inputs.append(_load(x_ref.at[row, place], mask, "evict_last"))
        added = []
        for first_output, total in zip(parts, sums, strict=True):
            for weights, rows in zip(decode(first_output), inputs, strict=True):
                total = total + plgpu.dot(weights, rows, trans_b=True)
            added.append(total)
        return tuple(added)

    zeros = jnp.zeros((block_o, block_t), jnp.float32)
    sums = jax.lax.fori_loop(0, call.steps, step, (zeros,) * len(parts))
    if call.gated:
        gate, up = sums
        result = gate * jax.nn.sigmoid(gate) * up
    else:
        (result,) = sums
    mask = _both(output_mask, None if row_mask is None else row.T < T)
    if mask is not None:
        mask = jnp.broadcast_to(mask, result.shape)
    plgpu.store(out_ref.at[split, row.reshape(1, -1), output], result.astype(call.dtype), mask=mask)


def _both(first, second):
    """The mask where both masks hold; None holds everywhere."""
    return second if first is None else first if second is None else first & second


def _load(ref, mask, eviction_policy: str):
    """A tile, with zeros where the mask does not hold."""
    if mask is None:
        return plgpu.load(ref, eviction_policy=eviction_policy)
    return plgpu.load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=0, eviction_policy=eviction_policy)
