"""Native tree attention: against float64, and the same bits as decoding token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    DTYPES,
    assert_cache,
    expected_and_bound,
    random_case,
    random_parents,
    tree_mask,
    visible,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import XLA, assert_close, assert_same_bits, bits, needs_native, run_native

from pallas_kernels import registry
from pallas_kernels.tree_attention import tree_attention

LENGTHS = (0, 1, 127, 128, 129, 300)
WINDOWS = (None, 1, 5, 130, 5000)
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


def attend(case, threads=1, active_rows=None, write_only=False):
    """Output, keys and values of the native call."""
    return run_native(
        _attend,
        *(case.qkv, case.cos, case.sin, case.key, case.value, np.int32(case.length), case.mask, case.position),
        *(None if number is None else np.int32(number) for number in (case.offset, active_rows)),
        case.sinks,
        threads=threads,
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
    if np.max(np.abs(case.qkv)) < 10:
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


@needs_native
@pytest.mark.parametrize("sliding_window", WINDOWS)
@pytest.mark.parametrize("model", MODELS)
def test_trees(model, sliding_window):
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        assert_right(random_case(rng, model, 13, length, random_parents(rng, 13), sliding_window), threads=2)


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 64, 130])
def test_trees_of_any_size(rows):
    rng = np.random.default_rng(rows)
    for model, length in zip(FEW_MODELS, (0, 129, 300, 128), strict=True):
        assert_right(random_case(rng, model, rows, length, random_parents(rng, rows)), threads=2)


@needs_native
@pytest.mark.parametrize("sliding_window", WINDOWS)
@pytest.mark.parametrize("rows, models", [(1, (1, 5)), (5, (0, 9)), (64, (2, 3)), (200, (1, 7))])
def test_causal_chunks(rows, models, sliding_window):
    rng = np.random.default_rng(rows)
    for model, lengths in zip(models, ((127, 300), (1, 128)), strict=True):
        for length in lengths:
            case = random_case(rng, MODELS[model], rows, length, sliding_window=sliding_window)
            result = assert_right(case, threads=2)
        # The last one as a tree that is a chain.
        mask, depth = tree_mask([*range(-1, rows - 1)], sliding_window)
        chain = attend(dataclasses.replace(case, mask=mask, position=length + depth))
        for got, expected in zip(chain, result, strict=True):
            assert_same_bits(got, expected)


@needs_native
@pytest.mark.parametrize("sliding_window", [None, 130])
@pytest.mark.parametrize("model", [MODELS[1], MODELS[9]])
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
@pytest.mark.parametrize("sliding_window", WINDOWS)
@pytest.mark.parametrize("model", FEW_MODELS)
def test_a_tree_is_its_paths_decoded_token_by_token(model, sliding_window):
    rng = np.random.default_rng(1)
    for length in (0, 1, 110, 127, 128, 129, 250, 300):
        parents = random_parents(rng, 24)
        case = random_case(rng, model, 24, length, parents, sliding_window)
        rows = token_by_token(case, case.position - length, parents, causal=length % 2 == 0)
        for threads in (1, 2):
            assert_same_rows(case, attend(case, threads), rows)


@needs_native
@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.sampled_from(MODELS),
    st.sampled_from((1, 2, 6, 24)),
    st.integers(0, 400),
    st.sampled_from((None, 5, 130)),
    st.integers(0, 2**32 - 1),
)
def test_any_tree(model, rows, length, sliding_window, seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, rows)
    case = random_case(rng, model, rows, length, parents, sliding_window)
    result = assert_right(case, threads=2)
    depth = case.position - length
    assert_same_rows(case, result, token_by_token(case, depth, parents))

    # The same tree with its rows in another order, parents still before children.
    order = np.lexsort((rng.random(rows), depth))
    place = {-1: -1, **{int(old): new for new, old in enumerate(order)}}
    mask, _ = tree_mask([place[parents[old]] for old in order], sliding_window)
    permuted = dataclasses.replace(cut_rows(case, order), mask=mask, position=case.position[order])
    out, key, value = result
    old_rows = [(out[old], key[:, length + old], value[:, length + old]) for old in order]
    assert_same_rows(permuted, attend(permuted), old_rows)

    # Fewer active rows, and garbage in the others.
    active_rows = int(rng.integers(1, rows + 1))
    broken = case.qkv.copy()
    broken[active_rows:] = rng.choice([np.nan, np.inf, 1e6])
    out, key, value = attend(dataclasses.replace(case, qkv=broken), active_rows=active_rows)
    active = [(result[0][row], result[1][:, length + row], result[2][:, length + row]) for row in range(active_rows)]
    assert_same_rows(case, (out, key, value), active)
    assert np.isfinite(out).all()


@needs_native
@pytest.mark.parametrize("sliding_window", [None, 5, 130])
@pytest.mark.parametrize("rows, models", [(5, FEW_MODELS), (200, (MODELS[1], MODELS[9]))])
def test_a_chunk_is_its_tokens_one_by_one(rows, models, sliding_window):
    rng = np.random.default_rng(0)
    for model, length in zip(models, (127, 0, 300, 129), strict=False):
        case = random_case(rng, model, rows, length, sliding_window=sliding_window)
        expected = token_by_token(case, np.arange(rows), range(-1, rows - 1), causal=True)
        for threads in (1, 2):
            assert_same_rows(case, attend(case, threads), expected)


@needs_native
@pytest.mark.parametrize("model", FEW_MODELS)
def test_a_chunk_in_parts(model):
    rng = np.random.default_rng(0)
    case = random_case(rng, model, 200, 100)
    out, key, value = attend(case)
    part_key, part_value, outs = case.key, case.value, []
    for rows in np.split(np.arange(200), [1, 6, 70]):
        part = dataclasses.replace(cut_rows(case, rows), key=part_key, value=part_value, length=100 + int(rows[0]))
        part_out, part_key, part_value = attend(part, threads=2)
        outs.append(part_out)
    assert_same_bits(np.concatenate(outs), out)
    assert_same_bits(part_key, key)
    assert_same_bits(part_value, value)


@needs_native
@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("model", FEW_MODELS)
def test_a_tree_that_grows(model, sliding_window):
    """Rows written after older rows of the window; the mask has columns for all of them, and for more to come."""
    rng = np.random.default_rng(2)
    rows, width = 24, 40
    for length in (0, 1, 115, 128, 300):
        parents = random_parents(rng, rows)
        case = random_case(rng, model, rows, length, parents, sliding_window)
        out, key, value = assert_right(case)
        expected = [(out[row], key[:, length + row], value[:, length + row]) for row in range(rows)]
        mask, _ = tree_mask(parents, sliding_window, width)
        key, value = case.key, case.value
        for part in np.split(np.arange(rows), [1, 5, 13]):
            step = dataclasses.replace(
                cut_rows(case, part),
                key=key,
                value=value,
                mask=mask[part],
                position=case.position[part],
                offset=int(part[0]),
            )
            result = assert_right(step, threads=2)
            assert_same_rows(step, result, [expected[row] for row in part])
            _, key, value = result


@needs_native
@pytest.mark.parametrize("garbage", [1e6, 3e38, 3.4e38, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sliding_window", [None, 5, 130])
def test_slots_that_no_row_sees(sliding_window, garbage):
    """Behind the rows, unmarked between them, and out of the sliding window's reach."""
    rng = np.random.default_rng(3)
    for model in (MODELS[1], MODELS[9]):
        for length in (0, 129, 300):
            parents = random_parents(rng, 7)
            tree = random_case(rng, model, 7, length, parents, sliding_window)
            # Seven rows after nine older slots of the window, of which they see some.
            mask = np.concatenate([rng.random((7, 9)) < 0.2, tree.mask, np.zeros((7, 4), bool)], axis=1)
            after = dataclasses.replace(tree, mask=mask, offset=9)
            for case in (tree, after, random_case(rng, model, 7, length, None, sliding_window)):
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
    for model in FEW_MODELS:
        for length in (0, 129):
            parents = random_parents(rng, 24)
            case = random_case(rng, model, 24, length, parents)
            out, key, value = attend(case)
            for broken_row in (0, 3, 11, 23):
                qkv = case.qkv.copy()
                qkv[broken_row, :, :, 1] = garbage
                broken = dataclasses.replace(case, qkv=qkv)
                got, got_key, got_value = attend(broken, threads=2)
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
def test_a_value_too_large_for_bfloat16():
    """What float32 holds and bfloat16 rounds to infinity: whatever is written, products with zero stay zero."""
    case = random_case(np.random.default_rng(5), (1, 1, 8, "bfloat16"), 2, 3, [-1, -1])
    qkv = case.qkv.copy()
    qkv[0, 0, -1, 0] = np.finfo(np.float32).max
    out, _, value = attend(dataclasses.replace(case, qkv=qkv))
    assert_same_bits(out[1], attend(case)[0][1])
    assert not np.isnan(value.astype(np.float32)).any()


