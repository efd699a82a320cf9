import math

import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.config import RopeConfig, config_from_data, config_to_data
from jaxspec.models.params import declare_leaves
from jaxspec.models.presets import list_presets, load_preset

# Parameter counts of published checkpoints: each family, scaling and way to share heads.
PUBLISHED = {
    "llama-2-7b": 6738415616,
    "llama-3-70b": 70553706496,
    "llama-3.1-405b": 405853388800,
    "llama-3.2-1b": 1235814400,
    "mistral-7b-v0.1": 7241732096,
    "qwen2-72b": 72706203648,
    "qwen2.5-0.5b": 494032768,
    "qwen3-0.6b": 596049920,
    "qwen3-32b": 32762123264,
    "smollm2-135m": 134515008,
    "tinyllama-1.1b": 1100048384,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    cfg = load_preset(name)
    assert sum(math.prod(info.shape) for info in declare_leaves(cfg, "float32").values()) == PUBLISHED[name]


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_is_of_its_family(name):
    cfg = load_preset(name)
    assert cfg.family == name.split("-")[0].split(".")[0].replace("smollm2", "llama").replace("tinyllama", "llama")
    assert cfg.qkv_bias == (cfg.family == "qwen2") and cfg.qk_norm == (cfg.family == "qwen3")
    assert (cfg.rope.scaling == "llama3") == name.startswith(("llama-3.1", "llama-3.2"))


def test_sliding_window_and_rope_are_read():
    assert load_preset("mistral-7b-v0.1").sliding_window == 4096
    assert load_preset("mistral-7b-v0.3").sliding_window is None
    assert load_preset("llama-3.2-1b").rope == RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)


def test_unknown_names_name_the_nearest():
    with pytest.raises(ConfigError, match="no geometry preset 'llama3-8b'; did you mean 'llama-3-8b'"):
        load_preset("llama3-8b")
    with pytest.raises(ConfigError, match="known: llama-2-13b, "):
        load_preset("../models/llama-3-8b.toml")


def test_unknown_and_wrong_values_are_refused():
    data = config_to_data(load_preset("qwen3-0.6b"))
    for change, message in [
        ({"num_layer": 3}, "here: unknown key 'num_layer'; did you mean 'num_layers'"),
        ({"rope": {"thета": 1.0}}, "here: rope: unknown key"),
        ({"rope": {"theta": "big"}}, "here: rope: theta must be float, got 'big'"),
        ({"sliding_layers": [1]}, "here: sliding_layers must be bool"),
        ({"sliding_window": 0}, "here: sliding_window must be at least 1"),
    ]:
        with pytest.raises(ConfigError) as caught:
            config_from_data(data | change, "here")
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="here: missing family, num_layers"):
        config_from_data({}, "here")
