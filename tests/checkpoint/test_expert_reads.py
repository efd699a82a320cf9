"""One expert of a checkpoint is read as a part of the whole parameter, and only its bytes are asked for."""

import contextlib
import os
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

    def counting(self, nbytes):
        self.counted = nbytes
        return contextlib.nullcontext()


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
            if kind == "native":  # TensorStore reads
                assert weights.file_bytes(name, one, expert) == reader.counted == part.nbytes
                continue
            # The first's gate and up take turns, and each reads both; the other's order of inputs is read when opened.
            if kind not in ("mxfp4", "gptq"):
                assert weights.file_bytes(name, one, expert) == len(reader.asked)
            asked.append(reader.asked)
        assert kind == "native" or set().union(*asked) == whole.asked


def test_an_expert_of_a_native_checkpoint_has_files_of_its_own(tmp_path):
    """A pass reads no bytes of other experts: their files may be missing."""
    weights = open_weights(write_native(tmp_path))
    name = "layers.0.down"
    info, folder = declare_leaves(weights.config, weights.own_storage)[name], tmp_path / "native" / "arrays" / name
    expected = weights.read(name, info)
    for expert in range(1, info.shape[0]):
        shutil.rmtree(folder / "c" / str(expert))
    np.testing.assert_array_equal(weights.direct(Reader())(name, info, expert=0), expected[:1])
    with pytest.raises(CheckpointError, match=r"layers\.0\.down: damaged or incomplete"):
        weights.direct(Reader())(name, info, expert=1)


def test_a_native_checkpoint_that_is_replaced_while_it_is_in_use_is_an_error(tmp_path):
    weights = open_weights(write_native(tmp_path))
    name = "layers.0.down"
    info, read = declare_leaves(weights.config, weights.own_storage)[name], weights.direct(Reader())
    read(name, info)
    os.utime(tmp_path / "native" / "jaxspec.json", ns=(1, 1))
    with pytest.raises(CheckpointError, match="was changed while it was in use: load the model again"):
        read(name, info)