@needs_native
@pytest.mark.parametrize("model", FEW_MODELS)
def test_active_rows(model):
    rng = np.random.default_rng(6)
    for length in (0, 129):
        tree = random_case(rng, model, 33, length, random_parents(rng, 33))
        for case in (tree, random_case(rng, model, 33, length)):
            out, key, value = attend(case)
            untouched = np.ones(key.shape[1], bool)
            untouched[case.written] = False
            for active_rows in (1, 2, 3, 7, 8, 9, 32, 33):
                mask = case.mask
                if mask is not None:
                    mask = mask.copy()
                    mask[active_rows:] = False
                result = attend(
                    dataclasses.replace(case, mask=mask), threads=1 + active_rows % 2, active_rows=active_rows
                )
                rows = [(out[row], key[:, length + row], value[:, length + row]) for row in range(active_rows)]
                assert_same_rows(case, result, rows)
                assert np.isfinite(result[0]).all()
                assert_same_bits(result[1][:, untouched], case.key[:, untouched])
                assert_same_bits(result[2][:, untouched], case.value[:, untouched])


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
@pytest.mark.parametrize(
    "length, offset", [(58, None), (57, 1), (64, None), (10_000, None), (2**31 - 1, None), (-1, None)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_do_not_fit_are_refused(causal, length, offset, write_only):
    rng = np.random.default_rng(10)
    case = random_case(rng, MODELS[0], 7, 50, None if causal else random_parents(rng, 7), slots=64)
    case = dataclasses.replace(case, length=length, offset=offset)
    # Of a chunk with an offset there is no meaning, whether it fits or not.
    with pytest.raises(REFUSALS, match="tree_attention|takes no offset"):
        attend(case, write_only=write_only)


@needs_native
@pytest.mark.parametrize("offset", [-1, 2**31 - 1])
def test_an_absurd_offset_is_refused(offset):
    rng = np.random.default_rng(10)
    case = random_case(rng, MODELS[0], 7, 50, random_parents(rng, 7), slots=64)
    with pytest.raises(REFUSALS, match="tree_attention"):
        attend(dataclasses.replace(case, offset=offset))


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


@pytest.mark.parametrize("kernels", [XLA, registry.Kernels("cpu", "cpu")], ids=["xla", "cpu"])
@pytest.mark.parametrize("what", REFUSED)
def test_operands_that_do_not_fit(what, kernels):
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
        with registry.using(kernels):
            return tree_attention(qkv, cos, sin, key, value, jnp.int32(5), mask, position)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, **operands)


def test_the_cases_themselves():
    """The oracle against an example worked out by hand: rows 1 and 2 are children of row 0, two slots are committed."""
    mask, depth = tree_mask([-1, 0, 0])
    assert mask.astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]] and depth.tolist() == [0, 1, 1]
    case = random_case(np.random.default_rng(0), MODELS[0], 3, 2, [-1, 0, 0], slots=6)
    assert visible(case).astype(int).tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]
    case = random_case(np.random.default_rng(0), MODELS[0], 3, 2, [-1, 0, 0], 2, slots=6)
    assert visible(case).astype(int).tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0]]
    case = random_case(np.random.default_rng(0), MODELS[0], 3, 2, None, 2, slots=6)
    assert visible(case).astype(int).tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]
    assert bits(np.float32([np.nan]))[0] == bits(-np.float32([np.nan]))[0]
