"""Conversations side by side in one tree window are those that plain decoding writes one by one."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distil_cases import PREFIX, SUFFIX, make_conversation, write_chat_tokenizer
from native_models import LLAMA, MISTRAL, write_native
from text_models import smollm2
from tiny_models import empty_cache, on_one_device
from train.corpus import Opening, draw_opening
from train.sample import Branch, Sampler, SampleSettings, Turns, _draw, answers_of, find_turns, sample_shards
from train.shards import read_meta, read_shard, shard_path, write_shard

from jaxspec import LLM, SamplingParams
from jaxspec.llm import internals
from jaxspec.models.transformer import forward, vocab_logits

pytestmark = pytest.mark.usefixtures("tiny_corpus")
SETTINGS = SampleSettings(branches=4, steps=48, top=12, longest=24, seed=5)
ROOM = len(PREFIX) + SETTINGS.longest


@pytest.fixture(scope="module")
def sampler(chat_llm, tiny_corpus):
    return Sampler(chat_llm, SETTINGS)


@pytest.fixture(scope="module")
def shard(sampler):
    return sampler.shard(3)


def text_of(conversation):
    return [*PREFIX[:-1], *conversation.token.tolist()]


def check_greedy(llm, conversations):
    """Every greedy answer is what plain decoding writes behind the same tokens; returns how many there were."""
    count = 0
    for c in conversations:
        tokens = c.token[c.answer :].tolist()
        if c.temperature == 0 and tokens:
            prompt = text_of(c)[: len(PREFIX) - 1 + c.answer]
            room = SETTINGS.longest - c.answer
            plain = list(llm.generate(prompt, SamplingParams(max_tokens=room)).token_ids)
            ended = tokens[-1] in llm.eos_ids or len(c.token) == SETTINGS.longest
            # The shard's end may cut it.
            assert tokens == (plain if ended else plain[: len(tokens)])
            count += 1
    return count


def test_greedy_answers_are_those_of_plain_decoding(chat_llm, shard):
    given = [c for c in shard if c.kind == "text"]
    for c in given:
        assert c.token[0] == PREFIX[-1] and set(c.token[1 : c.answer - len(SUFFIX)]) <= set(range(8, 50))
        assert c.answer == len(c.token) or tuple(c.token[c.answer - len(SUFFIX) : c.answer]) == SUFFIX
    # More than there are branches: some began where another had ended.
    assert check_greedy(chat_llm, given) > SETTINGS.branches
    assert check_greedy(chat_llm, [c for c in shard if c.kind == "own"]) > 0


def test_conversations_end_as_they_should(chat_llm, shard):
    ended = 0
    for c in shard:
        assert 1 < len(c.token) <= SETTINGS.longest and 0 < c.answer <= len(c.token) and c.shard == 3
        assert len(c.token) == len(c.teacher_id) == len(c.teacher_logprob)
        assert not set(c.token[c.answer : -1].tolist()) & set(chat_llm.eos_ids)
        ended += len(c.token) > c.answer and int(c.token[-1]) in chat_llm.eos_ids
    cut = [c for c in shard if len(c.token) < SETTINGS.longest and int(c.token[-1]) not in chat_llm.eos_ids]
    assert ended > SETTINGS.branches and len(cut) <= SETTINGS.branches
    # Every pass moved every branch on; what has one token only was dropped.
    places = SETTINGS.branches * SETTINGS.steps
    assert places - SETTINGS.branches <= sum(len(c.token) for c in shard) <= places


@functools.cache
def whole_text_logits(cfg):
    """Logits [T, V] of one pass over a text."""

    def run(params, token):
        causal = jnp.tril(jnp.ones((ROOM, ROOM), bool))
        hidden, _ = forward(params, cfg, token, jnp.arange(ROOM, dtype=jnp.int32), empty_cache(cfg, ROOM), causal)
        return vocab_logits(params, cfg, hidden)

    return on_one_device(run)


def check_teacher(llm, conversations, top):
    """The kept logits are the largest of the model's own, most probable first."""
    for c in conversations:
        text = np.zeros(ROOM, np.int32)
        text[: len(text_of(c))] = text_of(c)
        logits = whole_text_logits(internals(llm).target.cfg)(internals(llm).params.target, text)
        own = np.asarray(jax.nn.log_softmax(logits))[len(PREFIX) - 1 :][: len(c.token)]
        kept = c.teacher_logprob.astype(np.float32)
        # Half precision, and another order of summation.
        room = 2**-11 * np.abs(kept) + 2e-4
        assert c.teacher_logprob.dtype == np.float16 and c.teacher_id.dtype == np.uint16
        assert (np.abs(np.take_along_axis(own, c.teacher_id.astype(int), 1) - kept) < room).all()
        assert (np.abs(-np.sort(-own, axis=1)[:, :top] - kept) < room).all()
        assert (np.diff(kept, axis=1) <= 0).all()
        assert all(len(set(row)) == top for row in c.teacher_id.tolist())


