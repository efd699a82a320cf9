"""Training drafts that are fed states: what is trained is what decodes, and the tool from text to draft."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import typer

pytest.importorskip("optax")

import distil_draft
import jax
import jax.numpy as jnp
from distil_cases import PREFIX, SAMPLE, assert_same, curve_of, make_conversations, refuse, settings_of, succeed
from native_models import LLAMA
from tiny_models import FAMILIES, empty_cache, init_params, on_one_device, relative_error
from train import kinds
from train.batches import Packer
from train.eagle import (
    STATE_SCALE,
    STEP_WEIGHT,
    fed_config,
    head_config,
    head_loss,
    init_fed,
    init_head,
    scale_states,
    step_logprobs,
    unroll,
)
from train.export import begin_with_native, save_draft
from train.shards import read_shard
from train.states import KeptStates, StateFolder, TargetStates
from train.train import restore_params

from jaxspec import LLM, SamplingParams
from jaxspec.checkpoint.load import open_weights
from jaxspec.files import vocabulary_digest
from jaxspec.llm import internals
from jaxspec.models.feature_draft import forward_draft, fuse, prefill_draft
from jaxspec.models.transformer import forward_with_states
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement

HEAD = np.arange(6, 46, 2, dtype=np.int32)
STATES = (0, 1, 2)
LENGTH, STEPS = 32, 3
CFG = head_config(LLAMA, STATES, HEAD.tolist())
ADDED = fed_config(LLAMA, (0, 1), STATES, HEAD.tolist())
PACKER = Packer(PREFIX, LENGTH, HEAD, LLAMA.vocab_size)
EXACT = 3e-5  # float32, other orders of summation


@functools.cache
def target():
    return init_params(jax.random.key(0), LLAMA, scale=0.2)


@functools.cache
def draft_weights(cfg=CFG):
    """A draft's weights, far from where training begins."""
    params = init_head(target(), cfg) if cfg == CFG else init_fed(target(), cfg, (0, 1))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


@functools.cache
def batch():
    """Two rows of two conversations each, and random states of them."""
    conversations = make_conversations([9, 11, 14, 6], vocab=LLAMA.vocab_size)
    rows = PACKER.pack([conversations[:2], conversations[2:]])
    states = jax.random.normal(jax.random.key(2), (*rows.token.shape, len(STATES) * LLAMA.embed_dim))
    return rows, states.astype(jnp.bfloat16)


@functools.cache
def unrolled(cfg):
    rows, states = batch()
    run = jax.jit(lambda params, embed: list(unroll(params, cfg, embed, states, rows, STEPS)))
    return run(draft_weights(cfg), target()["embed"])


@pytest.mark.parametrize("cfg", [CFG, ADDED], ids=lambda cfg: cfg.features.kind)
def test_every_step_is_what_a_chain_computes(cfg):
    """From each row of each conversation: verified rows are committed, and the chain goes on from its own state."""
    rows, states = batch()

    def chain(params, token, states, count):
        own = fuse(params, cfg, states.astype(jnp.float32))
        cache = prefill_draft(params, cfg, token[1:], own[:-1], count, empty_cache(cfg, 2 * LENGTH))
        state, outputs = own[count][None], []
        for step in range(STEPS):
            # The chain's rows are committed one after the other.
            following = jax.lax.dynamic_slice_in_dim(token, count + 1 + step, 1)
            mask = jnp.ones((1, 1), bool)
            position = (count + step)[None]
            hidden, state, cache = forward_draft(params, cfg, following, state, position, cache, mask)
            cache = dataclasses.replace(cache, length=cache.length + 1)
            outputs.append(hidden[0])
        return jnp.stack(outputs)

    run = on_one_device(chain)
    params = draft_weights(cfg) | {"embed": target()["embed"]}
    compared = 0
    for r in range(len(rows.token)):
        for number in range(int(rows.segment[r].max()) + 1):
            places = np.flatnonzero(rows.segment[r] == number)
            token, own = np.zeros(LENGTH, np.int32), np.zeros((LENGTH, states.shape[2]), np.float32)
            token[: len(places)], own[: len(places)] = rows.token[r, places], np.asarray(states[r, places])
            for i in range(0, len(places) - 1 - STEPS, 3):
                expected = run(params, token, jnp.asarray(own, jnp.bfloat16), np.int32(i))
                found = np.stack([np.asarray(unrolled(cfg)[k][r, places[i]]) for k in range(STEPS)])
                assert relative_error(found, expected) < EXACT
                compared += 1
    assert compared > 10


