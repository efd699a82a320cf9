"""The text of one generation while its tokens come: stop strings, end-of-sequence tokens and the length limit."""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxspec.results import FinishReason
from jaxspec.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces: of several in it, the one that starts first.

    Text is held back only while it may be the beginning of a stop string: fewer characters than the longest one has.
    """

    def __init__(self, stops: Sequence[str]):
        """Look for `stops`, non-empty strings; none is allowed."""
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that no stop string can touch any more, and whether a stop string was found right after it."""
        if not self._stops:
            return text, False
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        size = min(self._longest - 1, len(text))
        while size and not any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
            size -= 1
        self._held = text[len(text) - size :]
        return text[: len(text) - size], False

    def finish(self) -> str:
        """Text that was held back, at the end of the tokens."""
        held, self._held = self._held, ""
        return held


@dataclasses.dataclass(frozen=True)
class StreamPiece:
    """The text that one token adds to a stream."""

    text: str  # that nothing can take back; often empty while a stop string may be under way
    num_tokens: int  # more tokens of `TextStream.token_ids` that are now certain, oldest first
    finish_reason: FinishReason | None = None


class TextStream:
    """The text of one generation, from its first token to its end; the rules of `Completion` on where it ends.

    Its `finish_reason` is None until the text has ended: by a token that ends texts or a stop string ("stop"), by the
    last of `max_tokens` tokens ("length"; "stop" if both happen at once), or by `abort` ("abort").
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], end_ids: Iterable[int], max_tokens: int,
        shown: frozenset[int] = frozenset(),
    ):  # fmt: skip
        """Start an empty text; it ends with any of `end_ids`, which are no text, or before any of `stops`.

        Special tokens are no text, but for those in `shown`.
        """
        self.finish_reason: FinishReason | None = None
        self._end_ids = frozenset(end_ids)
        self._max_tokens = max_tokens
        self._detokenizer = tokenizer.make_detokenizer(shown=shown)
        self._matcher = StopMatcher(stops)
        self._may_cut = bool(stops)
        self._ids: list[int] = []
        self._ends = [0]  # [n]: how many characters of the text the first n tokens hold
        self._partial: int | None = None  # the number of tokens up to the first byte of the character under way
        self._num_kept = 0
        self._num_decoded = 0  # characters, those that the matcher holds back included
        self._num_characters = 0  # characters given out
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text given out so far; all of it once finished."""
        return "".join(self._pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that are certain to be part of the result; all of them once finished."""
        return tuple(self._ids[: self._num_kept])

    def push(self, token_id: int) -> StreamPiece:
        """Add one generated token; RuntimeError if the text is finished."""
        if self.finish_reason is not None:
            raise RuntimeError(f"the text is finished ({self.finish_reason}): no token can follow")
        ended = token_id in self._end_ids
        last = ended or len(self._ids) + 1 >= self._max_tokens
        text = "" if ended else self._detokenizer.push((token_id,))
        if last:
            text += self._detokenizer.finish()
        self._place_token(token_id, text)
        text, stopped = self._matcher.push(text)
        if last and not stopped:
            text += self._matcher.finish()
        if stopped or last:
            self.finish_reason = "stop" if stopped or ended else "length"
        self._pieces.append(text)
        self._num_characters += len(text)
        return StreamPiece(text, self._keep_tokens(everything=last and not stopped), self.finish_reason)

    def abort(self) -> StreamPiece:
        """End the text here, with everything that was held back; RuntimeError if it is finished."""
        if self.finish_reason is not None:
            raise RuntimeError(f"the text is finished ({self.finish_reason}): it cannot be ended again")
        text, stopped = self._matcher.push(self._detokenizer.finish())
        if not stopped:
            text += self._matcher.finish()
        self.finish_reason = "stop" if stopped else "abort"
        self._pieces.append(text)
        self._num_characters += len(text)
        return StreamPiece(text, self._keep_tokens(everything=not stopped), self.finish_reason)

    def _place_token(self, token_id: int, text: str) -> None:
        """Note which characters the token holds, `text` being those that became certain with it."""
        if self._partial is not None and text.startswith(_REPLACEMENT):
            # The character under way turned out invalid: its U+FFFD ends the decoding of the tokens before this one.
            for count in range(self._partial, len(self._ends)):
                self._ends[count] += 1
        self._num_decoded += len(text)
        self._ids.append(token_id)
        self._ends.append(self._num_decoded)
        if not self._detokenizer.holds_bytes:
            self._partial = None
        elif self._partial is None or text:
            self._partial = len(self._ids)

    def _keep_tokens(self, everything: bool) -> int:
        """Move on the count of kept tokens, and return by how many."""
        before = self._num_kept
        if everything or (not self._may_cut and self.finish_reason is None):
            self._num_kept = len(self._ids)
        else:
            # The shortest prefix that holds the text given out: a stop string may follow directly.
            while self._ends[self._num_kept] < self._num_characters:
                self._num_kept += 1
        return self._num_kept - before
