"""Training, what it reaches, and the tool from sampled text to a draft that decodes."""

import functools
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("optax")

import distil.sample
import distil_draft
import jax
import jax.numpy as jnp
from distil.batches import CONTEXT_WEIGHT, Packer
from distil.shards import Conversation
from distil.student import init_student, student_config, student_hidden
from distil.train import (
    Quality,
    Trainer,
    TrainSettings,
    _run_lengths,
    batches,
    distil_loss,
    measure_quality,
    restore_params,
    student_logprob,
)
from distil_cases import PREFIX, K, draw_words, make_conversation, no_documents, write_chat_tokenizer
from native_models import LLAMA, write_native
from tiny_models import empty_cache, on_one_device, relative_error
from typer.testing import CliRunner

from jaxspec import LLM, SamplingParams
from jaxspec.models.params import init_params
from jaxspec.models.transformer import forward, vocab_logits

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


def assert_same(some, others):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), some, others)


@functools.cache
def unbroken():
    """Losses and parameters of a run that nobody stopped."""
    losses = {}
    trainer = train(report=losses.__setitem__)
    return losses, trainer.params


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [(1,), (SAVE_EVERY,), (18, 32, 59)])
def test_a_killed_run_ends_with_the_same_weights(tmp_path, at):
    losses = {}
    for last in at:

        def report(step, loss, last=last):
            losses[step] = loss
            if step == last:
                raise Killed

        with pytest.raises(Killed):
            train(folder=tmp_path, report=report)
    begun = Trainer(start(), CFG, *tables(), PACKER, lessons(), SETTINGS, tmp_path, SAVE_EVERY)
    assert begun.step == (at[-1] - 1) // SAVE_EVERY * SAVE_EVERY  # the last save before it
    begun.run(losses.__setitem__)
    assert losses == unbroken()[0]
    assert_same(begun.params, unbroken()[1])
    assert_same(restore_params(start(), SETTINGS, tmp_path), unbroken()[1])
    # Nothing is left to do.
    again = train(folder=tmp_path, report=lambda step, loss: pytest.fail("a step after the last"))
    assert again.step == SETTINGS.steps
    assert_same(again.params, unbroken()[1])


def test_the_students_start_is_left_alone():
    """Updates are donated; what the caller gave stays."""
    before = jax.tree.map(np.array, start())
    assert_same(start(), before)
    unbroken()
    assert_same(start(), before)
    assert any((np.asarray(a) != b).any() for a, b in zip(*map(jax.tree.leaves, (unbroken()[1], before)), strict=True))


