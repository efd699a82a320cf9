"""Layer sets: counting, text, and forward passes that leave units out."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part
from tiny_models import FAMILIES, empty_cache, on_one_device, tiny_params

from jaxspec.errors import ConfigError
from jaxspec.models.layer_set import (
    LayerSet,
    all_layers,
    count_skipped,
    from_skipped,
    num_units,
    parse_layers,
    uniform_layers,
)
from jaxspec.models.transformer import forward

TOKENS = np.array([3, 0, 7, 7, 42, 100], np.int32)


@pytest.mark.parametrize(
    ("layers", "ratio", "skipped", "units"), [(40, 0.45, 34, 76), (80, 0.5, 78, 156), (2, 0.5, 0, 0)]
)
def test_unit_counts(layers, ratio, skipped, units):
    assert (count_skipped(layers, ratio), num_units(layers)) == (skipped, units)
    assert count_skipped(layers, 0.0) == 0


@pytest.mark.parametrize("layers", [1, 2, 3, 40])
def test_text_is_read_back(layers):
    rng = np.random.default_rng(layers)
    sets = [all_layers(layers), uniform_layers(layers)]
    sets += [from_skipped(layers, rng.random(num_units(layers)) < 0.5) for _ in range(20)]
    for layer_set in sets:
        assert parse_layers(str(layer_set), layers) == layer_set
        assert from_skipped(layers, layer_set.skipped) == layer_set
        assert layer_set.num_skipped == layer_set.skipped.sum()
        assert layer_set.runs[[0, -1]].all()


def test_text():
    assert str(all_layers(5)) == "none"
    assert str(uniform_layers(8)) == "attention=1,3,5;mlp=1,3,5"
    assert str(uniform_layers(7)) == "attention=1,3,5;mlp=1,3,5"
    assert str(parse_layers(" mlp=3 ; attention=1-3,5", 8)) == "attention=1-3,5;mlp=3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn=1", "a part is attention=LAYERS"),
        ("mlp=", "is neither a layer nor a range"),
        ("mlp=3-1", "is neither a layer nor a range"),
        ("mlp=0", "layer 0 cannot be skipped in a model of 6 layers, only 1 to 4 can"),
        ("attention=1-99999999", "of any model"),
    ],
)
def test_malformed_text(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_layers(text, 6)


@functools.cache
def deep(family, layers=5):
    """A deeper model of a family: the two layers of the tiny one in turn; both ends are its first."""

    cfg, params = FAMILIES[family], tiny_params(family)
    cfg = dataclasses.replace(
        cfg,
        num_layers=layers,
        sliding_layers=tuple(cfg.sliding_layers[i % 2] for i in range(layers) if cfg.sliding_layers),
    )
    return cfg, params | {"layers": [params["layers"][i % 2] for i in range(layers)]}


def hidden_states(params, cfg, units):
    @on_one_device
    def run(params, token):
        rows = token.shape[0]
        mask = jnp.tril(jnp.ones((rows, rows), bool))
        cache = empty_cache(cfg, 16)
        given = units if isinstance(units, LayerSet) or units is None else jnp.asarray(units)
        return forward(params, cfg, token, jnp.arange(rows, dtype=jnp.int32), cache, mask, units=given)

    return run(params, TOKENS)


FAST = fast_part(FAMILIES, lambda family: family in ("llama", "qwen2"))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAST)
def test_skipping_is_computing_without(family):
    """Left out of the program, by branches and by rows: each equals a model whose skipped blocks add nothing."""
    cfg, params = deep(family)
    layer_set = parse_layers("attention=1,3;mlp=2,3", cfg.num_layers)

    def silence(index, layer):
        quiet = {"out": layer_set.attention[index], "down": layer_set.mlp[index]}
        return {name: leaf * 0 if not quiet.get(name, True) else leaf for name, leaf in layer.items()}

    silent = params | {"layers": [silence(*pair) for pair in enumerate(params["layers"])]}
    expected, _ = hidden_states(silent, cfg, None)
    full, _ = hidden_states(params, cfg, None)
    assert np.abs(np.asarray(full) - np.asarray(expected)).max() > 0.1
    got, cache = hidden_states(params, cfg, layer_set)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    # Attention that does not run writes no keys.
    assert [bool(np.asarray(key).any()) for key in cache.key] == [True, False, True, False, True]
    branched, branched_cache = hidden_states(params, cfg, layer_set.runs)
    np.testing.assert_allclose(branched, expected, atol=1e-5)
    assert [bool(np.asarray(key).any()) for key in branched_cache.key] == [True, False, True, False, True]
    by_row = np.repeat(layer_set.runs[:, :, None], len(TOKENS), axis=2)
    np.testing.assert_allclose(hidden_states(params, cfg, by_row)[0], expected, atol=1e-5)
    # A row of its own set after rows of another: causal rows before it are not touched.
    mixed = by_row.copy()
    mixed[:, :, -1] = True
    np.testing.assert_allclose(hidden_states(params, cfg, mixed)[0][:-1], expected[:-1], atol=1e-5)


def test_skipping_nothing_changes_nothing():
    cfg, params = deep("llama")
    full, _ = hidden_states(params, cfg, None)
    for units in (all_layers(5), all_layers(5).runs):
        np.testing.assert_array_equal(hidden_states(params, cfg, units)[0], full)
