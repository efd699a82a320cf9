"""A product and its sum over GPUs in one kernel, through memory of peers: Hopper GPUs that reach each other's memory.

A CTA multiplies all rows by one tile of outputs, with the inputs of its device. The device that owns the tile gets the
results of all devices in its `box`, adds them in the order of the devices, and writes the sum into the result of each.
So a tile crosses the links while others are multiplied, and every number crosses in bfloat16, once to its owner and
once from it. CTAs wait for those of the same tile alone: a device runs them in their order, so that none waits for one
that cannot start.

XLA starts a kernel that uses peers' memory after a barrier of its own, when the buffers of all devices are at hand. The
kernel ends on a device when every tile has arrived there: until then its box is read and its result is written.

Every row is computed as the first rows of a tile of 64, so its bits do not depend on the rows beside it.

JAX's interpreter has neither peers' memory nor semaphores (0.10), so it runs the two halves apart, `multiply` and
`add`, and a test carries tiles between them. It also has no transposed operands.

Letters: T rows, I inputs of a device, O outputs, n devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registry
from pallas_kernels.linear.config import MAX_ROWS
from pallas_kernels.tree_attention.mosaic import interpreter

NAME = "jaxspec_linear_sum"
ROWS = 64  # of a wgmma
STAGES = 4  # steps of inputs that are held at a time
MOST_DEVICES = 8


def supports(x: jax.Array, weight: Any, axis: str) -> bool:
    """Whether `linear_sum` takes a call: a few rows, whole tiles of a bfloat16 weight, and a reduction of ours."""
    kernels = registry.current()
    if kernels.exact or kernels.interpret or getattr(weight, "dtype", None) != jnp.bfloat16 or weight.ndim != 2:
        return False
    whole = all(extent % 64 == 0 for extent in weight.shape)
    return whole and x.shape[0] <= MAX_ROWS and 2 <= lax.axis_size(axis) <= MOST_DEVICES


def linear_sum(x: jax.Array, weight: jax.Array, axis: str) -> jax.Array:  # [T, I], [O, I] -> [T, O] bfloat16
    """`reference.linear_sum`, for calls that `supports` takes."""
    # Narrow tiles where wide ones would leave multiprocessors idle.
    width = 32 if len(weight) // 32 <= registry.current().multiprocessors else 64
    # TMA copies whole groups of eight rows.
    padded = jnp.pad(x.astype(weight.dtype), ((0, -len(x) % 8), (0, 0)))
    return _run(padded, weight, axis, width)[: len(x)]


def _run(x: jax.Array, weight: jax.Array, axis: str, width: int) -> jax.Array:
    rows, outputs, devices = len(x), len(weight), lax.axis_size(axis)
    tiles = outputs // width

    def linear_sum(x, weight, out, box, arrived, done, **scratch):
        me, tile = lax.axis_index(axis), lax.axis_index("tile")
        owner, place = find_owner(tile, devices)
        _multiply(x, weight, plgpu.remote_ref(box.at[me, place], owner), **scratch)
        # Of the CTA of the same tile there, which sees the signal after what was written before it.
        pl.semaphore_signal(arrived, device_id=owner)

        @pl.when(owner == me)
        def _():
            pl.semaphore_wait(arrived, devices)
            total = _add(box.at[:, place])
            for device in map(jnp.int32, range(devices)):
                plgpu.remote_ref(out.at[:, pl.ds(tile * width, width)], device)[...] = total
            for device in map(jnp.int32, range(devices)):
                pl.semaphore_signal(done, device_id=device)

        pl.semaphore_wait(done, 1)

    outs = ((rows, outputs), (devices, pl.cdiv(tiles, devices), rows, width))
    semaphores = (plgpu.SemaphoreType.REGULAR, plgpu.SemaphoreType.REGULAR)
    return _call(linear_sum, outs, tiles, semaphores, **_scratch(weight.shape[1], width))(x, weight)[0]


def multiply(x: jax.Array, weight: jax.Array, width: int) -> jax.Array:  # [T, I], [O, I] -> [O / width, T, width]
    """The kernel's first half, for tests: results of tiles, bfloat16. T is a multiple of eight."""

    def run(x, weight, out, **scratch):
        _multiply(x, weight, out.at[lax.axis_index("tile")], **scratch)

    tiles = weight.shape[0] // width
    return _call(run, ((tiles, len(x), width),), tiles, **_scratch(x.shape[1], width))(x, weight)[0]