def test_loss_against_one_row_at_a_time():
    """Soft cross-entropy over the head's tokens, less the teacher's entropy; nothing where its choice is outside."""
    rows, states = batch()
    embed, weight = target()["embed"], target()["embed"][HEAD]
    found = jax.jit(functools.partial(head_loss, cfg=CFG, steps=STEPS))(
        draft_weights(), embed=embed, head=weight, states=states, rows=rows
    )
    logprobs = [np.asarray(x) for x in step_logprobs(draft_weights(), CFG, embed, weight, states, rows, STEPS)]
    total = counted = 0.0
    learned = left_out = 0
    for k in range(STEPS):
        loss = weights = 0.0
        for r in range(len(rows.token)):
            for i in range(LENGTH - 1 - k):
                at = i + 1 + k
                if rows.segment[r, at] < 0 or rows.segment[r, at] != rows.segment[r, i] or not rows.weight[r, at]:
                    continue
                column = rows.teacher_column[r, at]
                inside = column < len(HEAD)
                if not inside[0]:
                    left_out += 1
                    continue
                teacher = np.exp(rows.teacher_logprob[r, at][inside])
                teacher /= teacher.sum()
                loss += rows.weight[r, at] * (teacher * (np.log(teacher) - logprobs[k][r, i, column[inside]])).sum()
                weights += rows.weight[r, at]
                learned += 1
        total += STEP_WEIGHT**k * loss / weights
        counted += STEP_WEIGHT**k
    assert learned > 20 and left_out > 20
    assert float(found) == pytest.approx(total / counted, abs=1e-5)


def test_a_head_begins_with_the_last_layer():
    family = "qwen3"
    cfg = head_config(FAMILIES[family], (0, 1, 2), range(5))
    params = init_head(init_params(jax.random.key(1), FAMILIES[family], scale=0.2), cfg)
    last = init_params(jax.random.key(1), FAMILIES[family], scale=0.2)["layers"][-1]
    [layer] = params["layers"]
    assert "head" not in params and "embed" not in params
    D = cfg.embed_dim
    np.testing.assert_array_equal(layer["qkv"][..., D:], last["qkv"])
    np.testing.assert_array_equal(layer["gate_up"], last["gate_up"])
    np.testing.assert_array_equal(params["fc"][:, -D:], np.eye(D))


@functools.cache
def computed_states(folder):
    llm = LLM(folder, method="ar", dtype="float32")
    return llm, TargetStates(llm, STATES, LENGTH)


def test_states_are_those_of_each_text_alone(chat_model):
    llm, source = computed_states(chat_model)
    rows, _ = batch()
    found = np.asarray(source(rows), np.float32)

    def alone(params, token):
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        cache = empty_cache(LLAMA, LENGTH)
        return forward_with_states(params, LLAMA, token, jnp.arange(LENGTH), cache, mask, STATES)[2]

    run = on_one_device(alone)
    for r in range(len(rows.token)):
        for number in range(int(rows.segment[r].max()) + 1):
            places = np.flatnonzero(rows.segment[r] == number)
            token = np.zeros(LENGTH, np.int32)
            token[: len(places)] = rows.token[r, places]
            expected = np.asarray(run(internals(llm).params.target, token))[: len(places)]
            assert relative_error(found[r, places], expected) < 1e-2  # bfloat16


def test_kept_states_outlive_a_killed_run(chat_model, tmp_path):
    """It left half a line, and states that no line names."""
    _, source = computed_states(chat_model)
    rows, _ = batch()
    expected = np.asarray(source(rows), np.float32) * (rows.segment >= 0)[..., None]
    KeptStates(source, tmp_path / "states")(rows)
    index = tmp_path / "states" / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:-1]) + lines[-1][:9])
    again = KeptStates(source, tmp_path / "states")
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(again(rows), np.float32), expected)
    with pytest.raises(ValueError, match="holds other states .layers."):
        KeptStates(TargetStates(computed_states(chat_model)[0], (0, 1), LENGTH), tmp_path / "states")


# The command line, from end to end.

TRAIN = "--kind eagle3 --head 24 --steps 6 --rows 2 --length 40 --unroll 2 --save-every 2 --measure-every 3".split()
TRAIN += ["--dtype", "float32", "--learning-rate", "5e-3"]


@pytest.fixture(scope="module")
def finished(command, data, tmp_path_factory):
    """Sampled conversations and a run, side by side."""
    folder = tmp_path_factory.mktemp("eagle")
    shutil.copytree(data, folder / "data")
    succeed(command("train", folder / "data", folder / "run", *TRAIN))
    return folder


def newest(run):
    settings = settings_of(run)
    if settings["kind"] == "added":
        cfg = fed_config(LLAMA, settings["layers"], settings["states"], settings["head_ids"])
        start = init_fed(target(), cfg, settings["layers"])
    else:
        cfg = head_config(LLAMA, settings["states"], settings["head_ids"])
        start = init_head(target(), cfg)
    if settings["learn_head"]:
        start |= {"head": jnp.zeros((len(cfg.head_ids), cfg.embed_dim))}
    return cfg, restore_params(start, distil_draft.as_settings(settings), run / "checkpoints")


