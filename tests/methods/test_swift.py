"""SWIFT: the tokens of plain decoding whatever is skipped, while the set is searched and after."""

import dataclasses
import functools
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    FLOAT32,
    LLAMA_LOOKUP,
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    VOCAB,
    EditedSource,
    arrays,
    plain,
    run,
    sharpen,
    target_params,
    tokens_of,
)
from method_cases import models_of as pair_of
from swift_cases import (
    EACH,
    EAGER,
    LAYERS,
    StepClock,
    config_of,
    damp,
    engine_of,
    models_of,
    on_step_clock,
    params_of,
    plain_tokens,
    restart_search,
)
from tiny_models import FAMILIES, empty_cache, on_one_device, quick_compilation

from jaxspec.checkpoint.load import load_foreign
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.base import ROUND_HEADER, ModelParams
from jaxspec.methods.core.timing import LONGEST, Finished, RoundTimer
from jaxspec.methods.swift.search import Standing
from jaxspec.methods.swift.settings import Swift
from jaxspec.models.kv_cache import commit_rows
from jaxspec.models.layer_set import all_layers, parse_layers, uniform_layers
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.program import compile_programs

RATIOS = (0.0, 0.2, 0.45, 0.6)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_plain_decoding_while_the_set_changes(family):
    engine, adopted, steps = engine_of(family), 0, 0
    for index, ratio in enumerate(RATIOS):
        names = list(SAMPLINGS)
        for step in (0, 2):
            search = restart_search(engine, ratio)
            sampling = SAMPLINGS[names[(index + step + len(family)) % len(names)]]
            prompt = (PROMPT, LONG_PROMPT)[(index + step // 2) % 2]
            rounds = run(engine, params_of(family), prompt, 100, index, **sampling)
            assert tokens_of(rounds) == plain_tokens(family, prompt, 100, index, **sampling), (ratio, sampling)
            for emitted in rounds:
                assert 0 <= emitted.accepted <= emitted.depth <= EAGER.length
                assert emitted.depth <= emitted.draft_passes <= EAGER.length
                assert emitted.drafted < EAGER.batch_rows
            steps += search.steps
            adopted += len(search.adopted) - 1
    assert adopted >= 1 and steps > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_with_default_settings(family):
    """Rounds with and without drafts, several tokens in some of the latter, and every length of text."""
    engine, kinds = engine_of(family, 1, Swift(length=5, ratio=0.2, window=6)), set()
    for seed, (count, sampling) in enumerate(((100, {}), (61, SAMPLINGS["cuts"]), (6, {}), (5, {}), (1, {}))):
        rounds = run(engine, params_of(family), PROMPT, count, seed, **sampling)
        assert tokens_of(rounds) == plain_tokens(family, PROMPT, count, seed, **sampling)
        kinds |= {emitted.draft_passes > 0 for emitted in rounds}
    assert kinds == {False, True}


@pytest.mark.parametrize(("family", "degree"), [("qwen2", 4), ("llama-tied", 2)])
def test_tokens_on_a_mesh_with_a_program_for_each_set(family, degree):
    """Sets are used once their programs are there; several are scored at once."""
    engine = engine_of(family, degree, EACH)
    runner, used = engine._runner, set()
    samplings: list[dict] = [{}, {"temperature": 0.7, "top_p": 0.9}]
    for seed, sampling in enumerate(samplings):
        rounds = run(engine, params_of(family, degree), PROMPT, 60, seed, **sampling)
        assert tokens_of(rounds) == plain_tokens(family, PROMPT, 60, seed, **sampling)
        used.add(runner.layers)
        # As if the search had found it.
        wanted = parse_layers(f"mlp={seed + 1}", LAYERS)
        runner._search.incumbent = Standing(wanted)
        runner._window = runner._pending = None
        while runner.layers != wanted:
            runner._adopt()
            if runner._compiling is not None:  # this set, or one that the search found in the text before
                with quick_compilation():
                    runner._compiling[1].result()
        used.add(runner.layers)
    assert len(used) > len(samplings) and runner._search.steps > 10


def test_without_skipping_everything_is_accepted():
    """r = 0: the draft is the target, at any temperature."""
    engine = engine_of("llama", 1, dataclasses.replace(EAGER, threshold=0.0, ratio=0.0))
    assert engine._runner.layers == all_layers(LAYERS)
    for seed, sampling in enumerate([{}, SAMPLINGS["T=1"], SAMPLINGS["cuts"], SAMPLINGS["penalties"]]):
        rounds = run(engine, params_of("llama"), PROMPT, 48, seed, **sampling)
        assert [emitted.accepted for emitted in rounds] == [5] * 8
        assert [emitted.draft_passes for emitted in rounds] == [5] * 8
        assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 48, seed, **sampling)


def test_a_full_batch_leaves_out_the_least_probable():
    method = dataclasses.replace(EAGER, batch=8, threshold=0.0)
    engine = engine_of("llama", 1, method)
    rounds = run(engine, params_of("llama"), PROMPT, 60)
    assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 60)
    assert max(emitted.drafted for emitted in rounds) == 7


