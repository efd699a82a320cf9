"""The Mosaic GPU attention: in JAX's interpreter it equals plain numpy, and it lowers for CUDA on any host.

The interpreter leaves NaN in all that was not written. Cache slots that no row of a case sees hold NaN too.
"""

import dataclasses
import functools
import re

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Interpreted, grown_case, random_case, random_parents
from jax.experimental.mosaic.gpu import dialect_lowering
from jax.experimental.mosaic.gpu.dialect_lowering import lower_mgpu_dialect
from lowering import MODELS, abstract_attention, lower_for_cuda
from marks import fast_part, quick_part

from pallas_kernels import registry
from pallas_kernels.tree_attention import mosaic, tree_attention
from pallas_kernels.tree_attention.mosaic import choose_config
from pallas_kernels.tree_attention.mosaic_kernel import Config, shared_bytes

KERNELS = registry.Kernels(
    "mosaic", "gpu", implementations=(("tree_attention", "mosaic"),), capability=(9, 0), interpret=True
)
# Around the edges of tiles of 64 slots. The last tile reaches over the end of the cache.
LENGTHS = (0, 1, 64, 200)
SLOTS = 328
TREE = (1, 3, 64, "bfloat16")  # K, G, H and the cache's dtype


ATTENTION = Interpreted(mosaic, KERNELS, {"bfloat16": 6e-3})
assert_right = ATTENTION.assert_right
pytestmark = pytest.mark.usefixtures("mosaic_compiled_once")


# K, G, H and the cache's dtype; rows; how they are cut up; lengths of the prefix.
TREES = (
    ((2, 4, 64, "bfloat16"), 8, Config(1, 2, 2), (0, 1, 64, SLOTS - 8)),
    ((1, 4, 128, "bfloat16"), 1, Config(1, 1, 2), (*LENGTHS, SLOTS - 1)),  # nothing to merge
    ((1, 3, 64, "bfloat16"), 23, Config(2, 3, 3), (1, SLOTS - 23)),  # 69 rows for two warpgroups
    ((1, 8, 128, "bfloat16"), 20, Config(2, 2, 2), (0, 63, SLOTS - 20)),  # two blocks, the last one not full
    ((1, 1, 128, "bfloat16"), 128, Config(2, 2, 2), (65, SLOTS - 128)),
    ((1, 7, 64, "bfloat16"), 70, Config(2, 3, 2), (33, SLOTS - 70)),  # 9 tokens a tile; a second tile of 6 new ones
)


FAST_TREES = fast_part(TREES, lambda _, rows, *__: rows <= 23)


@pytest.mark.parametrize(
    "model, rows, config, lengths", quick_part(FAST_TREES, lambda _, rows, *__: rows == 1), ids=str
)
def test_trees(model, rows, config, lengths):
    rng = np.random.default_rng(0)
    for length in lengths:
        assert_right(random_case(rng, model, rows, length, random_parents(rng, rows), slots=SLOTS), config)