def test_a_stopped_run_goes_on(command, finished, tmp_path, monkeypatch):
    """And with states that are kept it ends with the same weights."""
    run, measure = tmp_path / "run", kinds.measure_head
    words = [finished / "data", run, *TRAIN, "--keep-states", tmp_path / "states"]
    with monkeypatch.context() as patch:
        looks = iter([measure, measure])  # at the third, after step 6, it is killed
        patch.setattr("train.kinds.measure_head", lambda *words: next(looks)(*words))
        assert command("train", *words).exit_code == 1
    succeed(command("train", *words))
    assert_same(newest(run)[1], newest(finished / "run")[1])
    assert curve_of(run) == curve_of(finished / "run") and [entry["step"] for entry in curve_of(run)] == [0, 3, 6]
    for changed in (("--unroll", 3), ("--learn-head",), ("--states", "0")):
        refuse(command("train", *words, *changed), changed[0].strip("-").replace("-", "_"))


@pytest.mark.slow
def test_a_trained_head_loads(command, finished, tmp_path):
    """As the folder of an EAGLE-3 draft, with the weights that training left."""
    run = tmp_path / "run"
    succeed(command("train", finished / "data", run, *TRAIN, "--learn-head", "--steps", 2, "--measure-every", 2))
    assert "MB" in succeed(command("export", run, tmp_path / "draft"))
    opened = open_weights(tmp_path / "draft")
    cfg, params = newest(run)
    assert opened.config == cfg
    loaded = opened.load(Placement(opened.config, plan_mesh(1), np.dtype("float32")))
    assert_same({name: loaded[name] for name in params}, params)
    refuse(command("export", run, tmp_path / "draft"), "exists already")
    refuse(command("export", run, tmp_path / "other", "--quantize", "q8_0"), "jaxspec-convert")
    assert not (tmp_path / "other").exists()


def test_sizes_of_states():
    """Each number of a state comes out alike, however large it is beside the others."""
    rows, states = batch()
    size = jnp.logspace(-1, 2, states.shape[2])
    norms = np.asarray(scale_states(ADDED, states * size, rows))
    parts = np.asarray(states * size, np.float64)[rows.segment >= 0].reshape(-1, len(STATES), LLAMA.embed_dim)
    normed = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + ADDED.norm_eps) * norms
    np.testing.assert_allclose(np.sqrt((normed**2).mean(0)), STATE_SCALE, rtol=1e-2)


ADD = "--kind added --layers 0,1 --states 0,1,2 --head 24 --steps 4 --rows 2 --length 40 --unroll 2".split()
ADD += "--measure-every 4 --dtype float32 --learning-rate 1e-3".split()


@pytest.fixture(scope="module")
def added(command, finished, chat_llm):
    """Conversations with their states, an ordinary draft, and a run that begins with it, beside the others."""
    succeed(command("sample", finished / "fed", *SAMPLE, "--states", "0,1,2"))
    params = {"final_norm": 1.1 * target()["final_norm"], "layers": target()["layers"]}
    cfg = dataclasses.replace(LLAMA, shares_embedding=True, head_ids=tuple(HEAD.tolist()))
    save_draft(finished / "base", params, cfg, vocabulary_digest(chat_llm.tokenizer.token_strings()))
    succeed(command("train", finished / "fed", finished / "added", *ADD, "--begin-with", finished / "base"))
    return finished


def test_sampled_states_are_the_computed_ones(added, chat_model):
    """And the conversations are those that are sampled without them."""
    _, source = computed_states(chat_model)
    shard, other = (read_shard(added / name / "shard-00000.npz") for name in ("fed", "data"))
    assert [c.token.tolist() for c in shard] == [c.token.tolist() for c in other]
    kept = StateFolder(added / "fed" / "states", source.made_of)
    short = [c for c in shard if PACKER.tokens(c) <= LENGTH][:12]
    assert len(short) == 12
    for c in short:
        rows = PACKER.pack([[c]])
        text = rows.token[0][rows.segment[0] == 0]
        assert kept.has(text)
        computed = np.asarray(source(rows), np.float32)[0, : len(text)]
        assert relative_error(kept.read(text, source.width).astype(np.float32), computed) < 2e-2  # bfloat16


def test_shards_without_their_states_are_refused(command, added):
    refuse(command("sample", added / "data", *SAMPLE, "--states", "0,1,2"), "without its states")
    refuse(command("sample", added / "fed", *SAMPLE, "--states", "0,1"), "holds other states")
    succeed(command("sample", added / "fed", *SAMPLE, "--states", "0,1,2"))


