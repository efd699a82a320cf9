"""Native tree attention: against float64, and the same bits as decoding token by token. XLA's forms against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import DTYPES, assert_cache, expected_and_bound, random_case, random_parents, tree_mask, visible
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import XLA, assert_close, assert_same_bits, needs_native, run
from marks import quick_part

from pallas_kernels import registry
from pallas_kernels.tree_attention import tree_attention, xla
from pallas_kernels.tree_attention.blocked import QUERY_BLOCK, prefix_sizes

LENGTHS = (0, 1, 127, 128, 129, 300)
ROWS = (13, 1, 24, 2, 7, 130, 8, 33)
WINDOWS = (None, 1, 5, 140, 5000)
# K, G, H and the cache's dtype: every value of each, in ten of their combinations.
MODELS = (
    (1, 1, 8, "float32"),
    (2, 3, 64, "float32"),
    (3, 1, 24, "bfloat16"),
    (1, 4, 80, "float32"),
    (2, 4, 128, "bfloat16"),
    (3, 3, 8, "bfloat16"),
    (1, 3, 128, "float32"),
    (2, 1, 64, "bfloat16"),
    (3, 4, 24, "float32"),
    (1, 3, 80, "bfloat16"),
)
# What a failed call raises: the first where it is waited for, the second where its result is read.
REFUSALS = (jax.errors.JaxRuntimeError, ValueError)
FEW_MODELS = (MODELS[0], MODELS[1], MODELS[5], MODELS[9])


def attend(case, threads=1, active_rows=None, write_only=False, kernels=None):
    """Output, keys and values of the native call, or of other kernels."""
    return run(
        _attend,
        *case.operands,
        *(None if number is None else np.int32(number) for number in (case.offset, active_rows)),
        case.sinks,
        kernels=kernels or registry.Kernels("cpu", "cpu", threads),
        sliding_window=case.sliding_window,
        write_only=write_only,
    )


def _attend(
    qkv, cos, sin, key, value, length, mask, position, offset, active_rows, sinks, *, sliding_window, write_only
):  # fmt: skip
    return tree_attention(
        *(qkv, cos, sin, key, value, length, mask, position),
        offset=offset,
        sliding_window=sliding_window,
        active_rows=active_rows,
        write_only=write_only,
        sinks=sinks,
    )


def assert_right(case, threads=1):
    """The native result against numpy's; the result."""
    out, key, value = attend(case, threads)
    assert_cache(case, key, value)
    exact, bound = expected_and_bound(case, key, value)
    assert_close(out, exact, bound, f"length {case.length}")
    if np.max(np.abs(case.qkv)) < 10 and (case.sinks is None or case.sinks.max() < 10):
        # Rounding errors mostly cancel: far below the bound for scores of ordinary size, with any dtype of the cache.
        assert np.linalg.norm(out - exact) <= 1e-6 * np.linalg.norm(exact), f"length {case.length}"
    return out, key, value


def cut_rows(case, rows):
    """Some rows of a chunk as a chunk of its own; those before them are in the cache that it is given."""
    return dataclasses.replace(case, qkv=case.qkv[rows], cos=case.cos[rows], sin=case.sin[rows])


def token_by_token(case, depth, parents, threads=1, causal=False):
    """Each row decoded alone after its path, which lies at consecutive slots: output, key and value of each."""
    caches, results = {-1: (case.key, case.value)}, []
    for row in range(case.rows):
        key, value = caches[parents[row]]
        slot = case.length + int(depth[row])
        one = dataclasses.replace(
            cut_rows(case, slice(row, row + 1)),
            key=key,
            value=value,
            length=slot,
            mask=None if causal else np.ones((1, 1), bool),
            position=None if causal else np.array([slot], np.int32),
        )
        out, key, value = attend(one, threads)
        caches[row] = key, value
        results.append((out[0], key[:, slot], value[:, slot]))
    return results


