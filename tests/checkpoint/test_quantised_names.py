"""Names, types and shapes of published checkpoints: every tensor has its place. Only headers exist here.

tests/data/published_quantised.json lists the headers of real ones with the number of their tensors. The other cases
lay the formats' tensors out for the geometries of models, as their definitions say.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from make import hf_config
from test_published_names import listed
from test_quantised import GPTQ, grouped

from jaxspec.checkpoint.hf import read_config
from jaxspec.checkpoint.keymaps import recipes
from jaxspec.checkpoint.quantised.dispatch import find_scheme
from jaxspec.models.presets import load_preset
from pallas_kernels.linear.blocks import FORMATS

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_quantised.json").read_text(encoding="utf-8"))


class Headers:
    """The tensors of a checkpoint without their values, but for those that describe others."""

    path = Path("published")

    def __init__(self, tensors, values):
        self._tensors, self._values = tensors, values

    def names(self):
        return list(self._tensors)

    def describe(self, name):
        return self._tensors.get(name)

    def read_raw(self, name):
        return self._values(name, *self._tensors[name])


def gptq(out, width):
    return {
        "qweight": ("int32", (width // 8, out)), "qzeros": ("int32", (width // 128, out // 8)),
        "scales": ("float16", (width // 128, out)), "g_idx": ("int32", (width,)),
    }  # fmt: skip


def packed(out, width):
    return {
        "weight_packed": ("int32", (out, width // 8)), "weight_scale": ("bfloat16", (out, width // 128)),
        "weight_shape": ("int64", (2,)),
    }  # fmt: skip


KINDS = {
    "gptq": (GPTQ | {"damp_percent": 0.01, "static_groups": False, "true_sequential": True}, gptq, "int4_g128"),
    "compressed-tensors": (grouped(4, 128, symmetric=True, observer="minmax"), packed, "int4_g128"),
}


@pytest.mark.parametrize("geometry", ["llama-3-8b", "qwen2.5-7b"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_of_published_checkpoints(kind, geometry):
    settings, describe, kept = KINDS[kind]
    cfg = load_preset(geometry)
    shapes = dict(source for recipe in recipes(cfg).values() for source in recipe.sources)
    tensors, sizes = {}, {}
    for name, shape in shapes.items():
        if len(shape) != 2 or "embed" in name or "lm_head" in name:
            tensors[name] = ("float16", shape)
            continue
        module = name.removesuffix(".weight")
        sizes[module] = shape
        tensors |= {f"{module}.{part}": entry for part, entry in describe(*shape).items()}

    def values(name, dtype, shape):

        module = name.rpartition(".")[0]
        return np.arange(shape[0]) // 128 if name.endswith("g_idx") else np.array(sizes[module])

    scheme = find_scheme(Path("published"), hf_config(cfg) | {"quantization_config": settings}, Path("config.json"))
    assert scheme is not None
    weights, unused = scheme.find_weights(Headers(tensors, values))
    assert not unused
    assert {name: weight.shape for name, weight in weights.items()} == {f"{m}.weight": s for m, s in sizes.items()}
    assert {weight.format for weight in weights.values()} == {kept} and kept in FORMATS
    taken = [name for weight in weights.values() for name in weight.tensors]
    assert sorted(taken) == sorted(name for name in tensors if name.rpartition(".")[0] in sizes and "bias" not in name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_listings_of_published_checkpoints(name):
    """Every tensor of the headers becomes part of a parameter of its declared shape, quantised ones in their blocks."""
    model = PUBLISHED[name]
    config, tensors = model["config"], {n: (dtype, tuple(shape)) for n, (dtype, shape) in listed(model).items()}
    assert len(tensors) == model["count"]
    scheme = find_scheme(Path("published"), config, Path("config.json"))
    assert scheme is not None
    weights, unused = scheme.find_weights(Headers(tensors, lambda *_: None))
    taken = {part for weight in weights.values() for part in weight.tensors}
    assert not unused and {weight.format for weight in weights.values()} == {model["format"]}
    found = {part: shape for part, (_, shape) in tensors.items() if part not in taken}
    found |= {part: weight.shape for part, weight in weights.items()}
    cfg = read_config(Path("config.json"), config, max_layers=len(tensors))
    assert found == {source: shape for recipe in recipes(cfg).values() for source, shape in recipe.sources}
