"""SWIFT: the tokens of plain decoding whatever is skipped, while the set is searched and after."""

import dataclasses
import functools
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from marks import quick_part
from swift_cases import (
    CONTEXT,
    CUTS,
    EACH,
    EAGER,
    LAYERS,
    LONG_PROMPT,
    PENALTIES,
    PROMPT,
    VOCAB,
    SmallSwift,
    StepClock,
    config_of,
    engine_of,
    models_of,
    params_of,
    plain_tokens,
    restart_search,
    rounds_of,
    run,
    runner_of,
    tokens_of,
)
from tiny_models import FAMILIES, empty_cache, on_one_device, place, tiny_params

from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.base import Store
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.swift.settings import Swift
from jaxspec.models.kv_cache import commit_rows
from jaxspec.models.layer_set import all_layers, parse_layers, uniform_layers
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.program import compile_programs


@pytest.mark.thorough
@pytest.mark.parametrize("family", quick_part(["llama", "mistral"], lambda family: family == "llama"))
def test_tokens_are_those_of_plain_decoding_while_the_set_changes(family):
    engine, adopted, steps = engine_of(EAGER, family), 0, 0
    cases = [(0.2, PROMPT, {}), (0.45, LONG_PROMPT, CUTS), (0.6, PROMPT, PENALTIES), (0.45, PROMPT, {})]
    for seed, (ratio, prompt, sampling) in enumerate(cases):
        search = restart_search(engine, ratio)
        rounds = run(engine, params_of(family), prompt, 80, seed, **sampling)
        assert tokens_of(rounds) == plain_tokens(family, prompt, 80, seed, **sampling), (ratio, sampling)
        for output in rounds:
            assert 0 <= output.accepted <= output.depth <= output.draft_passes <= EAGER.length
            assert output.drafted < EAGER.num_rows
        steps += search.steps
        adopted += len(search.history)
    assert adopted >= 1 and steps > 20


@pytest.mark.thorough
def test_tokens_with_default_settings():
    """Rounds with and without drafts, several tokens in some of the latter, and every length of text."""
    engine, kinds = engine_of(SmallSwift(length=5, ratio=0.2), "mistral"), set()
    for seed, (count, sampling) in enumerate(((100, {}), (61, CUTS), (6, {}), (1, {}))):
        rounds = run(engine, params_of("mistral"), PROMPT, count, seed, **sampling)
        assert tokens_of(rounds) == plain_tokens("mistral", PROMPT, count, seed, **sampling)
        kinds |= {output.draft_passes > 0 for output in rounds}
    assert kinds == {False, True}


def test_a_share_of_one_steps_in_every_round():
    engine = engine_of(EAGER)
    search = restart_search(engine)
    rounds = run(engine, params_of("llama"), PROMPT, 100)
    assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 100)
    # A window has seven tokens of the answer, which are read a round late, and the last round is not scored after.
    first = next(index for index in range(len(rounds)) if sum(len(each.tokens) for each in rounds[:index]) > 6)
    assert len(rounds) - first - 2 <= search.steps <= len(rounds)
    scores = [score for _, score in search.history]
    assert scores == sorted(set(scores)) and scores[-1] == search.matchness
    assert runner_of(engine).timer.passes >= search.steps


@pytest.mark.slow
def test_tokens_on_a_mesh_with_a_program_for_each_set():
    """Sets are used once their programs are there."""
    engine = engine_of(EACH, "qwen2", 4)
    runner, used = runner_of(engine), set()
    samplings: list[dict] = [{}, {"temperature": 0.7, "top_p": 0.9}]
    for seed, sampling in enumerate(samplings):
        rounds = run(engine, params_of("qwen2", 4), PROMPT, 60, seed, **sampling)
        assert tokens_of(rounds) == plain_tokens("qwen2", PROMPT, 60, seed, **sampling)
        used.add(runner.drafter.layers)
        # As if the search had found it.
        wanted = parse_layers(f"mlp={seed + 1}", LAYERS)
        runner.search.layers = wanted
        while runner.drafter.layers != wanted:
            runner.drafter.adopt(wanted)
        used.add(wanted)
        rounds = run(engine, params_of("qwen2", 4), PROMPT, 20, seed, **sampling)
        assert tokens_of(rounds) == plain_tokens("qwen2", PROMPT, 20, seed, **sampling)
    assert len(used) > len(samplings) and runner.search.steps > 10


