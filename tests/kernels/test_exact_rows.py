"""Exact numerics: the bits of a row are the same in passes of 1 to 64 rows, for every operation that sees rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_part

from pallas_kernels import registry
from pallas_kernels.exact_rows import MOST_ROWS
from pallas_kernels.experts import choose_experts, chosen_experts, experts
from pallas_kernels.linear import exact as exact_linear
from pallas_kernels.linear import linear
from pallas_kernels.linear.reference import linear as plain_linear
from pallas_kernels.registry import Kernels
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.reference import attend_tree

FORMS = {
    "cpu": Kernels("xla", "cpu", exact=True),
    "gpu": Kernels("xla", "gpu", exact=True),
    "triton": Kernels(
        "pallas-triton", "gpu", implementations=(("linear", "triton"), ("tree_attention", "triton")), interpret=True,
        exact=True,
    ),
}  # fmt: skip
COUNTS = [1, 2, 7, 8, 9, 17, 33, MOST_ROWS]
rng = np.random.default_rng(5)


def bits(array):
    return np.asarray(array).view(np.uint8)


def run(form, function, *arrays):
    with registry.using(FORMS[form]):
        return jax.jit(function)(*arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_products(form, dtype):
    weight = jnp.asarray(rng.standard_normal((72, 1088)), dtype)
    x = jnp.asarray(rng.standard_normal((MOST_ROWS, 1088)), jnp.float32)
    most = run(form, linear, x, weight)
    np.testing.assert_allclose(most, plain_linear(x, weight), atol=2e-3)
    for rows in COUNTS:
        first = rng.integers(0, MOST_ROWS - rows + 1)
        assert (bits(run(form, linear, x[first : first + rows], weight)) == bits(most[first : first + rows])).all()


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "per_token"), [(4, 2), (40, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["cpu", "gpu"])
def test_experts(form, dtype, count, per_token):
    """Few experts, which many rows would all run, and many, of which a row gathers some; apart as streamed layers."""
    gate_up, down = (jnp.asarray(rng.standard_normal((count, *shape)), dtype) for shape in ((48, 64), (64, 24)))
    x, logits = (jnp.asarray(rng.standard_normal((MOST_ROWS, size)), jnp.float32) for size in (64, count))

    def mix(x, logits):
        return experts(x, logits, gate_up, down, per_token, scores="renormalised")

    def mix_apart(x, logits):
        choice, score = choose_experts(logits, per_token, scores="renormalised")
        return chosen_experts(x, choice, score, jnp.arange(count, dtype=jnp.int32), gate_up, down)

    most = run(form, mix, x, logits)
    np.testing.assert_allclose(most, jax.jit(mix)(x, logits), atol=0.3 if dtype == "bfloat16" else 1e-2)
    for rows in (1, 2, 8, 33):
        first = rng.integers(0, MOST_ROWS - rows + 1)
        some = slice(first, first + rows)
        for function in (mix, mix_apart):
            assert (bits(run(form, function, x[some], logits[some])) == bits(most[some])).all()


@pytest.mark.parametrize("form", ["cpu", "gpu"])
def test_norms(form):
    x, scale = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((MOST_ROWS, 1000), 1000))
    most = run(form, lambda x: rms_norm(x, scale, 1e-5), x)
    for rows in COUNTS:
        assert (bits(run(form, lambda x: rms_norm(x, scale, 1e-5), x[:rows])) == bits(most[:rows])).all()


@dataclasses.dataclass
class Text:
    """A text of tokens whose keys and values are known, of which some lie in the prefix and the rest in a window."""

    count: int = 140
    heads: tuple[int, int, int] = (2, 3, 32)

    def __post_init__(self):
        K, G, H = self.heads
        self.qkv = jnp.asarray(rng.standard_normal((self.count, K, G + 2, H)), jnp.float32)
        angle = rng.uniform(0, 6, (self.count, H // 2))
        self.cos, self.sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)

    def score(self, form, dtype, sliding=None, *, window, beside=0):
        """Results of the last `window` tokens, in one pass after the others; `beside` rows stand between them."""
        K, _, H = self.heads
        cache = jnp.zeros((K, 320, H), dtype)
        call = jax.jit(tree_attention, static_argnames=("sliding_window",))
        with registry.using(FORMS[form]):

            def rows(take, length, cache):
                order = np.asarray(take)
                real = np.sort(np.unique(order, return_index=True)[1]) if beside else np.arange(len(order))
                at = np.arange(len(order))
                mask = (at[None, :] == at[:, None]) | (np.isin(at, real)[None, :] & (at[None, :] <= at[:, None]))
                mask &= order[None, :] <= order[:, None]
                position = jnp.asarray(order, jnp.int32)
                if sliding is not None:
                    mask &= order[:, None] - order[None, :] < sliding
                return call(
                    self.qkv[order], self.cos[order], self.sin[order], *cache, jnp.int32(length), jnp.asarray(mask),
                    position, sliding_window=sliding,
                )  # fmt: skip

            caches = (cache, cache)
            done = self.count - window
            for token in range(done):  # as decoding writes them
                _, *caches = rows([token], token, caches)
            order = np.repeat(np.arange(done, self.count), 1 + beside)
            out, *_ = rows(order, done, caches)
            return out[:: 1 + beside], caches


@pytest.mark.thorough
@pytest.mark.parametrize("sliding", [None, 40])
@pytest.mark.parametrize("form", quick_part(FORMS, lambda form: form == "cpu"))
def test_attention(form, sliding):
    """A token's result does not depend on which of the tokens before it lie in the window, nor on rows beside it."""
    text = Text()
    dtype = jnp.bfloat16
    alone = _decode(text, form, dtype, sliding)
    for window, beside in ((9, 0), (60, 0), (20, 1)):
        out, _ = text.score(form, dtype, sliding, window=window, beside=beside)
        assert (bits(out) == bits(jnp.concatenate(alone[-window:]))).all()


