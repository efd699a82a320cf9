"""Every kernel on the device: attention against plain numpy, products against float32 on the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_attention, assert_cache, grown_case, poisoned, random_case, random_parents
from kernel_cases import numbers, random_weight

from pallas_kernels import registry, selection
from pallas_kernels.add_norm import add_norm
from pallas_kernels.linear import Blocks, linear
from pallas_kernels.linear.blocks import PLANES
from pallas_kernels.linear.planes import to_planes
from pallas_kernels.linear_sum import linear_sum
from pallas_kernels.move_rows import move_rows
from pallas_kernels.swiglu import norm_swiglu, swiglu
from pallas_kernels.tree_attention import tree_attention

ORACLE = registry.Kernels("xla", "cpu")
# Of attention, by norm: the query and the weights are rounded to the cache's dtype. Of SwiGLU, relative to the largest
# number: a result is a sum of rounded products.
ROUNDING = {"bfloat16": 6e-3, "float32": 1e-5}
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}
EPS = 1e-5

ATTENTION = {"triton": "pallas-triton", "mosaic": "mosaic"}
MOSAIC_WIDTHS = (64, 128)


def kernels_for(name, device, operation, implementation):
    """A set of kernels whose own implementation of an operation runs here; the test is skipped where it cannot."""
    obstacle = selection.find_obstacle(implementation, selection.choose("auto", "gpu", device=device).capability)
    if obstacle:
        pytest.skip(f"{name}: {obstacle}")
    kernels = selection.choose(name, "gpu", device=device)
    assert kernels.candidates(operation)[0] == implementation
    return kernels


def run(function, operands, kernels, device):
    """The results on a device, as numpy."""

    def call(operands):
        with registry.using(kernels):
            return function(*operands)

    with jax.default_device(device):
        return jax.tree.map(np.asarray, jax.jit(call)(jax.device_put(operands, device)))


def attend(case, implementation, device, active_rows=None):
    """A case by an implementation, which takes it; numbers that are data in programs are data."""
    kernels = kernels_for(ATTENTION[implementation], device, "tree_attention", implementation)
    numbers = {"offset": case.offset, "active_rows": active_rows}
    numbers = {name: np.int32(number) for name, number in numbers.items() if number is not None}
    tree = () if case.mask is None else (case.mask, case.position)

    def call(numbers, *operands):
        options = {
            "offset": None,
            "active_rows": None,
            "sliding_window": case.sliding_window,
            "write_only": False,
        } | numbers
        attention = (*operands[:6], *(operands[6:] or (None, None)))
        assert kernels.find("tree_attention", *attention, **options).__name__.endswith(f".{implementation}")
        return tree_attention(*operands, **numbers, sliding_window=case.sliding_window)

    return run(call, (numbers, *case.operands[:6], *tree), kernels, device)


def assert_right(case, implementation, device):
    """With NaN wherever no row may look."""
    case = poisoned(case)
    out, key, value = attend(case, implementation, device)
    assert_cache(case, key, value)
    assert_attention(case, out, key, value, ROUNDING[case.key.dtype.name])


def implementations(width, dtypes=("bfloat16", "float32")):
    """Pairs of implementation and dtype that take heads of a width."""
    pairs = [("triton", dtype) for dtype in dtypes]
    return [*pairs, ("mosaic", "bfloat16")] if width in MOSAIC_WIDTHS else pairs


def over_implementations(shapes):
    """Parameters of a test: shapes, which end in (K, G, H), for each implementation and dtype."""
    return [(*pair, *shape) for shape in shapes for pair in implementations(shape[-1][2])]


# Kind, positions that a row sees, rows, prefix, older rows and slots of the window, (K, G, H): lone rows, trees of one
# and several blocks, edges of tiles of 64 slots, odd widths; trees that grow; chunks.
CASES = [
    *(("tree", None, rows, prefix, 0, rows, model) for rows, prefix, model in (
        (1, 0, (8, 4, 128)), (1, 1, (3, 3, 64)), (8, 1000, (8, 4, 128)), (16, 64, (3, 3, 64)), (33, 63, (1, 8, 128)),
        (64, 2900, (1, 8, 128)), (128, 300, (2, 8, 64)), (8, 127, (2, 2, 80)), (40, 65, (1, 3, 96)),
        (5, 129, (2, 1, 256)), (1024, 700, (1, 1, 64)),
    )),
    ("grown", None, 5, 0, 0, 70, (2, 4, 64)), ("grown", None, 5, 120, 35, 70, (2, 4, 128)),
    ("grown", 7, 5, 64, 31, 70, (2, 4, 64)), ("grown", 200, 16, 1000, 200, 300, (1, 8, 128)),
    ("grown", 300, 8, 2000, 64, 128, (2, 2, 80)),
    ("chunk", None, 40, 0, 0, 40, (2, 3, 64)), ("chunk", None, 512, 1000, 0, 512, (1, 4, 128)),
    ("chunk", 7, 40, 64, 0, 40, (2, 3, 64)), ("chunk", 300, 512, 1000, 0, 512, (1, 4, 128)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "dtype", "kind", "sliding", "rows", "prefix", "offset", "window", "model"),
    over_implementations(CASES),
)
def test_attention(gpu, implementation, dtype, kind, sliding, rows, prefix, offset, window, model):
    rng = np.random.default_rng(prefix + rows)
    slots, model = -(-(prefix + window) // 64) * 64, (*model, dtype)
    if kind == "grown":
        case = grown_case(rng, model, rows, prefix, offset, window, sliding, slots)
    else:
        parents = random_parents(rng, rows) if kind == "tree" else None
        case = random_case(rng, model, rows, prefix, parents, sliding, slots)
    assert_right(case, implementation, gpu)


@pytest.mark.parametrize(("implementation", "dtype", "model"), over_implementations([((2, 3, 64),), ((1, 4, 128),)]))
def test_active_rows(gpu, implementation, dtype, model):
    """Garbage in the other rows reaches nothing, and what they give is finite."""
    rng = np.random.default_rng(4)
    case = poisoned(random_case(rng, (*model, dtype), 40, 100, random_parents(rng, 40), slots=192))
    for active_rows in (1, 25, 40):
        qkv = case.qkv.copy()
        qkv[active_rows:] = rng.choice([np.nan, np.inf])
        out, key, value = attend(dataclasses.replace(case, qkv=qkv), implementation, gpu, active_rows)
        assert np.isfinite(value[:, case.written].astype(np.float32)).all()
        # The exact result of the other rows is not asked for, and their keys may be anything.
        key = np.where(np.isfinite(key.astype(np.float32)), key, np.zeros_like(key))
        assert_attention(case, out, key, value, ROUNDING[dtype], active_rows)


# Mosaic's kernel cannot be mapped: JAX 0.11 has no rule for its scoped buffers. No program maps it.
@pytest.mark.parametrize(("implementation", "dtype"), [("triton", "bfloat16"), ("triton", "float32")])
@pytest.mark.parametrize("model", [(2, 4, 64)])
def test_sequences_in_a_batch(gpu, implementation, dtype, model):
    """Sequences have different lengths; the caches are given away, as engines do."""
    kernels = kernels_for(ATTENTION[implementation], gpu, "tree_attention", implementation)
    rng = np.random.default_rng(7)
    lengths = (10, 150)
    cases = [poisoned(random_case(rng, (*model, dtype), 8, n, random_parents(rng, 8), slots=192)) for n in lengths]
    fields = ("qkv", "cos", "sin", "length", "mask", "position")
    rows = [np.stack([np.asarray(getattr(case, name)) for case in cases]) for name in fields]
    rows = [x.astype(np.int32) if x.dtype == np.int64 else x for x in rows]
    caches = [np.stack([getattr(case, name) for case in cases]) for name in ("key", "value")]

    def call(caches, rows):
        qkv, cos, sin, length, mask, position = rows
        with registry.using(kernels):
            return jax.vmap(tree_attention)(qkv, cos, sin, *caches, length, mask, position)

    with jax.default_device(gpu):
        given = jax.device_put(caches, gpu)
        results = jax.tree.map(np.asarray, jax.jit(call, donate_argnums=0)(given, jax.device_put(rows, gpu)))
    for case, out, key, value in zip(cases, *results, strict=True):
        assert_cache(case, key, value)
        assert_attention(case, out, key, value, ROUNDING[dtype])


def as_float32(operands):
    return [np.asarray(o, np.float32) for o in operands]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("rows", "inputs", "columns"), [(1, 4096, 14336), (16, 576, 1536), (64, 2048, 3584), (3, 100, 83)]
)
def test_swiglu(gpu, dtype, rows, inputs, columns):
    kernels = kernels_for("jax-triton", gpu, "swiglu", "jax_triton")
    rng = np.random.default_rng(rows)
    x, scale = rng.normal(size=(rows, inputs)).astype(np.float32), rng.normal(size=inputs).astype(np.float32)
    weight = (rng.normal(size=(2 * columns, inputs)) / np.sqrt(inputs)).astype(jnp.dtype(dtype))
    host = jax.devices("cpu")[0]

    def normed(x, scale, weight):
        return norm_swiglu(x, scale, weight, EPS)

    for function, operands in ((normed, [x, scale, weight]), (swiglu, [x, weight])):
        got = run(function, operands, kernels, gpu)
        exact = run(function, as_float32(operands), ORACLE, host)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, exact, rtol=0, atol=TOLERANCE[dtype] * np.abs(exact).max())


@pytest.mark.parametrize("name", PLANES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 4096, 1024), (8, 3584, 4096), (16, 14336, 512), (64, 1024, 72)]
)
def test_packed_weights(gpu, name, rows, inputs, outputs):
    """Products and SwiGLU by weights in planes."""
    kernels = kernels_for("pallas-triton", gpu, "linear", "triton")
    rng, blocks = np.random.default_rng(rows), name.removesuffix("_planes")
    x, weight = rng.normal(size=(rows, inputs)).astype(np.float32), random_weight(rng, blocks, outputs, inputs)
    planes = Blocks(to_planes(weight.data, blocks, outputs), name)
    exact = [x.astype(jnp.bfloat16).astype(np.float32), numbers(weight).astype(jnp.bfloat16).astype(np.float32)]
    for function in (linear, swiglu):
        got, wanted = run(function, [x, planes], kernels, gpu), run(function, exact, ORACLE, jax.devices("cpu")[0])
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("rows", [1, 17, 65])
def test_rows_of_all_layers_move(gpu, rows):
    kernels = kernels_for("pallas-triton", gpu, "move_rows", "triton")
    rng = np.random.default_rng(rows)
    caches = tuple(rng.normal(size=(8, 512, 128)).astype(jnp.bfloat16) for _ in range(64))
    source = (200 + np.sort(rng.permutation(rows + 40)[:rows])).astype(np.int32)
    for cache, got in zip(caches, run(move_rows, [caches, source, np.int32(200)], kernels, gpu), strict=True):
        wanted = cache.copy()
        wanted[:, 200 : 200 + rows] = cache[:, source]
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 4096, 8), (17, 4096, 4), (64, 3584, 1)])
def test_sums_and_norms(gpu, rows, width, parts):
    kernels = kernels_for("pallas-triton", gpu, "add_norm", "triton")
    rng = np.random.default_rng(rows)
    operands = [rng.normal(size=shape).astype(np.float32) for shape in ((rows, width), (parts, rows, width), (width,))]
    wanted = run(lambda *o: add_norm(*o, EPS), operands, ORACLE, jax.devices("cpu")[0])
    for got, exact in zip(run(lambda *o: add_norm(*o, EPS), operands, kernels, gpu), wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_auto_finds_kernels(gpu):
    kernels = selection.choose("auto", "gpu", device=gpu)
    if selection.find_obstacle("triton", kernels.capability):
        pytest.skip("kernels are for NVIDIA GPUs from Ampere on")
    mosaic = () if selection.find_obstacle("mosaic", kernels.capability) else (("tree_attention", "mosaic"),)
    assert kernels.automatic and kernels.implementations == (("tree_attention", "triton"), *mosaic)


def test_exact_numerics():
    """The bits of a row are the same in passes of 1 to 64 rows."""
    kernels = selection.make_exact(selection.choose("auto", "gpu"), jax.devices()[0])
    assert {("linear", "triton"), ("tree_attention", "triton"), ("add_norm", "triton")} <= {*kernels.implementations}
    rng = np.random.default_rng(3)
    x, weight = (
        jnp.asarray(rng.standard_normal((64, 2048), np.float32)),
        jnp.asarray(rng.standard_normal((768, 2048)), jnp.bfloat16),
    )
    with registry.using(kernels):
        most = np.asarray(jax.jit(linear)(x, weight)).view(np.int32)
        for rows in (1, 2, 8, 9, 33):
            assert (np.asarray(jax.jit(linear)(x[:rows], weight)).view(np.int32) == most[:rows]).all()


@pytest.mark.parametrize("rows", [1, 8, 17, 64])
def test_products_and_sums_in_one_kernel(rows):
    """All GPUs of this process, or the first eight, have the same sums, which are XLA's."""
    devices = jax.devices()[:8]
    kernels = selection.choose("mosaic", "gpu", len(devices), devices[0])
    if not kernels.candidates("linear_sum"):
        pytest.skip("the kernel is for several Hopper GPUs of one process")
    mesh, rng = jax.sharding.Mesh(np.array(devices), ("tensor",)), np.random.default_rng(rows)
    shapes = (rows, 192 * len(devices)), (4096, 192 * len(devices))
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    found = []
    for chosen in (kernels, registry.Kernels("xla", "gpu")):
        run = jax.shard_map(
            lambda x, weight: linear_sum(x, weight, "tensor")[None],
            mesh=mesh, in_specs=(jax.P(None, "tensor"),) * 2, out_specs=jax.P("tensor"), check_vma=False,
        )  # fmt: skip
        with registry.using(chosen):
            # Again and again: a race would show now and then.
            found.append([np.asarray(jax.jit(run)(x, weight)) for _ in range(20)])
    assert all((each == found[0][0][0]).all() for each in found[0])
    np.testing.assert_allclose(found[0][0][0], found[1][0][0], atol=2e-2 * np.abs(found[1][0][0]).max())
