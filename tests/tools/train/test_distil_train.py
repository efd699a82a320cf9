"""Training, what it reaches, and the tool from sampled text to a draft that decodes."""

import dataclasses
import functools
import json
import math
import shutil

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
from distil_cases import (
    PREFIX,
    SAMPLE,
    K,
    assert_same,
    make_conversation,
    refuse,
    settings_of,
    succeed,
    write_chat_tokenizer,
)
from native_models import LLAMA, write_native
from tiny_models import init_params
from train.batches import CONTEXT_WEIGHT, Packer
from train.shards import Conversation, shard_path, write_meta, write_shard
from train.student import init_student, student_config, student_hidden
from train.train import (
    Trainer,
    TrainSettings,
    batches,
    distil_loss,
    latest_step,
    measure_quality,
    restore_params,
)

from jaxspec import LLM, SamplingParams
from jaxspec.llm import internals

HEAD = np.arange(6, 30, dtype=np.int32)  # what the student scores
LENGTH = 40
ROWS = 4
CFG = student_config(LLAMA, [0], HEAD.tolist())
PACKER = Packer(PREFIX, LENGTH, HEAD, LLAMA.vocab_size)
SETTINGS = TrainSettings(steps=60, rows=ROWS, learning_rate=2e-2)
SAVE_EVERY = 15


@functools.cache
def tables():
    """Embedding and head of a random target."""
    embed = jax.random.normal(jax.random.key(1), (LLAMA.vocab_size, LLAMA.embed_dim))
    return embed, embed[HEAD]


@functools.cache
def start():
    """A student's first parameters."""
    return init_student(init_params(jax.random.key(0), LLAMA, scale=0.2), [0])


def follow(rng, length, temperature=0.0):
    """A conversation of a teacher for whom the next token depends on the last one alone; 6 to 29 are the student's."""
    successor = np.random.default_rng(11).permutation(30)
    token = [int(rng.integers(0, 30))]
    for _ in range(length - 1):
        token.append(int(successor[token[-1]]) if rng.random() < 0.9 else int(rng.integers(0, 30)))
    ids = np.stack([[successor[t], *((successor[t] + 7 * j) % 30 for j in range(1, K))] for t in token])
    logprob = np.log(np.tile([0.85, 0.08, 0.04, 0.02], (length, 1)))
    return Conversation(
        np.array(token, np.int32), ids.astype(np.uint16), logprob.astype(np.float16), 3, "own", temperature
    )


@functools.cache
def lessons(count=60, seed=0):
    rng = np.random.default_rng(seed)
    return [follow(rng, int(rng.integers(8, 36)), float(i % 3 == 2)) for i in range(count)]


def train(folder=None, report=lambda step, loss: None):
    trainer = Trainer(start(), CFG, *tables(), PACKER, lessons(), SETTINGS, folder, SAVE_EVERY)
    trainer.run(report)
    return trainer


@functools.cache
def unbroken():
    """Losses and parameters of a run that was not stopped."""
    losses = {}
    trainer = train(report=losses.__setitem__)
    return losses, trainer.params


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(tmp_path):
    losses, before = {}, jax.tree.map(np.array, start())
    for last in (18, 32, 59):

        def report(step, loss, last=last):
            losses[step] = loss
            if step == last:
                raise Killed

        with pytest.raises(Killed):
            train(folder=tmp_path, report=report)
    begun = Trainer(start(), CFG, *tables(), PACKER, lessons(), SETTINGS, tmp_path, SAVE_EVERY)
    assert begun.step == 45  # the last save before it
    begun.run(losses.__setitem__)
    assert losses == unbroken()[0]
    assert_same(begun.params, unbroken()[1])
    assert_same(restore_params(start(), SETTINGS, tmp_path), unbroken()[1])
    # Nothing is left to do.
    again = train(folder=tmp_path, report=lambda step, loss: pytest.fail("a step after the last"))
    assert again.step == SETTINGS.steps
    assert_same(again.params, unbroken()[1])
    # Updates are donated; what the caller gave stays.
    assert_same(start(), before)


