"""A matcher: which tokens a shape allows next, at one place of a text or at every node of a tree.

A mask is a row of bits, uint32 `[words]`: token t is allowed if bit t % 32 of word t // 32 is 1. Where the shape leaves
one text alone, a mask has the one token that the tokenizer writes it with, so that tokenisation stays the model's own.
Masks are functions of the tokens before them, so they are the same in every method.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.errors import ConfigError


def mask_words(columns: int) -> int:
    """Words of a mask over so many columns."""
    return -(-columns // 32)


class Matcher:
    """The state of one answer; `text` are the tokens that it has taken."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: Sequence[int]):
        """Join llguidance's matcher, which is used by this object alone, to the tokens that end a text."""
        self._matcher, self._vocab_size = matcher, vocab_size
        self._row = np.zeros(mask_words(vocab_size), np.uint32)
        self._ends = frozenset(eos_ids)
        self._end_mask = self._bits(eos_ids)
        self.ended = False  # an end token was taken
        self._next: list[int] | None = None  # the forced token, or none, once it is known of this state
        self.num_forced = 0  # tokens taken that were the only ones allowed, of `num_taken`
        self.num_taken = 0

    def _bits(self, tokens: Sequence[int]) -> np.ndarray:
        row = np.zeros_like(self._row)
        for token in tokens:
            row[token // 32] |= np.uint32(1 << (token % 32))
        return row

    def take(self, tokens: Sequence[int]) -> None:
        """Go on after verified tokens; what follows an end is no part of the text.

        ConfigError: a token is not allowed, which other settings of the request must have brought about.
        """
        for token in tokens:
            if self.ended:
                return
            forced = self.forced()
            if token in self._ends:
                accepted = self._matcher.is_accepting()
                self.ended, self._next = True, None
            else:
                accepted = token == forced or (forced is None and self._matcher.validate_tokens([token]) == 1)
                if accepted:
                    self._consume(token)
            self._check()
            if not accepted:
                raise ConfigError(
                    f"structured_outputs allow no token that logit_bias and the model's logits leave possible: "
                    f"token {token} was chosen"
                )
            self.num_taken += 1
            self.num_forced += forced is not None

    def forced(self) -> int | None:
        """The one token that may come next; None where there are several, or only ends of the text."""
        if self._next is None:
            tokens = [] if self.ended else self._matcher.compute_ff_tokens()[:1]
            ends = tokens and (tokens[0] in self._ends or self._matcher.validate_tokens(tokens) != 1)
            self._next = [] if ends else tokens
        return self._next[0] if self._next else None

    def chain(self, most: int) -> list[int]:
        """Forced tokens that follow each other, at most `most`; the state stays."""
        tokens = []
        while len(tokens) < most and (token := self.forced()) is not None and self._consume(token):
            tokens.append(token)
        self._back(len(tokens))
        return tokens

    def mask(self) -> np.ndarray:
        """What may come next, uint32 [words]; the row is overwritten by the next call."""
        if self.ended:
            return self._end_mask
        if (token := self.forced()) is not None:
            return self._bits([token])
        self._matcher.unsafe_compute_mask_ptr(self._row.ctypes.data, self._row.nbytes)
        self._check()
        return self._row

    def masks(self, token: np.ndarray, parent: np.ndarray, columns: int) -> np.ndarray:
        """Masks of a batch of a tree: uint32 [rows, words] for `columns` columns.

        `token` and `parent` are int32 [rows]; row 0 is the root, which was taken, and unused rows are their own
        parents. Rows that the shape does not allow have an empty mask: no walk reaches them.
        """
        rows = len(token)
        found = np.zeros((rows, mask_words(columns)), np.uint32)
        children: list[list[int]] = [[] for _ in range(rows)]
        for row in range(1, rows):
            if parent[row] != row:
                children[parent[row]].append(row)
        # Depth first; a stack of our own, since trees may be deeper than Python's. A negative row leaves a node.
        stack = [0]
        while stack:
            if (row := stack.pop()) < 0:
                self._back(1)
                continue
            if row:
                self._consume(int(token[row]))
                stack.append(-row)
            mask = self.mask()
            found[row, : len(mask)] = mask
            for child in reversed(children[row]):
                bit = int(token[child])
                if mask[bit // 32] >> np.uint32(bit % 32) & 1 and bit not in self._ends:
                    stack.append(child)
        return found

    def _consume(self, token: int) -> bool:
        self._next = None
        return self._matcher.consume_token(token)

    def _back(self, count: int) -> None:
        self._next = None if count else self._next
        if count and not self._matcher.rollback(count):
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(f"structured_outputs are too complex: {self._matcher.get_error()}")
