"""Feature drafts: the invariants of every draft, and what is kept between rounds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import fast_part, quick_part
from method_cases import (
    LONG_PROMPT,
    PROMPT,
    SAMPLINGS,
    Case,
    Steps,
    Untimed,
    case_id,
    check_counts,
    decode,
    engine_of,
    logprobs_of,
    models_of,
    params_of,
    plain,
    run,
    tokens_of,
)
from test_draft_cache import assert_prefix
from test_exact import exact_samplings
from test_prefix_reuse import answer
from tiny_models import FAMILIES, on_one_device
from tiny_pairs import FLOAT32, VOCAB, EditedSource, count_on, counting, draft_config, target_params

from jaxspec.check.distribution import Draw, check_distribution
from jaxspec.check.reference_decoder import ReferenceDecoder
from jaxspec.checkpoint.load import load_foreign
from jaxspec.checkpoint.shared_weights import share_embedding
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.errors import ConfigError
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.models.feature_draft import forward_draft, fuse
from jaxspec.models.features import FeatureConfig
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.quantization import Storage
from jaxspec.models.transformer import prefill_with_states, vocab_logits
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement, SharedEmbedding

FED_CHAIN = Case("llama", 1, "fed", Chain(4))
FED_SPECEXEC = Case("llama", 1, "fed", SpecExec(12, width=3))
FED_SPECINFER = Case("llama", 1, "fed", SpecInfer((2, 2, 1)))
FED_AUTO = Case("llama", 1, "fed", Auto(draft_cost=1e-3))
FED_ASSISTANT = Case("gemma4", 1, "fed assistant", Auto(draft_cost=1e-3))
FED_ADDED = Case("llama", 1, "fed added", SpecExec(10, width=2))
FED_TP4 = Case("llama", 4, "fed", SpecExec(9, width=2))
BLOCKS = [
    Case("llama", 1, "fed block", SpecExec(9, branch=4)),
    Case("llama", 2, "fed block", Chain(4)),
    Case("qwen3", 1, "fed block", Chain(3, min_probability=0.05)),
    Case("llama", 2, "fed block own", SpecExec(6, branch=3)),
    Case("llama", 1, "fed block", Auto(draft_cost=1e-3)),
    Case("llama", 1, "fed dspark", SpecExec(9, branch=4)),
    Case("llama", 4, "fed dspark", Auto(draft_cost=1e-3)),
    Case("llama", 2, "fed dspark", Chain(7)),
    Case("llama", 1, "fed block", Chain(3, "rejection")),
    Case("llama", 2, "fed dspark", Chain(5, "rejection")),
    Case("qwen3", 1, "fed dspark", SpecInfer((2, 2))),
    Case("llama", 1, "fed dflash2", SpecExec(9, branch=3)),
    Case("llama", 4, "fed dflash2", Chain(4)),
    Case("mistral", 1, "fed dflash2", Auto(draft_cost=1e-3)),
]
PARALLEL = [
    Case("llama", 1, "fed parallel", SpecExec(9, branch=3)),
    Case("llama", 4, "fed parallel", Chain(6)),
    Case("llama", 1, "fed parallel", Auto(draft_cost=1e-3)),
    Case("llama", 2, "fed parallel", Chain(3, "rejection")),
]
MTP = [
    Case("qwen3.5", 1, "fed mtp", SpecExec(12, width=3)),
    Case("qwen3.5", 2, "fed mtp", Chain(4)),
    Case("qwen3.5", 1, "fed mtp", Auto(draft_cost=1e-3)),
    Case("qwen3.5", 2, "fed mtp", SpecInfer((2, 2, 1))),
    Case("qwen3.5", 1, "fed mtp", Chain(3, "rejection")),
]
ASSISTANTS = [
    Case("gemma4", 1, "fed assistant", SpecExec(12, width=3)),
    Case("gemma4-two", 2, "fed assistant", Chain(4)),
    Case("gemma4-two", 2, "fed assistant", Auto(draft_cost=1e-3)),
    FED_ASSISTANT,
    Case("gemma4-large-two", 2, "fed assistant", Chain(4)),
    Case("gemma4", 3, "fed assistant", SpecInfer((2, 2, 1))),
    Case("gemma4", 1, "fed assistant", Chain(3, "rejection")),
]
FAST = [
    FED_CHAIN,
    FED_SPECINFER,
    FED_AUTO,
    FED_ADDED,
    FED_TP4,
    BLOCKS[0],
    BLOCKS[4],
    BLOCKS[5],
    PARALLEL[0],
    MTP[1],
    ASSISTANTS[1],
]
QUICK = (FED_CHAIN, BLOCKS[0])
CASES = [
    *FAST,
    FED_SPECEXEC,
    Case("qwen2", 1, "fed own", SpecExec(7, width=2)),
    Case("qwen3", 4, "fed own", Chain(3, min_probability=0.05)),
    Case("llama-tied", 1, "fed eagle1", SpecExec(8, width=2)),
    Case("llama", 4, "fed", SpecInfer((3, 1, 2), replacement=False)),
    Case("mistral", 4, "fed eagle1", Auto(draft_cost=1e-3)),
    Case("llama", 1, "fed", Chain(3, "rejection")),
    Case("llama", 4, "fed added", Auto(draft_cost=1e-3)),
    Case("qwen3", 1, "fed added", SpecInfer((2, 2))),
    Case("mistral", 1, "fed added", Chain(3)),
    Case("gemma2", 1, "fed", Chain(2)),
    *(case for case in (*BLOCKS, *PARALLEL, *MTP, *ASSISTANTS) if case not in FAST),
]
PARTS = quick_part(fast_part(CASES, lambda case: case in FAST), lambda case: case in QUICK)
LAW = {"temperature": 2.5, "presence_penalty": 0.4}
KINDS = ("copy", "random", "adversarial", "constant", "broken")


@pytest.mark.parametrize("case", PARTS, ids=case_id)
def test_tokens_are_those_of_plain_decoding(case):
    samplings = exact_samplings(case)
    for index, draft in enumerate(KINDS):
        for sampling in {samplings[0], samplings[1 % len(samplings)], samplings[index % len(samplings)]}:
            prompt = (PROMPT, LONG_PROMPT, PROMPT[:1], PROMPT[:2])[index % 4]
            rounds = decode(case, prompt, 20, draft, index, **SAMPLINGS[sampling])
            expected = plain(case.family, prompt, 20, index, **SAMPLINGS[sampling])
            assert tokens_of(rounds) == tokens_of(expected), (draft, sampling)
            np.testing.assert_allclose(logprobs_of(rounds), logprobs_of(expected), atol=1e-3)
            check_counts(case, rounds)


def spoil_unread(state):
    """The same state with other numbers in hidden states that belong to no verified token, as earlier rounds leave."""
    verified = state.verified
    own = np.arange(len(verified.tokens))[:, None] < int(verified.count)
    states = np.where(own, np.asarray(verified.states), np.float32(1e4))
    states = jax.device_put(states, verified.states.sharding)
    return dataclasses.replace(state, verified=dataclasses.replace(verified, states=states))


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("case", PARTS, ids=case_id)
def test_caches_and_states_equal_a_fresh_prefill_of_the_verified_text(case, sampling):
    for index, draft in enumerate(("copy", "random", "adversarial")):
        prompt = (PROMPT, LONG_PROMPT, PROMPT[:1])[index]
        steps = Steps(case, draft, prompt, index, **SAMPLINGS[sampling])
        for number in range(8):
            steps.step(room=4 if number % 2 else 1)
            known = len(steps.text) - len(steps.output.tokens)
            steps.state = spoil_unread(steps.state)
        known = len(steps.text) if steps.take_states() else known
        caches, fresh = steps.caches(), steps.prefilled(steps.text)
        sequence, is_block = steps.state.draft.sequence, case in (*BLOCKS, *ASSISTANTS)
        assert int(sequence.seen) == known and int(caches["draft"].length) == max(known - 2 + is_block, 0)
        assert_prefix(caches["target"], fresh.target.cache, len(steps.text) - 1)
        # The root's row lies after the prefix, with true states, too, unless it is that of the text's last token.
        rows = min(known, len(steps.text) - 1) - 1
        lengthened = dataclasses.replace(caches["draft"], length=rows)
        assert_prefix(lengthened, fresh.draft.sequence.cache, rows)
        # The states of the last verified token's row, which the next root takes.
        verified, count = steps.state.verified, int(steps.state.verified.count)
        np.testing.assert_allclose(
            np.asarray(verified.states)[count - 1], np.asarray(fresh.verified.states)[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("case", quick_part(FAST, lambda case: case in QUICK), ids=case_id)
def test_a_conversation_gives_the_bits_of_cold_runs(case, monkeypatch):
    """The last kept token of a prompt runs again: its hidden states were not kept."""
    engine, params, prompt = engine_of(case), params_of(case, "copy"), list(PROMPT)
    sampling = {"temperature": 1.0} if case.method.exact == "tokens" else {}
    monkeypatch.setattr("jaxspec.engine.CPU_PIECE", 9)
    for turn in range(2):
        monkeypatch.setattr(engine, "session_memory", 0)
        cold, cached = answer(engine, params, prompt, 12, turn, **sampling)
        assert cached == 0
        monkeypatch.setattr(engine, "session_memory", None)
        answer(engine, params, prompt[:-3], 5, turn)
        warm, cached = answer(engine, params, prompt, 12, turn, **sampling)
        assert len(prompt) - 12 <= cached < len(prompt) - 1
        assert tokens_of(warm) == tokens_of(cold)
        np.testing.assert_array_equal(logprobs_of(warm), logprobs_of(cold))
        monkeypatch.setattr(engine, "session_memory", 0)
        assert tokens_of(answer(engine, params, prompt, 12, turn, True, **sampling)[0]) == tokens_of(cold)
        if not isinstance(case.method, Auto):  # which carries what it learned of a draft over to the next text
            # The draft proposed the same, too.
            assert [one.accepted for one in warm] == [one.accepted for one in cold]
        prompt += [*tokens_of(warm), *PROMPT[turn : turn + 4]]


@pytest.mark.parametrize("geometry", ["fed block", "fed dspark", "fed parallel"])
def test_methods_that_cannot_fill_blocks_say_what_can(geometry):
    with pytest.raises(ConfigError, match="one pass: use 'auto'"):
        SwiftSpec().check(models_of(Case("llama", 1, geometry, SwiftSpec())))
    with pytest.raises(ConfigError, match="7 levels, the draft fills [45] places"):
        SpecInfer((1,) * 7).check(models_of(Case("llama", 1, geometry, SpecInfer((1,) * 7))))


@pytest.mark.thorough
@pytest.mark.parametrize("case", [BLOCKS[9], pytest.param(PARALLEL[3], marks=pytest.mark.slow)], ids=case_id)
def test_the_law_of_rejection_is_that_of_the_target(case):
    """q is a place's own law, or its row of the transitions, with penalties of the tokens drawn before it."""
    target = Placement(FAMILIES["llama"], plan_mesh(1), FLOAT32)
    reference = ReferenceDecoder(target, target_params("llama"))
    sampling = SamplingParams(4, **LAW)

    @functools.cache
    def scores(text):
        row = list(reference.rows(text[: len(PROMPT)], text[len(PROMPT) :], sampling))[-1]
        return row.log_probs

    draws = []
    for seed in range(500):
        rounds = run(engine_of(case), params_of(case, "random"), PROMPT, 4, 1000 + seed, **LAW)
        draws.append(Draw(tuple(tokens_of(rounds)), rounds[0].accepted))
    result = check_distribution(scores, PROMPT, draws)
    assert result.verdict == "equal" and result.after, result


