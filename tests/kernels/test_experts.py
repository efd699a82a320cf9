"""A mixture of experts: native and XLA against numpy, in every format; a row's bits do not depend on other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.quantization import encode_blocks
from pallas_kernels import registry
from pallas_kernels.experts import Clamp, choose_experts, chosen_experts, experts
from pallas_kernels.linear import Blocks, reference
from pallas_kernels.linear.blocks import FORMATS, dequantise, packed_name
from pallas_kernels.linear.packing import pack_blocks
from pallas_kernels.linear.planes import to_planes
from pallas_kernels.selection import choose

NATIVE = choose("auto", "cpu")
KERNELS = [
    pytest.param(NATIVE, marks=pytest.mark.skipif(not NATIVE.native, reason="not built"), id="native"),
    pytest.param(registry.Kernels("xla", "cpu"), id="xla"),
]
needs_native = pytest.mark.skipif(not NATIVE.native, reason="the native kernels were not built")

E, D, F, K = 7, 256, 288, 3  # nothing that sixteen divides where blocks allow it
BIASED = {"gate_up_bias": "gate_up", "down_bias": "down"}
ROUNDED = {"int8": 2e-2, "int16": 1e-4}


def operands(rows, seed=0, columns=F):
    rng = np.random.default_rng(seed)
    shapes = {"x": (rows, D), "logits": (rows, E), "gate_up": (E, 2 * columns, D), "down": (E, D, columns)}
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return made | {"gate_up": made["gate_up"] / 16, "down": made["down"] / 17}


def best_experts(logits, renormalise):
    """Experts and scores of each row."""
    scores = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64)
    scores /= scores.sum(1, keepdims=True)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :K]
    best = np.take_along_axis(scores, order, 1)
    return order, best / best.sum(1, keepdims=True) if renormalise else best


def expected(o, renormalise=True, mine=range(E), activation=None):
    out = np.zeros(o["x"].shape)
    columns = o["down"].shape[2]
    up_bias, down_bias = (o.get(name, np.zeros(E)) for name in ("gate_up_bias", "down_bias"))
    for row, (chosen, scores) in enumerate(zip(*best_experts(o["logits"], renormalise), strict=True)):
        for expert, score in zip(chosen, scores, strict=True):
            hidden = o["x"][row].astype(np.float64) @ o["gate_up"][expert].T + up_bias[expert]
            gate, up = hidden[:columns], hidden[columns:]
            if activation is None:
                hidden = gate / (1 + np.exp(-gate)) * up
            elif activation == "gelu":
                hidden = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up
            else:
                limit, alpha = activation.limit, activation.alpha
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                hidden = (up + 1) * gate / (1 + np.exp(-alpha * gate))
            out[row] += (expert in mine) * score * (hidden @ o["down"][expert].T + down_bias[expert])
    return out


def run(kernels, o, renormalise=True, active_rows=None, **options):
    options = {"scores": "renormalised" if renormalise else "all"} | options

    def call(o, active_rows):
        biases = {name: o[name] for name in ("gate_up_bias", "down_bias") if name in o}
        return experts(
            o["x"], o["logits"], o["gate_up"], o["down"], K, active_rows=active_rows, **biases, **options
        )  # fmt: skip

    with registry.using(kernels):
        return np.asarray(jax.jit(call)(o, active_rows))


def error(got, exact):
    return np.abs(got - exact).max() / np.abs(exact).max()


@pytest.mark.parametrize("in_planes", [False, True])
@pytest.mark.parametrize("rows", [2, 9])
def test_accelerators_make_numbers_of_a_tile(rows, in_planes, monkeypatch):
    """Blocks of experts stay packed there; two rows pass their own experts, nine go through all of them."""
    o = operands(rows)
    exact = dict(o)
    for leaf in ("gate_up", "down"):
        blocks = Blocks(jnp.asarray(encode_blocks(o[leaf], "q8_0").reshape(*o[leaf].shape[:2], -1, 34)), "q8_0")
        exact[leaf] = np.asarray(dequantise(blocks))
        planes = to_planes(blocks.data, "q8_0", E * blocks.shape[1])
        o[leaf] = Blocks(planes, "q8_0_planes") if in_planes else blocks
    monkeypatch.setattr(reference, "TILE_VALUES", 100 * D)
    got = run(registry.Kernels("xla", "gpu"), o)
    assert error(got, expected(exact)) < 2e-2
    # Those that another device has add nothing.
    half = {leaf: Blocks(o[leaf].data[2:5], o[leaf].format) for leaf in ("gate_up", "down")}
    got = run(registry.Kernels("xla", "gpu"), o | half, first=2)
    assert error(got, expected(exact, mine=range(2, 5))) < 2e-2


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("rows", "renormalise"), [(1, True), (2, False), (9, True), (40, False)])
def test_equals_numpy(kernels, rows, renormalise):
    """One row, and two, gather their experts' weights with XLA; nine go through all experts. Ties go to the lower."""
    o = operands(rows)
    o["logits"][0] = 0
    assert error(run(kernels, o, renormalise), expected(o, renormalise)) < 1e-5


