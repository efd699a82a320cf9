"""Residual sums and norms in one launch: the operation, and the layers that hand each other parts of a sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import needs_native, run_native
from lowering import lower_for_cuda
from tiny_models import FAMILIES, RandomSource, empty_cache, on_one_device, tiny_params

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.specexec import SpecExec
from jaxspec.models.transformer import forward, forward_with_states
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.placement import Placement
from pallas_kernels import registry
from pallas_kernels.add_norm import add_norm, fuses, triton
from pallas_kernels.linear import linear, linear_parts
from pallas_kernels.linear.config import MAX_ROWS, count_parts
from pallas_kernels.rms_norm import rms_norm

ADD = (("add_norm", "triton"),)
XLA = registry.Kernels("xla", "gpu")
TRITON = registry.Kernels("pallas-triton", "gpu", implementations=ADD, interpret=True)
LOWERED = registry.Kernels("pallas-triton", "gpu", implementations=ADD, device_kind="NVIDIA H100 80GB HBM3")
EPS = 1e-5


def operands(rows, width, parts):
    rng = np.random.default_rng(rows)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((rows, width), (parts, rows, width), (width,))]


def added(kernels, x, parts, scale, dtype=jnp.float32):
    def run(*operands):
        with registry.using(kernels):
            return add_norm(*operands, EPS, dtype)

    return jax.tree.map(np.asarray, jax.jit(run)(x, parts, scale))


@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 64, 1), (5, 100, 3), (17, 33, 8)])
def test_equals_a_sum_and_a_norm(rows, width, parts):
    x, given, scale = operands(rows, width, parts)
    total, normed = added(TRITON, x, given, scale)
    np.testing.assert_allclose(total, x + given.sum(0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(normed, rms_norm(jnp.asarray(total), jnp.asarray(scale), EPS), rtol=0, atol=1e-5)
    for kernels in (TRITON, XLA):
        assert [each.dtype for each in added(kernels, x, given, scale, jnp.bfloat16)] == [np.float32, jnp.bfloat16]


@needs_native
@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 64, 1), (5, 100, 3), (17, 33, 1)])
def test_native_sums_and_norms_are_those_of_two_operations(rows, width, parts):
    x, given, scale = operands(rows, width, parts)
    total, normed = added(registry.Kernels("cpu", "cpu"), x, given, scale)
    np.testing.assert_array_equal(total, x + np.asarray(jnp.sum(given, axis=0)))
    np.testing.assert_array_equal(normed, run_native(rms_norm, total, scale, eps=EPS))
    for active in range(1, rows):
        some = run_native(lambda *o: add_norm(*o[:3], EPS, active_rows=o[3]), x, given, scale, np.int32(active))
        for one, other in zip(some, (total, normed), strict=True):
            np.testing.assert_array_equal(one[:active], other[:active])


def lower(rows, width=4096):
    def run(*operands):
        with registry.using(LOWERED):
            return add_norm(*operands, EPS, jnp.bfloat16)

    shapes = (rows, width), (4, rows, width), (width,)
    return lower_for_cuda(run, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def test_one_launch_for_a_few_rows():
    text = lower(17)
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1 and triton.NAME in text
    assert "xla.gpu.triton" not in lower(triton.MAX_ROWS + 1)
    assert "xla.gpu.triton" not in lower(4, triton.MOST_WIDTH + 1)
    with pytest.raises(ValueError, match=r"add_norm needs \[T, D\], \[P, T, D\] and \[D\]"):
        add_norm(jnp.zeros((2, 8)), jnp.zeros((2, 8)), jnp.zeros(8), EPS)
    with registry.using(XLA):
        assert not fuses(jnp.zeros((2, 8)), jnp.zeros(8))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_hand_on_parts(family):
    """All sums but the last, and all norms but the first and the last, in launches of two for a layer."""
    cfg = FAMILIES[family]
    rows = 5
    token, position = jnp.arange(rows, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    mask = position[:, None] >= position

    def passes(kernels):
        def run(params):
            with registry.using(kernels):
                hidden, cache = forward(params, cfg, token, position, empty_cache(cfg, 40), mask)
                *_, states = forward_with_states(params, cfg, token, position, empty_cache(cfg, 40), mask, (0, 1, 2))
                return hidden, cache.key, cache.value, states

        return on_one_device(run)

    params = tiny_params(family)
    program = str(jax.make_jaxpr(passes(TRITON))(params))
    assert program.count("add_norm") > 0
    got, wanted = (jax.tree.leaves(passes(kernels)(params)) for kernels in (TRITON, XLA))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * float(np.abs(other).max() or 1))


def parts_of(kernels, rows, weight):
    x = np.random.default_rng(rows).normal(size=(rows, weight.shape[1])).astype(np.float32)

    def run(x, weight):
        with registry.using(kernels):
            return linear_parts(x, weight), linear(x, weight)

    return jax.tree.map(np.asarray, jax.jit(run)(x, weight))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_in_parts(dtype):
    """Products of few outputs have several parts; one row, many rows, and a CPU have one."""
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(72, 1024)), dtype)
    parts, whole = parts_of(XLA, 3, weight)
    assert parts.shape == (4, 3, 72) and parts.dtype == np.float32
    np.testing.assert_allclose(parts.sum(0), whole, rtol=0, atol=1e-5 * np.abs(whole).max())
    for kernels, rows in ((XLA, 1), (XLA, MAX_ROWS + 1), (registry.Kernels("xla", "cpu"), 3)):
        parts, whole = parts_of(kernels, rows, weight)
        np.testing.assert_array_equal(parts[0], whole)
        assert len(parts) == 1


def test_as_many_parts_as_xla_takes():
    """Parts of Llama-3-8B's products on an H100; nothing is cut where inputs cannot be."""
    shapes = {(6144, 4096): 4, (4096, 4096): 8, (4096, 14336): 8, (28672, 4096): 1, (64, 511): 1, (64, 3 * 256): 2}
    assert {shape: count_parts(*shape, multiprocessors=132) for shape in shapes} == shapes


def decode(kernels, method, devices=1):
    """Greedy tokens of a tiny model with sliding windows; a draft is the target itself."""
    cfg = dataclasses.replace(FAMILIES["mistral"], max_context=64)
    target = Placement(cfg, MeshPlan(tuple(jax.devices()[:devices]), kernels), np.dtype("float32"))
    params = load_foreign(RandomSource(cfg), target.plan, target.dtype)
    drafts = method.drafts
    engine, prompt = Engine(Models(target, target if drafts else None), method), [*range(3, 43)]
    engine.prepare(len(prompt) + 12)
    given = ModelParams(params, params) if drafts else ModelParams(params)
    with engine.open(given, prompt, SamplingParams(max_tokens=12), seed=0) as session:
        while not session.done:
            session.step()
    return session.tokens[len(prompt) :]


@pytest.mark.slow
def test_sums_and_norms_on_two_devices():
    """Layers hand each other the parts of sums, which devices add up among each other. A check has it on one device."""
    plain = decode(registry.Kernels("xla", "cpu"), Autoregressive())
    assert decode(TRITON, SpecExec(6, width=2, depth=3), devices=2) == plain