def test_loss_goes_down_and_agreement_up():
    held_out = lessons(20, seed=1)
    losses = [unbroken()[0][step + 1] for step in range(SETTINGS.steps)]
    assert np.isfinite(losses).all()
    before = measure_quality(start(), CFG, *tables(), PACKER, held_out, ROWS)
    after = measure_quality(unbroken()[1], CFG, *tables(), PACKER, held_out, ROWS)
    assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:5])
    assert after.loss < 0.3 * before.loss
    assert before.agreement < 0.2 and after.agreement > 0.6
    assert after.accepted[-1] > 4 * before.accepted[-1]
    assert after.positions == before.positions == sum(len(c.token) - c.answer for c in held_out)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("params", math.nan, "the weights are no longer finite"),
        ("optimizer", -math.inf, "the weights are no longer finite"),
        ("loss", math.nan, "the loss is nan"),
    ],
)
def test_what_is_not_finite_is_not_saved(tmp_path, monkeypatch, part, value, message):
    def step(params, optimizer, *words, **settings):
        state = {"params": params, "optimizer": optimizer, "loss": jnp.ones(1)}
        leaves, tree = jax.tree.flatten(state[part])
        if len(told) == 2:
            at = max(range(len(leaves)), key=lambda i: leaves[i].size)
            leaves[at] = leaves[at].at[..., -1].set(value)
        state[part] = jax.tree.unflatten(tree, leaves)
        return state["params"], state["optimizer"], state["loss"][0]

    told = []
    monkeypatch.setattr("train.train.train_step", step)
    trainer = Trainer(start(), CFG, *tables(), PACKER, lessons(), SETTINGS, tmp_path, save_every=1)
    with pytest.raises(FloatingPointError, match=f"step 3: {message}"):
        trainer.run(lambda step, loss: told.append(step))
    assert told == [1, 2] and latest_step(tmp_path) == 2


def test_batches_go_on_epoch_after_epoch():
    stream = batches(PACKER, lessons(), SETTINGS)
    seen = [next(stream) for _ in range(40)]  # an epoch has fewer
    assert {rows.token.shape for rows in seen} == {(ROWS, LENGTH)}
    assert len({rows.token.tobytes() for rows in seen}) == 40
    again = batches(PACKER, lessons(), SETTINGS)
    assert all(np.array_equal(rows.token, next(again).token) for rows in seen)
    with pytest.raises(ValueError, match="3 conversations do not fill one batch of 4 rows"):
        next(batches(PACKER, lessons()[:3], SETTINGS))


@functools.cache
def own_logprobs(length):
    """Log-probabilities of a student, for one text alone."""
    embed, head = tables()

    def run(params, token):
        position = jnp.arange(token.shape[1])[None]
        hidden = student_hidden(params, CFG, embed, token, position, jnp.zeros_like(token))
        return jax.nn.log_softmax(jnp.einsum("rtd,vd->rtv", hidden, head))

    return jax.jit(run)


def examine_alone(conversation):
    """Log-probabilities [n, V_head] behind a conversation's own tokens."""
    text = np.zeros(LENGTH, np.int32)
    text[: PACKER.tokens(conversation)] = [*PREFIX[:-1], *conversation.token]
    found = np.asarray(own_logprobs(LENGTH)(start(), text[None]))[0]
    return found[len(PREFIX) - 1 :][: len(conversation.token)]


def slow_loss(conversations):
    """Weighted KL divergence and weight, token by token."""
    column = {token: i for i, token in enumerate(HEAD.tolist())}
    total, weights = 0.0, 0.0
    for c in conversations:
        own = examine_alone(c)
        for i in range(len(c.token) - 1):
            weight = 1.0 if i + 1 >= c.answer else CONTEXT_WEIGHT
            for token, logprob in zip(c.teacher_id[i].tolist(), c.teacher_logprob[i].tolist(), strict=True):
                if token in column:
                    total += weight * np.exp(logprob) * (logprob - own[i, column[token]])
            weights += weight
    return total / weights


