"""One expert of a checkpoint is read as a part of the whole parameter, and only its bytes are asked for."""

import json
import shutil

import numpy as np
import pytest
import quantised_writers as qw
from gguf import GGMLQuantizationType as Kind
from make import random_tensors, tiny_config, write_gguf, write_hf
from test_gpt_oss import write as write_gpt_oss

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.load import open_weights
from jaxspec.errors import CheckpointError
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.params import EXPERT_WEIGHTS, declare_leaves

MIXTRAL, QWEN = tiny_config("mixtral"), tiny_config("qwen3_moe")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq_v2"}


def write_gptq(folder):
    # The router is quantised, too: its outputs fill words.
    cfg = tiny_config("qwen3_moe", experts=ExpertsConfig(8, 2, 32))
    qw.write_folder(folder / "gptq", cfg, GPTQ, qw.gptq, version=2, group=32, least_zero=0)
    return folder / "gptq"


def write_native(folder):
    path = write_gguf(folder / "model.gguf", QWEN, random_tensors(QWEN), qtype=Kind.Q8_0)
    convert(path, folder / "native")
    return folder / "native"


def write_mxfp4(folder):
    write_gpt_oss(folder / "oss")
    return folder / "oss"


KINDS = {
    "folder": lambda folder: write_hf(folder / "hf", MIXTRAL, random_tensors(MIXTRAL), shards=2, dtype="bfloat16"),
    "gguf": lambda folder: write_gguf(folder / "model.gguf", MIXTRAL, random_tensors(MIXTRAL), qtype=Kind.Q4_0),
    "gptq": write_gptq,
    "native": write_native,
    "mxfp4": write_mxfp4,
}


class Reader:
    """Reads files, and notes what was asked for."""

    def __init__(self):
        self.asked = set()

    def __call__(self, path, offset, nbytes):
        self.asked |= {(path, byte) for byte in range(offset, offset + nbytes)}
        return np.fromfile(path, np.uint8, nbytes, offset=offset)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_is_a_part_of_the_whole(kind, tmp_path):
    import ml_dtypes  # noqa: F401  # its dtypes by name

    weights = open_weights(KINDS[kind](tmp_path))
    infos = declare_leaves(weights.config, weights.own_storage)
    for leaf in EXPERT_WEIGHTS:
        name = f"layers.1.{leaf}"
        info, whole = infos[name], Reader()
        one = info.__class__(**{**vars(info), "shape": (1, *info.shape[1:])})
        expected = weights.direct(whole)(name, info)
        asked = []
        for expert in range(weights.config.experts.count):
            reader = Reader()
            part = weights.direct(reader)(name, one, expert=expert)
            np.testing.assert_array_equal(part, expected[expert : expert + 1], strict=True)
            assert not any(reader.asked & other for other in asked), "bytes of another expert were read"
            # The first's gate and up take turns, and each reads both; the other's order of inputs is read when opened.
            if kind not in ("mxfp4", "gptq"):
                assert weights.file_bytes(name, one, expert) == len(reader.asked)
            asked.append(reader.asked)
        assert set().union(*asked) == whole.asked


def test_several_experts_in_a_file_are_refused(tmp_path):
    """As earlier versions wrote them: a checksum holds for a whole file."""
    weights = open_weights(write_native(tmp_path))
    name = "layers.0.down"
    folder = tmp_path / "native" / "arrays" / name
    zarr = json.loads((folder / "zarr.json").read_text())
    shape = zarr["shape"]
    assert zarr["chunk_grid"]["configuration"]["chunk_shape"] == [1, *shape[1:]]
    zarr["chunk_grid"]["configuration"]["chunk_shape"] = shape
    (folder / "zarr.json").write_text(json.dumps(zarr))
    shutil.rmtree(folder / "c")
    info = declare_leaves(weights.config, weights.own_storage)[name]
    for call in (weights.file_bytes, weights.direct(Reader())):
        with pytest.raises(
            CheckpointError, match=r"layers\.0\.down.*holds several experts in a file.*convert the model"
        ):
            call(name, info, expert=0)