@pytest.mark.thorough
def test_rounds_do_not_wait_for_a_new_program(monkeypatch, caplog):
    """They go on with the old set while another one's program is compiled, and where that fails."""
    drafter = runner_of(engine_of(EACH, "mistral")).drafter
    old, compile_, may_finish = drafter.layers, drafter._compile, threading.Event()
    wanted = [parse_layers(text, LAYERS) for text in ("mlp=1-2", "mlp=3-4")]

    def fail(layers):
        may_finish.wait(60)
        raise MemoryError("no room for it")

    monkeypatch.setattr(drafter, "_compile", fail)
    assert not drafter.adopt(wanted[0]) and not drafter.adopt(wanted[0]) and drafter.layers == old
    may_finish.set()
    while "could not be compiled: no room for it" not in caplog.text:
        drafter.adopt(wanted[0])
    assert not drafter.adopt(wanted[0]) and drafter.layers == old
    monkeypatch.setattr(drafter, "_compile", compile_)
    while not drafter.adopt(wanted[1]):
        pass
    assert drafter.layers == wanted[1]


@pytest.mark.thorough
def test_without_skipping_everything_is_accepted():
    """r = 0: the draft is the target, at any temperature."""
    engine = engine_of(dataclasses.replace(EAGER, threshold=0.0, ratio=0.0))
    assert runner_of(engine).drafter.layers == all_layers(LAYERS)
    for seed, sampling in enumerate([{}, CUTS, PENALTIES]):
        rounds = run(engine, params_of("llama"), PROMPT, 48, seed, **sampling)
        assert [(output.accepted, output.draft_passes) for output in rounds] == [(5, 5)] * 8
        assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 48, seed, **sampling)


@pytest.mark.thorough
def test_a_full_batch_leaves_out_the_least_probable():
    engine = engine_of(dataclasses.replace(EAGER, num_draft_tokens=7, threshold=0.0))
    rounds = run(engine, params_of("llama"), PROMPT, 60)
    assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 60)
    assert max(output.drafted for output in rounds) == 7


@pytest.mark.thorough
def test_a_fixed_set_is_used_and_nothing_is_searched():
    engine = engine_of(Swift(length=5, threshold=0.1, adaptive=False, layers="attention=1,3;mlp=2"))
    rounds = run(engine, params_of("llama"), PROMPT, 40)
    assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 40)
    runner = runner_of(engine)
    assert "matchness" not in {program.name for program in runner.programs}
    report = runner.report()
    assert report.layers == "attention=1,3;mlp=2" and report.search_passes == 0 and report.steps is None


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "method"), [("llama", EAGER), ("mistral", EACH)])
def test_matchness_is_what_the_skipped_model_says(family, method):
    """Scores equal those of decoding token by token with the set; the state is returned as it was."""
    engine, params = engine_of(method, family), params_of(family)
    runner, window = runner_of(engine), method.search_settings.window
    text = PROMPT + tokens_of(run(engine, params, PROMPT, 20))
    state = runner.resume(params, runner.start(0, None), np.array(text, np.int32), 0)
    for start in (len(PROMPT), len(text) - 1 - window):
        for layers in (uniform_layers(LAYERS), all_layers(LAYERS), parse_layers("mlp=1-4", LAYERS)):
            expected = matches_by_hand(family, layers, text, start, window)
            before = [np.array(layer) for layer in (*state.target.cache.key, *state.target.cache.value)]
            tokens = np.array(text[start : start + window + 1], np.int32)
            target, matches = runner.score(params.target, state.target, tokens, np.int32(start), layers.runs)
            state = dataclasses.replace(state, target=target)
            assert int(matches) == expected
            for old, new in zip(before, (*target.cache.key, *target.cache.value), strict=True):
                np.testing.assert_array_equal(old, new)
            assert layers != all_layers(LAYERS) or expected == window


def matches_by_hand(family, layers, text, start, window):
    """One pass per token, by another program: the prefix with all layers, the window with some."""
    fill, say = programs_by_hand(family)
    params, units = params_of(family).target, jnp.asarray(layers.runs)
    cache, matches = fill(params, np.pad(np.array(text, np.int32), (0, 200 - len(text))), np.int32(start)), 0
    for at in range(start, start + window):
        said, cache = say(params, np.int32(text[at]), cache, units)
        matches += int(said) == text[at + 1]
    return matches


@functools.cache
def programs_by_hand(family):
    cfg = config_of(family)

    @on_one_device
    def fill(params, tokens, count):
        return prefill(params, cfg, tokens, count, empty_cache(cfg, 202))

    @on_one_device
    def say(params, token, cache, units):
        hidden, cache = forward(
            params, cfg, token[None], cache.length[None], cache, jnp.ones((1, 1), bool), units=units[:, :, None]
        )
        return jnp.argmax(vocab_logits(params, cfg, hidden)[0]), commit_rows(cache, jnp.int32(1))

    return fill, say