def _decode(text, form, dtype, sliding):
    K, _, H = text.heads
    caches, found = (jnp.zeros((K, 320, H), dtype),) * 2, []
    call = jax.jit(tree_attention, static_argnames=("sliding_window",))
    with registry.using(FORMS[form]):
        for token in range(text.count):
            one = slice(token, token + 1)
            out, *caches = call(
                text.qkv[one], text.cos[one], text.sin[one], *caches, jnp.int32(token), jnp.ones((1, 1), bool),
                jnp.full(1, token, jnp.int32), sliding_window=sliding,
            )  # fmt: skip
            found.append(out)
    mask, position = jnp.ones((1, 1), bool), jnp.full(1, text.count - 1, jnp.int32)
    query = jnp.asarray(_rotate(text.qkv[-1:, :, :-2], text.cos[-1:], text.sin[-1:]))
    expected = attend_tree(query, *caches, jnp.int32(text.count - 1), mask, position, sliding)
    np.testing.assert_allclose(found[-1], expected, atol=2e-2)
    return found


def _rotate(x, cos, sin):
    first, second = np.split(np.asarray(x), 2, axis=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("operation", ["linear", "tree_attention"])
def test_one_row_and_eight_are_the_same_call(operation):
    """Kernels are launched with the same shapes and the same code."""
    weight, text = jnp.zeros((128, 256), jnp.bfloat16), Text(8)
    cache = jnp.zeros((2, 320, 32), jnp.bfloat16)

    def call(rows):
        if operation == "linear":
            return exact_linear.linear_parts(jnp.zeros((rows, 256)), weight)
        mask, position = jnp.tril(jnp.ones((rows, rows), bool)), jnp.arange(rows, dtype=jnp.int32)
        given = text.qkv[:rows], text.cos[:rows], text.sin[:rows], cache, cache, jnp.int32(0), mask, position
        return tree_attention(*given)[0]

    found = []
    for rows in (1, 8):
        with registry.using(FORMS["triton"]):
            jaxpr = jax.make_jaxpr(call, static_argnums=0)(rows)
        launches = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
        found.append([(str(eqn.params["jaxpr"]), [var.aval for var in eqn.invars]) for eqn in launches])
    assert found[0] == found[1] and len(found[0]) == (1 if operation == "linear" else 2)