def good_params(wrong=(), heeds=0.0):
    """A target that counts, but after `wrong` tokens, and a draft that counts always.

    Its attention sees the row alone and copies the embedding. `heeds` says how much of the states joins it.
    """
    target = counting(wrong)
    config = dataclasses.replace(
        draft_config("llama", "fed"), num_heads=6, num_kv_heads=6, head_dim=8, sliding_window=1, head_ids=(),
        features=FeatureConfig(48, (1, 1, 2), norm_before_residual=True),
    )  # fmt: skip

    def edit(tensors):
        layer = "model.layers.0"
        identity = np.eye(48, dtype=np.float32)
        tensors[f"{layer}.self_attn.v_proj.weight"] = np.concatenate([identity, 0 * identity], axis=1)
        tensors[f"{layer}.self_attn.o_proj.weight"] = identity
        tensors[f"{layer}.mlp.down_proj.weight"] *= 0
        tensors[f"{layer}.hidden_norm.weight"] = np.full(48, heeds, np.float32)
        tensors[f"{layer}.input_layernorm.weight"] = np.ones(48, np.float32)
        tensors["model.norm.weight"] = np.full(48, 5, np.float32)
        embed = np.asarray(target["embed"])[:VOCAB]
        tensors["lm_head.weight"] = np.empty_like(embed)
        tensors["lm_head.weight"][(np.arange(VOCAB) + 1) % VOCAB] = embed

    own = load_foreign(EditedSource(config, 0, edit), plan_mesh(1), FLOAT32)
    shared = SharedEmbedding(FAMILIES["llama"], Storage("float32"))
    placement = Placement(config, plan_mesh(1), FLOAT32, shared_embedding=shared)
    return placement, ModelParams(target, own | share_embedding(placement, target))


