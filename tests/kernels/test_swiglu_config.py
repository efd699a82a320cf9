"""Block sizes of SwiGLU: sound for every shape, and taken from the table where it has them."""

import json

import pytest

from pallas_kernels.swiglu import config
from pallas_kernels.swiglu.config import Config, block_rows, bucket, choose, step_bytes

KIND = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("T", [1, 16, 17, 64])
@pytest.mark.parametrize(("D", "F"), [(4096, 14336), (8192, 28672), (8192, 3584), (576, 1536), (100, 83), (8, 8)])
def test_the_heuristic_fits_every_gpu(T, D, F, itemsize):
    sizes = choose(KIND, T, D, F, itemsize)
    assert sizes.stages * step_bytes(block_rows(T), sizes.block_f, sizes.block_k, itemsize) <= 99 << 10
    assert sizes.stages >= 2


def test_blocks_that_triton_does_not_take():
    for sizes in ((8, 16, 4, 2), (16, 48, 4, 2), (16, 16, 3, 2), (16, 16, 4, 0)):
        with pytest.raises(ValueError, match="got"):
            Config(*sizes)


def test_the_table_goes_before_the_heuristic(tmp_path, monkeypatch):
    sizes = {"block_f": 128, "block_k": 16, "warps": 8, "stages": 2}
    table = tmp_path / "swiglu.json"
    table.write_text(json.dumps({KIND: {bucket(8, 4096, 14336): sizes}}))
    monkeypatch.setattr(config, "TABLE", table)
    config.load_table.cache_clear()
    try:
        assert choose(KIND, 16, 4096, 14336) == Config(**sizes)  # rows of the same tile
        assert choose(KIND, 17, 4096, 14336) != Config(**sizes)
        assert choose("NVIDIA A100-SXM4-80GB", 8, 4096, 14336) != Config(**sizes)
    finally:
        config.load_table.cache_clear()