@pytest.mark.parametrize("kernels", KERNELS)
def test_devices_with_some_experts_add_up(kernels):
    """Also where the last device has fewer: its padding is of zeros, and is never chosen."""
    for rows in (1, 9):
        o, total = operands(rows), 0
        for first in range(0, E, 2):
            own = {name: np.zeros((2, *o[name].shape[1:]), np.float32) for name in ("gate_up", "down")}
            for name, part in own.items():
                part[: len(o[name][first : first + 2])] = o[name][first : first + 2]
            got = run(kernels, o | own, first=first)
            exact = expected(o, mine=range(first, first + 2))
            np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(expected(o)).max())
            total = total + got
        assert error(total, expected(o)) < 1e-5


CLAMP = Clamp(0.6, 1.702)
CHOSEN = {"scores": "chosen", "activation": CLAMP}


def with_biases(o, seed=1):
    rng = np.random.default_rng(seed)
    biases = {name: rng.normal(size=o[leaf].shape[:2]) for name, leaf in BIASED.items()}
    return o | {name: bias.astype(np.float32) for name, bias in biases.items()}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 9])
def test_biases_and_the_clamped_activation(kernels, rows):
    o = with_biases(operands(rows))
    assert error(run(kernels, o, **CHOSEN), expected(o, activation=CLAMP)) < 1e-5
    assert error(expected(o), expected(o, activation=CLAMP)) > 0.1
    for left in BIASED:
        some = {name: value for name, value in o.items() if name != left}
        assert error(run(kernels, some), expected(some)) < 1e-5


@pytest.mark.parametrize("kernels", KERNELS)
def test_gelu(kernels):
    o = operands(9)
    assert error(run(kernels, o, activation="gelu"), expected(o, activation="gelu")) < 1e-5
    assert error(expected(o), expected(o, activation="gelu")) > 1e-3
    o["gate_up"][0] *= 100  # far beyond where gelu is the identity or zero
    assert error(run(kernels, o, activation="gelu"), expected(o, activation="gelu")) < 1e-5


@pytest.mark.parametrize("kernels", KERNELS)
def test_chosen_scores_go_by_the_logits(kernels):
    """Far below the largest logit all scores are zero; the logits still say which experts are better."""
    o = operands(2) | {"logits": np.tile(np.array([-200, -150, 0, -201, -190, -199, -160], np.float32), (2, 1))}
    order = np.argsort(-o["logits"][0])[:K]
    # Whatever else is chosen makes the result NaN.
    bias = np.full((E, D), np.nan, np.float32)
    bias[order] = 0
    got = run(kernels, o | {"down_bias": bias}, scores="chosen")
    assert error(got, expected(o)) < 1e-5


