"""The tensors of published checkpoints map to parameters completely, one for each family.

tests/data/published_families.json has their settings, the names and shapes of their tensors (those of one layer and of
one expert stand for all), and the number of parameters that their publishers state. A tensor of MXFP4 codes holds two
parameters a byte, its scales are none. published_quantised.json has quantised ones and the number of their tensors.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxspec.checkpoint.experts_together import split_experts
from jaxspec.checkpoint.hf import read_config
from jaxspec.checkpoint.keymaps import check_accounted, recipes, split_fused
from jaxspec.checkpoint.quantised import mxfp4
from jaxspec.checkpoint.quantised.dispatch import find_scheme
from jaxspec.errors import CheckpointError
from jaxspec.models.families import FAMILIES
from jaxspec.models.params import declare_leaves

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = json.loads((DATA / "published_families.json").read_text(encoding="utf-8"))
QUANTISED = json.loads((DATA / "published_quantised.json").read_text(encoding="utf-8"))


class Tensor(NamedTuple):
    """A tensor without numbers."""

    shape: tuple[int, ...]
    offset: int = 0
    nbytes: int = 0
    dtype: np.dtype = np.dtype("float32")


class Source:
    """The part of a checkpoint that `check_accounted` reads."""

    path = Path("published")
    eos_ids = ()

    def __init__(self, config, tensors):
        cut = lambda tensor, shape, offset, nbytes: Tensor(shape, offset, nbytes)  # noqa: E731
        cut_view = lambda tensor, offset, size, view: tensor._replace(shape=view.part_shape)  # noqa: E731
        self.config = config
        self.tensors = split_fused(split_experts(self.path, tensors, config, cut_view), config, cut)

    def names(self):
        return list(self.tensors)

    def describe(self, name):
        tensor = self.tensors.get(name)
        return tensor and (tensor.dtype.name, tensor.shape)

    def shapes(self):
        quantised = mxfp4.find_weights(self, None)  # pyright: ignore[reportArgumentType]
        of_codes = {name for weight in quantised.values() for name in weight.tensors}
        plain = {name: tensor.shape for name, tensor in self.tensors.items() if name not in of_codes}
        return plain | {name: weight.shape for name, weight in quantised.items()}


def listed(model):
    """Every tensor of a published checkpoint as its list describes it."""
    named = dict(model["top"])
    for index in range(model["config"]["num_hidden_layers"]):
        named |= {f"model.layers.{index}.{part}": shape for part, shape in model["layer"].items()}
        for expert in range(model.get("experts", 0)):
            named |= {f"model.layers.{index}.{part.format(expert)}": s for part, s in model["expert"].items()}
    return named


def tensors_of(model):
    coded = {True: np.dtype("uint8"), False: np.dtype("float32")}
    return {n: Tensor(tuple(s), dtype=coded[n.endswith(("_blocks", "_scales"))]) for n, s in listed(model).items()}


def parameters_of(tensors):
    each = {"_blocks": 2, "_scales": 0}
    return sum(math.prod(tensor.shape) * each.get(name[-7:], 1) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_has_a_place(name):
    model, tensors = PUBLISHED[name], tensors_of(PUBLISHED[name])
    assert parameters_of(tensors) == model["parameters"]
    config = read_config(Path("config.json"), model["config"], max_layers=len(tensors))
    check_accounted(Source(config, tensors))
    assert sum(math.prod(info.shape) for info in declare_leaves(config, "float32").values()) == model["parameters"]
    lost = next(name for name in tensors if ".3." in name)
    with pytest.raises(CheckpointError, match=r"missing|lacks the tensor"):
        check_accounted(Source(config, {name: tensor for name, tensor in tensors.items() if name != lost}))


def test_what_the_settings_mean():
    configs = {name.partition("/")[2]: read_config(Path("c"), m["config"], 1000) for name, m in PUBLISHED.items()}
    assert configs["Mixtral-8x7B-Instruct-v0.1"].experts.renormalise
    shared = configs["Qwen1.5-MoE-A2.7B"]
    assert shared.qkv_bias and not shared.experts.renormalise and shared.experts.shared_dim == 5632
    assert configs["Qwen3-30B-A3B"].experts.per_token == 8
    two, three = configs["gemma-2-2b-it"], configs["gemma-3-1b-it"]
    assert two.tied and three.tied and two.embed_scale == 48 and (two.attention_softcap, two.logit_softcap) == (50, 30)
    assert [index for index in range(26) if two.window(index) is None] == list(range(1, 26, 2))
    assert [index for index in range(26) if three.window(index) is None] == [5, 11, 17, 23]
    assert (three.layer_rope(0).theta, three.layer_rope(5).theta) == (1e4, 1e6)
    assert configs["Phi-3-mini-4k-instruct"].sliding_window == 2047
    assert configs["OLMo-2-1124-7B"].wide_qk_norm
    oss = configs["gpt-oss-20b"]
    assert [index for index in range(24) if oss.window(index) == 128] == list(range(0, 24, 2))
    assert (oss.experts.scores, oss.experts.limit, oss.experts.alpha) == ("chosen", 7, 1.702)
    assert oss.qkv_bias and oss.out_bias and oss.attention_sinks and not oss.rope.truncate
    assert (oss.rope.factor, oss.rope.original_context, oss.max_context) == (32, 4096, 131072)
    assert abs(oss.rope.attention_factor - 1.3465735902799727) < 1e-12


# Families of which no published list of tensors is at hand; transformers' own folders are in tests/parity.
UNLISTED = {"olmo3", "seed_oss", "smollm3", "exaone4", "glm4", "granite", "granitemoehybrid", "ministral3"}
UNLISTED |= {"gemma4_text", "lfm2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}


def test_every_family_beyond_the_first_four_is_listed():
    listed = {model["config"]["model_type"] for model in PUBLISHED.values()}
    assert listed == set(FAMILIES) - {"llama", "mistral", "qwen2", "qwen3"} - UNLISTED


class Headers:
    """The types and shapes of a quantised checkpoint's tensors."""

    path = Path("published")

    def __init__(self, tensors):
        self.names, self.describe, self.read_raw = lambda: list(tensors), tensors.get, lambda name: None


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_tensors_have_a_place(name):
    """Every tensor of the headers becomes part of a parameter of its declared shape, quantised ones in their blocks."""
    model = QUANTISED[name]
    config, tensors = model["config"], {n: (dtype, tuple(shape)) for n, (dtype, shape) in listed(model).items()}
    assert len(tensors) == model["count"]
    scheme = find_scheme(Path("published"), config, Path("config.json"))
    assert scheme is not None
    weights, unused = scheme.find_weights(Headers(tensors))
    taken = {part for weight in weights.values() for part in weight.tensors}
    assert not unused and {weight.format for weight in weights.values()} == {model["format"]}
    found = {part: shape for part, (_, shape) in tensors.items() if part not in taken}
    found |= {part: weight.shape for part, weight in weights.items()}
    cfg = read_config(Path("config.json"), config, max_layers=len(tensors))
    assert found == {source: shape for recipe in recipes(cfg).values() for source, shape in recipe.sources}