def mixed(seed=3):
    """Conversations, greedy and not, some without an answer, some with a short one, that the student half knows."""
    rng = np.random.default_rng(seed)
    some = [make_conversation(rng, int(rng.integers(14, 37)), 3, temperature=float(i % 4 == 3)) for i in range(14)]
    some += [make_conversation(rng, 12, 12), make_conversation(rng, 9, 7), make_conversation(rng, 8, 7)]
    for c in some:
        best = HEAD[examine_alone(c).argmax(axis=1)]
        known = (rng.random(len(best)) < 0.6) & (c.teacher_id != best[:, None]).all(axis=1)
        c.teacher_id[known, 0] = best[known]
    return some


def test_loss_against_one_token_at_a_time():
    conversations = mixed()
    rows = PACKER.pack(PACKER.fill(conversations))
    loss = jax.jit(functools.partial(distil_loss, cfg=CFG))(start(), embed=tables()[0], head=tables()[1], rows=rows)
    assert abs(float(loss) - slow_loss(conversations)) < 1e-5


def slow_runs(hits, longest):
    """How many hits in a row begin at each place."""
    runs = []
    for begin in range(len(hits) - longest + 1):
        run = 0
        while run < longest and hits[begin + run]:
            run += 1
        runs.append(run)
    return runs


def test_quality_against_lists():
    """More rows than a batch has, and a number that no batch size divides."""
    conversations = mixed()
    depth, hits, runs = 3, [], []
    for c in conversations:
        if c.answer >= len(c.token):
            continue
        own = examine_alone(c)
        # Whether the student proposes what the teacher finds most probable behind every token but the last.
        right = [HEAD[own[i].argmax()] == c.teacher_id[i, 0] for i in range(c.answer - 1, len(c.token) - 1)]
        hits += right
        if c.temperature == 0:
            runs += slow_runs(right, depth)
    assert len(PACKER.fill(conversations)) % 4 and 0 < sum(hits) < len(hits) and max(runs) > 1
    quality = measure_quality(start(), CFG, *tables(), PACKER, conversations, 4, depth)
    assert quality.positions == len(hits)
    assert quality.agreement == pytest.approx(sum(hits) / len(hits))
    assert quality.accepted == pytest.approx([sum(min(run, d) for run in runs) / len(runs) for d in (1, 2, 3)])
    reached = [sum(run >= d for run in runs) for d in range(depth + 1)]
    conditional = [reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in (1, 2, 3)]
    assert quality.by_depth == pytest.approx(conditional)
    # A chain of d tokens: each counts if those before it were right too.
    shares = np.cumprod(quality.by_depth)
    assert quality.accepted == pytest.approx(np.cumsum(shares))
    assert quality.loss == pytest.approx(slow_loss([c for c in conversations if c.answer < len(c.token)]), abs=1e-5)


# The command line, from end to end.

TRAIN = f"--layers 0 --head 24 --steps 6 --rows 2 --length {LENGTH} --save-every 2 --measure-every 3".split()


@pytest.fixture(scope="module")
def finished(command, data):
    run = data.parent / "run"
    succeed(command("train", data, run, *TRAIN))
    return run


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_sampling_goes_on_where_it_was(command, data, tmp_path):
    assert sorted(content(data)) == ["meta.json", "shard-00000.npz", "shard-00001.npz", "shard-00002.npz"]
    succeed(command("sample", tmp_path / "data", *SAMPLE[:-1], 641))
    assert len(content(tmp_path / "data")) == 3
    succeed(command("sample", tmp_path / "data", *SAMPLE))
    assert content(tmp_path / "data") == content(data)


