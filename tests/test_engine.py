"""The engine on a tiny model: lengths, capacity, buffers, late reading."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import init_params

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.core.sequence import CHUNKS, MOST_SMALL, MOST_SMALL_NATIVE, plan_chunks, split_chunks
from jaxspec.models.config import ModelConfig
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

TINY = ModelConfig("llama", 2, 32, 64, 4, 2, 8, 101, max_context=4096)


@pytest.fixture(scope="module")
def placement():
    return Placement(TINY, plan_mesh(1), np.dtype("float32"))


@pytest.fixture(scope="module")
def params(placement):
    values = init_params(jax.random.key(0), TINY, scale=0.3)
    return jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), values, placement.params())


@pytest.fixture(scope="module")
def engine(placement):
    engine = Engine(Models(placement), Autoregressive())
    engine.prepare()
    return engine


def decode(engine, params, prompt, count, **sampling):
    options = SamplingParams(max_tokens=count, **sampling)
    engine.check_request(prompt, options)
    engine.prepare(len(prompt) + count)
    with engine.open(ModelParams(params), prompt, options, 0) as session:
        return rest_of(session)


def rest_of(session):
    """Tokens of a session that are still to come."""
    tokens = []
    while not session.done:
        tokens += session.step().tokens
    return tokens


def prompt_of(length):
    return [(7 * i) % TINY.vocab_size for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 300, 513, 700])
def test_prefill_in_chunks_equals_token_by_token(engine, params, length):
    prompt = prompt_of(length)
    # The same context reached by decoding: a one-token prompt whose bias forces every further token.
    runner = engine.runner
    state = runner.start(prompt[0], None)
    for token in prompt[1:]:
        state, _ = runner.executor.sequence.prefill(params, state, np.array([int(state.root)], np.int32))
        state = dataclasses.replace(state, root=jax.device_put(np.int32(token), state.root.sharding))
    chunked = runner.resume(ModelParams(params), runner.start(0, None), np.array(prompt, np.int32), 0)
    assert int(chunked.cache.length) == int(state.cache.length) == length - 1
    for one, other in zip(chunked.cache.key, state.cache.key, strict=True):
        np.testing.assert_allclose(one[:, : length - 1], other[:, : length - 1], rtol=1e-4, atol=1e-5)


def test_second_generation_compiles_nothing(engine, params, compilations):
    decode(engine, params, prompt_of(5), 4)
    compilations.clear()
    decode(engine, params, prompt_of(700), 9, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01)
    decode(engine, params, prompt_of(3), 30, repetition_penalty=1.2, logit_bias={3: 1.0}, logprobs=True)
    assert compilations == []


def test_capacity_grows_on_demand_and_never_shrinks(placement, params):
    engine = Engine(Models(placement), Autoregressive())
    short = decode(engine, params, prompt_of(5), 8)
    first = engine.runner.slots
    assert first < TINY.max_context
    decode(engine, params, prompt_of(first), 8)
    assert first < engine.runner.slots <= TINY.max_context + CHUNKS[0]
    grown = engine.runner
    assert decode(engine, params, prompt_of(5), 8) == short
    assert engine.runner is grown


def test_last_token_of_the_context_can_be_decoded(placement, params):
    engine = Engine(Models(placement), Autoregressive(), max_context=200)
    assert len(decode(engine, params, prompt_of(150), 50)) == 50
    # A length that is not given is what the context has room for.
    assert engine.token_limit(prompt_of(150), SamplingParams()) == 50
    with pytest.raises(ConfigError, match=r"150 tokens and max_tokens 51 exceed the context of 200.*at most 50"):
        decode(engine, params, prompt_of(150), 51)


def test_interleaved_and_abandoned_generations_do_not_disturb_each_other(engine, params):
    options = SamplingParams(max_tokens=12)
    alone = decode(engine, params, prompt_of(9), 12)
    with engine.open(ModelParams(params), prompt_of(9), options, 0) as one:
        steps = [(one.step().tokens, len(one._in_flight)) for _ in range(2)]
        assert [waiting for _, waiting in steps] == [0, 1]  # the first token comes alone
        tokens = [token for new, _ in steps for token in new]
        other = engine.open(ModelParams(params), prompt_of(40), options, 0)
        other.step()
        other.abort()
        assert decode(engine, params, prompt_of(9), 12) == alone
        tokens += rest_of(one)
        assert one.tokens == prompt_of(9) + tokens and one.num_emitted == 12
    assert tokens == alone
    with pytest.raises(RuntimeError, match="session has ended"):
        other.step()
    assert decode(engine, params, prompt_of(9), 12) == alone


def test_finished_buffers_are_reused(engine, params, monkeypatch):
    given, resume = [], type(engine.runner).resume

    def spy(runner, params, state, tokens, common):
        given.append(state.cache.key[0].unsafe_buffer_pointer())
        return resume(runner, params, state, tokens, common)

    monkeypatch.setattr(type(engine.runner), "resume", spy)
    for length in (5, 9, 7):
        decode(engine, params, prompt_of(length), 3)
    assert len(given) == 3 and len(set(given)) == 1


def test_one_broken_row_does_not_reach_others(engine, params):
    """Masked slots are multiplied with zero, and 0 * NaN is NaN: neither padding nor old buffers may hold any."""
    broken = {**params, "embed": params["embed"].at[0].set(np.nan)}
    prompt = [t for t in prompt_of(60) if t != 0]
    sound = decode(engine, params, prompt, 6, logit_bias={0: -np.inf})
    assert decode(engine, broken, prompt, 6, logit_bias={0: -np.inf}) == sound
    decode(engine, broken, [0, 5, 0, 7], 6)
    assert decode(engine, broken, prompt, 6, logit_bias={0: -np.inf}) == sound


def test_settings_of_the_caller_do_not_reach_our_programs(placement, params):
    def run():
        engine = Engine(Models(placement), Autoregressive())
        return decode(engine, params, prompt_of(70), 4, temperature=0.7, top_p=0.9)

    expected, promotion = run(), jax.numpy_dtype_promotion("strict")
    with jax.enable_x64(True), promotion, jax.numpy_rank_promotion("raise"), jax.disable_jit():
        assert run() == expected


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ([101], {}, "101 is not in the vocabulary of 101"),
        ([-1], {}, "-1 is not in the vocabulary"),
        (["a"], {}, "'a' is not in the vocabulary"),
        ([True], {}, "True is not in the vocabulary"),
        ([1] * 4096, {"max_tokens": 1}, "4096 tokens, the context holds 4096"),
        ([1] * 4000, {"max_tokens": 97}, "at most 96"),
        ([1], {"logit_bias": {101: 1.0}}, "token 101"),
        ([1], {"logit_bias": dict.fromkeys(range(101), -np.inf)}, "bans all 101 tokens"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, sampling, message):
    with pytest.raises(ConfigError, match=message):
        engine.check_request(prompt, SamplingParams(**sampling))


def test_capacity_beyond_the_context_is_refused(placement):
    engine = Engine(Models(placement), Autoregressive(), 64)
    with pytest.raises(ConfigError, match="65 tokens exceed the context of 64"):
        engine.prepare(65)


def test_max_context_beyond_the_model_is_refused(placement):
    with pytest.raises(ConfigError, match="5000 exceeds the model's context of 4096"):
        Engine(Models(placement), Autoregressive(), max_context=5000)


@pytest.mark.parametrize("most_small", [MOST_SMALL, MOST_SMALL_NATIVE])
@pytest.mark.parametrize("slots", [64, 192, 576, 2048])
def test_chunks_cover_every_length_within_the_cache(slots, most_small):
    for count in range(slots):
        sizes = plan_chunks(count, slots, most_small)
        assert sum(sizes) >= count and sum(sizes) - count < max(CHUNKS)
        assert sum(sizes) <= slots
        tokens = np.arange(count, dtype=np.int32)
        pieces = [chunk[:valid] for chunk, valid in split_chunks(tokens, slots, most_small)]
        np.testing.assert_array_equal(np.concatenate([*pieces, tokens[:0]]), tokens)
