"""Products added up over devices: the Mosaic kernel in JAX's interpreter, by halves, against XLA's reference."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from lowering import H100
from marks import fast_part, quick_part

from pallas_kernels import registry
from pallas_kernels.linear_sum import linear_sum, linear_sum_parts, mosaic, reference

AXIS = "tensor"
KERNELS = registry.Kernels(
    "mosaic", "gpu", implementations=(("linear_sum", "mosaic"),), capability=(9, 0), interpret=True
)


pytestmark = pytest.mark.usefixtures("mosaic_compiled_once")


def make(rows, devices, inputs, outputs, whole=False):
    rng = np.random.default_rng(rows)
    draw = functools.partial(rng.integers, -3, 4) if whole else lambda size: rng.standard_normal(size)
    return (jnp.asarray(draw(size=(devices, size, inputs)), jnp.bfloat16) for size in (rows, outputs))


def over_devices(function, x, weight, kernels=KERNELS):
    """Results of all devices, [n, ...], of a function of each one's operands."""
    mesh = Mesh(np.array(jax.devices()[: len(x)]), (AXIS,), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        lambda x, weight: function(x[0], weight[0], AXIS)[None],
        mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False,
    )  # fmt: skip
    with registry.using(kernels):
        return np.asarray(jax.jit(run)(x, weight).astype(jnp.float32))


def run_in_turn(x, weight, width):
    """The kernel's halves for each device after the other, and tiles carried as the kernel's writes do."""
    devices, rows, _ = x.shape
    x = jnp.pad(x, ((0, 0), (0, -rows % 8), (0, 0)))
    with registry.using(KERNELS):
        sent = [np.asarray(mosaic.multiply(*shard, width)) for shard in zip(x, weight, strict=True)]
        tiles = len(sent[0])
        box = np.zeros((devices, devices, -(-tiles // devices), *sent[0].shape[1:]), sent[0].dtype)
        owners = [tuple(map(int, mosaic.find_owner(jnp.int32(tile), devices))) for tile in range(tiles)]
        for tile, (owner, place) in enumerate(owners):
            for device in range(devices):
                box[owner, device, place] = sent[device][tile]
        sums = [np.asarray(mosaic.add(jnp.asarray(each))) for each in box]
    return np.concatenate([sums[owner][place] for owner, place in owners], axis=1)[:rows].astype(np.float32)


# Devices, rows, inputs of each, outputs, width of a tile: a last step of 64 inputs, tiles that no device count divides.
CALLS = ((2, 1, 192, 128, 32), (2, 64, 1024, 128, 64), (4, 17, 128, 192, 64))


FAST = fast_part([(call,) for call in CALLS], lambda call: call[0] == 2)


@pytest.mark.thorough
@pytest.mark.parametrize("call", quick_part(FAST, lambda call: call == CALLS[1]), ids=str)
def test_halves(call):
    """To the bit where every product and sum is whole, else within the rounding of what crosses."""
    *sizes, width = call
    devices, rows, inputs, outputs = sizes
    for whole, tolerance in ((True, 0), (False, 1e-2)):
        x, weight = make(rows, devices, inputs, outputs, whole)
        expected = over_devices(reference.linear_sum, x, weight)
        assert (expected == expected[:1]).all()
        found = run_in_turn(x, weight, width)
        np.testing.assert_allclose(found, expected[0], rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.thorough
def test_rows_are_apart():
    """A row's bits are the same alone and among 64."""
    x, weight = make(64, 2, 128, 64)
    several = run_in_turn(x, weight, 32)
    for row in (0, 63):
        assert (run_in_turn(x[:, row : row + 1], weight, 32) == several[row]).all()


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_what_the_kernel_does_not_take(devices):
    """In place of it the product and XLA's all-reduce."""
    x, weight = make(5, devices, 64, 64)
    sums = [over_devices(function, x, weight)[0] for function in (linear_sum, linear_sum_parts)]
    expected = np.einsum("dti,doi->to", *(np.asarray(each, np.float32) for each in (x, weight)))
    np.testing.assert_allclose(sums[0], expected, atol=0.2)
    np.testing.assert_allclose(sums[1].astype(np.float32).sum(axis=0), expected, atol=0.2)


def test_supports():
    """Few rows, whole tiles of bfloat16, several devices; not in the interpreter, not with exact numerics."""

    def taken(rows=8, shape=(64, 64), dtype=jnp.bfloat16, devices=2, **changes):
        mesh = AbstractMesh((devices,), (AXIS,))
        found = []

        def ask(x):
            found.append(mosaic.supports(x, jax.ShapeDtypeStruct(shape, dtype), AXIS))
            return x

        with registry.using(dataclasses.replace(KERNELS, **{"interpret": False} | changes)):
            jax.eval_shape(jax.shard_map(ask, mesh=mesh, in_specs=P(), out_specs=P()), jnp.zeros((rows, shape[1])))
        return found[0]

    assert taken() and taken(64) and taken(devices=8)
    assert not taken(65) and not taken(shape=(96, 64)) and not taken(dtype=jnp.float32) and not taken(devices=1)
    assert not taken(interpret=True) and not taken(exact=True)


@pytest.mark.parametrize(("devices", "rows", "outputs"), [(2, 1, 64), (4, 17, 64), (8, 64, 128), (2, 20, 8192)])
def test_lowers_for_hopper(devices, rows, outputs):
    """The whole kernel, with narrow and wide tiles: one launch, given the memory of peers, and no collective."""
    device = AbstractDevice(device_kind=H100[0], num_cores=H100[1], platform="gpu")
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=device)
    shards = [jax.ShapeDtypeStruct((extent, 128 * devices), jnp.bfloat16) for extent in (rows, outputs)]
    run = jax.shard_map(
        lambda x, weight: linear_sum(x, weight, AXIS),
        mesh=mesh, in_specs=(P(None, AXIS),) * 2, out_specs=P(), check_vma=False,
    )  # fmt: skip
    with (
        registry.using(dataclasses.replace(KERNELS, interpret=False, multiprocessors=H100[1])),
        use_abstract_mesh(mesh),
    ):
        text = jax.jit(run).trace(*shards).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1 and "uses_xla_collective_metadata = true" in text
    assert not re.search("stablehlo.(all_|reduce_scatter|collective)", text)
