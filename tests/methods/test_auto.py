"""Drafting as far as it pays: what is learned, what it is weighed against, and the rounds that come of it.

That the tokens are plain decoding's is `test_exact`'s matter; here it is how often the draft is asked, and for what.
"""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    CASES,
    HEAD_IDS,
    LLAMA_AUTO,
    LLAMA_AUTO_LONG,
    LLAMA_LOOKUP,
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    Case,
    Steps,
    arrays,
    case_id,
    check_counts,
    count_on,
    counting,
    decode,
    engine_of,
    models_of,
    params_of,
    plain,
    run,
    tokens_of,
)

from jaxspec import llm as llm_module
from jaxspec.engine import StepOutput
from jaxspec.errors import ConfigError
from jaxspec.llm import _tune
from jaxspec.methods.auto import LONGEST_CHAIN, Auto
from jaxspec.methods.base import ModelParams
from jaxspec.methods.core import tuned
from jaxspec.methods.core.acceptance import (
    CLASSES,
    EDGES,
    FORGETTING,
    PRIOR_CHANCE,
    PRIOR_SECOND,
    PRIOR_WEIGHT,
    chance_of,
    class_of,
    init_acceptance,
    observe,
)
from jaxspec.methods.core.auto import FIRST_PATIENCE, LONGEST_PATIENCE, SYNC_ROWS
from jaxspec.methods.core.cost_model import FIXED_DRAFT_COST, pass_costs, relative_draft_cost
from jaxspec.metrics import _kind
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from pallas_kernels import registry
from pallas_kernels.active_rows import relative_pass_cost

LENGTH = LLAMA_AUTO_LONG.method.length
AUTO_TP4 = next(case for case in CASES if isinstance(case.method, Auto) and case.degree == 4)
# As long as the engine has room for, less the longer prompt.
MANY = 300


# What became of drafts


def test_classes_part_at_their_edges():
    inside = [0.0, 1e-30, 0.05, *((a + b) / 2 for a, b in itertools.pairwise(EDGES)), 0.99, 1.0]
    classes = np.asarray(class_of(jnp.log(jnp.array(inside)))).tolist()
    assert classes == [0, 0, 0, *range(1, CLASSES - 1), CLASSES - 1, CLASSES - 1]
    assert int(class_of(jnp.float32(-np.inf))) == 0
    assert int(class_of(jnp.log(jnp.float32(0.55)), second=True)) == CLASSES + 5
    assert len(PRIOR_CHANCE) == len(PRIOR_SECOND) == CLASSES == len(EDGES) + 1


def test_before_anything_is_known_the_prior_holds():
    gauge = init_acceptance()
    chance = chance_of(gauge, jnp.arange(2 * CLASSES))
    np.testing.assert_allclose(chance, PRIOR_CHANCE + PRIOR_SECOND, rtol=1e-6)


def test_what_was_looked_at_counts_and_older_rounds_count_less():
    kind = jnp.array([2 * CLASSES, 3, 10, 10, CLASSES + 3, 0], jnp.int32)  # the root, four that count, one unreached
    tried = jnp.array([False, True, True, True, True, False])
    accepted = jnp.array([False, True, True, False, False, False])
    gauge = observe(init_acceptance(), kind, tried, accepted)
    expected = np.zeros((2, 2 * CLASSES))
    expected[0, [3, 10, CLASSES + 3]] = 1, 2, 1
    expected[1, [3, 10]] = 1, 1
    np.testing.assert_array_equal(np.stack([gauge.tried, gauge.accepted]), expected)
    at_ten = (1 + PRIOR_WEIGHT * PRIOR_CHANCE[10]) / (2 + PRIOR_WEIGHT)
    assert float(chance_of(gauge, jnp.int32(10))) == pytest.approx(at_ten)
    second = PRIOR_WEIGHT * PRIOR_SECOND[3] / (1 + PRIOR_WEIGHT)
    assert float(chance_of(gauge, jnp.int32(CLASSES + 3))) == pytest.approx(second)
    # Each first choice that is looked at makes what came before count less.
    again = observe(gauge, kind, tried, accepted)
    np.testing.assert_allclose(np.stack([again.tried, again.accepted]), expected * (1 + FORGETTING**3), rtol=1e-6)