def test_states_that_were_sampled_are_not_computed(command, added, tmp_path, monkeypatch):
    def refuse(*words):
        raise AssertionError("computed")

    with monkeypatch.context() as patch:
        patch.setattr(TargetStates, "__call__", refuse)
        succeed(command("train", added / "fed", tmp_path / "run", *ADD, "--begin-with", added / "base"))
        assert_same(newest(tmp_path / "run")[1], newest(added / "added")[1])
        other = [word if word != "0,1,2" else "0,2" for word in ADD]
        result = command("train", added / "fed", tmp_path / "other", *other, "--begin-with", added / "base")
    assert isinstance(result.exception, AssertionError) and "holds states of layers 0,1,2" in result.output


def test_a_trained_draft_that_is_fed_states_loads(command, added, chat_model, chat_llm, tmp_path):
    """In native format, with the weights that training left, which differ from those it began with."""
    assert "MB" in succeed(command("export", added / "added", tmp_path / "draft"))
    opened = open_weights(tmp_path / "draft")
    cfg, params = newest(added / "added")
    cfg = dataclasses.replace(cfg, sliding_window=settings_of(added / "added")["length"])
    assert opened.config == cfg and cfg.features.kind == "added"
    assert_same(opened.load(Placement(cfg, plan_mesh(1), np.dtype("float32"))), params)
    assert all(np.abs(np.asarray(params[name])).max() > 0 for name in ("fc", "fc_own"))
    prompt, sampling = [0, 10, 11, 1, 20, 2, 3], SamplingParams(max_tokens=12)
    drafted = LLM(chat_model, draft=tmp_path / "draft", method="chain", dtype="float32")
    assert drafted.generate(prompt, sampling).token_ids == chat_llm.generate(prompt, sampling).token_ids
    succeed(command("sample", tmp_path / "fresh", *SAMPLE[:-3], 3, *SAMPLE[-2:]))
    found = [
        json.loads(succeed(command("measure", path, tmp_path / "fresh")))
        for path in (added / "added", tmp_path / "draft")
    ]
    assert found[0] == found[1] and found[0]["positions"] > 0
    assert json.loads(succeed(command("measure", added / "base", tmp_path / "fresh"))) != found[0]


def test_native_bases(command, added, chat_llm, tmp_path):
    """An ordinary draft gives its layers, one that is fed states all that it has."""
    digest = vocabulary_digest(chat_llm.tokenizer.token_strings())
    begun = init_fed(target(), ADDED, (0, 1))
    taken, is_fed = begin_with_native(begun, ADDED, added / "base", digest)
    assert not is_fed
    assert_same(taken, begun | {"final_norm": 1.1 * target()["final_norm"]})
    succeed(command("export", added / "added", tmp_path / "draft"))
    cfg, trained = newest(added / "added")
    taken, is_fed = begin_with_native(begun, cfg, tmp_path / "draft", digest)
    assert is_fed
    assert_same(taken, trained)
    with pytest.raises(typer.BadParameter, match="another target"):
        begin_with_native(begun, ADDED, added / "base", "0")
    others = dataclasses.replace(cfg, features=dataclasses.replace(cfg.features, layers=(0, 2, 1)))
    with pytest.raises(typer.BadParameter, match="is fed other states"):
        begin_with_native(begun, others, tmp_path / "draft", digest)


def test_bases_that_do_not_fit_are_refused(command, added, tmp_path):
    words = ["train", added / "fed", tmp_path / "run", *ADD]
    refuse(command(*words, "--layers", "1", "--begin-with", added / "base"), "has 2 layers")
    shutil.copytree(added / "base", tmp_path / "damaged")
    (tmp_path / "damaged" / "jaxspec.json").write_text("{")
    refuse(command(*words, "--begin-with", tmp_path / "damaged"), "jaxspec.json")
    refuse(command(*words, "--begin-with", added / "run"), "is of --kind eagle3")
    refuse(command(*words, "--states", "0", "--begin-with", added / "added"), "--states")


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (("--unroll", 3), "are for --kind eagle3, added and block"),
        (("--states", "1"), "are for --kind eagle3, added and block"),
        (("--keep-states", "states"), "are for --kind eagle3, added and block"),
        (("--learn-head",), "is for --kind eagle3"),
        (("--kind", "added", "--learn-head"), "is for --kind eagle3"),
        (("--kind", "eagle3", "--layers", "1"), "has no layers of the target"),
    ],
)
def test_options_of_another_kind_are_refused(command, tmp_path, option, problem):
    refuse(command("train", tmp_path / "data", tmp_path / "run", *option), problem)


def test_states_that_the_target_lacks_are_refused(command, finished, tmp_path):
    words = "train", finished / "data", tmp_path / "run", *TRAIN
    refuse(command(*words, "--states", "0,3"), "from 0 to 2")
    refuse(command(*words, "--target-dtype", "int8"), "must be float32 or bfloat16")
    refuse(command("sample", tmp_path / "data", *SAMPLE, "--states", "3"), "from 0 to 2")
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()