def assert_same_rows(case, result, rows):
    """A call's outputs and written rows against those of `rows`, bit for bit."""
    out, key, value = result
    for row, (alone, alone_key, alone_value) in enumerate(rows):
        slot = case.first_slot + row
        assert_same_bits(out[row], alone, f"output of row {row}, length {case.length}")
        assert_same_bits(key[:, slot], alone_key, f"key of row {row}")
        assert_same_bits(value[:, slot], alone_value, f"value of row {row}")


def check_tree(rng, model, rows, length, sliding_window, sinks=None):
    """A random tree against numpy; the same bits by token, in another order, and with garbage in some rows."""
    parents = random_parents(rng, rows)
    case = with_sinks(rng, random_case(rng, model, rows, length, parents, sliding_window), sinks)
    result = assert_right(case, threads=2)
    depth = case.position - length
    expected = token_by_token(case, depth, parents, causal=length % 2 == 0)
    for threads in (1, 2):
        assert_same_rows(case, attend(case, threads), expected)

    # The same tree with its rows in another order, parents still before children.
    order = np.lexsort((rng.random(rows), depth))
    place = {-1: -1, **{int(old): new for new, old in enumerate(order)}}
    mask, _ = tree_mask([place[parents[old]] for old in order], sliding_window)
    permuted = dataclasses.replace(cut_rows(case, order), mask=mask, position=case.position[order])
    assert_same_rows(permuted, attend(permuted), [expected[old] for old in order])
    check_active_rows(rng, case, result, int(rng.integers(1, rows + 1)))


def with_sinks(rng, case, size):
    """A case with sinks that are up to `size` large, if it is a number."""
    if size is None:
        return case
    heads = case.qkv.shape[1], case.qkv.shape[2] - 2
    return dataclasses.replace(case, sinks=(3 + size * rng.normal(size=heads)).astype(np.float32))


def check_active_rows(rng, case, result, active_rows):
    """Garbage in the rows that are not active, which see nothing, reaches none of the others."""
    broken, mask = case.qkv.copy(), case.mask
    broken[active_rows:] = rng.choice([np.nan, np.inf, 1e6])
    if mask is not None and rng.random() < 0.5:
        mask = mask.copy()
        mask[active_rows:] = False
    out, key, value = attend(
        dataclasses.replace(case, qkv=broken, mask=mask), 1 + active_rows % 2, active_rows=active_rows
    )
    assert_same_rows(case, (out, key, value), written_rows(case, result)[:active_rows])
    untouched = np.ones(key.shape[1], bool)
    untouched[case.written] = False
    assert_same_bits(key[:, untouched], case.key[:, untouched])
    assert_same_bits(value[:, untouched], case.value[:, untouched])


def written_rows(case, result):
    """Output, key and value of each row of a result."""
    out, key, value = result
    return [(out[row], key[:, case.first_slot + row], value[:, case.first_slot + row]) for row in range(case.rows)]


@needs_native
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_trees(number):
    """Every pair of model and window, of length and window; sinks of which the large leave next to nothing to keys."""
    rng = np.random.default_rng(number)
    for which, length in enumerate(LENGTHS):
        window = WINDOWS[(number + which) % len(WINDOWS)]
        sinks = (None, 1.0, 60.0)[which % 3]
        check_tree(rng, MODELS[number], ROWS[(3 * number + which) % len(ROWS)], length, window, sinks)


@needs_native
@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    st.sampled_from(MODELS),
    st.sampled_from((1, 2, 6, 24)),
    st.integers(0, 400),
    st.sampled_from((None, 5, 140)),
    st.integers(0, 2**32 - 1),
)
def test_any_tree(model, rows, length, sliding_window, seed):
    check_tree(np.random.default_rng(seed), model, rows, length, sliding_window)


