"""Sampled conversations on disk, in batches, and what they begin with."""

import collections
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distil_cases import PREFIX, K, identities, make_conversation, make_conversations
from train.batches import CONTEXT_WEIGHT, HELD_OUT, Packer, choose_head, epoch, split_held_out
from train.corpus import CODE_TASKS, MORE_OPENERS, OPENERS, PROSE_TASKS, TEXT_TASKS, Documents, draw_opening
from train.shards import read_meta, read_shard, shard_path, write_meta, write_shard

HEAD = np.array([1, 2, 3, 5, 8, 13, 21, 34], np.int32)
PROMPTS = Path(__file__).parents[3] / "configs" / "prompts" / "mini.jsonl"


def packer(length=32):
    return Packer(PREFIX, length, HEAD, 50)


def test_rows_are_filled_first_fit_the_longest_first():
    conversations = make_conversations([4, 1, 6, 2, 3, 1])  # 7, 4, 9, 5, 6, 4 places
    one, two, three, four, five, six = conversations
    rows = packer(16).fill(conversations)
    assert [identities(row) for row in rows] == [identities(row) for row in ([three, one], [five, four, two], [six])]
    # Equally long ones keep their order; what fits exactly, fits.
    rows = packer(9).fill([two, three, six])
    assert [identities(row) for row in rows] == [identities(row) for row in ([three], [two, six])]


def test_packed_rows_against_one_token_at_a_time():
    rng = np.random.default_rng(1)
    rows = [
        [make_conversation(rng, 9, 4), make_conversation(rng, 6, 6), make_conversation(rng, 3, 1)],
        [make_conversation(rng, 12, 11)],
        [make_conversation(rng, 29, 2)],  # a full row
    ]
    arrays = packer().pack(rows)
    columns = {token: column for column, token in enumerate(HEAD.tolist())}
    for r, row in enumerate(rows):
        t = 0
        for number, c in enumerate(row):
            for i, token in enumerate([*PREFIX[:-1], *c.token.tolist()]):
                assert arrays.token[r, t] == token
                assert arrays.position[r, t] == i
                assert arrays.segment[r, t] == number
                own = i - len(PREFIX) + 1  # number of the conversation's own token
                weight = 0.0
                if own >= 0:
                    expected = [columns.get(token, len(HEAD)) for token in c.teacher_id[own].tolist()]
                    assert arrays.teacher_column[r, t].tolist() == expected
                    assert arrays.teacher_logprob[r, t].tolist() == c.teacher_logprob[own].tolist()
                    if own + 1 < len(c.token):  # else nothing follows
                        weight = 1.0 if own + 1 >= c.answer else CONTEXT_WEIGHT
                assert arrays.weight[r, t] == np.float32(weight)
                t += 1
        assert (arrays.segment[r, t:] == -1).all() and (arrays.weight[r, t:] == 0).all()
    assert (arrays.teacher_column == len(HEAD)).any() and (arrays.teacher_column < len(HEAD)).any()
    assert {array.shape for array in (arrays.token, arrays.position, arrays.segment, arrays.weight)} == {(3, 32)}
    assert arrays.teacher_column.shape == arrays.teacher_logprob.shape == (3, 32, K)


