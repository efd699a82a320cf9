"""Transfers between target and draft go from device to device: the host sees a round's result and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from jax.sharding import NamedSharding, PartitionSpec
from marks import quick_part
from tiny_models import FAMILIES, RandomSource

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.core.round import ROUND_HEADER, DraftCounts, ModelParams, Models
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.runtime.mesh import plan_mesh, plan_pair
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.transfer import replicated, transfer

FLOAT32 = np.dtype("float32")
PROMPT = [0, 5, 0, 17, 3]


@pytest.fixture
def host_copies(monkeypatch):
    """Shapes of the arrays that the host read, in a list that grows: by JAX itself, as values, or as numpy arrays."""
    shapes, value = [], ArrayImpl._value

    def read(array):
        shapes.append(array.shape)
        return value.fget(array)

    def counted(convert):
        def run(thing, *args, **options):
            before = len(shapes)
            result = convert(thing, *args, **options)
            if isinstance(thing, jax.Array):
                # One copy, whichever way numpy took.
                shapes[before:] = [thing.shape]
            return result

        return run

    monkeypatch.setattr(ArrayImpl, "_value", property(read))
    for name in ("asarray", "array"):
        monkeypatch.setattr(np, name, counted(getattr(np, name)))
    return shapes


def placed(values, plan, *axes):
    return jax.device_put(np.asarray(values, np.int32), NamedSharding(plan.mesh, PartitionSpec(*axes)))


def test_the_spy_sees_detours(host_copies):
    """JAX takes them silently where the layout changes."""
    split = placed(range(8), plan_mesh(4), TENSOR_AXIS)
    host_copies.clear()
    jax.device_put(split, replicated(plan_mesh(2, 4)))
    assert host_copies == [(8,)]
    int(split.sum())
    np.asarray(split)
    np.array(split)
    assert host_copies == [(8,), (), (8,), (8,)]


@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 4), (6, 2), (7, 1)])
def test_replicated_arrays_cross_without_the_host(source, target, host_copies):
    plan, other = plan_mesh(source), plan_mesh(target, source)
    values = [3, 70_000, -1, 2**31 - 1]
    # As in a round: what crosses comes out of a program.
    array = jax.jit(lambda x: x + 1 - 1, out_shardings=replicated(plan))(placed(values, plan))
    host_copies.clear()
    there = transfer(array, other)
    back = transfer(there, plan)
    jax.block_until_ready((there, back))
    assert host_copies == []
    assert there.sharding == replicated(other) and back.sharding == replicated(plan)
    assert there.dtype == jnp.int32
    for copy in (array, there, back):
        assert all(np.asarray(shard.data).tolist() == values for shard in copy.addressable_shards)
    assert {shard.device for shard in there.addressable_shards} == set(other.devices)


def test_the_same_devices_need_no_transfer():
    plan = plan_mesh(3)
    array = placed([1, 2], plan)
    before = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    moved = transfer(array, plan)
    assert [shard.data.unsafe_buffer_pointer() for shard in moved.addressable_shards] == before


def test_split_arrays_are_refused():
    """Also where no other mesh is involved."""
    plan = plan_mesh(4)
    for target in (plan, plan_mesh(2), plan_mesh(1, 4)):
        with pytest.raises(ValueError, match="only replicated arrays cross meshes"):
            transfer(placed(range(8), plan, TENSOR_AXIS), target)


@pytest.fixture(scope="module")
def pairs():
    """Engines and their parameters, by devices and method; the draft is another random model."""
    config, made = FAMILIES["llama"], {}

    def make(target, draft, method):
        key = target, draft, method
        if key not in made:
            plans = plan_pair(target, draft, method="swiftspec", own_devices=True)
            engine = Engine(Models(*(Placement(config, plan, FLOAT32) for plan in plans)), method, 64)
            engine.prepare()
            params = [load_foreign(RandomSource(config, seed), plan, FLOAT32) for seed, plan in enumerate(plans)]
            made[key] = engine, ModelParams(*params)
        return made[key]

    return make


PAIRS = [
    (1, 1, SwiftSpec(3, 2, depth=2)),
    (2, 3, SwiftSpec(3, 2, adaptive=True, depth=1, leaves=False)),
]


@pytest.mark.parametrize("pair", quick_part([(pair,) for pair in PAIRS], lambda pair: pair is PAIRS[0]))
def test_rounds_read_nothing(pair, pairs, host_copies):
    engine, params = pairs(*pair)
    runner = engine.runner
    request = runner.place_request(SamplingParams(temperature=1.0), 0)
    state = runner.resume(params, runner.start(0, None), np.array(PROMPT, np.int32), 0)
    host_copies.clear()
    for _ in range(6):
        state, round_, _ = runner.round(params, state, request, 1)
    jax.block_until_ready((state, round_))
    assert host_copies == []


@pytest.mark.parametrize("pair", PAIRS)
def test_a_generation_reads_its_rounds_and_nothing_else(pair, pairs, host_copies):
    engine, params = pairs(*pair)
    steps = engine.method.max_path
    options = SamplingParams(max_tokens=12)

    def decode():
        with engine.open(params, PROMPT, options, 0) as session:
            while not session.done:
                yield session.step()
        engine.settle()

    list(decode())
    host_copies.clear()
    rounds = list(decode())
    assert host_copies == [(ROUND_HEADER + steps,), (steps,), (len(DraftCounts._fields),)] * len(rounds)


@pytest.mark.parametrize("pair", PAIRS)
def test_two_packed_arrays_cross(pair, pairs, monkeypatch):
    """In every round one each way, int32; no logits, no keys."""
    engine, params = pairs(*pair)
    runner, crossed, steps = engine.runner, [], engine.method.max_path
    target, draft = (model.plan for model in engine.models)

    def spy(array, plan):
        crossed.append((array.shape, array.dtype, plan))
        return transfer(array, plan)

    monkeypatch.setattr("jaxspec.methods.swiftspec.runner.transfer", spy)
    request = runner.place_request(SamplingParams(), 0)
    state = runner.resume(params, runner.start(0, None), np.array(PROMPT, np.int32), 0)
    for _ in range(3):
        state, _, _ = runner.round(params, state, request, 1)
    jax.block_until_ready(state)
    one_round = [((1 + steps,), jnp.int32, draft), ((1 + 2 * engine.method.num_rows,), jnp.int32, target)]
    assert crossed == one_round * 3