def add(box: jax.Array) -> jax.Array:  # [n, tiles, T, width] -> [tiles, T, width]
    """The kernel's second half, for tests: sums of what the devices sent to one of them."""

    def run(box, out):
        out[lax.axis_index("tile")] = _add(box.at[:, lax.axis_index("tile")])

    return _call(run, (box.shape[1:],), box.shape[1])(box)[0]


def find_owner(tile: Any, devices: int) -> tuple[Any, Any]:
    """The device that adds up a tile, and the place of the tile among that device's own."""
    return lax.rem(tile, jnp.int32(devices)), lax.div(tile, jnp.int32(devices))


def _multiply(x, weight, out, rows_ref, weight_ref, staged, ready) -> None:
    """Multiply all rows by this CTA's tile of outputs, and write the result, bfloat16, to `out`, [rows, width]."""
    tile, (rows, width) = lax.axis_index("tile"), out.shape
    steps, size = x.shape[1] // weight_ref.shape[2], weight_ref.shape[2]

    def fetch(step):
        place, inputs = lax.rem(step, jnp.int32(STAGES)), pl.ds(step * size, size)
        plgpu.copy_gmem_to_smem(weight.at[pl.ds(tile * width, width), inputs], weight_ref.at[place], ready.at[place])
        # The other rows hold anything, and so do their results, which go nowhere.
        plgpu.copy_gmem_to_smem(x.at[:, inputs], rows_ref.at[place, pl.ds(0, rows)], ready.at[place])

    for step in range(min(STAGES - 1, steps)):
        fetch(jnp.int32(step))

    def add_products(accumulator):
        @pl.loop(0, steps)
        def _(step):
            place = lax.rem(step, jnp.int32(STAGES))
            plgpu.barrier_wait(ready.at[place])
            _add_product(accumulator, rows_ref.at[place], weight_ref.at[place])
            # The step before is done, and its place free.
            pl.when(step + (STAGES - 1) < steps)(lambda: fetch(step + (STAGES - 1)))

        return accumulator[...]

    staged[...] = _accumulate(add_products, width).astype(jnp.bfloat16)
    plgpu.commit_smem()
    out[...] = staged[pl.ds(0, rows)]


def _accumulate(add_products: Any, width: int) -> jax.Array:  # [64, width] float32
    if not registry.current().interpret:
        return pl.run_scoped(add_products, plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32))

    def from_zero(total):
        total[...] = jnp.zeros(total.shape, total.dtype)
        return add_products(total)

    return pl.run_scoped(from_zero, plgpu.SMEM((ROWS, width), jnp.float32))


def _add_product(accumulator, rows, weight) -> None:  # [64, width], [64, inputs], [width, inputs]
    if registry.current().interpret:
        accumulator[...] += jnp.dot(rows[...], weight[...].T, preferred_element_type=jnp.float32)
        return plgpu.commit_smem()  # as `wgmma_wait` does, before TMA writes over what was read
    plgpu.wgmma(accumulator, rows, weight.transpose((1, 0)))
    return plgpu.wgmma_wait(1)


def _add(box: Any) -> jax.Array:  # [n, rows, width] -> [rows, width] bfloat16
    """The sum of the results of all devices, in their order."""
    results = [box[device].astype(jnp.float32) for device in range(box.shape[0])]
    return functools.reduce(jnp.add, results).astype(jnp.bfloat16)


def _scratch(inputs: int, width: int) -> dict[str, Any]:
    """Shared memory and barriers of `_multiply`."""
    size = 128 if inputs % 128 == 0 else 64
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return {
        "rows_ref": plgpu.SMEM((STAGES, ROWS, size), jnp.bfloat16, transforms=tiled),
        "weight_ref": plgpu.SMEM((STAGES, width, size), jnp.bfloat16, transforms=tiled),
        "staged": plgpu.SMEM((ROWS, width), jnp.bfloat16),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    }


def _call(body: Any, outs: tuple[tuple[int, ...], ...], tiles: int, semaphores: tuple = (), **scratch: Any) -> Any:
    """A kernel with a CTA of one warpgroup for each tile; its results are bfloat16."""

    def run(*refs):
        pl.run_scoped(functools.partial(body, *refs), *semaphores, collective_axes=(), **scratch)

    return pl.kernel(
        run,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in outs),
        mesh=plgpu.Mesh(grid=(tiles,), grid_names=("tile",)),
        # JAX's search for layouts, by warpgroup, gives up where a kernel has as many accesses as this one.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter() if registry.current().interpret else None,
        name=NAME,
    )