def test_an_epoch_has_every_conversation_once():
    conversations = make_conversations(np.random.default_rng(2).integers(2, 25, 700))  # two pools
    batches = list(epoch(packer(), conversations, 1, seed=3, number=0))
    seen = collections.Counter(id(c) for batch in batches for row in batch for c in row)
    assert seen == collections.Counter(identities(conversations))
    assert all(sum(map(packer().tokens, row)) <= 32 for batch in batches for row in batch)
    other = [id(c) for batch in epoch(packer(), conversations, 1, seed=3, number=1) for row in batch for c in row]
    assert other != [id(c) for batch in batches for row in batch for c in row]
    # In larger batches the same rows, but for those that fill none.
    larger = list(epoch(packer(), conversations, 7, seed=3, number=0))
    assert [len(batch) for batch in larger] == [7] * (len(batches) // 7)
    rows = [row for batch in batches for row in batch]
    assert [identities(row) for batch in larger for row in batch] == [identities(r) for r in rows[: 7 * len(larger)]]


def test_no_question_is_learned_from_and_measured_with():
    rng = np.random.default_rng(4)
    conversations = [make_conversation(rng, 8, 5) for _ in range(6 * HELD_OUT)]
    # Number 0 would be held out; its question is asked again, with another answer.
    conversations[7] = make_conversation(rng, 9, 5, token=[*conversations[0].token[:5], 1, 2, 3, 4])
    # The beginning of that question is another question.
    conversations[HELD_OUT] = make_conversation(rng, 7, 4, token=[*conversations[0].token[:4], 1, 2, 3])
    learned, held = split_held_out(conversations)

    def questions(some):
        return {tuple(c.token[: c.answer].tolist()) for c in some}

    assert not questions(learned) & questions(held)
    assert identities(held) == identities(conversations[HELD_OUT::HELD_OUT])
    assert identities(learned) == [id(c) for i, c in enumerate(conversations) if i % HELD_OUT]


def test_the_head_has_the_tokens_of_the_largest_mass():
    conversations = make_conversations([30, 40, 1], seed=5)
    mass = [0.0] * 50
    for c in conversations:
        for ids, logprobs in zip(c.teacher_id.tolist(), c.teacher_logprob.tolist(), strict=True):
            for token, logprob in zip(ids, logprobs, strict=True):
                mass[token] += np.exp(logprob)
    expected = sorted(sorted(range(50), key=lambda token: -mass[token])[:12])
    head = choose_head(conversations, 50, 12)
    assert head.tolist() == expected and head.dtype == np.int32
    assert choose_head(conversations[::-1], 50, 12).tolist() == expected
    assert choose_head(conversations, 50, 60).tolist() == list(range(50))
    # Nobody ever thought of those: the first ones are taken.
    assert choose_head([], 50, 3).tolist() == [0, 1, 2]


def test_a_shard_reads_as_it_was_written(tmp_path):
    path = shard_path(tmp_path, 12)
    written = make_conversations([5, 1, 9], seed=6, kind="text", temperature=0.75, shard=12)
    written += make_conversations([3], seed=7, kind="own", shard=12)
    written[1].answer = 1  # it has none
    write_shard(path, written)
    assert [p.name for p in tmp_path.iterdir()] == ["shard-00012.npz"]
    for before, after in zip(written, read_shard(path), strict=True):
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if isinstance(old, np.ndarray):
                assert new.dtype == old.dtype and np.array_equal(new, old)
            else:
                assert new == old and type(new) is type(old)
    large = make_conversation(np.random.default_rng(8), 4)
    large.teacher_id = large.teacher_id.astype(np.int32) + 100_000  # ids of a large vocabulary
    write_shard(path, [large])
    assert np.array_equal(read_shard(path)[0].teacher_id, large.teacher_id)


def test_a_failed_write_leaves_the_old_shard(tmp_path, monkeypatch):
    path = shard_path(tmp_path, 0)
    write_shard(path, make_conversations([4]))

    def fail(file, **arrays):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr("train.shards.np.savez", fail)
    with pytest.raises(OSError, match="disk full"):
        write_shard(path, make_conversations([4, 5]))
    assert len(read_shard(path)) == 1 and len([*tmp_path.glob("shard-*.npz")]) == 1


def test_a_folder_keeps_to_its_settings(tmp_path):
    folder = tmp_path / "a" / "data"
    assert read_meta(folder) == {}
    meta = {"seed": 1, "prefix": [0, 1], "documents": "abc"}
    write_meta(folder, meta)
    write_meta(folder, dict(reversed(meta.items())))
    assert read_meta(folder) == meta
    write_meta(folder, meta | {"seed": 9})  # a correction: there is no shard yet
    write_meta(folder, meta)
    write_shard(shard_path(folder, 0), make_conversations([4]))
    for other in (meta | {"seed": 2}, meta | {"top": 3}, {"seed": 1, "prefix": [0, 1]}):
        with pytest.raises(ValueError, match=r"other settings \((seed|top|documents)\)"):
            write_meta(folder, other)
    assert read_meta(folder) == meta


@pytest.fixture(scope="module")
def documents():
    return Documents()


def fragments(text, size=5):
    """All runs of `size` words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def judged_by():
    """Runs of words of the benchmark, and its turns."""
    turns = [turn for line in PROMPTS.read_text().splitlines() for turn in json.loads(line)["turns"]]
    assert len(turns) >= 40
    return set().union(*map(fragments, turns)), [turn.lower() for turn in turns]


def test_nothing_of_the_benchmark_is_learned_from(documents):
    judged, turns = judged_by()
    tasks = [*TEXT_TASKS, *CODE_TASKS, *PROSE_TASKS]
    assert len(documents.texts) > 100 and len(documents.code) > 100
    given = [*OPENERS, *MORE_OPENERS, *tasks, *documents.texts, *documents.code]
    assert [text for text in given if fragments(text) & judged] == []
    assert [task for task in tasks if any(task.lower() in turn for turn in turns)] == []


def test_openings(documents):
    prose, shares = ["An answer.", "Another."], {"own": 0.5, "prose": 0.22, "quiz": 0.08, "text": 0.08, "code": 0.12}
    passages = {"text": documents.texts, "code": documents.code, "prose": prose}
    corpus = SimpleNamespace(texts=documents.texts, code=documents.code, prose=prose)
    tasks = {"text": TEXT_TASKS, "code": CODE_TASKS, "prose": PROSE_TASKS}

    def draw(seed):
        rng = np.random.default_rng(seed)
        return [draw_opening(rng, corpus) for _ in range(1000)]

    drawn = draw(0)
    assert draw(0) == drawn != draw(1)
    kinds = collections.Counter(opening.kind for opening in drawn)
    assert set(kinds) == set(shares)
    for kind, share in shares.items():
        assert abs(kinds[kind] / 1000 - share) < 4 * np.sqrt(share * (1 - share) / 1000)
    for opening in drawn:
        match opening.kind:
            case "own":
                assert opening.question in ("", *OPENERS, *MORE_OPENERS)
            case "quiz":
                assert opening.question in [f"{passage}\n\nQuestion:" for passage in prose]
            case kind:
                assert any(task in opening.question for task in tasks[kind])
                assert any(passage in opening.question for passage in passages[kind])
        assert opening.asks_on == (opening.kind in ("own", "quiz")) == (opening.question_temperature > 0)
    assert {opening.answer_temperature for opening in drawn} == {0.0, 0.3, 0.7, 1.0}