def test_the_teacher_is_the_model(chat_llm, shard):
    check_teacher(chat_llm, shard, SETTINGS.top)


def test_what_follows_is_among_the_teachers_tokens(shard):
    """Sampled tokens are drawn from what is kept, greedy ones are the first of it."""
    for c in shard:
        for i in range(c.answer, len(c.token)):
            assert c.token[i] in c.teacher_id[i - 1]
            assert c.temperature > 0 or c.token[i] == c.teacher_id[i - 1, 0]


def same(some, others):
    """Whether two shards are alike, bit for bit."""

    def content(c):
        fields = (getattr(c, field.name) for field in dataclasses.fields(c))
        return [f.tobytes() if isinstance(f, np.ndarray) else f for f in fields]

    return list(map(content, some)) == list(map(content, others))


def test_a_shard_depends_on_seed_and_number_alone(chat_llm, sampler, shard):
    sampler.shard(1)
    assert same(sampler.shard(3), shard)
    other = sampler.shard(4)
    assert not same([dataclasses.replace(c, shard=3) for c in other], shard)
    seeded = Sampler(chat_llm, dataclasses.replace(SETTINGS, seed=6))
    assert not same(seeded.shard(3), shard)
    seeded.settings = SETTINGS
    assert same(seeded.shard(3), shard)


def test_shards_that_are_there_are_not_sampled_again(tmp_path, sampler, shard, monkeypatch):
    made, told = [], []
    sample = sampler.shard

    def count(index, progress):
        made.append(index)
        return sample(index, progress)

    monkeypatch.setattr(sampler, "shard", count)
    sample_shards(sampler, tmp_path, [3], told.append)
    assert made == [3] and same(read_shard(tmp_path / "shard-00003.npz"), shard_as_read(shard))
    before = (tmp_path / "shard-00003.npz").stat()
    (tmp_path / "shard-00002.partial").write_bytes(b"of a killed one")
    sample_shards(sampler, tmp_path, [2, 3], told.append)
    assert made == [3, 2] and (tmp_path / "shard-00003.npz").stat() == before
    assert sum(told) == 3 * SETTINGS.branches * SETTINGS.steps
    assert sorted(path.name for path in tmp_path.glob("shard-*")) == ["shard-00002.npz", "shard-00003.npz"]
    assert read_meta(tmp_path)["prefix"] == [*PREFIX] and read_meta(tmp_path)["suffix"] == [*SUFFIX]
    monkeypatch.setattr(sampler, "settings", dataclasses.replace(SETTINGS, seed=6))
    with pytest.raises(ValueError, match="other settings .seed."):
        sample_shards(sampler, tmp_path, [9], told.append)
    assert made == [3, 2]


def test_finished_answers_are_passages(chat_llm, tmp_path):
    rng = np.random.default_rng(0)

    def converse(answer, last=2, **options):
        return make_conversation(rng, len(answer) + 4, 4, token=[1, 9, 2, 3, *answer[:-1], last], **options)

    words = [rng.integers(8, 50, length).tolist() for length in (40, 140, 60)]
    refused = [
        converse(words[2], last=9), converse(words[2][:39]), converse([*words[1], 9]),
        converse(words[2], kind="text"), converse(words[2], temperature=1.0), make_conversation(rng, 60, 60),
    ]  # fmt: skip
    write_shard(shard_path(tmp_path, 0), [*refused, converse(words[1])])
    write_shard(shard_path(tmp_path, 1), [converse(words[0], temperature=0.7), converse(words[1]), *refused])
    # The last token ended the answer.
    texts = [chat_llm.tokenizer.decode(answer[:-1]).strip() for answer in words[:2]]
    assert answers_of(chat_llm, tmp_path) == sorted(texts)


def shard_as_read(conversations):
    """Temperatures are kept in single precision."""
    return [dataclasses.replace(c, temperature=float(np.float32(c.temperature))) for c in conversations]


def test_turns_of_the_tiny_template(chat_llm):
    assert find_turns(chat_llm) == Turns(PREFIX, SUFFIX)