def test_a_fixed_set_is_used_and_nothing_is_searched():
    method = Swift(length=5, threshold=0.1, adaptive=False, layers="attention=1,3;mlp=2")
    engine = engine_of("llama", 1, method)
    runner = engine._runner
    assert runner._score is None and runner.layers == parse_layers(method.layers, LAYERS)
    rounds = run(engine, params_of("llama"), PROMPT, 40)
    assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 40)
    assert engine.method.explain(engine.models)["layers"] == "attention=1,3;mlp=2"


class Generation:
    """Rounds with the state in reach."""

    def __init__(self, engine, params, prompt, **sampling):
        self.runner, self.params = engine._runner, params
        self.request = self.runner.place_request(SamplingParams(**sampling), 0)
        state = self.runner.start(prompt[-1], None)
        self.state = self.runner.prefill(params, state, np.array(prompt[:-1], np.int32))
        self.tokens = []

    def step(self):
        self.state, round_ = self.runner.round(self.params, self.state, self.request)
        packed = np.asarray(round_.packed).tolist()
        self.tokens += packed[ROUND_HEADER : ROUND_HEADER + packed[0]]


@pytest.mark.parametrize(("family", "method"), [("qwen3", EAGER), ("mistral", EACH)])
def test_matchness_is_what_the_skipped_model_says(family, method):
    """Scores equal those of decoding token by token with the set; the state comes back as it was."""
    engine = engine_of(family, 1, method)
    generation = Generation(engine, params_of(family), PROMPT)
    for _ in range(12):
        generation.step()
    runner, text = engine._runner, PROMPT + generation.tokens
    window, sets = runner._search.settings.window, runner._sets
    layer_sets = [uniform_layers(LAYERS), all_layers(LAYERS), parse_layers("mlp=1-4", LAYERS)]
    for start in (len(PROMPT), len(text) - 1 - window):
        for first in range(0, 3, sets):
            chosen = layer_sets[first : first + sets]
            expected = [matches_by_hand(family, layers, text, start, window) for layers in chosen]
            before = arrays(generation.state.target.cache)
            tokens = np.array(text[start : start + window + 1], np.int32)
            units = np.stack([layers.runs for layers in chosen])
            target, matches = runner._score(
                generation.params.target, generation.state.target, tokens, np.int32(start), units
            )
            generation.state = dataclasses.replace(generation.state, target=target)
            assert np.asarray(matches).tolist() == expected
            for old, new in zip(before, arrays(target.cache), strict=True):
                np.testing.assert_array_equal(old, new)
            if all_layers(LAYERS) in chosen:
                assert expected[chosen.index(all_layers(LAYERS))] == window


def matches_by_hand(family, layers, text, start, window):
    """One pass per token, by another program: the prefix with all layers, the window with some."""
    fill, say = programs_by_hand(family)
    params, units = params_of(family).target, jnp.asarray(layers.runs)
    cache, matches = fill(params, np.pad(np.array(text, np.int32), (0, 200 - len(text))), np.int32(start)), 0
    for place in range(start, start + window):
        said, cache = say(params, np.int32(text[place]), cache, units)
        matches += int(said) == text[place + 1]
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
        return jnp.argmax(vocab_logits(params, hidden)[0]), commit_rows(cache, jnp.int32(1))

    return fill, say


def test_the_search_finds_the_layers_that_matter_least():
    """Layers 2 and 4 add nearly nothing, layers 1 and 3, which the uniform set skips, much."""

    def edit(tensors):
        sharpen(tensors)
        damp(tensors, 0.01, (2, 4))

    source = EditedSource(config_of("llama"), 0, edit)
    params = ModelParams(load_foreign(source, plan_mesh(1), FLOAT32))
    engine, rounds = engine_of("llama"), []
    search = restart_search(engine, ratio=0.5, steps=200)
    rng = np.random.default_rng(0)
    while search.stopped is None:
        rounds = run(engine, params, rng.integers(0, VOCAB, 40).tolist(), 100)
    left_out = search.incumbent.layers.skipped.reshape(2, LAYERS - 2).sum(axis=0)
    assert left_out.tolist() == [0, 2, 0, 2]
    assert search.incumbent.matchness > 0.9
    assert np.mean([emitted.accepted for emitted in rounds]) > 3