@pytest.mark.parametrize(("up", "down"), [("q8_0", "q4_0"), ("q4_0", "q4_1"), ("q4_1", "mxfp4"), ("mxfp4", "q8_0")])
@pytest.mark.parametrize("kernels", KERNELS)
def test_blocks(kernels, up, down):
    """The same as the numbers that the blocks stand for; gate and down may differ in format."""
    o = operands(9)
    names = {"gate_up": up, "down": down}
    blocks = {leaf: Blocks(jnp.asarray(encode(o[leaf], name)), name) for leaf, name in names.items()}
    numbers = {leaf: np.asarray(dequantise(weight)) for leaf, weight in blocks.items()}
    assert error(run(kernels, o | blocks), expected(o | numbers)) < 1e-5


def encode(numbers, name):
    return encode_blocks(numbers, name).reshape(*numbers.shape[:2], -1, FORMATS[name].nbytes)


@needs_native
@pytest.mark.parametrize(("name", "activations"), [("q4_0", "int8"), ("q8_0", "int16"), ("mxfp4", "int8")])
def test_packed_blocks(name, activations):
    """Integer products, of experts whose columns do not fill groups of sixteen; some fill tiles of AMX."""
    o = operands(43)
    weights, numbers = {}, {}
    for leaf in ("gate_up", "down"):
        data = encode(o[leaf], name)
        numbers[leaf] = np.asarray(dequantise(Blocks(jnp.asarray(data), name)))
        packed = pack_blocks(data, name, data.shape[0] * data.shape[1])
        weights[leaf] = Blocks(jnp.asarray(packed), packed_name(name, activations))
    assert error(run(NATIVE, o | weights), expected(o | numbers)) < ROUNDED[activations]
    check_invariance(o | weights)
    places = np.arange(E, dtype=np.int32)[::-1] + 3
    np.testing.assert_array_equal(in_two_steps(NATIVE, o | weights, places)[0], run(NATIVE, o | weights))


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_row_bits_do_not_depend_on_other_rows(dtype):
    o = operands(40, columns=F if dtype == jnp.bfloat16 else 37)
    check_invariance(o | {name: o[name].astype(dtype) for name in ("gate_up", "down")})
    check_invariance(with_biases(o), **CHOSEN)
    whole = run(NATIVE, o)
    o["logits"][1], o["logits"][3, 2] = np.nan, np.inf
    np.testing.assert_array_equal(np.delete(run(NATIVE, o), (1, 3), 0), np.delete(whole, (1, 3), 0))


def check_invariance(o, **options):
    """Alone, in another order, among rows that all go to the same experts, with dead rows, on one thread."""
    rows = len(o["x"])
    together = run(NATIVE, o, **options)
    for row in (0, 1, rows - 1):
        alone = run(NATIVE, o | {name: o[name][row : row + 1] for name in ("x", "logits")}, **options)
        np.testing.assert_array_equal(alone[0], together[row])
    order = np.random.default_rng(1).permutation(rows)
    mixed = run(NATIVE, o | {name: o[name][order] for name in ("x", "logits")}, **options)
    np.testing.assert_array_equal(mixed, together[order])
    crowd = {"x": np.repeat(o["x"][:1], rows, 0), "logits": np.repeat(o["logits"][:1], rows, 0)}
    np.testing.assert_array_equal(run(NATIVE, o | crowd, **options), np.repeat(together[:1], rows, 0))
    some = run(NATIVE, o, active_rows=np.int32(5), **options)
    np.testing.assert_array_equal(some[:5], together[:5])
    assert not some[5:].any()
    single = registry.Kernels("cpu", "cpu", 1)
    np.testing.assert_array_equal(run(single, o, **options), together)