@pytest.mark.thorough
def test_the_search_finds_the_layers_that_matter_least():
    """Layers 2 and 4 add nearly nothing, layers 1 and 3, which the uniform set skips, much."""
    params, engine, rounds = params_of("llama", gain=0.01, layers=(2, 4)), engine_of(EAGER), []
    search = restart_search(engine, ratio=0.5, steps=200)
    rng = np.random.default_rng(0)
    while search.stopped is None:
        rounds = run(engine, params, rng.integers(0, VOCAB, 40).tolist(), 100)
    assert search.layers.skipped.reshape(2, LAYERS - 2).sum(axis=0).tolist() == [0, 2, 0, 2]
    assert (search.matchness or 0) > 0.9
    assert np.mean([output.accepted for output in rounds]) > 3


def test_interleaved_generations():
    """Candidates are scored on the text at hand, whichever that is."""
    engine, params = engine_of(EAGER), params_of("llama")
    search = restart_search(engine)
    pair = [rounds_of(engine, params, prompt, count) for prompt, count in ((PROMPT, 40), (LONG_PROMPT, 110))]
    texts, steps = [[], []], []
    for _ in range(110):
        for text, rounds in zip(texts, pair, strict=True):
            output = next(rounds, None)
            text += [] if output is None else output.tokens
        steps.append((len(texts[0]), search.steps))
    assert texts == [plain_tokens("llama", PROMPT, 40), plain_tokens("llama", LONG_PROMPT, 110)]
    # Both of them taught something.
    first = max(count for length, count in steps if length < 40)
    assert 3 < first < search.steps


@pytest.mark.thorough
def test_the_search_takes_its_share_of_the_time(monkeypatch):
    """By a clock on which a round takes a second, and another one if it waited for a scoring pass."""
    engine, scored = engine_of(EAGER), []
    runner = runner_of(engine)
    for share in (0.0, 0.05, 0.3):
        monkeypatch.setattr(runner, "share", share)
        monkeypatch.setattr(runner.timer, "now", StepClock())
        passes = runner.timer.passes
        search = restart_search(engine, interval=10_000)
        for seed in range(2):
            for output in rounds_of(engine, params_of("llama"), PROMPT, 120, seed, temperature=1.0):
                assert output.tokens
                runner.timer.now.seconds += runner.timer.passes > passes
                passes = runner.timer.passes
        scored.append(search.steps)
        # What a pass takes is known after it: the first may be longer than was thought.
        assert search.spent_s <= share * search.decoded_s + 1
    assert scored[0] == 0 < scored[1] < scored[2]


@pytest.mark.thorough
@pytest.mark.parametrize("method", [EAGER, EACH])
def test_no_program_copies_a_cache(method):
    """Drafting and scoring work in the cache at hand: what they need besides is a small part of it."""
    runner = method.bind(models_of("llama"), 20_000)
    programs = [program for program in runner.programs if program.name in ("draft", "matchness")]
    compile_programs(programs)
    layer = runner.executor.state.cache.key[0]
    assert len(programs) == 2
    for program in programs:
        (compiled,) = program._compiled.values()
        needed = compiled.memory_analysis().temp_size_in_bytes
        assert needed < layer.size * layer.dtype.itemsize / 8, program.name


def test_the_last_token_of_the_context():
    engine = engine_of(EAGER)
    prompt = (LONG_PROMPT + PROMPT)[:90]
    room = CONTEXT - len(prompt)
    assert tokens_of(run(engine, params_of("llama"), prompt, room)) == plain_tokens("llama", prompt, room)
    prompt = (prompt * 3)[: CONTEXT - 1]
    assert tokens_of(run(engine, params_of("llama"), prompt, 1)) == plain_tokens("llama", prompt, 1)


def test_a_second_generation_compiles_nothing(compilations):
    engine = engine_of(EAGER)
    run(engine, params_of("llama"), PROMPT, 30)
    engine.settle()
    compilations.clear()
    run(engine, params_of("llama"), LONG_PROMPT, 60, 5, **CUTS)
    assert compilations == []


@pytest.mark.thorough
def test_drafts_that_do_not_pay_are_left_alone():
    """Skipping makes another model of this one: nothing is accepted, and soon nothing is drafted."""
    engine = engine_of(Swift(length=5, layers="attention=1-4;mlp=1-4"))
    rounds = run(engine, params_of("llama", gain=4.0), PROMPT, 120)
    assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 120, gain=4.0)
    assert 0 < sum(output.draft_passes > 0 for output in rounds) < 25