@pytest.mark.parametrize("context", ["recent", "first"])
def test_interleaved_generations_and_contexts(context, monkeypatch):
    """Candidates are compared on the text that the search began with; the other one takes over when that has ended."""
    engine, params = engine_of("llama"), params_of("llama")
    runner = engine._runner
    monkeypatch.setattr(runner, "_context", context)
    restart_search(engine)
    pair = [
        engine.rounds(params, prompt, SamplingParams(max_tokens=count), 0)
        for prompt, count in ((PROMPT, 40), (LONG_PROMPT, 110))
    ]
    texts, followed = [[], []], []
    for _ in range(110):
        for text, rounds in zip(texts, pair, strict=True):
            emitted = next(rounds, None)
            text += [] if emitted is None else emitted.tokens
            if runner._window is not None:
                followed.append((runner._window.text.prompt, runner._search.steps))
    assert texts == [plain_tokens("llama", PROMPT, 40), plain_tokens("llama", LONG_PROMPT, 110)]
    lengths = [length for length, _ in followed]
    assert lengths == sorted(lengths) and set(lengths) == {len(PROMPT), len(LONG_PROMPT)}
    # Both of them taught something.
    first = max(steps for length, steps in followed if length == len(PROMPT))
    assert 3 < first < runner._search.steps


def test_a_paused_reader_is_no_slow_draft(monkeypatch):
    """Time in which nobody reads is neither decoding nor the search's."""
    engine = engine_of("llama")
    clock = StepClock(late=2)
    meter = RoundTimer(clock)
    monkeypatch.setattr(engine._runner, "meter", meter)
    monkeypatch.setattr(engine._runner, "_share", 0.1)
    restart_search(engine)
    for index, _ in enumerate(engine.rounds(params_of("llama"), PROMPT, SamplingParams(max_tokens=60), 0)):
        clock.seconds += 1e6 * (index in (5, 8, 11))
    assert clock.seconds > 3e6 and meter.total_s < 1e3
    report = meter.report()
    assert report["search_passes"] >= 1 and meter.search_s < 0.2 * meter.total_s


class PassesTakeTime(RoundTimer):
    """A round that waited for a search pass takes a second longer than the others."""

    def lap(self, rounds, *, first):
        self.clock.seconds += sum(round_.delayed for round_ in rounds)
        super().lap(rounds, first=first)


def test_the_search_takes_its_share_of_the_time(monkeypatch):
    """By a clock on which rounds and passes take a second each, and without proposals, which take real time."""
    engine, scored, taken = engine_of("llama"), [], []
    for share in (0.0, 0.05, 0.3):
        meter = PassesTakeTime(StepClock())
        monkeypatch.setattr(engine._runner, "meter", meter)
        monkeypatch.setattr(engine._runner, "_share", share)
        search = restart_search(engine, interval=10_000)
        for seed in range(2):
            run(engine, params_of("llama"), PROMPT, 120, seed, temperature=1.0)
        scored.append(search.steps)
        taken.append(search.spent_s / search.decoded_s)
        assert taken[-1] <= share
    assert scored[0] == 0 < scored[1] < scored[2]
    assert taken[0] == 0 < taken[1] < taken[2]


@pytest.mark.parametrize("method", [EAGER, EACH])
def test_no_program_copies_a_cache(method):
    """Drafting and scoring work in the cache at hand: what they need besides is a small part of it."""
    runner = on_step_clock(method).bind(models_of("llama"), 20_000)
    programs = [*runner._drafts.values(), runner._score]
    compile_programs(programs)
    layer = runner._side.state.cache.key[0]
    for program in programs:
        needed = program._compiled.memory_analysis().temp_size_in_bytes
        assert needed < layer.size * layer.dtype.itemsize / 8, program.name