def test_a_round_without_the_draft_changes_nothing():
    gauge = observe(init_acceptance(), jnp.array([1, 2]), jnp.array([True, True]), jnp.array([True, False]))
    nothing = jnp.zeros(4, bool)
    same = observe(gauge, jnp.full(4, 2 * CLASSES), nothing, nothing)
    jax.tree.map(np.testing.assert_array_equal, same, gauge)


def test_a_change_for_the_worse_is_noticed_within_a_hundred_tokens():
    gauge, one, yes, no = init_acceptance(), jnp.array([9]), jnp.array([True]), jnp.array([False])
    step = jax.jit(observe)
    for _ in range(400):
        gauge = step(gauge, one, yes, yes)
    assert float(chance_of(gauge, jnp.int32(9))) > 0.95
    for _ in range(100):
        gauge = step(gauge, one, yes, no)
    assert float(chance_of(gauge, jnp.int32(9))) < 0.25


# What passes cost


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ["xla", "auto"])
def test_measured_figures_go_on_as_the_built_in_ones(name, blocks):
    plan, storage = plan_mesh(1, kernels=name), Storage("q8_0" if blocks else "float32")
    target = dataclasses.replace(models_of(LLAMA_AUTO).target, plan=plan, storage=storage)
    with registry.using(plan.kernels):
        built_in = np.array([relative_pass_cost(1 + more, 12, blocks) for more in range(12)])
    np.testing.assert_allclose(pass_costs(target, 12), built_in)
    got = pass_costs(target, 12, (1.0, 1.5, 1.75))
    np.testing.assert_allclose(got, [1.0, 1.5, 1.75, *(built_in[3:] * 1.75 / built_in[2])])
    np.testing.assert_allclose(pass_costs(target, 2, (1.0, 1.5, 1.75)), [1.0, 1.5])
    np.testing.assert_allclose(pass_costs(target, 12, (1.0,)), built_in / built_in[0])


def test_a_draft_pass_costs_what_it_reads():
    """A layer has 19392 numbers, its norms among them; the target two of them, a norm and a head of 101 rows of 48."""
    layer, norm, row = 19392, 48, 48
    shared, same, none = (models_of(Case("llama", 1, geometry, None)) for geometry in ("shared", "same", "none"))
    target = 2 * layer + norm + 101 * row
    small = layer + norm + len(HEAD_IDS) * row
    assert relative_draft_cost(*shared) == pytest.approx(small / target + FIXED_DRAFT_COST)
    assert relative_draft_cost(*same) == pytest.approx(1 + FIXED_DRAFT_COST)
    # The embedding is the head here, of the target and of a draft that has all of its rows.
    tied = models_of(Case("llama-tied", 1, "layer", None))
    assert relative_draft_cost(*tied) == pytest.approx((layer + norm + 101 * row) / target + FIXED_DRAFT_COST)
    assert none.draft is None


# Rounds


def asked_of(rounds):
    """Rounds in which the draft ran."""
    return [index for index, emitted in enumerate(rounds) if emitted.draft_passes]


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("draft", ["random", "adversarial"])
def test_a_poor_draft_is_left_alone_and_tried_again_ever_more_rarely(draft, sampling):
    rounds = decode(LLAMA_AUTO_LONG, PROMPT, MANY, draft, 1, **SAMPLINGS[sampling])
    assert tokens_of(rounds) == tokens_of(plain("llama", PROMPT, MANY, 1, **SAMPLINGS[sampling]))
    check_counts(LLAMA_AUTO_LONG, rounds)
    asked = asked_of(rounds)
    assert len(asked) < len(rounds) / 4
    assert sum(emitted.drafted == 0 for emitted in rounds) > 20  # plain; others copy what the text repeats
    # Once it is known not to pay, patience doubles; where a copy pays, the draft waits a little longer.
    gaps = [b - a - 1 for a, b in itertools.pairwise(asked)]
    first = next(index for index, gap in enumerate(gaps) if gap >= FIRST_PATIENCE)
    expected = [min(FIRST_PATIENCE * 2**n, LONGEST_PATIENCE) for n in range(len(gaps) - first)]
    assert len(expected) >= 4 and expected[3] == LONGEST_PATIENCE
    for gap, patience in zip(gaps[first:], expected, strict=True):
        assert patience <= gap <= patience + 16
    assert len(rounds) - asked[-1] <= LONGEST_PATIENCE + 16