@needs_native
@pytest.mark.parametrize("sliding_window", WINDOWS)
@pytest.mark.parametrize(
    "rows, models", quick_part([(1, (1, 5)), (5, (0, 9)), (64, (2, 3)), (300, (1, 7))], lambda rows, _: rows == 300)
)
def test_causal_chunks(rows, models, sliding_window):
    """Against numpy, as a tree that is a chain, token by token, in parts, and with some active rows."""
    rng = np.random.default_rng(rows)
    for model, length in zip(models, (200, 1 + 126 * (rows == 5)), strict=True):
        case = random_case(rng, MODELS[model], rows, length, sliding_window=sliding_window)
        result = assert_right(case, threads=2)
        chain = [*range(-1, rows - 1)]
        mask, depth = tree_mask(chain, sliding_window)
        for got, expected in zip(
            attend(dataclasses.replace(case, mask=mask, position=length + depth)), result, strict=True
        ):
            assert_same_bits(got, expected)
        if rows < 100 or sliding_window == 140:
            assert_same_rows(case, result, token_by_token(case, depth, chain, causal=True))
        part_key, part_value = case.key, case.value
        for part in np.split(np.arange(rows), [cut for cut in (1, 6, 70) if cut < rows]):
            start = dict(key=part_key, value=part_value, length=length + int(part[0]))
            step = dataclasses.replace(cut_rows(case, part), **start)
            part_out, part_key, part_value = attend(step, threads=2)
            assert_same_bits(part_out, result[0][part])
        assert_same_bits(part_key, result[1])
        assert_same_bits(part_value, result[2])
        check_active_rows(rng, case, result, (rows + 1) // 2)


@needs_native
@pytest.mark.parametrize("model, sliding_window", [(MODELS[1], None), (MODELS[9], 140)])
def test_a_long_prefix(model, sliding_window):
    rng = np.random.default_rng(0)
    parents = random_parents(rng, 24)
    case = random_case(rng, model, 24, 2000, parents, sliding_window, slots=2112)
    result = assert_right(case)
    for threads in (2, 3, 8):
        for got, expected in zip(attend(case, threads), result, strict=True):
            assert_same_bits(got, expected)
    assert_same_rows(case, result, token_by_token(case, case.position - 2000, parents))
    assert_right(random_case(rng, model, 24, 2000, None, sliding_window, slots=2112), threads=2)


@needs_native
@pytest.mark.parametrize("spread", [0, 100, 1e4])
def test_scores_of_any_size(spread):
    """From all equal to one that outweighs all others."""
    rng = np.random.default_rng(0)
    for model in (MODELS[1], MODELS[9]):
        assert_right(random_case(rng, model, 13, 129, random_parents(rng, 13), spread=spread))
        assert_right(random_case(rng, model, 13, 129, spread=spread))


@needs_native
@pytest.mark.parametrize("number", range(4))
def test_a_tree_that_grows(number):
    """Rows written after older rows of the window; the mask has columns for all of them, and for more to come."""
    rng = np.random.default_rng(2)
    rows, width, sliding_window = 24, 40, (None, 5, 5, None)[number]
    for length in (0, 1, 115, 128, 300):
        parents = random_parents(rng, rows)
        case = random_case(rng, FEW_MODELS[number], rows, length, parents, sliding_window)
        expected = written_rows(case, assert_right(case))
        mask, _ = tree_mask(parents, sliding_window, width)
        key, value = case.key, case.value
        for part in np.split(np.arange(rows), [1, 5, 13]):
            new = dict(key=key, value=value, mask=mask[part], position=case.position[part], offset=int(part[0]))
            step = dataclasses.replace(cut_rows(case, part), **new)
            result = assert_right(step, threads=2)
            assert_same_rows(step, result, [expected[row] for row in part])
            _, key, value = result


@needs_native
@pytest.mark.parametrize("garbage", [1e6, 3.4e38, np.nan, -np.inf])
def test_slots_that_no_row_sees(garbage):
    """After the rows, unmarked between them, and out of the sliding window's reach."""
    rng = np.random.default_rng(3)
    for model, length, sliding_window in ((1, 0, None), (9, 129, 140), (1, 300, 140), (9, 300, 5), (1, 129, 5)):
        tree = random_case(rng, MODELS[model], 7, length, random_parents(rng, 7), sliding_window)
        # Seven rows after nine older slots of the window, of which they see some.
        mask = np.concatenate([rng.random((7, 9)) < 0.2, tree.mask, np.zeros((7, 4), bool)], axis=1)
        later = dataclasses.replace(tree, mask=mask, offset=9)
        for case in (tree, later, random_case(rng, MODELS[model], 7, length, None, sliding_window)):
            unseen = ~visible(case).any(0)
            unseen[case.written] = True  # what the rows are written over
            key, value = case.key.copy(), case.value.copy()
            key[:, unseen] = value[:, unseen] = garbage
            expected = attend(case)
            got = attend(dataclasses.replace(case, key=key, value=value), threads=2)
            assert_same_bits(got[0], expected[0])
            for after, before, start in zip(got[1:], expected[1:], (key, value), strict=True):
                assert_same_bits(after[:, case.written], before[:, case.written])
                unseen[case.written] = False
                assert_same_bits(after[:, unseen], start[:, unseen])


@needs_native
@pytest.mark.parametrize("garbage", [1e6, np.nan, np.inf])
def test_a_slot_that_other_rows_see(garbage):
    """A broken row reaches its descendants and no other row."""
    rng = np.random.default_rng(4)
    for model, length in zip(FEW_MODELS, (0, 129, 0, 129), strict=True):
        case = random_case(rng, model, 24, length, random_parents(rng, 24))
        out, key, value = attend(case)
        for broken_row in (0, 3, 11, 23):
            qkv = case.qkv.copy()
            qkv[broken_row, :, :, 1] = garbage
            got, got_key, got_value = attend(dataclasses.replace(case, qkv=qkv), threads=2)
            others = ~case.mask[:, broken_row]
            assert_same_bits(got[others], out[others])
            rows = length + np.flatnonzero(np.arange(24) != broken_row)
            assert_same_bits(got_key[:, rows], key[:, rows])
            assert_same_bits(got_value[:, rows], value[:, rows])
            if not np.isfinite(garbage):
                assert (got_value[:, length + broken_row, 1] == 0).all()
                assert np.isnan(got[broken_row]).any()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_are_written_as_zeros(dtype):
    rng = np.random.default_rng(5)
    case = random_case(rng, (2, 3, 24, dtype), 7, 130)
    qkv = case.qkv.copy()
    qkv[1, 0, -1, 3], qkv[2, 1, -1, 0], qkv[6, 1, -1, 23] = np.nan, np.inf, -np.inf
    # The first that bfloat16 rounds to infinity, and the one before.
    qkv[3, 0, -1, :2] = float.fromhex("0x1.ffp127"), float.fromhex("0x1.fefffep127")
    broken = dataclasses.replace(case, qkv=qkv)
    # Only the values are broken: everything is finite again.
    assert_right(broken, threads=2)
    qkv[3] = np.nan
    out, _, value = attend(dataclasses.replace(case, qkv=qkv))
    assert (value[:, 133] == 0).all()
    assert np.isfinite(out[:3]).all()


@needs_native
@pytest.mark.parametrize("model", FEW_MODELS)
def test_write_only(model):
    rng = np.random.default_rng(7)
    for length in (0, 129):
        tree = random_case(rng, model, 24, length, random_parents(rng, 24))
        older = np.zeros((24, 6), bool)
        after = dataclasses.replace(tree, mask=np.concatenate([older, tree.mask], axis=1), offset=6)
        for case in (tree, after, random_case(rng, model, 24, length)):
            out, key, value = attend(case)
            written = attend(case, threads=2, write_only=True)
            assert written[0].shape == out.shape
            assert_same_bits(written[1], key)
            assert_same_bits(written[2], value)


@needs_native
def test_a_cache_that_is_given_away():
    """Written in place."""
    rng = np.random.default_rng(8)
    case = random_case(rng, MODELS[1], 13, 129, random_parents(rng, 13))
    expected = attend(case)

    def step(key, value, qkv, cos, sin, mask, position):
        with registry.using(registry.Kernels("cpu", "cpu", 2)):
            return tree_attention(qkv, cos, sin, key, value, jnp.int32(129), mask, position)

    key, value = jnp.asarray(case.key), jnp.asarray(case.value)
    at = key.unsafe_buffer_pointer()
    got = jax.jit(step, donate_argnums=(0, 1))(key, value, case.qkv, case.cos, case.sin, case.mask, case.position)
    assert key.is_deleted() and got[1].unsafe_buffer_pointer() == at
    for result, of_copies in zip(got, expected, strict=True):
        assert_same_bits(result, of_copies)


@needs_native
def test_the_end_of_the_cache():
    """Filled to the last slot, and a mask whose unmarked columns reach beyond."""
    rng = np.random.default_rng(9)
    for model in FEW_MODELS:
        tree = random_case(rng, model, 7, 57, random_parents(rng, 7), slots=64)
        assert_right(tree)
        assert_right(random_case(rng, model, 7, 57, slots=64))
        wide = dataclasses.replace(tree, mask=np.concatenate([tree.mask, np.zeros((7, 30), bool)], axis=1), offset=0)
        for got, expected in zip(attend(wide, threads=2), attend(tree), strict=True):
            assert_same_bits(got, expected)


@needs_native
@pytest.mark.parametrize("write_only", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_do_not_fit_are_refused(causal, write_only):
    rng = np.random.default_rng(10)
    case = random_case(rng, MODELS[0], 7, 50, None if causal else random_parents(rng, 7), slots=64)
    places = [(58, None), (57, 1), (64, None), (10_000, None), (2**31 - 1, None), (-1, None), (50, -1), (50, 2**31 - 1)]
    for length, offset in places:
        # An offset of a chunk has no meaning, whether it fits or not.
        with pytest.raises(REFUSALS, match="tree_attention|takes no offset"):
            attend(dataclasses.replace(case, length=length, offset=offset), write_only=write_only)


@needs_native
@pytest.mark.parametrize("column", [7, 20])
def test_a_mask_beyond_the_cache_is_refused(column):
    rng = np.random.default_rng(11)
    case = random_case(rng, MODELS[0], 7, 57, random_parents(rng, 7), slots=64)
    mask = np.concatenate([case.mask, np.zeros((7, 30), bool)], axis=1)
    mask[3, column] = True
    with pytest.raises(REFUSALS, match="tree_attention"):
        attend(dataclasses.replace(case, mask=mask, offset=0))


REFUSED = {
    "qkv of three dimensions": ({"qkv": (7, 5, 8)}, r"float32 \(7, 5, 8\)"),
    "no query": ({"qkv": (7, 2, 2, 8)}, r"\(7, 2, 2, 8\)"),
    "an odd width": (
        {"qkv": (7, 2, 5, 7), "cos": (7, 3), "sin": (7, 3), "key": (2, 64, 7), "value": (2, 64, 7)},
        "head width must be even.*got 7",
    ),
    "qkv in bfloat16": ({"qkv": ((7, 2, 5, 8), jnp.bfloat16)}, "got bfloat16"),
    "other heads": ({"key": (3, 64, 8), "value": (3, 64, 8)}, r"\(7, 2, 5, 8\).*\(3, 64, 8\)"),
    "another width": ({"key": (2, 64, 16), "value": (2, 64, 16)}, r"\(2, 64, 16\)"),
    "keys and values apart": ({"value": (2, 63, 8)}, r"\(2, 64, 8\).*\(2, 63, 8\)"),
    "two dtypes": ({"value": ((2, 64, 8), jnp.bfloat16)}, "float32.*bfloat16"),
    "int8": ({"key": ((2, 64, 8), jnp.int8), "value": ((2, 64, 8), jnp.int8)}, "int8"),
    "cache of four dimensions": ({"key": (1, 2, 64, 8), "value": (1, 2, 64, 8)}, r"\(1, 2, 64, 8\)"),
    "wide tables": ({"cos": (7, 8), "sin": (7, 8)}, r"\(7, 4\), got float32 \(7, 8\)"),
    "tables of other rows": ({"cos": (6, 4), "sin": (6, 4)}, r"\(7, 4\), got float32 \(6, 4\)"),
    "unequal tables": ({"sin": (7, 3)}, r"\(7, 4\), got float32 \(7, 3\)"),
    "tables in bfloat16": ({"cos": ((7, 4), jnp.bfloat16)}, "bfloat16"),
    "mask of other rows": ({"mask": ((6, 9), jnp.bool_)}, r"\(6, 9\)"),
    "mask of one dimension": ({"mask": ((7,), jnp.bool_)}, r"\(7,\)"),
    "mask of numbers": ({"mask": ((7, 9), jnp.float32)}, "float32"),
    "positions of other rows": ({"position": ((8,), jnp.int32)}, r"\(8,\)"),
    "positions of two dimensions": ({"position": ((7, 1), jnp.int32)}, r"\(7, 1\)"),
    "mask without positions": ({"position": None}, "together"),
    "positions without mask": ({"mask": None}, "together"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operands_that_do_not_fit(what):
    """Before any call: the native library need not be there."""
    changes, message = REFUSED[what]
    fitting = {
        "qkv": (7, 2, 5, 8),
        "cos": (7, 4),
        "sin": (7, 4),
        "key": (2, 64, 8),
        "value": (2, 64, 8),
        "mask": ((7, 9), jnp.bool_),
        "position": ((7,), jnp.int32),
    }

    def array(spec):
        if spec is None:
            return None
        shape, dtype = spec if isinstance(spec[0], tuple) else (spec, jnp.float32)
        return jax.ShapeDtypeStruct(shape, dtype)

    operands = {name: array(spec) for name, spec in (fitting | changes).items()}

    def step(qkv, cos, sin, key, value, mask, position):
        return tree_attention(qkv, cos, sin, key, value, jnp.int32(5), mask, position)

    for kernels in (XLA, registry.Kernels("cpu", "cpu")):
        with registry.using(kernels), pytest.raises(ValueError, match=message):
            jax.eval_shape(step, **operands)


def test_sinks_that_do_not_fit_are_refused():
    case = random_case(np.random.default_rng(0), MODELS[1], 3, 2, [-1, 0, 0], slots=6)
    for sinks in (np.zeros((1, 3), np.float32), np.zeros((2, 3), np.float16)):
        with pytest.raises(ValueError, match=r"sinks must be float32 \(2, 3\)"):
            tree_attention(*case.operands, sinks=sinks)


@pytest.mark.parametrize("kernels", [XLA, *(registry.Kernels("xla", name) for name in ("gpu", "tpu"))], ids=str)
@pytest.mark.parametrize(
    "model, rows, tree, sliding_window",
    [
        (1, 1, True, None), (3, 1, True, None), (1, 12, True, 7), (1, 12, True, 300), (1, 1, False, None),
        (1, 12, False, 1), (1, QUERY_BLOCK + 44, False, 300),
    ],
)  # fmt: skip
def test_xlas_forms(model, rows, tree, sliding_window, kernels, monkeypatch):
    """Against numpy, on every static length of a prefix; all slots after those in use hold large numbers.

    Twelve rows are two blocks on a TPU, and one row of one narrow KV head is padded there. A program for each case:
    windows come with sinks, trees with active rows.
    """
    monkeypatch.setattr(xla, "MOST_SCORES", 5 * 2 * 3 * 600 * 4)
    rng = np.random.default_rng(3)
    for which, length in enumerate((0, 1, 100, 255, 256, 257, 290)):
        parents = random_parents(rng, rows) if tree else None
        case = random_case(rng, MODELS[model], rows, length, parents, sliding_window, slots=600)
        case = with_sinks(rng, case, 1.0 if sliding_window else None)
        for cache in (case.key, case.value):
            cache[:, length + rows :] = 1e6
        active_rows = (rows if which % 3 else max(1, rows // 2)) if tree else None
        out, key, value = attend(case, active_rows=active_rows, kernels=kernels)
        assert_cache(case, key, value)
        exact, _ = expected_and_bound(case, key, value)
        np.testing.assert_allclose(out[:active_rows], exact[:active_rows], rtol=0, atol=1e-5)


def test_prefix_sizes():
    assert prefix_sizes(600) == [256, 600] and prefix_sizes(64) == [64]
    assert prefix_sizes(2112) == [256, 512, 1024, 2112]
