"""Tables of tuned block sizes: read where they are whole, refused by name before anything is traced where not."""

import json
import types

import pytest

from pallas_kernels import selection, tables
from pallas_kernels.linear import config as linear_config
from pallas_kernels.tree_attention import config as attention_config
from pallas_kernels.tree_attention.config import Config

SIZES = {"block_q": 16, "block_k": 32, "splits": 2, "warps": 4, "stages": 2}
KIND = "NVIDIA H100 80GB HBM3"


def test_a_table_and_none(tmp_path):
    path = tmp_path / "table.json"
    assert tables.load_table(path, Config) == {}
    path.write_text(json.dumps({KIND: {"T8": SIZES}, "other": {}}))
    assert tables.load_table(path, Config) == {KIND: {"T8": Config(**SIZES)}, "other": {}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (SIZES | {"block_k": 48}, "block_k must be a power of two of at least 16, got 48"),
        (SIZES | {"block": 16}, "unexpected keyword argument 'block'"),
        ({"block_q": 16}, "missing 4 required"),
        (SIZES | {"warps": "4"}, "not supported"),
        (7, "must be a mapping"),
    ],
)
def test_rows_that_are_none(tmp_path, row, reason):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({KIND: {"good": SIZES, "T8 G4": row}}))
    with pytest.raises(ValueError, match=rf"table.json, '{KIND}', 'T8 G4': .*{reason}.*tools/tune_kernels.py"):
        tables.load_table(path, Config)


@pytest.mark.parametrize("text", ["[]", "{", '{"kind": []}'])
def test_files_that_are_none(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="tuned block sizes cannot be read: .*table.json: .*delete it"):
        tables.load_table(path, Config)


@pytest.mark.parametrize("config", [attention_config, linear_config])
def test_kernels_are_not_chosen_with_a_broken_table(tmp_path, monkeypatch, config):
    """However they are asked for, and before they are run."""
    monkeypatch.setattr(selection, "find_failure", lambda *_: pytest.fail("a kernel was run"))
    monkeypatch.setattr(config, "TABLE", tmp_path / "table.json")
    config.TABLE.write_text('{"kind": {"row": {}}}')
    config.load_table.cache_clear()
    try:
        for name in ("auto", "pallas-triton"):
            device = types.SimpleNamespace(device_kind=KIND, compute_capability="9.0")
            with pytest.raises(ValueError, match="table.json, 'kind', 'row'"):
                selection.choose(name, "gpu", device=device)
    finally:
        config.load_table.cache_clear()