def test_where_nothing_pays_a_round_decodes_several_tokens(monkeypatch):
    """Each is an emission of its own, as if it had been a round, and the last round may hold more than is wanted."""
    engine = engine_of(LLAMA_AUTO_LONG)
    launched, launch = [], type(engine._runner).round

    def counted(self, *args):
        launched.append(args)
        return launch(self, *args)

    monkeypatch.setattr(type(engine._runner), "round", counted)
    sampling = dict(temperature=1.3, seed=7)
    for count in (MANY, MANY - 1, MANY - 2, MANY - 3):
        launched.clear()
        rounds = decode(LLAMA_AUTO_LONG, PROMPT, count, "random", **sampling)
        assert tokens_of(rounds) == tokens_of(plain("llama", PROMPT, count, **sampling))
        alone = [emitted for emitted in rounds if not emitted.drafted]
        assert len(alone) > count // 2 and all(len(emitted.tokens) == 1 for emitted in alone)
        # One round is in flight when the last token comes; the first of each calm stretch hold one token.
        assert len(launched) < len(rounds) - len(alone) + 2 * len(alone) // 3
        assert sum(emitted.draft_passes for emitted in rounds) < 40
        # Nobody waits for tokens behind the end: one round was under way when the last token was read.
        ended = engine._idle
        assert int(ended.draft.text.generated) + int(ended.outcome.count) <= count + 2


@pytest.mark.parametrize("draft", ["constant", "broken"])
def test_a_draft_that_is_never_sure_is_left_alone(draft):
    """Its tokens have a chance of 1 % by its own account: few are verified, and it is found out all the same."""
    rounds = decode(LLAMA_AUTO_LONG, PROMPT, 150, draft, 1)
    assert len(asked_of(rounds)) < len(rounds) / 4


def test_rounds_are_counted_by_whether_the_draft_ran():
    steps = Steps(LLAMA_AUTO_LONG, "random", PROMPT, 1)
    kinds = set()
    for _ in range(60):
        steps.step()
        drafted, passes = steps.header[1], steps.header[3]
        kinds.add(_kind(StepOutput((0,), (0.0,), drafted=drafted, draft_passes=passes)))
    assert kinds == {"plain", "copied", "drafted"}


