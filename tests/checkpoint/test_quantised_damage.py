"""Quantised safetensors that are damaged, inconsistent or of other layouts: every fault has its own message."""

import copy
import json
import shutil

import numpy as np
import pytest
import quantised_writers as qw
from make import tiny_config
from safetensors import deserialize
from safetensors.numpy import save_file
from test_quantised import AWQ, CASES, FP8, GPTQ, SOME

from jaxspec.checkpoint.load import open_checkpoint, open_weights
from jaxspec.errors import CheckpointError, ConfigError, JaxspecError

SMALL = tiny_config(num_layers=1, embed_dim=128, mlp_dim=128, num_heads=2, num_kv_heads=1, head_dim=64, vocab_size=16)
VALUES = (None, 0, -1, 1, 3, 7, 2**40, 1.5, "", "x", "gemv", True, False, [], [0, 0], [[]], {}, {"a": {}}, "re:(a+)+$")
DTYPES = (np.int32, np.uint8, np.int8, np.float16, np.float32, np.int64, qw.FP8, qw.BF16)
DOWN = "model.layers.0.mlp.down_proj"


def load_file(file):
    """The tensors of a file, writable; the package's own function knows no float8."""
    dtypes = {"F8_E4M3": qw.FP8, "BF16": qw.BF16, "F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8", "I8": "i1",
              "U8": "u1"}  # fmt: skip
    return {
        name: np.frombuffer(bytearray(entry["data"]), dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in deserialize(file.read_bytes())
    }


def read_all(folder):
    source = open_checkpoint(folder)
    open_weights(folder)
    for name in source.shapes():
        kept = source.weight_type(name) not in ("float32", "float16", "bfloat16")
        source.read(name, keep_blocks=kept)


def places_of(tree, path=()):
    """Every place in nested settings."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places_of(value, (*path, key))


def mutate(rng, config, tensors, raw):
    """Change a setting, a tensor, or bytes of the file; returns the file's new bytes or None."""
    kind = rng.integers(8)
    names = [name for name in tensors if "proj" in name]
    name = names[rng.integers(len(names))]
    value = tensors[name]
    if kind < 2:
        settings = config["quantization_config"]
        paths = list(places_of(settings))
        *outer, last = paths[rng.integers(len(paths))]
        for key in outer:
            settings = settings[key]
        settings[last] = VALUES[rng.integers(len(VALUES))]
    elif kind == 2:
        del tensors[name]
    elif kind == 3:
        axis = rng.integers(max(1, value.ndim))
        tensors[name] = np.take(value, range(rng.integers(value.shape[axis])), axis) if value.ndim else value
    elif kind == 4:
        tensors[name] = np.ones(value.shape, DTYPES[rng.integers(len(DTYPES))])
    elif kind == 5:
        tensors[name] = rng.integers(0, 256, value.nbytes, np.uint8).view(value.dtype).reshape(value.shape)
    elif kind == 6:
        return raw[: rng.integers(len(raw))]
    else:
        damaged = bytearray(raw)
        for _ in range(8):
            damaged[rng.integers(4000)] = rng.integers(256)
        return bytes(damaged)
    return None


@pytest.mark.parametrize("name", [*SOME, "w8a16"])
def test_a_hundred_mutations(name, tmp_path):
    case = CASES[name]
    qw.write_folder(tmp_path / "m", SMALL, case.settings, case.write, **case.options)
    read_all(tmp_path / "m")
    file, config_file = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    raw, config, tensors = file.read_bytes(), json.loads(config_file.read_text()), load_file(file)
    rng, messages = np.random.default_rng(0), set()
    for _ in range(100):
        changed, left = copy.deepcopy(config), dict(tensors)
        damaged = mutate(rng, changed, left, raw)
        config_file.write_text(json.dumps(changed))
        if damaged is None:
            save_file({key: np.ascontiguousarray(value) for key, value in left.items()}, file)
        else:
            file.write_bytes(damaged)
        try:
            read_all(tmp_path / "m")
        except JaxspecError as error:
            assert str(tmp_path) in str(error)
            messages.add(str(error))
    assert len(messages) > 30


REFUSED = {
    "gemv": (AWQ | {"version": "gemv"}, "version is 'gemv'; only AWQ's layout 'gemm' is supported"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; GPTQ layouts gptq and gptq_v2"),
    "3 bits": (GPTQ | {"bits": 3}, "bits is 3; GPTQ of 4 and 8 bits"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: awq"),
    "sparse": (
        qw.compressed_config("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config is .*sparse layouts",
    ),
    "nvfp4": (qw.compressed_config("nvfp4-pack-quantized", num_bits=4, type="float"), "format is 'nvfp4-pack"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_are_refused_by_name(name, tmp_path, monkeypatch):
    settings, message = REFUSED[name]
    qw.write_folder(tmp_path / "m", SMALL, settings, qw.awq)
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config\.{message}"):
        open_checkpoint(tmp_path / "m")


FAULTS = {
    "missing": (lambda t: t.pop(f"{DOWN}.qzeros"), "lacks the tensor 'model.layers.0.mlp.down_proj.qzeros'"),
    "twice": (lambda t: t.update({f"{DOWN}.weight": np.zeros((128, 128), np.float16)}), "twice"),
    "type": (lambda t: t.update({f"{DOWN}.scales": t[f"{DOWN}.scales"].astype(np.int32)}), "has type int32, not float"),
    "shape": (
        lambda t: t.update({f"{DOWN}.scales": t[f"{DOWN}.scales"][:, :8].copy()}),
        r"is \[1, 8\], not \[1, 128\]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_have_messages_of_their_own(name, tmp_path):
    change, message = FAULTS[name]
    qw.write_folder(tmp_path / "m", SMALL, AWQ, qw.awq)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "m")


def test_values_that_are_no_numbers(tmp_path):
    """They are found when weights are read."""
    for name, (settings, write, part, value) in {
        "scale": (AWQ, qw.awq, "scales", np.float16(np.inf)),
        "code": (FP8, qw.fp8, "weight", qw.FP8(np.nan)),
    }.items():
        qw.write_folder(tmp_path / name, SMALL, settings, write)
        file = tmp_path / name / "model.safetensors"
        tensors = load_file(file)
        damaged = tensors[f"{DOWN}.{part}"].copy()
        damaged[0, 5] = value
        save_file(tensors | {f"{DOWN}.{part}": damaged}, file)
        with pytest.raises(CheckpointError, match=f"{DOWN}.{part}' holds a (scale|value) that is n"):
            open_checkpoint(tmp_path / name).read(f"{DOWN}.weight")


def test_groups_that_are_no_whole_blocks(tmp_path):
    qw.write_folder(tmp_path / "m", SMALL, AWQ | {"group_size": 16}, qw.awq, group=16)
    with pytest.raises(ConfigError, match="groups of 16 inputs are not supported, multiples of 32 are"):
        open_checkpoint(tmp_path / "m")


def test_settings_in_a_file_beside_the_config(tmp_path):
    numbers = qw.write_folder(tmp_path / "m", SMALL, {}, qw.gptq)
    (tmp_path / "m" / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128, "desc_act": False}))
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "m").read(f"{DOWN}.weight"), numbers[f"{DOWN}.weight"])


def test_biases_of_zeros_are_dropped(tmp_path):
    qw.write_folder(tmp_path / "m", SMALL, GPTQ, qw.gptq)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file) | {f"{DOWN}.bias": np.zeros(128, np.float16)}
    save_file(tensors, file)
    assert f"{DOWN}.bias" not in open_checkpoint(tmp_path / "m").shapes()
    tensors[f"{DOWN}.bias"][3] = 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1 unexpected \(model.layers.0.mlp.down_proj.bias\)"):
        open_checkpoint(tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
