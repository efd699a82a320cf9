"""The Triton attention in Pallas' interpreter, which leaves NaN in all that no program wrote.

The caches that it is given are NaN where no row sees them, and where it writes: on a GPU programs run in any order, and
none may read there.
"""

import functools

import jax
import numpy as np
import pytest
from attention_cases import Interpreted, grown_case, poisoned, random_case, random_parents
from kernel_cases import assert_same_bits
from marks import quick_part

from pallas_kernels import registry
from pallas_kernels.tree_attention import config, tree_attention, triton
from pallas_kernels.tree_attention.config import Config

KERNELS = registry.Kernels(
    "pallas-triton", "cpu", implementations=(("tree_attention", "triton"),), capability=(8, 0), interpret=True
)
# Tiles of 32 slots: a prefix of a few tiles, whose edges are 32, 64, ...
LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 150)
SLOTS = 200
ATTENTION = Interpreted(triton, KERNELS, {"float32": 2e-6, "bfloat16": 6e-3})
attend, assert_right = ATTENTION.attend, ATTENTION.assert_right


# K, G, H and the cache's dtype; rows; block sizes.
TREES = (
    ((2, 3, 64, "float32"), 13, Config(16, 32, 4, 4, 2)),  # several blocks of rows, the last one not full
    ((1, 4, 128, "bfloat16"), 8, Config(32, 32, 1, 4, 2)),  # one part of the prefix, nothing to merge
    ((2, 1, 64, "bfloat16"), 1, Config(16, 32, 2, 4, 2)),  # plain decoding without groups
    ((1, 8, 128, "float32"), 5, Config(64, 16, 8, 4, 2)),  # more parts than tiles
    ((1, 3, 80, "bfloat16"), 40, Config(128, 32, 2, 4, 2)),  # two words of mask bits; a width that is no power of two
    pytest.param((1, 4, 128, "bfloat16"), 128, Config(128, 64, 2, 4, 2), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("model, rows, blocks", quick_part(TREES, lambda _, rows, __: rows in (1, 40)), ids=str)
def test_trees(model, rows, blocks):
    """The last one up to the end of the cache."""
    rng = np.random.default_rng(0)
    for length in (*LENGTHS, SLOTS):
        parents = random_parents(rng, rows)
        case = random_case(rng, model, rows, length, parents, slots=SLOTS + rows)
        if length == 0 and rows > 4:
            case.mask[4] = False  # a row that sees nothing
            out, _, _ = attend(poisoned(case), blocks)
            assert np.isfinite(out).all() and not out[4].any()
        else:
            assert_right(case, blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, rows, length",
    [((1, 1, 64, "float32"), 1024, 100), ((1, 2, 128, "bfloat16"), 1024, 33), ((1, 8, 128, "bfloat16"), 3, 2900)],
    ids=str,
)
def test_a_thousand_rows_and_a_long_prefix(model, rows, length):
    rng = np.random.default_rng(10)
    _, group, width, dtype = model
    slots = rows + length + 5
    chosen = config.choose("", 64, rows, group, width, slots, kv_heads=1, itemsize=4 if dtype == "float32" else 2)
    assert_right(random_case(rng, model, rows, length, random_parents(rng, rows), slots=slots), chosen)


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_a_tree_that_grows(sliding_window):
    """Rows written after older rows of the window, some of which are on no row's path."""
    rng = np.random.default_rng(2)
    model, blocks = (1, 4, 64, "bfloat16"), Config(32, 32, 2, 4, 2)
    for length, offset in ((0, 0), (31, 1), (64, 31), (120, 32), (128, 35)):
        assert_right(grown_case(rng, model, 5, length, offset, 70, sliding_window, SLOTS), blocks)


@pytest.mark.thorough
@pytest.mark.parametrize("sliding_window", [5, 40])
def test_sliding_windows_and_causal_chunks(sliding_window):
    rng = np.random.default_rng(1)
    model, rows, blocks = (2, 3, 64, "float32"), 13, Config(16, 32, 2, 4, 2)
    for length in LENGTHS[::2]:
        parents = random_parents(rng, rows)
        assert_right(random_case(rng, model, rows, length, parents, sliding_window, slots=SLOTS), blocks)
    for length in (1, 63, 150):
        window = None if sliding_window == 40 else sliding_window
        case = random_case(rng, (1, 3, 64, "float32"), 40, length, sliding_window=window, slots=SLOTS)
        assert_right(case, blocks)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_apart(dtype):
    """Whole blocks of rows that are not active are left out."""
    rng = np.random.default_rng(4)
    case = random_case(rng, (2, 3, 64, dtype), 13, 100, random_parents(rng, 13), slots=SLOTS)
    ATTENTION.assert_rows_are_apart(rng, case, Config(16, 32, 2, 4, 2), (1, 5, 6, 13))


def test_rows_beyond_the_cache_write_nothing():
    """Which the contract forbids: they must not come to the next head's slots."""
    rng = np.random.default_rng(8)
    case = random_case(rng, (2, 3, 64, "float32"), 13, SLOTS - 5, [-1] * 13, slots=SLOTS)
    _, *caches = attend(case, Config(16, 32, 4, 4, 2))
    for got, given in zip(caches, (case.key, case.value), strict=True):
        assert_same_bits(got[:, : SLOTS - 5], given[:, : SLOTS - 5])
    assert_same_bits(caches[1][:, SLOTS - 5 :], case.qkv[:5, :, -1].swapaxes(0, 1))


@pytest.mark.thorough
def test_sequences_in_a_batch():
    rng = np.random.default_rng(7)
    model, blocks = (2, 1, 64, "bfloat16"), Config(16, 32, 2, 4, 2)
    cases = [poisoned(random_case(rng, model, 1, length, [-1], slots=SLOTS)) for length in (10, 150)]
    operands = jax.tree.map(lambda *each: np.stack(each), *(case.operands for case in cases))
    operands = tuple(x.astype(np.int32) if x.dtype == np.int64 else x for x in operands)
    batch = jax.jit(jax.vmap(ATTENTION.function(blocks)))
    together = jax.tree.map(np.asarray, batch(operands))
    for index, case in enumerate(cases):
        for got, expected in zip(together, attend(case, blocks), strict=True):
            np.testing.assert_allclose(got[index].astype(np.float32), expected.astype(np.float32), rtol=0, atol=1e-5)


def test_windows_without_a_meaning():
    """Implementations differ on these, and no model makes them."""
    rng = np.random.default_rng(9)
    case = random_case(rng, (2, 1, 64, "bfloat16"), 3, 20, [-1] * 3, slots=SLOTS)
    rows = (case.qkv, case.cos, case.sin, case.key, case.value, np.int32(20))
    for kernels in (KERNELS, registry.Kernels("xla", "cpu")):
        with registry.using(kernels):
            with pytest.raises(ValueError, match="a window of 8 slots for 3 rows needs the rows' offset in it"):
                tree_attention(*rows, np.ones((3, 8), bool), case.position)
            with pytest.raises(ValueError, match="a causal chunk .* takes no offset"):
                tree_attention(*rows, offset=np.int32(40))


def test_the_operation_goes_through_it():
    """The choice of block sizes included; `write_only` goes through XLA."""
    rng = np.random.default_rng(8)
    case = poisoned(random_case(rng, (2, 1, 64, "bfloat16"), 1, 33, [-1], slots=SLOTS))
    with registry.using(KERNELS):
        text = jax.jit(tree_attention).lower(*case.operands).as_text()
        assert "while" in text  # the interpreter's loop over programs
        text = jax.jit(functools.partial(tree_attention, write_only=True)).lower(*case.operands).as_text()
        assert "while" not in text


def test_block_sizes(monkeypatch):
    for kv_heads, group, width in ((8, 4, 128), (1, 8, 128), (3, 3, 64), (4, 1, 256), (2, 7, 80)):
        for T in (1, 8, 64, 1024):
            for slots in (16, 1024, 131072):
                chosen = config.choose("NVIDIA A10G", 80, T, group, width, slots, kv_heads=kv_heads)
                assert chosen.block_q >= min(16, T * group) and chosen.stages >= 2
                assert chosen.splits * 2 * chosen.block_k <= max(slots, 2 * chosen.block_k)
    # A row of queries leaves most of a GPU idle unless the prefix is split; a thousand rows fill it.
    assert config.choose("NVIDIA H100 80GB HBM3", 132, 1, 4, 128, 8192, kv_heads=8).splits == 32
    assert config.choose("NVIDIA H20", 78, 1, 4, 128, 8192, kv_heads=8).splits == 16
    assert config.choose("NVIDIA H100 80GB HBM3", 132, 1024, 4, 128, 8192, kv_heads=8).splits == 1
    tuned = Config(16, 16, 2, 2, 1)
    table = {"NVIDIA A10G": {config.bucket(7, 4, 128, 1000, 8): tuned}}
    monkeypatch.setattr(config, "load_table", lambda: table)
    assert config.choose("NVIDIA A10G", 80, 8, 4, 128, 1024) == tuned
    assert config.choose("NVIDIA A10G", 80, 9, 4, 128, 1024) != tuned
    # A benchmark's case after 1024 or 8192 tokens has the bucket of a model's cache of as many slots.
    for slots, near in ((512, 512), (1024, 1024), (1088, 1024), (1400, 1024), (1500, 2048), (8256, 8192)):
        assert config.bucket(8, 4, 128, slots, 8) == f"T8 G4 H128 S{near} K8 x2"
    for changed in ({"block_q": 8}, {"block_k": 48}, {"splits": 3}, {"warps": 0}, {"stages": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(changed))} must be"):
            Config(**{"block_q": 16, "block_k": 16, "splits": 1, "warps": 4, "stages": 2} | changed)