@pytest.mark.thorough
@pytest.mark.parametrize("method", [Chain(4), SpecInfer((1, 1, 1, 1))], ids=lambda method: method.name)
def test_a_good_draft_is_always_accepted(method):
    placement, params = good_params()
    engine = Engine(Models(Placement(FAMILIES["llama"], plan_mesh(1), FLOAT32), placement), method, 150)
    engine.prepare()
    for prompt in ([5, 6, 7], [42]):
        rounds = run(engine, params, prompt, 40)
        assert tokens_of(rounds) == count_on(prompt[-1], 40)
        # The root of a text of one token has no state before it: what follows it may be missed.
        assert [one.accepted for one in rounds[1:]] == [4] * (len(rounds) - 1)


def good_block():
    """A target that counts, and a DSpark head that counts too: by its correction of the token before."""
    target, rng = counting(), np.random.default_rng(3)
    config = draft_config("llama", "fed dspark")
    features = dataclasses.replace(config.features, markov_rank=48, markov_gated=False)
    config = dataclasses.replace(config, head_ids=(), features=features)

    def edit(tensors):
        codes = rng.normal(size=(VOCAB, 48)).astype(np.float32)
        tensors["lm_head.weight"] *= 0
        tensors["markov_head.markov_w1.weight"] = codes
        tensors["markov_head.markov_w2.weight"] = np.roll(codes, 1, axis=0)

    own = load_foreign(EditedSource(config, 0, edit), plan_mesh(1), FLOAT32)
    return Placement(config, plan_mesh(1), FLOAT32), ModelParams(target, own)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    fast_part([Chain(9), SpecExec(12, branch=2), Auto(draft_cost=0.01)], lambda method: method.name == "auto"),
    ids=lambda method: method.name,
)
def test_a_good_block_is_always_accepted(method, monkeypatch):
    monkeypatch.setattr("jaxspec.methods.auto.settings.RoundTimer", Untimed)
    placement, params = good_block()
    engine = Engine(Models(Placement(FAMILIES["llama"], plan_mesh(1), FLOAT32), placement), method, 250)
    engine.prepare()
    for prompt in ([5, 6, 7], [42]):
        rounds = run(engine, params, prompt, 90)
        assert tokens_of(rounds) == count_on(prompt[-1], 90)
        # Every place of every block, as soon as `auto` knows that it pays.
        assert [one.accepted for one in rounds[-6:-1]] == [5] * 5
        assert {one.draft_passes for one in rounds[-6:]} == {1}