def test_a_run_without_checkpoints(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        restore_params(start(), SETTINGS, tmp_path)


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


def test_batches_go_on_epoch_after_epoch():
    stream = batches(PACKER, lessons(), SETTINGS)
    seen = [next(stream) for _ in range(40)]  # an epoch has fewer
    assert {rows.token.shape for rows in seen} == {(ROWS, LENGTH)}
    assert len({rows.token.tobytes() for rows in seen}) == 40
    again = batches(PACKER, lessons(), SETTINGS)
    assert all(np.array_equal(rows.token, next(again).token) for rows in seen)
    with pytest.raises(ValueError, match="3 conversations do not fill one batch of 4 rows"):
        next(batches(PACKER, lessons()[:3], SETTINGS))


def test_the_student_scores_as_the_draft_that_decodes():
    embed, head = tables()
    conversation = lessons()[0]
    rows = PACKER.pack([[conversation]])
    count = PACKER.tokens(conversation)

    def run(params, token):
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        hidden, _ = forward(params, CFG, token, jnp.arange(LENGTH), empty_cache(CFG, LENGTH), causal)
        return jax.nn.log_softmax(vocab_logits(params, hidden))

    expected = on_one_device(run)(start() | {"embed": embed, "head": head}, rows.token[0])
    found = jax.jit(functools.partial(student_logprob, cfg=CFG))(start(), embed=embed, head=head, rows=rows)
    assert found.shape == (1, LENGTH, len(HEAD))
    assert relative_error(found[0, :count], expected[:count]) < 2e-5


@functools.cache
def own_logprobs(length):
    """Of a student, for one text alone."""
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


@pytest.mark.parametrize("longest", [1, 3, 8])
def test_run_lengths(longest):
    rng = np.random.default_rng(0)
    for length in (0, 1, 2, 3, 7, 8, 9, 40):
        for share in (0.0, 0.6, 1.0):
            hits = rng.random(length) < share
            found = _run_lengths(hits, longest)
            assert found.tolist() == slow_runs(hits.tolist(), longest)


@pytest.mark.parametrize("rows", [4, 8])
def test_quality_against_lists(rows):
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
    quality = measure_quality(start(), CFG, *tables(), PACKER, conversations, rows, depth)
    assert quality.positions == len(hits)
    assert quality.agreement == pytest.approx(sum(hits) / len(hits))
    assert quality.accepted == pytest.approx([sum(min(run, d) for run in runs) / len(runs) for d in (1, 2, 3)])
    reached = [sum(run >= d for run in runs) for d in range(depth + 1)]
    conditional = [reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in (1, 2, 3)]
    assert quality.by_depth == pytest.approx(conditional)
    # A chain of d tokens: each counts if those before it were right too.
    shares = np.cumprod(quality.by_depth)
    assert quality.accepted == pytest.approx(np.cumsum(shares))


def test_held_out_loss_against_one_token_at_a_time():
    conversations = [c for c in mixed() if c.answer < len(c.token)]
    rows = len(PACKER.fill(conversations))
    quality = measure_quality(start(), CFG, *tables(), PACKER, conversations, rows)
    assert quality.loss == pytest.approx(slow_loss(conversations), abs=1e-5)


def test_held_out_loss_does_not_depend_on_the_batches():
    conversations = [c for c in mixed() if c.answer < len(c.token)]
    quality = measure_quality(start(), CFG, *tables(), PACKER, conversations, 4)
    assert quality.loss == pytest.approx(slow_loss(conversations), abs=1e-5)


def test_held_out_text_without_greedy_answers():
    warm = lessons(20, seed=1)[2::3]
    assert {c.temperature for c in warm} == {1.0}
    quality = measure_quality(start(), CFG, *tables(), PACKER, warm, ROWS)
    assert isinstance(quality, Quality) and quality.positions > 0


# The command line, from end to end. With this seed some held-out answers are long enough for a chain.

SAMPLE = "--branches 8 --steps 80 --top 12 --longest 32 --seed 2 --tokens 1920".split()
TRAIN = f"--layers 0 --head 24 --steps 6 --rows 2 --length {LENGTH} --save-every 2 --measure-every 3".split()


@pytest.fixture(scope="module")
def command(chat_model):
    """Runs a command of the tool on the tiny model, which is loaded once."""
    runner = CliRunner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distil.sample, "draw_opening", draw_words)
        patch.setattr(distil.sample, "Documents", no_documents)
        patch.setattr(distil_draft, "LLM", functools.cache(LLM))

        def run(name, *words, model=chat_model):
            return runner.invoke(distil_draft.app, [name, *map(str, words), "--model", str(model)])

        yield run


