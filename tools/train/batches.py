"""Training batches: conversations packed into rows, in an order that depends on the seed alone."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from train.shards import Conversation

# One conversation in so many is held out, by its number.
HELD_OUT = 20
# What a token that the target did not write as an answer counts.
CONTEXT_WEIGHT = 0.3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """R rows of T tokens.

    Attributes:
      token: int32 [R, T].
      position: int32 [R, T], within the conversation.
      segment: int32 [R, T], which conversation of the row; -1 for padding.
      teacher_column: int32 [R, T, K], the teacher's tokens as columns of the student's head; its width where it has
        none.
      teacher_logprob: float32 [R, T, K].
      weight: float32 [R, T]; 0 where nothing is learned.
    """

    token: np.ndarray
    position: np.ndarray
    segment: np.ndarray
    teacher_column: np.ndarray
    teacher_logprob: np.ndarray
    weight: np.ndarray


def split_held_out(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to learn from and to measure with; a question that is asked in both is only learned from."""
    train, held = [], []
    for i, conversation in enumerate(conversations):
        (held if i % HELD_OUT == 0 else train).append(conversation)
    known = {c.token[: c.answer].tobytes() for c in train}
    return train, [c for c in held if c.token[: c.answer].tobytes() not in known]


def choose_head(conversations: Sequence[Conversation], vocab_size: int, size: int) -> np.ndarray:
    """The tokens that the teacher finds most probable over all conversations, int32 [size], ascending."""
    mass = np.zeros(vocab_size)
    for c in conversations:
        np.add.at(mass, c.teacher_id.reshape(-1), np.exp(c.teacher_logprob.astype(np.float32)).reshape(-1))
    return np.sort(np.argsort(-mass, kind="stable")[:size]).astype(np.int32)


class Packer:
    """Packs conversations for one student."""

    def __init__(self, prefix: Sequence[int], length: int, head_ids: np.ndarray, vocab_size: int):
        """`length` is T; `prefix` is put before each conversation, whose first token is its last."""
        self.length = length
        self._prefix = np.array(prefix[:-1], np.int32)
        self._column = np.full(vocab_size, len(head_ids), np.int32)
        self._column[head_ids] = np.arange(len(head_ids))

    def tokens(self, conversation: Conversation) -> int:
        """Places that a conversation takes."""
        return len(self._prefix) + len(conversation.token)

    def fill(self, conversations: Sequence[Conversation]) -> list[list[Conversation]]:
        """Rows of conversations, first fit, the longest first."""
        rows: list[tuple[int, list[Conversation]]] = []
        for conversation in sorted(conversations, key=self.tokens, reverse=True):
            size = self.tokens(conversation)
            for i, (room, row) in enumerate(rows):
                if size <= room:
                    row.append(conversation)
                    rows[i] = (room - size, row)
                    break
            else:
                rows.append((self.length - size, [conversation]))
        return [row for _, row in rows]

    def pack(self, rows: Sequence[Sequence[Conversation]]) -> Rows:
        """The arrays of some rows."""
        R, T, K = len(rows), self.length, rows[0][0].teacher_id.shape[1]
        token, position = np.zeros((R, T), np.int32), np.zeros((R, T), np.int32)
        segment, weight = np.full((R, T), -1, np.int32), np.zeros((R, T), np.float32)
        column = np.zeros((R, T, K), np.int32)
        logprob = np.zeros((R, T, K), np.float32)
        for r, row in enumerate(rows):
            at = 0
            for number, c in enumerate(row):
                text = np.concatenate([self._prefix, c.token])
                whole, own = slice(at, at + len(text)), slice(at + len(self._prefix), at + len(text))
                token[r, whole], position[r, whole], segment[r, whole] = text, np.arange(len(text)), number
                column[r, own] = self._column[c.teacher_id]
                logprob[r, own] = c.teacher_logprob
                # Row i of the teacher's is about the token after token i; there is none for the last one.
                weight[r, own] = np.where(np.arange(len(c.token)) + 1 >= c.answer, 1.0, CONTEXT_WEIGHT)
                weight[r, own.stop - 1] = 0
                at = whole.stop
        return Rows(token, position, segment, column, logprob, weight)


def epoch(
    packer: Packer, conversations: Sequence[Conversation], rows: int, seed: int, number: int
) -> Iterator[Sequence[Sequence[Conversation]]]:
    """One pass over the conversations in batches of `rows` rows; what does not fill a batch is left out."""
    rng = np.random.default_rng([seed, number])
    order = rng.permutation(len(conversations))
    # Packed in pools, so that a row's conversations are no longer a matter of their length alone.
    pools = [order[i : i + 512] for i in range(0, len(order), 512)]
    packed = [row for pool in pools for row in packer.fill([conversations[i] for i in pool])]
    packed = [packed[i] for i in rng.permutation(len(packed))]
    for start in range(0, len(packed) - rows + 1, rows):
        yield packed[start : start + rows]