def test_nobody_waits_for_a_new_program(monkeypatch, caplog):
    """Rounds go on with the old set while another one's program is compiled, and where that fails."""
    engine = engine_of("mistral", 1, EACH)
    runner, may_finish = engine._runner, threading.Event()
    old, compiled = runner.layers, runner._compile
    wanted = [parse_layers(text, LAYERS) for text in ("mlp=1-2", "mlp=3")]
    search = SimpleNamespace(incumbent=Standing(wanted[0]), stopped="for the test")
    monkeypatch.setattr(runner, "_search", search)
    monkeypatch.setattr(runner, "_pending", None)

    def fail(layers):
        may_finish.wait(60)
        raise MemoryError("no room for it")

    def run_some():
        rounds = run(engine, params_of("mistral"), PROMPT, 20)
        assert tokens_of(rounds) == plain_tokens("mistral", PROMPT, 20)

    monkeypatch.setattr(runner, "_compile", fail)
    run_some()
    assert runner.layers == old and not runner._compiling[1].done()
    may_finish.set()
    runner._compiling[1].exception()
    run_some()
    run_some()
    assert runner.layers == old and caplog.text.count("could not be compiled: no room for it") == 1
    monkeypatch.setattr(runner, "_compile", compiled)
    search.incumbent = Standing(wanted[1])
    runner._adopt()
    with quick_compilation():
        runner._compiling[1].result()
    run_some()
    assert runner.layers == wanted[1]


def test_the_last_token_of_the_context():
    engine = engine_of("llama")
    room = engine.max_context - 90
    prompt = (LONG_PROMPT + PROMPT)[:90]
    assert tokens_of(run(engine, params_of("llama"), prompt, room)) == plain_tokens("llama", prompt, room)
    prompt = (prompt * 3)[: engine.max_context - 1]
    assert tokens_of(run(engine, params_of("llama"), prompt, 1)) == plain_tokens("llama", prompt, 1)


def test_a_second_generation_compiles_nothing(compilations):
    engine = engine_of("llama")
    run(engine, params_of("llama"), PROMPT, 30)
    jax.block_until_ready(engine._idle)
    compilations.clear()
    run(engine, params_of("llama"), LONG_PROMPT, 60, 5, **SAMPLINGS["cuts"])
    assert compilations == []


def test_drafts_that_do_not_pay_are_left_alone():
    """Skipping makes another model of this one: nothing is accepted, and soon nothing is drafted."""
    method = Swift(length=5, layers="attention=1-4;mlp=1-4")
    engine = engine_of("llama", 1, method)
    rounds = run(engine, params_of("llama", gain=4.0), PROMPT, 120)
    assert tokens_of(rounds) == plain_tokens("llama", PROMPT, 120, gain=4.0)
    assert 0 < sum(emitted.draft_passes > 0 for emitted in rounds) < 25


def test_a_runner_for_longer_texts_goes_on_with_the_search():
    method = on_step_clock(EAGER)
    engine = Engine(models_of("llama"), method)
    engine._first_capacity = 100
    with quick_compilation():
        engine.prepare()
        run(engine, params_of("llama"), PROMPT, 60)
        before = method.search(engine.models).steps
        assert before > 3
        engine.prepare(300)
    assert tokens_of(run(engine, params_of("llama"), PROMPT, 60)) == plain_tokens("llama", PROMPT, 60)
    assert method.search(engine.models).steps > before


def test_models_without_layers_to_skip(monkeypatch):
    """Two layers: the draft is the target, which never pays."""
    engine = Engine(pair_of(LLAMA_LOOKUP), on_step_clock(Swift(length=4)), 150)
    with quick_compilation():
        engine.prepare()
    programs, skip = [], engine._runner._skip
    monkeypatch.setattr(engine._runner, "_skip", lambda *args: (programs.append(skip(*args)), programs[-1])[1])
    rounds = run(engine, ModelParams(target_params("llama")), PROMPT, 30)
    assert tokens_of(rounds) == tokens_of(plain("llama", PROMPT, 30))
    assert not any(emitted.draft_passes for emitted in rounds)
    # The first tokens come one by one, the others four in a program, none behind the last one.
    assert [int(drafted.plain) for _, drafted in programs][:10] == [1, 1, 2, *[4] * 6, 2]
    assert engine.method.explain(engine.models)["stopped"] == "there is nothing to choose"


