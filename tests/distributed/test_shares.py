"""Every process reads its own part of a checkpoint, and holds what a whole reading would give it."""

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from make import tiny_config, write_gguf, write_hf
from native_models import write_native
from process_harness import run_processes

from jaxspec.models.experts import ExpertsConfig

SCRIPT = Path(__file__).parent / "loading.py"
WIDE = {"embed_dim": 128, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 96}


@pytest.fixture(scope="module")
def loads(tmp_path_factory):
    """Path, whether blocks are kept, and whether experts lie whole on the devices."""
    folder = tmp_path_factory.mktemp("shares")
    dense = tiny_config("qwen3", mlp_dim=256, **WIDE)
    mixture = tiny_config("mixtral", mlp_dim=128, experts=ExpertsConfig(4, 2, 128), **WIDE)
    shared = tiny_config("qwen2_moe", experts=ExpertsConfig(6, 3, 64, False, 128), **WIDE)
    write_native(folder / "native", dense)
    write_native(folder / "native-mixture", mixture)
    gguf = write_gguf(folder / "model.gguf", dense, qtype=GGMLQuantizationType.Q8_0)
    mixed = write_gguf(folder / "mixture.gguf", mixture, qtype=GGMLQuantizationType.Q8_0)
    hf, hf_mixture, hf_shared = (
        write_hf(folder / name, cfg) for name, cfg in (("hf", dense), ("hf-mixture", mixture), ("hf-shared", shared))
    )
    plain = [(folder / "native", False, False), (hf, False, False), (gguf, True, False), (gguf, False, False)]
    mixtures = folder / "native-mixture", hf_mixture, hf_shared, mixed
    experts = [(path, path == mixed, whole) for path in mixtures for whole in (False, True)]
    return [(str(path), *rest) for path, *rest in plain + experts]


def test_each_process_reads_its_share(loads):
    spec = {"devices": 1, "loads": loads}
    ended = run_processes([spec, spec], script=SCRIPT)
    assert [process.status for process in ended] == [0, 0], "\n".join(p.err[-2000:] for p in ended)
    found = [json.loads(line) for line in ended[0].out.splitlines() if line.startswith('["read"')]
    assert len(found) == len(loads)
    for _, *load, told in found:
        for share, own in told:
            assert own > 100_000 and 0.9 < share < 1.1, (load, told)


@pytest.mark.thorough
def test_padding_alone_is_read_from_nothing(tmp_path):
    """Five experts on four devices of two processes: the last device has none."""
    folder = write_hf(tmp_path / "model", tiny_config("qwen3_moe", experts=ExpertsConfig(5, 2, 32)))
    spec = {"devices": 2, "loads": [(str(folder), False, True), (str(folder), False, False)]}
    ended = run_processes([spec, spec], script=SCRIPT)
    assert [process.status for process in ended] == [0, 0], "\n".join(p.err[-2000:] for p in ended)
