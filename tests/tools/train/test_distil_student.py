"""The training pass over packed texts equals the pass that decodes each of them alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part
from tiny_models import FAMILIES, empty_cache, on_one_device, relative_error, tiny_params
from train.student import init_student, student_config, student_hidden

from jaxspec.models.transformer import forward, prefill

T = 24
EXACT = 2e-5  # float32, other orders of summation
# Texts of each row; longer than the sliding window of 7, and shorter.
PACKED = [(9, 11), (T,), (5, 8, 7, 1)]
# Upside down, so that a layer's kind (sliding or not) must go with it.
LAYERS = (1, 0)


@functools.cache
def student(family):
    """Geometry, own parameters, the target's embedding."""
    cfg = student_config(FAMILIES[family], LAYERS, range(0, 101, 3))
    params = tiny_params(family)
    return cfg, init_student(params, LAYERS), params["embed"]


@functools.cache
def decoder(family):
    """Runs one text [T], of which `count` tokens count, as decoding does: in one pass, and its last token alone."""
    cfg, params, embed = student(family)

    def run(params, token, position, count):
        causal = jnp.tril(jnp.ones((T, T), bool))
        at_once, _ = forward(params, cfg, token, position, empty_cache(cfg, T), causal)
        cache = prefill(params, cfg, token, count - 1, empty_cache(cfg, 2 * T))
        last, _ = forward(params, cfg, token[count - 1][None], cache.length[None], cache, jnp.ones((1, 1), bool))
        return at_once, last[0]

    return functools.partial(on_one_device(run), params | {"embed": embed})


def pack(seed=0):
    """Token, position and segment [R, T] of `PACKED`, padded."""
    token = np.random.default_rng(seed).integers(0, 101, (len(PACKED), T)).astype(np.int32)
    position, segment = np.zeros_like(token), np.full_like(token, -1)
    for r, lengths in enumerate(PACKED):
        at = 0
        for number, length in enumerate(lengths):
            position[r, at : at + length], segment[r, at : at + length] = np.arange(length), number
            at += length
    return token, position, segment


def texts(segment):
    """Row and slice of each text."""
    for r, lengths in enumerate(PACKED):
        for number in range(len(lengths)):
            places = np.flatnonzero(segment[r] == number)
            yield r, slice(places[0], places[-1] + 1)


@functools.cache
def training_pass(family):
    cfg, params, embed = student(family)
    return jax.jit(functools.partial(student_hidden, params, cfg, embed))


@pytest.mark.parametrize("family", fast_part(FAMILIES, lambda family: family == "qwen2"))
def test_each_packed_text_is_as_if_decoded_alone(family):
    token, position, segment = pack()
    hidden = np.asarray(training_pass(family)(token, position, segment))
    assert hidden.shape == (len(PACKED), T, FAMILIES[family].embed_dim) and np.isfinite(hidden).all()
    for r, place in texts(segment):
        count = place.stop - place.start
        alone = np.zeros(T, np.int32)
        alone[:count] = token[r, place]
        at_once, last = decoder(family)(alone, np.arange(T, dtype=np.int32), np.int32(count))
        assert relative_error(hidden[r, place], at_once[:count]) < EXACT
        assert relative_error(hidden[r, place.stop - 1], last) < EXACT


def test_texts_of_a_row_do_not_see_each_other():
    """Nor the padding: bit for bit, so not even a tiny attention weight leaks."""
    token, position, segment = pack()
    before = np.asarray(training_pass("llama")(token, position, segment))
    other = np.where((segment == 1) | (segment == -1), (token + 7) % 101, token)
    after = np.asarray(training_pass("llama")(other, position, segment))
    for r, place in texts(segment):
        assert np.array_equal(before[r, place], after[r, place]) == (segment[r, place.start] != 1)


def test_a_student_has_layers_of_its_target():
    target = FAMILIES["qwen2"]
    cfg = student_config(target, LAYERS, [3, 5])
    assert cfg == dataclasses.replace(target, sliding_layers=(True, False), shares_embedding=True, head_ids=(3, 5))
    assert student_config(FAMILIES["mistral"], [1], ()).sliding_layers == ()
    params = tiny_params("qwen2")
    own = init_student(params, LAYERS)
    assert set(own) == {"final_norm", "layers"}
    for mine, layer in zip(own["layers"], LAYERS, strict=True):
        for name, leaf in mine.items():
            assert leaf.dtype == jnp.float32 and np.array_equal(leaf, params["layers"][layer][name])