@pytest.mark.slow
def test_a_trained_draft_decodes_the_same_tokens(command, chat_model, chat_llm, finished, tmp_path):
    curve = [json.loads(line) for line in (finished / "curve.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in curve] == [0, 3, 6]
    draft = tmp_path / "draft"
    assert "MB" in succeed(command("export", finished, draft))
    llm = LLM(chat_model, draft=draft, method="chain", dtype="float32")
    settings = settings_of(finished)
    cfg = dataclasses.replace(student_config(LLAMA, [0], settings["head_ids"]), sliding_window=settings["length"])
    assert internals(llm).models.draft.cfg == cfg
    assert len(settings["head_ids"]) == 24
    params = restore_params(start(), TrainSettings(steps=6, rows=2), finished / "checkpoints")
    assert_same(params, {name: internals(llm).params.draft[name] for name in params})
    for prompt in ([0, 10, 11, 1, 20, 21, 2, 3], [1, 33]):
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        completion = llm.generate(prompt, sampling)
        assert completion.token_ids == chat_llm.generate(prompt, sampling).token_ids
        assert completion.stats.speculative_decoding.num_draft_tokens > 0
    result = command("export", finished, draft)
    assert result.exit_code == 2 and "exists already" in " ".join(result.output.split())


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """Another target of the same geometry, vocabulary and template."""
    folder = tmp_path_factory.mktemp("distil") / "other"
    write_native(folder, LLAMA, seed=9)
    write_chat_tokenizer(folder, LLAMA.vocab_size)
    return folder


def test_a_run_and_its_data_keep_to_their_settings(command, data, finished, other_model, tmp_path):
    before = content(finished), content(data)
    for changed, named in (
        (("--head", 23), "head_ids"), (("--layers", "1"), "layers"), (("--tokens", 1000), "conversations"),
        (("--learning-rate", 0.5), "learning_rate"),
    ):  # fmt: skip
        refuse(command("train", data, finished, *TRAIN, *changed), "other settings", named)
    # Other conversations, as many of them.
    meta = json.loads((data / "meta.json").read_text())
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "meta.json").write_text(json.dumps(meta | {"seed": 3}))
    refuse(command("train", tmp_path / "data", finished, *TRAIN), "other settings (data)")
    refuse(command("sample", data, *SAMPLE, "--longest", 20), "other settings (longest)")
    for option, value, said in (("--steps", 1, "--steps"), ("--longest", 3, "from 4 to"), ("--top", 51, "to 50")):
        refuse(command("sample", tmp_path / "none", *SAMPLE, option, value), said)
    refuse(command("train", tmp_path / "none", tmp_path / "run", *TRAIN), "run `sample` first")
    # Folders of different teachers, and another target of the same geometry, vocabulary and template.
    for name, value, said in (("top", 5, "numbers of teacher logits"), ("prefix", [0, 1], "chat templates")):
        write_meta(tmp_path / name, meta | {name: value})
        refuse(command("train", data, tmp_path / "run", *TRAIN, "--more-data", tmp_path / name), said)
    assert command("sample", data, *SAMPLE, model=other_model).exit_code != 0
    assert command("train", data, finished, *TRAIN, model=other_model).exit_code != 0
    assert (content(finished), content(data)) == before
    assert not (tmp_path / "run").exists() and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--rows", 0, "--rows"), ("--learning-rate", "nan", "positive"), ("--learning-rate", 0, "positive"),
        ("--dtype", "int8", "bfloat16"),
        ("--rows", 1000, "do not fill one batch of 1000 rows"), ("--length", 7, "longest conversation takes"),
        ("--layers", 2, "must be numbers from 0 to 1"),
    ],
)  # fmt: skip
def test_a_refused_value_leaves_no_run(command, data, tmp_path, option, value, said):
    refuse(command("train", data, tmp_path / "run", *TRAIN, option, value), said)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def stop_before_training(monkeypatch):
    """Ends `train` where training would begin; yields the weights that it would have begun with."""
    begun = []

    def stop(params, *words):
        begun.append(params)
        raise Killed

    monkeypatch.setattr("train.kinds.Trainer", stop)
    return begun


def test_data_without_a_conversation_or_an_answer(command, data, finished, tmp_path):
    empty, silent = tmp_path / "empty", tmp_path / "silent"
    meta = json.loads((data / "meta.json").read_text()) | {"seed": 77}
    write_meta(empty, meta)
    write_meta(silent, meta)
    rng = np.random.default_rng(0)
    write_shard(shard_path(silent, 0), [make_conversation(rng, 9, 9) for _ in range(60)])
    for folder, said in ((empty, "no conversations yet"), (silent, "has an answer; sample more")):
        refuse(command("train", folder, tmp_path / "run", *TRAIN), said)
        refuse(command("measure", finished, folder), said)
    assert not (tmp_path / "run").exists()


def copy_base(finished, folder, less=()):
    """The finished run, at a time before it had some of its checkpoints."""
    shutil.copytree(finished, folder)
    for step in less:
        shutil.rmtree(folder / "checkpoints" / str(step))
    return folder


