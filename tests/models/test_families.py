"""A dense family is one file in jaxspec/models/families and one line in its `__init__`; this adds one and decodes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from native_models import write_tokenizer
from safetensors.numpy import save_file

import jaxspec
from jaxspec.checkpoint.hf import open_hf
from jaxspec.checkpoint.keymaps import recipes
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models import families
from jaxspec.models.config import ModelConfig

PACKAGE = Path(jaxspec.__file__).parent

# Embeddings times a factor that the config gives, norm scales stored less one, norms of each head, a width of its own.
TOY = '''
"""Toy: scaled embeddings, and norms as Gemma stores them."""

from jaxspec.models.families.base import ConfigValues, Family


class Toy(Family):
    """Every hook of a family file."""

    name = "toy"
    features = {"qk_norm": True}
    norm_offset = 1.0
    default_head_dim = 8

    def read_config(self, values: ConfigValues, num_layers: int):
        """As the base class, with a factor of the embeddings."""
        return super().read_config(values, num_layers) | {"embed_scale": values.number("embedding_multiplier")}


FAMILY = Toy()
'''

CONFIG = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
# What the toy computes, said in terms of a family that is there.
SAME_MODEL = ModelConfig("qwen3", 2, 32, 48, 4, 2, 8, 40, 64, qk_norm=True)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The file, and the line that registers it."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.setitem(families.FAMILIES, "toy", families.load_family("toy"))
    yield
    del sys.modules["jaxspec.models.families.toy"]


def tensors_of(cfg):
    rng = np.random.default_rng(0)
    sources = [source for recipe in recipes(cfg).values() for source in recipe.sources]
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in sources}


def write_folder(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder, CONFIG["vocab_size"])
    return folder


def effective(name, tensor):
    """The toy's factors: powers of two and sums of float32 numbers, so that not a bit differs."""
    if name.endswith("norm.weight"):
        return tensor + np.float32(1)
    return tensor * np.float32(4) if name == "model.embed_tokens.weight" else tensor


def test_a_new_family_decodes(tmp_path, toy):
    tensors = tensors_of(SAME_MODEL)
    toy_folder = write_folder(tmp_path / "toy", {"model_type": "toy", "embedding_multiplier": 4.0}, tensors)
    assert open_hf(toy_folder).config.embed_scale == 4.0
    same = {name: effective(name, tensor) for name, tensor in tensors.items()}
    plain_folder = write_folder(tmp_path / "plain", {"model_type": "qwen3", "head_dim": 8}, same)
    sampling = jaxspec.SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=True, ignore_eos=True)
    results = [
        jaxspec.LLM(folder, method="ar", draft="none").generate("w3 w1 w4 w1", sampling)
        for folder in (toy_folder, plain_folder)
    ]
    assert len(results[0].token_ids) == 12
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logprobs == results[1].logprobs


def test_its_own_key_is_required_and_others_are_refused(tmp_path, toy):
    tensors = tensors_of(SAME_MODEL)
    with pytest.raises(CheckpointError, match="lacks embedding_multiplier"):
        open_hf(write_folder(tmp_path / "lacks", {"model_type": "toy"}, tensors))
    config = {"model_type": "toy", "embedding_multiplier": 4.0}
    with pytest.raises(ConfigError, match="logit_soft_cap is 30.0; this setting is not known"):
        open_hf(write_folder(tmp_path / "more", config | {"logit_soft_cap": 30.0}, tensors))
    # Other families do not read the key.
    with pytest.raises(ConfigError, match="embedding_multiplier is 4.0; this setting is not known"):
        open_hf(write_folder(tmp_path / "other", config | {"model_type": "qwen3"}, tensors))


def test_families_are_named_in_their_own_files_only():
    """No branch on a family's name in the readers of checkpoints or in the model."""
    inside = PACKAGE / "models" / "families"
    files = [f for room in ("checkpoint", "models") for f in (PACKAGE / room).rglob("*.py") if inside not in f.parents]
    assert len(files) > 15
    for file in files:
        found = [name for name in families.FAMILIES if f'"{name}"' in file.read_text()]
        assert not found, f"{file} names {found}"
