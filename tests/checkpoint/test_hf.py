import json

import ml_dtypes
import numpy as np
import pytest
from make import random_tensors, tiny_config, write_hf

from jaxspec.checkpoint.hf import open_hf
from jaxspec.models.config import RopeConfig

LLAMA3 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 64)

CASES = {
    "llama": tiny_config("llama"),
    "llama-tied": tiny_config("llama", tied=True),
    "llama3": tiny_config("llama", rope=LLAMA3),
    "mistral": tiny_config("mistral"),
    "qwen2": tiny_config("qwen2"),
    "qwen2-window": tiny_config("qwen2", sliding_window=8),
    "qwen2-window-later-layers": tiny_config("qwen2", sliding_window=8, sliding_layers=(False, True)),
    "qwen3": tiny_config("qwen3", head_dim=32),
}


@pytest.mark.parametrize("name", CASES)
def test_round_trip(tmp_path, name):
    cfg, tensors = CASES[name], random_tensors(CASES[name])
    source = open_hf(write_hf(tmp_path, cfg, tensors, shards=3 if name.startswith("qwen") else 1))
    assert source.config == cfg
    assert source.eos_ids == (2,)
    assert source.shapes() == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.read(name), tensor)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types(tmp_path, dtype):
    cfg, tensors = tiny_config(), random_tensors(tiny_config())
    source = open_hf(write_hf(tmp_path, cfg, tensors, dtype=dtype))
    for name, tensor in tensors.items():
        assert source.read(name).dtype == dtype
        np.testing.assert_array_equal(source.read(name), tensor.astype(dtype))


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5.0}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e6}}, RopeConfig(1e6, "linear", 2.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e4}, RopeConfig(1e4, "linear", 2.0)),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
                },
            },
            LLAMA3,
        ),
    ],
)  # fmt: skip
def test_rope_spellings(tmp_path, changes, rope):
    source = open_hf(write_hf(tmp_path, tiny_config(), changes={"rope_theta": None} | changes))
    assert source.config.rope == rope


def test_absent_keys_take_the_family_default(tmp_path):
    folder = write_hf(tmp_path, tiny_config("mistral", norm_eps=1e-6))
    config = json.loads((folder / "config.json").read_text())
    for key in ("tie_word_embeddings", "head_dim", "sliding_window", "rope_theta", "rms_norm_eps", "hidden_act"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_hf(folder).config == tiny_config("mistral", norm_eps=1e-6, sliding_window=4096)


def test_layer_types_win_over_max_window_layers(tmp_path):
    cfg = tiny_config("qwen3", sliding_window=8)
    changes = {"layer_types": ["sliding_attention", "full_attention"], "max_window_layers": 2}
    assert open_hf(write_hf(tmp_path, cfg, changes=changes)).config.sliding_layers == (True, False)


def test_neutral_unknown_keys_are_allowed(tmp_path):
    changes = {"logit_soft_cap": None, "residual_multiplier": 1.0, "num_experts": 0, "rope_interleaved": False}
    assert open_hf(write_hf(tmp_path, tiny_config(), changes=changes)).config == tiny_config()


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([3, 2, 3], None, (3, 2)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids(tmp_path, config_eos, generation, expected):
    folder = write_hf(tmp_path, tiny_config(), changes={"eos_token_id": config_eos}, generation=generation)
    assert open_hf(folder).eos_ids == expected


def test_tied_config_beside_a_head(tmp_path):
    """An equal head is the embedding; another one counts, as in transformers 5."""
    cfg = tiny_config(tied=True)
    tensors = random_tensors(cfg)
    equal = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    assert open_hf(write_hf(tmp_path / "equal", cfg, equal)).config.tied
    other = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}
    assert not open_hf(write_hf(tmp_path / "other", cfg, other)).config.tied