def test_operands_that_do_not_fit_are_refused():
    o = operands(3)
    for change, message in (
        ({"logits": o["logits"][:2]}, "logits"),
        ({"down": o["down"][:, :, :-1]}, "need .e, 2F, D."),
        ({"gate_up": o["gate_up"].astype(np.float64)}, "need float32, bfloat16 or float16"),
        ({"logits": o["logits"][:, :2]}, "3 experts of a row, of 2"),
        ({"down_bias": np.zeros((E, F), np.float32)}, r"the bias of experts \(7, 256\) must be float32 \(7, 256\)"),
        ({"gate_up_bias": np.zeros((E, 2 * F))}, "must be float32"),
    ):
        with pytest.raises(ValueError, match=message), jax.enable_x64(True):
            run(registry.Kernels("xla", "cpu"), o | change)
    places, choice, score = np.arange(E, dtype=np.int32), np.zeros((3, K), np.int32), np.zeros((3, K), np.float32)
    with pytest.raises(ValueError, match="float32 logits"):
        choose_experts(jnp.zeros((3, E), jnp.bfloat16), K, scores="all")
    for given, message in (
        ((choice[:1], score, places), "chosen experts need int32"),
        ((choice.astype(np.int64), score, places), "chosen experts need int32"),
        ((choice, score.astype(np.float64), places), "must be float32"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen_experts(o["x"], *given, o["gate_up"], o["down"])


def in_two_steps(kernels, o, places, active_rows=None, garbage=np.nan, **options):
    """`experts` by a choice and then the chosen experts, whose weights lie at `places` among others."""

    def call(o, active_rows):
        biases = {name: o[name] for name in BIASED if name in o}
        choice, score = choose_experts(
            o["logits"], K, scores=options.get("scores", "renormalised"), active_rows=active_rows
        )
        if active_rows is not None:
            choice = jnp.where(jnp.arange(len(choice))[:, None] < active_rows, choice, -1)
        clamp = options.get("activation")
        out = chosen_experts(o["x"], choice, score, places, o["gate_up"], o["down"], activation=clamp, **biases)
        return out, choice

    def spread(weight):
        if isinstance(weight, Blocks):
            return Blocks(spread(weight.data), weight.format)
        weight = np.asarray(weight)
        whole = np.full((2 * E, *weight.shape[1:]), 255 if weight.dtype == np.uint8 else garbage, weight.dtype)
        whole[places[places >= 0]] = weight[places >= 0]
        return jnp.asarray(whole)

    o, places = o | {leaf: spread(o[leaf]) for leaf in ("gate_up", "down")}, jnp.asarray(places)
    with registry.using(kernels):
        out, choice = jax.jit(call)(o, active_rows)
        return np.asarray(out), np.asarray(choice)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 9])
def test_two_steps_give_the_same_bits(kernels, rows):
    """Wherever the weights of the chosen experts lie, and whatever lies beside them."""
    places = np.random.default_rng(3).permutation(2 * E)[:E].astype(np.int32)
    biased = {"gate_up_bias": np.ones((E, 2 * F), np.float32) / 3, "down_bias": np.ones((E, D), np.float32) / 7}
    for extra, options in (({}, {}), (biased, {"scores": "chosen", "activation": Clamp(7.0, 1.702)})):
        o = operands(rows) | extra
        got, choice = in_two_steps(kernels, o, places, **options)
        np.testing.assert_array_equal(got, run(kernels, o, **options))
        # Experts that no row is sent to may be missing.
        some = np.where(np.isin(np.arange(E), choice), places, -1)
        if rows < 3:
            assert (some < 0).any()
        np.testing.assert_array_equal(in_two_steps(kernels, o, some, **options)[0], got)
    # Rows that are not active need no experts.
    if rows > 4:
        few, choice = in_two_steps(kernels, o, places, active_rows=jnp.int32(4), **options)
        assert (choice[4:] == -1).all() and (choice[:4] >= 0).all()
        np.testing.assert_array_equal(few[:4], got[:4])
        assert np.isfinite(few).all()