@pytest.mark.thorough
def test_models_without_layers_to_skip():
    """Two layers: the draft is the target, which never pays."""
    engine = Engine(Models(place(FAMILIES["llama"])), Swift(length=4), 150)
    engine.prepare()
    rounds = run(engine, ModelParams(tiny_params("llama")), PROMPT, 30)
    assert not any(output.draft_passes for output in rounds) and len(rounds) < 15
    assert runner_of(engine).report().stopped == "there is nothing to choose"


@pytest.mark.slow
def test_a_search_outlives_runners_and_processes(tmp_path):
    """A runner of larger capacity takes it over; another process reads what was stored; a fixed set stores nothing."""
    (tmp_path / "model").write_bytes(b"weights")
    store = Store(tmp_path / "model", tmp_path)
    engine = Engine(models_of("llama"), EAGER, store=store)
    engine._first_capacity = 100
    engine.prepare()
    old = runner_of(engine)
    run(engine, params_of("llama"), PROMPT, 60)
    before = old.search.steps
    assert before > 3
    engine.prepare(150)
    assert runner_of(engine) is not old and runner_of(engine).search is old.search
    assert runner_of(engine).timer is old.timer
    assert tokens_of(run(engine, params_of("llama"), PROMPT, 60)) == plain_tokens("llama", PROMPT, 60)
    assert old.search.steps > before
    again = EAGER.configure(models_of("llama"), store).bind(models_of("llama"), 100, store)
    assert (again.search.steps, again.search.layers) == (old.search.steps, old.search.layers)
    assert again.drafter.layers == old.search.layers
    fixed = Swift(layers="none").bind(models_of("llama"), 100, store)
    assert fixed.drafter.layers == all_layers(LAYERS)
    fixed.close(None)
    assert [path.name for path in tmp_path.iterdir()] == ["model", "swift-layers.json"]
    # A file that was named has to fit, before anything is loaded.
    (tmp_path / "other.json").write_text("no layer sets")
    with pytest.raises(ConfigError, match="other.json cannot be read"):
        Swift(layers_file=str(tmp_path / "other.json")).configure(models_of("llama"), store)


def test_batches_hold_what_the_table_allows():
    paper = Swift(adaptive=False)
    assert paper.num_rows == 83
    for settings, rows in (
        ({"siblings": (3, 5, 8, 10)}, 131),
        ({"threshold": 0.0}, 251),
        ({"threshold": 1.0}, 1 + 24 + 10),
        ({"length": 1}, 11),
        ({"num_draft_tokens": 39}, 40),
        ({"adaptive": True}, 32),
        ({"adaptive": True, "num_draft_tokens": 999}, 251),
        ({"adaptive": True, "length": 40}, 41),
    ):
        assert dataclasses.replace(paper, **settings).num_rows == rows


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"ratio": 1.0}, "ratio must be below 1"),
        ({"ratio": -0.1}, "ratio"),
        ({"length": 0}, "length"),
        ({"num_draft_tokens": 24}, "num_draft_tokens must be at least 25"),
        ({"threshold": 2}, "threshold"),
        ({"siblings": (1, 3, 5)}, "siblings has 3 numbers"),
        ({"siblings": (1, 3, 5, 0)}, "siblings"),
        ({"siblings": (1, 3, 5, 2.5)}, "siblings must be an integer"),
        ({"share": 1.5}, "share"),
        ({"task": ""}, "task"),
        ({"layers": 5}, "layers must be text"),
        ({"layers": "none", "ratio": 0.2, "task": "x"}, "nothing is searched: leave out ratio, task"),
        ({"adaptive": 1}, "adaptive must be true or false"),
        ({"steps": 0}, "steps"),
    ],
)
def test_settings_that_make_no_sense(settings, word):
    with pytest.raises(ConfigError, match=word):
        Swift(**settings)


def test_settings_that_do_not_fit_the_model():
    with pytest.raises(ConfigError, match="layer 5 cannot be skipped in a model of 6 layers"):
        Engine(models_of("llama"), Swift(layers="mlp=5"))
    with pytest.raises(ConfigError, match="siblings 32 exceed"):
        models = models_of("llama")
        few = dataclasses.replace(models.target, cfg=dataclasses.replace(models.target.cfg, vocab_size=20))
        Engine(models._replace(target=few), Swift(siblings=(1, 3, 5, 32)))
    plan = models.target.plan
    exact = dataclasses.replace(plan, kernels=dataclasses.replace(plan.kernels, exact=True))
    with pytest.raises(ConfigError, match="up to 64 rows, 'swift' has 83"):
        Swift(adaptive=False).check(models._replace(target=dataclasses.replace(models.target, plan=exact)))