def test_a_draft_that_is_tried_again_catches_up_in_chunks():
    rounds = decode(LLAMA_AUTO_LONG, LONG_PROMPT, MANY, "adversarial", 1, **SAMPLINGS["T=1"])
    checked = 0
    for before, now in itertools.pairwise(asked_of(rounds)):
        behind = sum(len(emitted.tokens) for emitted in rounds[before:now])
        # What was accepted of the last chain it has already, but for that chain's last token.
        least = -(-(behind - rounds[before].accepted) // SYNC_ROWS)
        assert least <= rounds[now].draft_passes <= -(-behind // SYNC_ROWS) + LENGTH - 1
        checked += behind > 2 * SYNC_ROWS
    assert checked >= 2


def test_a_perfect_draft_is_asked_every_round():
    rounds = decode(LLAMA_AUTO_LONG, PROMPT, 120, "copy", 1)
    own = [emitted for emitted in rounds[:-1] if emitted.draft_passes]
    assert len(own) > 0.8 * len(rounds)
    # Where a copy is worth more than what the draft is sure of, the copy is verified.
    assert sum(emitted.accepted == emitted.depth for emitted in own) > 0.8 * len(own)
    assert sum(len(emitted.tokens) for emitted in rounds) / len(rounds) > 3.5


def test_a_sure_draft_writes_chains_of_full_length():
    params = ModelParams(counting(), counting())
    rounds = run(engine_of(LLAMA_AUTO_LONG), params, count_on(0, 20), 6 * (LENGTH + 1))
    assert [t for emitted in rounds for t in emitted.tokens] == count_on(20, 6 * (LENGTH + 1))
    assert [emitted.accepted for emitted in rounds[:-1]] == [emitted.depth for emitted in rounds[:-1]]
    # It has to prove itself for two rounds.
    assert [(emitted.accepted, emitted.draft_passes) for emitted in rounds[2:-1]] == [(LENGTH, LENGTH)] * 4


def test_where_the_text_repeats_itself_it_is_copied_and_the_draft_rests():
    """A target that counts, over and over: 101 tokens, then the same again."""
    params = ModelParams(counting(), params_of(LLAMA_AUTO_LONG, "adversarial").draft)
    rounds = run(engine_of(LLAMA_AUTO_LONG), params, count_on(0, 110), 100)
    assert tokens_of(rounds) == count_on(110, 100)
    copied = [emitted for emitted in rounds if emitted.drafted and not emitted.draft_passes]
    assert len(copied) > len(rounds) / 2 and len(rounds) < 25


def test_a_wrong_turn_and_the_way_back():
    """The target jumps behind some tokens, the draft does not: chains are cut there, and go on."""
    wrong = (15, 40, 70)
    params = ModelParams(counting(wrong), counting())
    prompt = count_on(0, 5)
    rounds = run(engine_of(LLAMA_AUTO_LONG), params, prompt, 90)
    assert tokens_of(rounds) == tokens_of(plain("llama", prompt, 90, params=counting(wrong)))
    assert sum(emitted.accepted for emitted in rounds) > 60


# The draft's cache


def assert_draft_cache(steps):
    """The committed prefix is that of a fresh prefill of the verified text."""
    cache = steps.caches()["draft"]
    length = int(cache.length)
    assert length <= len(steps.text)
    fresh = steps.prefilled([*steps.text, 0]).draft.cache
    for one, other in zip(arrays(cache), arrays(fresh), strict=True):
        np.testing.assert_allclose(one[:, :length], other[:, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [LLAMA_AUTO, LLAMA_AUTO_LONG, AUTO_TP4], ids=case_id)
def test_the_drafts_cache_is_that_of_the_verified_text(case):
    for index, draft in enumerate(("copy", "first layer", "random", "constant")):
        for sampling in ("greedy", "T=1"):
            steps = Steps(case, draft, (PROMPT, LONG_PROMPT)[index % 2], index, **SAMPLINGS[sampling])
            for _ in range(10):
                known = len(steps.text)
                steps.step()
                # Up to the root where it was asked, else where it stopped.
                length = int(steps.caches()["draft"].length)
                assert (length == known) if int(steps.state.draft.idle) == 0 else (length <= known)
            assert_draft_cache(steps)


def test_the_drafts_cache_after_long_rests():
    steps = Steps(LLAMA_AUTO_LONG, "adversarial", LONG_PROMPT, 1, temperature=1.0)
    longest = caught_up = 0
    while len(steps.text) < 300:
        idle, known = int(steps.state.draft.idle), len(steps.text)
        lag = known - int(steps.caches()["draft"].length)
        steps.step()
        if int(steps.state.draft.idle) == 0 and lag > SYNC_ROWS:
            assert int(steps.caches()["draft"].length) == known
            assert_draft_cache(steps)
            caught_up += 1
        longest = max(longest, idle)
    assert longest >= LONGEST_PATIENCE and caught_up >= 3
    assert_draft_cache(steps)


# The whole context


@pytest.mark.parametrize("case", [LLAMA_AUTO, LLAMA_AUTO_LONG], ids=case_id)
def test_the_last_token_of_the_context_can_be_decoded(case):
    """Down to the last slot of both caches, also by a draft that has to catch up there."""
    engine = engine_of(case)
    prompt = (LONG_PROMPT + PROMPT)[:90]
    room = engine.max_context - len(prompt)
    for draft, sampling in (("copy", "greedy"), ("first layer", "T=1"), ("random", "T=1"), ("constant", "greedy")):
        expected = tokens_of(plain(case.family, prompt, room, 1, **SAMPLINGS[sampling]))
        assert tokens_of(decode(case, prompt, room, draft, 1, **SAMPLINGS[sampling])) == expected
    prompt = (prompt * 5)[: engine.max_context - 1]
    assert tokens_of(decode(case, prompt, 1, "copy", 1)) == tokens_of(plain(case.family, prompt, 1, 1))


# Without a draft


def test_without_a_draft_it_is_prompt_lookup():
    """Round by round: what is drafted, accepted and written."""
    case = Case("llama", 1, "none", Auto(round_cost=0))
    for prompt, sampling in ((LONG_PROMPT, "greedy"), (PROMPT, "T=1"), (LONG_PROMPT, "cuts")):
        rounds = decode(case, prompt, 60, seed=3, **SAMPLINGS[sampling])
        assert rounds == decode(LLAMA_LOOKUP, prompt, 60, seed=3, **SAMPLINGS[sampling])
    assert any(emitted.drafted for emitted in rounds) and not any(emitted.draft_passes for emitted in rounds)


def test_without_a_draft_given_figures_count_too():
    """Rows that cost a thousand passes are never worth it."""
    case = Case("llama", 1, "none", Auto(batch=2, pass_cost=(1.0, 1000.0)))
    rounds = decode(case, [1, 2, 3] * 12, 30, logit_bias={1: 50.0, 2: 50.0, 3: 50.0})
    assert not any(emitted.drafted for emitted in rounds)


# Figures


def test_settings_that_make_no_sense():
    assert Auto().length == LONGEST_CHAIN and Auto(batch=5).length == 4
    assert Auto(pass_cost=[1, 1.5]).pass_cost == (1, 1.5)
    for settings, message in (
        ({"batch": 1}, "batch must be at least 2"),
        ({"batch": 4, "length": 4}, "length must be at most 3"),
        ({"length": 0}, "length"),
        ({"ngram": 0}, "ngram"),
        ({"candidates": 65}, "candidates"),
        ({"draft_cost": -0.1}, "draft_cost must be a time relative to a one-row pass, at least 0, got -0.1"),
        ({"draft_cost": True}, "draft_cost"),
        ({"round_cost": float("nan")}, "round_cost"),
        ({"pass_cost": (1, "2")}, "pass_cost"),
    ):
        with pytest.raises(ConfigError, match=message):
            Auto(**settings)


def test_explain_says_what_the_choices_rest_on():
    method = Auto(batch=4, draft_cost=0.125, pass_cost=(1.0, 1.25, 1.5, 2.0), round_cost=0.25)
    known = method.explain(models_of(LLAMA_AUTO))
    assert known == {"pass_cost": [1.0, 1.25, 1.5, 2.0], "round_cost": 0.25, "draft_cost": 0.125}
    assert json.loads(json.dumps(known)) == known
    assert method.explain(models_of(LLAMA_LOOKUP)) == {"pass_cost": [1.0, 1.25, 1.5, 2.0], "round_cost": 0.25}
    # Nothing given: built-in figures, and an estimate by the weights.
    models = models_of(LLAMA_AUTO)
    known = Auto().explain(models)
    np.testing.assert_allclose(known["pass_cost"], pass_costs(models.target, 16), atol=2e-3)
    assert known["draft_cost"] == pytest.approx(relative_draft_cost(*models), abs=1e-4)


@pytest.fixture
def shipped_figures(monkeypatch):
    """What would be shipped for a draft of this name; the calls are kept."""
    calls = []

    def figures(draft, kernels, blocks):
        calls.append((draft, kernels, blocks))
        return {"draft_cost": 0.02, "pass_cost": [1.0, 1.1, 1.3], "round_cost": 0.15} if draft == "known" else {}

    monkeypatch.setattr(llm_module, "tuned_settings", figures)
    return calls


def test_shipped_figures_fill_in_what_nobody_gave(shipped_figures):
    models = models_of(LLAMA_AUTO)
    method, source = _tune(Auto(ngram=5), "known", models)
    assert (method, source) == (Auto(ngram=5, draft_cost=0.02, pass_cost=(1.0, 1.1, 1.3), round_cost=0.15), "shipped")
    assert shipped_figures == [("known", models.target.plan.kernels, False)]
    # What was given besides stays.
    method, source = _tune(Auto(length=3), "known", models)
    assert (method.length, method.draft_cost, source) == (3, 0.02, "shipped")


ALL_GIVEN = {"draft_cost": 0.1, "pass_cost": (1.0, 1.2), "round_cost": 0.2}
SHIPPED = {"draft_cost": 0.02, "pass_cost": (1.0, 1.1, 1.3), "round_cost": 0.15}


@pytest.mark.parametrize("name", ALL_GIVEN)
def test_a_given_figure_drops_no_other_shipped_one(shipped_figures, name):
    given = {name: ALL_GIVEN[name]}
    assert _tune(Auto(**given), "known", models_of(LLAMA_AUTO)) == (Auto(**SHIPPED | given), "given, rest shipped")
    # A draft that somebody else made has no figures.
    assert _tune(Auto(**given), None, models_of(LLAMA_AUTO)) == (Auto(**given), "given, rest built in")
    assert _tune(Auto(**given), "unknown", models_of(LLAMA_AUTO)) == (Auto(**given), "given, rest built in")


def test_given_figures_are_the_callers(shipped_figures):
    assert _tune(Auto(**ALL_GIVEN), "known", models_of(LLAMA_AUTO)) == (Auto(**ALL_GIVEN), "given")
    # What a draft costs says nothing where there is none.
    two = {name: ALL_GIVEN[name] for name in ("pass_cost", "round_cost")}
    assert _tune(Auto(**two), None, models_of(LLAMA_LOOKUP)) == (Auto(**two), "given")
    one = Auto(draft_cost=0.1)
    assert _tune(one, None, models_of(LLAMA_LOOKUP)) == (one, "built in")
    assert shipped_figures == []


def test_without_shipped_figures_built_in_ones_hold(shipped_figures):
    assert _tune(Auto(), "unknown", models_of(LLAMA_AUTO)) == (Auto(), "built in")
    assert _tune(Auto(), None, models_of(LLAMA_LOOKUP)) == (Auto(), "built in")


def test_figures_are_read_by_draft_kernels_and_storage(tmp_path, monkeypatch):
    kernels = models_of(LLAMA_AUTO).target.plan.kernels
    (tmp_path / "costs").mkdir()
    table = ".".join(json.dumps(key) for key in (kernels.platform, kernels.name))
    (tmp_path / "costs" / "known.toml").write_text(
        f"[{table}.blocks]\ndraft_cost = 0.5\n[{table}.numbers]\npass_cost = [1, 1.5]\n"
    )
    monkeypatch.setattr(tuned.importlib.resources, "files", lambda package: tmp_path)
    assert tuned.tuned_settings("known", kernels, True) == {"draft_cost": 0.5}
    assert tuned.tuned_settings("known", kernels, False) == {"pass_cost": [1, 1.5]}
    assert tuned.tuned_settings("unknown", kernels, False) == {}
    other = dataclasses.replace(kernels, platform="elsewhere")
    assert tuned.tuned_settings("known", other, False) == {}


@pytest.mark.parametrize("blocks", [False, True])
def test_the_figures_of_the_shipped_draft_are_found_and_make_sense(blocks):
    kernels = dataclasses.replace(models_of(LLAMA_AUTO).target.plan.kernels, platform="cpu", name="cpu")
    figures = tuned.tuned_settings("smollm2-135m", kernels, blocks)
    assert sorted(figures) == sorted(tuned.COST_SETTINGS)
    assert len(Auto(**figures).pass_cost) == Auto().batch
