import jax
import ml_dtypes
import numpy as np
import pytest
from make import random_tensors, tiny_config, write_gguf, write_hf

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.checkpoint.load import detect_format, load_foreign, open_checkpoint
from jaxspec.errors import CheckpointError
from jaxspec.models.heads import arrange_heads
from jaxspec.models.params import declare_params, leaf_name
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.sharding import placed_shapes, split_layout


def named_leaves(params):
    return {leaf_name(path): leaf for path, leaf in jax.tree.flatten_with_path(params)[0]}


@pytest.mark.parametrize(("family", "degree"), [("llama", 1), ("qwen2", 3), ("llama", 8)])
def test_leaves_are_placed_padded_and_equal(tmp_path, family, degree):
    cfg = tiny_config(family, vocab_size=70)
    source = open_checkpoint(write_hf(tmp_path, cfg))
    plan = plan_mesh(degree)
    params = load_foreign(source, plan, np.float32)
    targets = named_leaves(placed_shapes(declare_params(cfg, np.float32), plan))
    made = recipes(cfg)
    for name, leaf in named_leaves(params).items():
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (
            targets[name].shape, targets[name].dtype, targets[name].sharding,
        )  # fmt: skip
        expected, info = made[name].read(source), made[name].info
        if (layout := split_layout(info, degree)) is not None:
            axis = info.axes.index("kv_heads")
            expected = arrange_heads(expected, layout, axis, info.axes[axis + 1])
        expected = np.pad(expected, [(0, n - have) for n, have in zip(leaf.shape, expected.shape, strict=True)])
        np.testing.assert_array_equal(np.asarray(leaf), expected, err_msg=name)


def test_cast_rounds_to_nearest_and_keeps_norms(tmp_path):
    cfg = tiny_config("qwen3", tied=True)
    tensors = random_tensors(cfg)
    tensors["model.embed_tokens.weight"][0, :2] = [1 + 2**-8 + 2**-20, 3.4e38]
    params = load_foreign(open_checkpoint(write_hf(tmp_path, cfg, tensors)), plan_mesh(1), ml_dtypes.bfloat16)
    embed = np.asarray(params["embed"])
    assert embed.dtype == ml_dtypes.bfloat16
    assert embed[0, 0] == 1 + 2**-7 and embed[0, 1] == np.inf
    assert params["final_norm"].dtype == params["layers"][0]["q_norm"].dtype == np.float32


def test_formats_are_told_by_content(tmp_path):
    assert detect_format(write_hf(tmp_path / "folder", tiny_config())) == "hf"
    assert detect_format(write_gguf(tmp_path / "no_suffix", tiny_config())) == "gguf"
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "jaxspec.json").write_text("{}")
    (tmp_path / "native" / "config.json").write_text("{}")
    assert detect_format(str(tmp_path / "native")) == "native"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no such file or folder"),
        ("empty", {}, "the folder is empty"),
        ("other", {"notes.txt": "x"}, "neither config.json .* it holds notes.txt"),
        ("ggufs", {"model.gguf": "GGUF"}, "give the GGUF file in it, such as .*model.gguf"),
        ("adapter", {"adapter_config.json": "{}"}, "holds an adapter"),
        ("native", {"jaxspec.json": "{}"}, "is a native checkpoint already"),
        ("notes.txt", "hello", "^[^:]*notes.txt: is no checkpoint .* begins with b'hell'"),
        ("nothing.gguf", "", "begins with b''"),
        ("model.safetensors", "hello", "give the folder around it"),
        ("pytorch_model.bin", "hello", "pickle, which can run code"),
    ],
)
def test_what_is_no_checkpoint(tmp_path, name, content, message):
    """A folder has the files of `content`, a file its text."""
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.mkdir()
        for file, text in content.items():
            (path / file).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