def restored(base, step):
    return restore_params(start(), TrainSettings(steps=6, rows=2), base / "checkpoints", step)


def test_a_run_begins_with_the_same_weights_again(command, data, finished, tmp_path, stop_before_training):
    base, run = copy_base(finished, tmp_path / "base", [6]), tmp_path / "run"
    begin = [*TRAIN, "--steps", 5, "--begin-with", base]
    assert isinstance(command("train", data, run, *begin).exception, Killed)
    assert settings_of(run)["begin_step"] == 4
    (run / "curve.jsonl").write_text('{"step": 0, "places": 0}\n')
    shutil.copytree(finished / "checkpoints" / "6", base / "checkpoints" / "6")  # the base goes on
    assert isinstance(command("train", data, run, *begin).exception, Killed)
    assert settings_of(run)["begin_step"] == 4
    assert_same(stop_before_training[0], restored(base, 4))
    assert_same(stop_before_training[1], restored(base, 4))
    assert (np.asarray(restored(base, 4)["final_norm"]) != np.asarray(restored(base, 6)["final_norm"])).any()
    shutil.rmtree(base / "checkpoints" / "4")  # and drops what was the newest
    refuse(command("train", data, run, *begin), "no longer holds the checkpoint of step 4", "name another run")
    assert (run / "curve.jsonl").exists()
    # With other settings it begins anew, as it has no checkpoint.
    assert isinstance(command("train", data, run, *begin, "--rows", 3).exception, Killed)
    assert settings_of(run)["begin_step"] == 6 and not (run / "curve.jsonl").exists()
    assert_same(stop_before_training[2], restored(base, 6))
    # With a checkpoint of its own it needs the base no more.
    shutil.copytree(finished / "checkpoints", run / "checkpoints")
    shutil.rmtree(base)
    before, begin = content(run), [*begin, "--rows", 3]
    assert isinstance(command("train", data, run, *begin).exception, Killed)
    assert content(run) == before
    refuse(command("train", data, run, *begin[:-4], "--rows", 3), "other settings (begin_with)")
    (run / "settings.json").unlink()
    refuse(command("train", data, run, *TRAIN), "holds checkpoints, but no settings.json")


def test_bases_that_do_not_fit(command, data, finished, other_model, tmp_path):
    run, begin = tmp_path / "run", ("--begin-with", finished)
    refuse(command("train", data, run, *TRAIN, *begin, model=other_model), "trained for another target")
    for layers in ("1", "0,1"):
        refuse(command("train", data, run, *TRAIN, *begin, "--layers", layers), "has the target's layers 0;")
    early = copy_base(finished, tmp_path / "early", [4, 6])
    refuse(command("train", data, run, *TRAIN, "--begin-with", early), "holds no checkpoint yet")
    shutil.rmtree(early / "checkpoints")
    refuse(command("train", data, run, *TRAIN, "--begin-with", early), "holds no checkpoint yet")
    refuse(command("train", data, run, *TRAIN, "--begin-with", tmp_path / "none"), "holds no run")
    assert not run.exists() and not (early / "checkpoints").exists() and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_run_is_not_measured_on_what_it_has_seen(command, data, finished, tmp_path, stop_before_training):
    """Under whatever name, however much of it, and also if the run that it began with has seen it."""
    fresh, longer = tmp_path / "fresh", tmp_path / "longer"
    meta = json.loads((data / "meta.json").read_text())
    for folder, other in ((fresh, {"seed": 3}), (longer, {"steps": 160})):
        shutil.copytree(data, folder)
        (folder / "meta.json").write_text(json.dumps(meta | other))
    for folder in (data, longer):
        refuse(command("measure", finished, folder), "has learned from text of seed 2")
    quality = json.loads(succeed(command("measure", finished, fresh)))
    assert quality["positions"] > 0 and math.isfinite(quality["loss"])
    run = tmp_path / "run"
    assert isinstance(command("train", fresh, run, *TRAIN, "--begin-with", finished).exception, Killed)
    assert settings_of(run)["seen"] == [2, 3]
    for folder, seed in ((data, 2), (fresh, 3)):
        refuse(command("measure", run, folder), f"has learned from text of seed {seed}")