@pytest.mark.thorough
def test_what_a_draft_is_fed_is_what_the_reference_is_fed():
    """Rounds of a chain against the draft run by hand over the whole text, with the states of a pass of the target."""
    case = Case("llama", 1, "fed", Chain(4))
    cfg, target_cfg = draft_config("llama", "fed"), FAMILIES["llama"]
    params = params_of(case, "copy")
    steps = Steps(case, "copy", LONG_PROMPT)
    size = 128

    @on_one_device
    def logits_of(target, draft, token, count, drafted, num_drafted):
        """Logits of the draft's head after `num_drafted` tokens of its own."""
        cache = init_cache(target_cfg, target_cfg.num_kv_heads, size, FLOAT32)
        _, states = prefill_with_states(target, target_cfg, token, count, cache, cfg.features.layers)
        # Row t joins token t + 1 to the state of token t; drafted ones take the own state of the row before.
        fed = fuse(draft, cfg, states)
        text = jnp.concatenate([token[1:], jnp.zeros(1, jnp.int32)])
        position, mask = jnp.arange(size), jnp.tril(jnp.ones((size, size), bool))
        for index in range(5):
            empty = init_cache(cfg, cfg.num_kv_heads, 2 * size, FLOAT32)
            hidden, own, _ = forward_draft(draft, cfg, text, fed, position, empty, mask)
            text = text.at[count - 1 + index].set(drafted[index])
            fed = fed.at[count - 1 + index].set(own[count - 2 + index])
        last = jax.lax.dynamic_slice_in_dim(hidden, count - 2 + num_drafted, 1)
        return vocab_logits(draft, cfg, last)[0]

    ids = np.array(cfg.head_ids)
    for _ in range(4):
        text = list(steps.text)
        token = np.zeros(size, np.int32)
        token[: len(text)] = text
        drafted: list[int] = []
        for count in range(4):
            padded = np.array([*drafted, *[0] * (5 - len(drafted))], np.int32)
            logits = logits_of(params.target, params.draft, token, np.int32(len(text)), padded, np.int32(count))
            drafted.append(int(ids[np.argmax(np.asarray(logits)[: len(ids)])]))
        steps.step()
        assert np.asarray(steps.state.draft.tree.child_token)[:4, 0].tolist() == drafted