def test_batches_hold_what_the_table_allows():
    paper = Swift(adaptive=False)
    assert paper.batch_rows == 83
    for settings, rows in (
        ({"siblings": (3, 5, 8, 10)}, 131),
        ({"threshold": 0.0}, 251),
        ({"threshold": 1.0}, 1 + 24 + 10),
        ({"length": 1}, 11),
        ({"batch": 40}, 40),
        ({"adaptive": True}, 32),
        ({"adaptive": True, "batch": 1000}, 251),
        ({"adaptive": True, "length": 40}, 41),
    ):
        assert dataclasses.replace(paper, **settings).batch_rows == rows


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"ratio": 1.0}, "ratio must be below 1"),
        ({"ratio": -0.1}, "ratio"),
        ({"length": 0}, "length"),
        ({"batch": 25}, "batch must be at least 26"),
        ({"threshold": 2}, "threshold"),
        ({"siblings": (1, 3, 5)}, "siblings has 3 numbers"),
        ({"siblings": (1, 3, 5, 0)}, "siblings"),
        ({"siblings": (1, 3, 5, 2.5)}, "siblings must be integers"),
        ({"context": "last"}, "context must be one of recent, first"),
        ({"programs": "two"}, "programs must be one of"),
        ({"programs": "one", "candidates": 4}, "scores one at a time, not 4"),
        ({"share": 1.5}, "share"),
        ({"task": ""}, "task"),
        ({"layers": 5}, "layers must be text"),
        ({"layers": "none", "ratio": 0.2, "task": "x"}, "nothing is searched: leave out ratio, task"),
        ({"adaptive": 1}, "adaptive must be true or false"),
        ({"window": 0}, "window"),
    ],
)
def test_settings_that_make_no_sense(settings, word):
    with pytest.raises(ConfigError, match=word):
        Swift(**settings)


def test_settings_that_do_not_fit_the_model():
    with pytest.raises(ConfigError, match="layer 5 cannot be skipped in a model of 6 layers"):
        Engine(models_of("llama"), Swift(layers="mlp=5"))


def test_meter():
    meter = RoundTimer()
    meter.pass_cost = 8.0
    assert not meter.may_draft() and meter.gain is None and meter.pass_s is None
    plain, drafted = Finished(1, False, False, False), Finished(3, True, True, False)
    for _ in range(4):
        meter.add(1.0, [plain])
    assert meter.pass_s == 8.0
    for _ in range(12):
        meter.add(2.0, [drafted])
    assert meter.gain == pytest.approx(1.5)
    # Rounds without a draft may give several tokens, and take their share of a time.
    meter.add(10.0, [Finished(4, False, False, False), plain])
    assert list(meter._plain)[-2:] == [2.0, 2.0] and meter.plain_s == 1.0
    # A round behind a search pass: what it took more is the search's.
    meter.add(9.0, [Finished(3, True, True, True)])
    assert (meter.search_s, meter.passes, meter.pass_s) == (7.0, 1, 7.0)
    assert meter.total_s == 47.0
    # Time in which nothing finished belongs to what finishes next.
    meter.add(1.0, [])
    meter.add(1.0, [plain])
    assert meter.plain_s == 1.0 and max(meter._plain) == 2.0
    # A reader who had something else to do.
    before, searched = meter.total_s, meter.search_s
    meter.add(1e6, [plain])
    assert meter.total_s - before == LONGEST and max(meter._plain) == LONGEST
    meter.add(1e6, [Finished(3, True, True, True)])
    assert meter.search_s - searched == 7.0 and meter.passes == 2


def test_meter_knows_what_a_pass_costs_where_every_round_drafts():
    """Without plain rounds there is no gain to tell, but the search has to start."""
    meter = RoundTimer()
    meter.pass_cost = 3.0
    meter.add(2.0, [Finished(3, True, True, False)])
    assert meter.pass_s == 6.0 and meter.gain is None
    # Declined drafts are neither kind.
    meter.add(5.0, [Finished(1, True, False, False)])
    assert meter.plain_s is None


def test_times_are_those_between_launches_whatever_the_text():
    clock = StepClock()
    meter, plain = RoundTimer(clock), [Finished(1, False, False, False)]
    meter.lap([], first=True)
    for _ in range(3):
        meter.lap(plain, first=False)
    clock.seconds += 1e3  # nobody decodes
    meter.lap([], first=True)
    meter.lap(plain, first=False)
    assert meter.total_s == 4.0 and meter.plain_s == 1.0


def test_meter_stops_drafts_that_lose():
    meter = RoundTimer()
    allowed = []
    for _ in range(1500):
        allowed.append(meter.may_draft())
        meter.add(4.0 if allowed[-1] else 1.0, [Finished(1 + allowed[-1], *[allowed[-1]] * 2, False)])
    assert not any(allowed[:3]) and any(allowed)
    # A drafted round loses as much as two plain ones.
    assert 2 * sum(allowed) / 1500 < 0.12 and sum(allowed[-500:]) <= 26


def test_rounds_that_decline_are_asked_less():
    meter, allowed = RoundTimer(), []
    for _ in range(160):
        allowed.append(meter.may_draft())
        meter.add(1.0, [Finished(1, allowed[-1], False, False)])
    assert sum(allowed[:8]) >= 3 and sum(allowed[-80:]) == 10


def test_the_uniform_set_starts():
    assert Swift().search(models_of("llama")).incumbent.layers == uniform_layers(LAYERS)
