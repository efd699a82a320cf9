"""Models whose layers are of two kinds (Gemma 4): what they cannot do is refused before anything is computed."""

import dataclasses

import numpy as np
import pytest
from tiny_models import MORE_FAMILIES, place

from jaxspec.errors import ConfigError
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.round import Models
from jaxspec.methods.swift.settings import Swift
from jaxspec.models.config import config_from_data, config_to_data
from jaxspec.models.layer_kinds import LayerKinds
from jaxspec.runtime.mesh import plan_mesh

CFG = MORE_FAMILIES["gemma4"]


def test_refusals():
    target = place(CFG)
    with pytest.raises(ConfigError, match="the target has layers of two kinds, which method 'swift', which leaves out"):
        Swift().check(Models(target))
    streamed = dataclasses.replace(target, resident_layers=1)
    with pytest.raises(ConfigError, match="the target has layers of two kinds, which offload does not support yet"):
        Chain(2).check(Models(streamed, place(CFG)))
    wide = dataclasses.replace(target, plan=plan_mesh(2))  # of three KV heads
    with pytest.raises(ConfigError, match="which a split over 2 devices does not support yet"):
        Chain(2).check(Models(wide, place(CFG)))


def test_geometry():
    assert config_from_data(config_to_data(CFG), "here") == CFG
    assert CFG.attention_layers == (0, 1) and [CFG.keys_of(index) for index in range(4)] == [0, 1, 0, 1]
    assert [CFG.layer_heads(index) for index in range(2)] == [(3, 8), (3, 12)]
    assert [CFG.layer_mlp_dim(index) for index in (0, 3)] == [70, 140]
    with pytest.raises(ConfigError, match="share keys of earlier ones, which there are not of each kind"):
        dataclasses.replace(CFG, kinds=LayerKinds(12, 3, sharing=3, sharing_mlp_dim=140))
    with pytest.raises(ConfigError, match="full_head_dim 7 is odd"):
        LayerKinds(7, 1)
    with pytest.raises(ConfigError, match="num_heads 9 is not a multiple of full_kv_heads 2"):
        dataclasses.replace(CFG, kinds=LayerKinds(12, 2))
    assert np.unique([leaf.shape for leaf in place(CFG).cache(64).key], axis=0).tolist() == [[3, 64, 8], [3, 64, 12]]