def test_turns_of_the_default_model():
    """A question between them is the conversation that the template writes, token for token."""
    tokenizer = smollm2()
    turns = find_turns(SimpleNamespace(encode=tokenizer.encode_chat))
    assert tokenizer.decode(turns.prefix, False).endswith("<|im_start|>user\n")
    assert tokenizer.decode(turns.suffix, False) == "<|im_end|>\n<|im_start|>assistant\n"
    assert turns.suffix[0] in tokenizer.eos_ids
    rng = np.random.default_rng(0)
    passages = SimpleNamespace(texts=["The  sea. (1) is blue;"], code=["def f(x):\n    return 3 * x\n"], prose=[])
    drawn = [draw_opening(rng, passages).question for _ in range(200)]
    passages.prose = ["The lake.\n\n1. It is **blue**:\n  - deep"]
    drawn += [draw_opening(rng, passages).question for _ in range(200)]
    for question in {*drawn} - {""}:
        ids = [*turns.prefix, *tokenizer.encode(question, False), *turns.suffix]
        assert ids == tokenizer.encode_chat([{"role": "user", "content": question}])


def converse(opening, script, longest=50):
    """Tokens of a conversation whose teacher always finds the next of `script` most probable, and its answer."""
    tokenizer = SimpleNamespace(encode=lambda text, special: [int(word) for word in text.split()])
    llm = SimpleNamespace(eos_ids=(2, 5), tokenizer=tokenizer)
    branch, rng = Branch(opening, llm, Turns(PREFIX, SUFFIX), longest, 0), np.random.default_rng(0)
    script, goes_on = iter(script), True
    while goes_on:
        forced = len(branch._forced) > 1
        token = 9 if forced else next(script, 9)
        goes_on = branch.take(np.array([token, 7]), np.array([-0.1, -3.0], np.float16), rng)
    made = branch.conversation(0)
    return made.token.tolist(), made.answer


GIVEN = Opening("text", "20 21", False, 0.0, 0.0)
ASKING = Opening("own", "20", True, 0.0, 0.0)


@pytest.mark.parametrize(
    ("opening", "script", "tokens", "answer"),
    [
        (GIVEN, [30, 31, 2], [1, 20, 21, 2, 3, 30, 31, 2], 5),
        (GIVEN, [5], [1, 20, 21, 2, 3, 5], 5),
        # Whatever ends the question, the template's own end of turn is put there.
        (ASKING, [22, 2, 30, 5], [1, 20, 22, 2, 3, 30, 5], 5),
        (ASKING, [22, 5, 30, 5], [1, 20, 22, 2, 3, 30, 5], 5),
        (Opening("own", "", True, 0.0, 0.0), [2, 30, 2], [1, 2, 3, 30, 2], 3),
    ],
)
def test_turns_of_a_conversation(opening, script, tokens, answer):
    assert converse(opening, script) == (tokens, answer)


def test_conversations_are_cut(monkeypatch):
    assert converse(GIVEN, [30] * 50, longest=9) == ([1, 20, 21, 2, 3, 30, 30, 30, 30], 5)
    assert converse(GIVEN, [30] * 50, longest=6) == ([1, 20, 21, 2, 3, 30], 5)
    assert converse(GIVEN, [30] * 50, longest=5) == ([1, 20, 21, 2, 3], 5)  # no answer
    assert converse(GIVEN, [30] * 50, longest=2) == ([1, 20], 2)
    monkeypatch.setattr("train.sample.LONGEST_QUESTION", 4)
    asked, answer = converse(ASKING, [22] * 20 + [2])
    assert asked[:answer] == [1, 20, *[22] * 4, 2, 3]


def test_tokens_are_drawn_by_their_probability():
    rng = np.random.default_rng(1)
    logprob = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float16)
    assert {_draw(logprob, 0.0, rng) for _ in range(20)} == {0}
    for temperature in (0.5, 1.0, 2.0):
        weight = np.array([0.5, 0.3, 0.15, 0.05]) ** (1 / temperature)
        expected = weight / weight.sum()
        drawn = np.bincount([_draw(logprob, temperature, rng) for _ in range(4000)], minlength=4) / 4000
        assert (np.abs(drawn - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000)).all()
    # One draw's temperature moves no later one.
    one, other = np.random.default_rng(2), np.random.default_rng(2)
    _draw(logprob, 0.0, one), _draw(logprob, 1.0, other)
    assert one.random() == other.random()


def load(folder, cfg, *template):
    write_native(folder, cfg)
    write_chat_tokenizer(folder, cfg.vocab_size, *template)
    return LLM(folder, method="ar", dtype="float32")


def test_a_template_of_one_token_before_the_question(tmp_path):
    llm = load(tmp_path / "model", LLAMA, "<user> {{ messages[0].content }} <end> <assistant>")
    assert find_turns(llm) == Turns((1,), SUFFIX)
    assert Sampler(llm, SETTINGS).shard(3)


def test_targets_with_sliding_windows(tmp_path):
    llm = load(tmp_path / "model", dataclasses.replace(MISTRAL, vocab_size=50))
    conversations = Sampler(llm, SETTINGS).shard(3)
    check_teacher(llm, conversations, SETTINGS.top)
    assert check_greedy(llm, conversations) > SETTINGS.branches