def succeed(result):
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def data(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("distilled") / "data"
    succeed(command("sample", folder, *SAMPLE))
    return folder


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


def test_a_trained_draft_decodes_the_same_tokens(command, chat_model, chat_llm, finished, tmp_path):
    curve = [json.loads(line) for line in (finished / "curve.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in curve] == [0, 3, 6]
    draft = tmp_path / "draft"
    assert "MB" in succeed(command("export", finished, draft))
    llm = LLM(chat_model, draft=draft, method="chain", dtype="float32")
    settings = json.loads((finished / "settings.json").read_text())
    assert llm.engine.models.draft.cfg == student_config(LLAMA, [0], settings["head_ids"])
    assert len(settings["head_ids"]) == 24
    params = restore_params(start(), TrainSettings(steps=6, rows=2), finished / "checkpoints")
    assert_same(params, {name: llm.draft_params[name] for name in params})
    for prompt in ([0, 10, 11, 1, 20, 21, 2, 3], [1, 33]):
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        completion = llm.generate(prompt, sampling)
        assert completion.token_ids == chat_llm.generate(prompt, sampling).token_ids
        assert completion.stats.speculative_decoding["num_draft_tokens"] > 0
    result = command("export", finished, draft)
    assert result.exit_code == 2 and "exists already" in " ".join(result.output.split())


def test_a_stopped_run_goes_on(command, data, finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    measure = distil_draft.measure_quality
    with monkeypatch.context() as patch:
        looks = iter([measure, measure])  # at the third, behind step 6, it is killed
        patch.setattr(distil_draft, "measure_quality", lambda *words: next(looks)(*words))
        assert command("train", data, run, *TRAIN).exit_code == 1
    succeed(command("train", data, run, *TRAIN))
    settings = TrainSettings(steps=6, rows=2)
    weights = [restore_params(start(), settings, folder / "checkpoints") for folder in (run, finished)]
    assert_same(*weights)
    assert qualities(run) == qualities(finished)
    succeed(command("train", data, run, *TRAIN))  # nothing is left to do
    assert qualities(run) == qualities(finished)


def qualities(run):
    """The curve, less what depends on where it was stopped."""
    entries = [json.loads(line) for line in (run / "curve.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k not in ("seconds", "training_loss")} for entry in entries]


def test_a_run_stopped_at_once_goes_on(command, data, finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *words: 1 / 0)
        assert command("train", data, run, *TRAIN).exit_code == 1
    succeed(command("train", data, run, *TRAIN))
    assert qualities(run) == qualities(finished)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--steps", 7), "steps"), (("--head", 23), "head_ids"), (("--layers", "1"), "layers"), (("--seed", 1), "seed"),
        (("--length", 48), "length"), (("--rows", 3), "rows"), (("--tokens", 1000), "conversations"),
        (("--learning-rate", 0.5), "learning_rate"),
    ],
)  # fmt: skip
def test_a_run_keeps_to_its_settings(command, data, finished, changed, named):
    before = content(finished)
    result = command("train", data, finished, *TRAIN, *changed)
    assert result.exit_code == 2
    assert "other settings" in result.output and named in result.output
    assert content(finished) == before


def test_missing_data_is_refused(command, tmp_path):
    result = command("train", tmp_path / "nothing", tmp_path / "run", *TRAIN)
    assert result.exit_code == 2 and "run `sample` first" in " ".join(result.output.replace("│", "").split())
    assert not (tmp_path / "run").exists() and not (tmp_path / "nothing").exists()


def test_other_samples_of_the_same_folder_are_refused(command, data):
    before = content(data)
    result = command("sample", data, *SAMPLE, "--longest", 20)
    assert result.exit_code == 2 and "other settings (longest)" in " ".join(result.output.split())
    assert content(data) == before


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """Of the same geometry, vocabulary and template."""
    folder = tmp_path_factory.mktemp("distil") / "other"
    write_native(folder, LLAMA, seed=9)
    write_chat_tokenizer(folder, LLAMA.vocab_size)
    return folder


def test_two_models_do_not_share_a_folder(command, data, other_model, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    assert command("sample", tmp_path / "data", *SAMPLE, model=other_model).exit_code != 0


def test_a_run_keeps_to_its_model(command, data, finished, other_model, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    assert command("train", data, tmp_path / "run", *TRAIN, model=other_model).exit_code != 0


def test_all_tokens_in_the_head(command, data, tmp_path):
    succeed(command("train", data, tmp_path / "run", *TRAIN, "--head", 0, "--steps", 2))
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["head_ids"] == []
    succeed(command("export", tmp_path / "run", tmp_path / "draft"))
    manifest = json.loads((tmp_path / "draft" / "jaxspec.json").read_text())
    assert not manifest["model"].get("head_ids")