@pytest.mark.slow
def test_a_thousand_rows_and_a_long_prefix():
    """A call of a wide tree, and a prefix of many tiles that every row sees, whose rings are filled several times."""
    rng = np.random.default_rng(9)
    for rows, length, config in ((1024, 100, Config(2, 1, 2)), (3, 800, Config(1, 2, 4))):
        slots = -(-(rows + length) // 8) * 8
        parents = random_parents(rng, rows)
        assert_right(random_case(rng, (1, 1, 64, "bfloat16"), rows, length, parents, slots=slots), config)


@pytest.mark.thorough
def test_a_tree_that_grows():
    """Rows written after older rows of the window, some of which are on no row's path."""
    rng = np.random.default_rng(2)
    for length, offset in ((0, 0), (31, 1), (64, 31), (120, 32), (128, 35)):
        assert_right(grown_case(rng, TREE, 5, length, offset, 70, slots=SLOTS), Config(1, 2, 2))


@pytest.mark.thorough
def test_causal_chunks():
    rng, sliding_window = np.random.default_rng(3), 7
    for length in (0, 63, 150):
        case = random_case(rng, TREE, 40, length, sliding_window=sliding_window, slots=SLOTS)
        assert_right(case, Config(2, 2, 2))


@pytest.mark.thorough
def test_rows_are_apart():
    rng = np.random.default_rng(4)
    case = random_case(rng, TREE, 40, 100, random_parents(rng, 40), slots=SLOTS)
    ATTENTION.assert_rows_are_apart(rng, case, Config(1, 2, 2), (1, 25))


@pytest.mark.thorough
def test_no_races(monkeypatch, capsys):
    """Rings of two places that are filled several times, with and without a mask.

    The prefix ends with a tile: else its last tile is read while slots that no row sees of it are written.
    """
    monkeypatch.setattr(mosaic, "interpreter", functools.partial(mosaic.interpreter, detect_races=True))
    rng = np.random.default_rng(6)
    case = random_case(rng, TREE, 40, 256, random_parents(rng, 40), 200, slots=SLOTS)
    # A config of its own, so that its program is traced here.
    assert_right(case, Config(2, 1, 2))
    assert "RACE" not in capsys.readouterr().out


def lower(operands, **options):
    kernels = dataclasses.replace(KERNELS, interpret=False)

    def function(*operands):
        with registry.using(kernels):
            return tree_attention(*operands, **options)

    return lower_for_cuda(function, *operands)


# A second each: rows decide on warpgroups and stages, heads on parts. Odd numbers of rows leave the last tile fewer
# tokens than a multiple of two.
LOWERED = [("llama-3-8b", 1), ("llama-3-8b", 65), ("llama-3-70b on 8", 129), ("smollm2", 64)]
MORE_LOWERED = [("llama-3-8b", 16), ("llama-3-70b on 4", 16), ("qwen2-72b", 8), ("smollm2", 1)]
LOWERED += [pytest.param(*each, marks=pytest.mark.slow) for each in MORE_LOWERED]


@pytest.mark.thorough
@pytest.mark.parametrize("model, T", LOWERED)
def test_lowering(model, T):
    assert lower(abstract_attention(T, *MODELS[model], 8192)).count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("model", ["llama-3-8b", "smollm2"])
def test_slices_of_swizzled_places_begin_where_the_swizzle_does(monkeypatch, model):
    """TMA swizzles by the address, warpgroups by the place in their slice, which the interpreter does not show."""
    modules = []

    def keep(module, *rest, **options):
        modules.append(str(module))
        return lower_mgpu_dialect(module, *rest, **options)

    for holder in (mgpu, dialect_lowering):
        monkeypatch.setattr(holder, "lower_mgpu_dialect", keep, raising=False)
    lower(abstract_attention(10, *MODELS[model], 4096))
    (module,) = modules
    starts, checked = {}, 0
    for line in module.splitlines():
        if slice_ := re.search(r"(%\S+) = memref\.subview %\S+\[(.*?)\]", line):
            starts[slice_[1]] = slice_[2].split(", ")
        use = re.search(r'"mosaic_gpu\.vector_(?:load|store)"\((?:%\S+, )?(%\S+?)\).*?tile<\[(\d+), (\d+)\]>', line)
        if use and use[1] in starts:
            row, column = starts[use[1]][-2:]
            assert int(row) % 8 == 0 and int(column) % (int(use[3]) if use[2] == "8" else 8 * int(use[3])) == 0, line
            checked += 1
    assert checked > 3


@pytest.mark.thorough
def test_lowering_of_everything_at_once():
    operands = abstract_attention(1024, *MODELS["llama-3-8b"], 8200, window=1100)
    assert (
        lower(operands, offset=jnp.int32(3), active_rows=jnp.int32(7), sliding_window=4096).count("@mosaic_gpu_v2") == 1
    )
    assert lower(operands[:-2], sliding_window=100).count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    "operands, options",
    [
        (abstract_attention(8, 2, 4, 128, 512, dtype=jnp.float32), {}),
        (abstract_attention(8, 2, 4, 96, 512), {}),
        (abstract_attention(8, 2, 4, 64, 500), {}),  # slots
        (abstract_attention(8, 2, 4, 64, 56), {}),
        # Its mask bits leave no room for tiles.
        (abstract_attention(64, 2, 4, 128, 16384, window=8192), {"offset": np.int32(0)}),
        (abstract_attention(64, 2, 4, 64, 16384, window=8192), {"offset": np.int32(0)}),  # more than one copy of TMA
        (abstract_attention(8, 2, 4, 64, 512), {"write_only": True}),
    ],
    ids=["float32", "width", "slots", "few slots", "window", "narrow window", "write only"],
)
def test_what_is_left_to_xla(operands, options):
    assert "@mosaic_gpu" not in lower(operands, **options)


def test_config():
    def choose(*shape, multiprocessors=132):
        return choose_config(*shape, multiprocessors=multiprocessors)

    # Plain decoding of one head: as many parts as a merge is worth.
    assert choose(1, 1, 128, 8192, 4) == Config(1, 32, 3)
    # As many CTAs as multiprocessors.
    assert choose(1, 8, 128, 8192, 4) == Config(1, 16, 3)
    assert choose(1, 8, 128, 8192, 4, multiprocessors=78) == Config(1, 9, 3)
    assert choose(4, 8, 128, 8192, 4) == Config(2, 8, 2)
    assert choose(64, 8, 64, 8192, 36) == Config(2, 1, 4)
    # Mask bits that leave no room for those of a second warpgroup.
    assert choose(64, 8, 128, 8192, 68) == Config(1, 1, 2)
    # No more parts than tiles.
    assert choose(1, 1, 64, 200, 4) == Config(1, 4, 4)
    assert choose(4, 8, 128, 8192, 400) is None
    for tiles in (1, 2, 64):
        for words in (4, 36, 80):
            config = choose(tiles, 8, 128, 8192, words)
            assert config is None or shared_bytes(config, 128, words) <= mosaic.SHARED_BYTES
