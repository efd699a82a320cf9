"""A tiny model's chats: its tokenizer, questions to ask it, and made-up conversations for tests that need no model."""

import json
from types import SimpleNamespace

import jax
import numpy as np
from native_models import list_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from train.corpus import Opening
from train.shards import Conversation

SPECIAL = ["<s>", "<user>", "<end>", "<assistant>", "<eos>", "<stop>"]
TEMPLATE = "<s> w10 w11 <user> {{ messages[0].content }} <end> <assistant>"
# What that puts around a question.
PREFIX, SUFFIX = (0, 10, 11, 1), (2, 3)

K = 4  # teacher logits of a token of a made-up conversation


def write_chat_tokenizer(folder, vocab_size, template=TEMPLATE):
    """Word w<i> is token i; the first tokens are special (2, the end of a turn, and 5 end a text), then X and 7."""
    words = [*SPECIAL, "X", "7", *(f"w{i}" for i in range(len(SPECIAL) + 2, vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w8"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    list_files(folder)


def draw_words(rng, documents):
    """In place of `draw_opening`: most answers are greedy, some beside them are not."""
    words = " ".join(f"w{token}" for token in rng.integers(8, 50, int(rng.integers(1, 6))))
    if rng.random() < 0.3:
        return Opening("own", words if rng.random() < 0.5 else "", True, 0.9, float(rng.choice([0.0, 0.8])))
    return Opening("text", words, False, 0.0, 0.0 if rng.random() < 0.8 else 1.0)


def no_documents(prose=()):
    """In place of `Documents`, which takes seconds to read."""
    return SimpleNamespace(prose=list(prose), digest=" ".join(prose))


def make_conversation(rng, length, answer=None, *, temperature=0.0, vocab=50, kind="own", shard=0, token=None):
    """A conversation of `length` tokens with random teacher logits; its answer begins in the middle."""
    noise = rng.gumbel(size=(length, vocab)) * 2
    logprob = noise - np.log(np.exp(noise).sum(1, keepdims=True))
    ids = np.argsort(-logprob, axis=1)[:, :K]
    return Conversation(
        (rng.integers(0, vocab, length) if token is None else np.asarray(token)).astype(np.int32),
        ids.astype(np.uint16),
        np.take_along_axis(logprob, ids, axis=1).astype(np.float16),
        length // 2 if answer is None else answer,
        kind,
        temperature,
        shard,
    )


def make_conversations(lengths, seed=0, **options):
    """One of each length."""
    rng = np.random.default_rng(seed)
    return [make_conversation(rng, int(length), **options) for length in lengths]


def identities(conversations):
    """Which they are."""
    return [id(c) for c in conversations]


# The command line, from end to end. With this seed some held-out answers are long enough for a chain.
SAMPLE = "--branches 8 --steps 80 --top 12 --longest 32 --seed 2 --tokens 1920".split()


def output_of(result):
    """The output of a command, in one line."""
    return " ".join(result.output.replace("│", " ").split())


def succeed(result):
    """The output of a command that must have succeeded."""
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refuse(result, *said):
    """A message for the user, and no traceback."""
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert all(words in output_of(result) for words in said), result.output


def settings_of(run):
    """The settings that a run notes of itself."""
    return json.loads((run / "settings.json").read_text())


def curve_of(run):
    """A run's curve, less what depends on where it was stopped."""
    entries = [json.loads(line) for line in (run / "curve.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k not in ("seconds", "training_loss")} for entry in entries]


def assert_same(some, others):
    """Equal pytrees of arrays."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), some, others)
