"""Text in and text out: tokenizers, chat templates, and text made from tokens while they come.

A stream of tokens becomes text in three steps, each of which holds back what it cannot yet decide: `Detokenizer` holds
bytes that do not make a character yet, `StopMatcher` holds text that may begin a stop string, and `TextStream` joins
both with end-of-sequence tokens and the length limit.
"""

import codecs
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.gguf_header import read_header
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.results import FinishReason
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.gguf_tokenizer import build_gguf_tokenizer
from jaxspec.text.hf_tokenizer import copy_folder_tokenizer, load_folder_tokenizer, save_folder_tokenizer
from jaxspec.text.parts import TokenizerParts
from jaxspec.text.token_bytes import TokenBytes

_REPLACEMENT = "\ufffd"


def load_tokenizer(path: Path | str) -> "Tokenizer":
    """Load the tokenizer of a model: a Hugging Face folder, a native checkpoint or a GGUF file.

    Raises:
      CheckpointError: nothing is there, or it is damaged.
      ConfigError: it needs a tokenizer that is not supported; the message names it.
    """
    path = Path(path)
    return Tokenizer(load_folder_tokenizer(path) if path.is_dir() else build_gguf_tokenizer(_read_metadata(path)))


def save_tokenizer(source: Path | str, folder: Path | str) -> None:
    """Write the tokenizer of the model at `source` into `folder`, from where it loads and encodes the same."""
    source, folder = Path(source), Path(folder)
    if source.is_dir():
        copy_folder_tokenizer(source, folder)
    else:
        save_folder_tokenizer(build_gguf_tokenizer(_read_metadata(source)), folder)


def _read_metadata(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a model folder or a GGUF file")
    return read_header(path).metadata


class Tokenizer:
    """Text to token ids and back, for one model.

    Attributes:
      bos_id: the beginning-of-sequence token, or None.
      eos_ids: the tokens that end a text or a turn, the usual one first.
      special_ids: tokens that steer the model and are no text; decoding leaves them out.
    """

    def __init__(self, parts: TokenizerParts):
        """Make a tokenizer of what `load_folder_tokenizer` or `build_gguf_tokenizer` read."""
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self._backend = parts.backend
        self._parts = parts
        self._bytes = TokenBytes(parts.backend)
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`.

        Text that reads like a special token becomes that token, as in Hugging Face.

        Args:
          text: any text; "" gives no tokens but those that `add_special_tokens` adds.
          add_special_tokens: put the tokens around it that the model expects around a text (BOS, seldom EOS).

        Raises:
          ConfigError: `text` is not a string, or holds a lone surrogate, which no encoding can represent.
        """
        if not isinstance(text, str):
            raise ConfigError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text holds a lone surrogate at character {error.start}") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, U+FFFD for bytes that are not UTF-8; unknown ids (embedding padding) are no text."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, special or not; none for an id that is no token."""
        return self._bytes[token_id]

    @property
    def leading_spaces(self) -> int:
        """How many spaces at the front of a decoded text are the tokenizer's own, and taken off (SentencePiece)."""
        return self._bytes.leading_spaces

    @functools.cached_property
    def _token_strings(self) -> tuple[str, ...]:
        vocab = self._backend.get_vocab(with_added_tokens=True)
        strings = [""] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            strings[token_id] = token
        return tuple(strings)

    def token_strings(self) -> list[str]:
        """Every token as the vocabulary writes it, by id; "" for an id without a token."""
        return list(self._token_strings)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's embedding may have further rows, as padding."""
        return len(self._token_strings)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return self._parts.chat_template is not None

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._parts.chat_template is None:
            raise ConfigError("the model has no chat template; give it plain text (generate, or --raw)")
        return ChatTemplate(self._parts.chat_template, self._parts.special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation (dicts with `role` and `content`), as the model's template writes it.

        Raises:
          ConfigError: the model has no template, the messages are malformed, or the template refuses them.
        """
        return self._chat_template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The token ids of a conversation; the template itself writes what special tokens it needs."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)


class Detokenizer:
    """Text from tokens as they come, in whole characters, in constant time per token.

    All that `push` and `finish` return, joined, is `tokenizer.decode` of all ids. Nothing returned is ever changed:
    the bytes of a character that is not complete, three at most, are held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        """Start an empty text."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = tokenizer.leading_spaces

    @property
    def holds_bytes(self) -> bool:
        """Whether the text so far ends within a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete; may be empty."""
        skipped, token_bytes = self._skipped, self._tokenizer.token_bytes
        return self._strip(self._decoder.decode(b"".join(token_bytes(i) for i in ids if i not in skipped)))

    def finish(self) -> str:
        """What was held back, now that nothing follows: U+FFFD for an incomplete character, or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while text and self._leading_spaces:
            if text[0] != " ":
                self._leading_spaces = 0
            else:
                text = text[1:]
                self._leading_spaces -= 1
        return text


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    The text is searched after each piece. Of several stop strings in it, the one that starts first cuts it. Text is
    held back only while it may be the beginning of a stop string: fewer characters than the longest one has.
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
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


@dataclasses.dataclass(frozen=True)
class StreamPiece:
    """What one token adds to a streamed text.

    Attributes:
      text: new text that nothing can take back; often empty while a stop string may be under way.
      num_tokens: how many more tokens are now certain to be part of the result, oldest first; over all pieces they
        add up to `TextStream.token_ids`.
      finish_reason: None until the text is finished.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None


class TextStream:
    """The text of one generation, from its first token to its end; the rules of `Completion` on where it ends.

    Attributes:
      finish_reason: None until an end-of-sequence token or a stop string ("stop") or the last of `max_tokens` tokens
        ("length") was pushed; "stop" if both happen at once.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], eos_ids: Iterable[int], ignore_eos: bool, max_tokens: int
    ):
        """Start an empty text; with `ignore_eos`, end-of-sequence tokens are special tokens like others."""
        self.finish_reason: FinishReason | None = None
        self._eos_ids = frozenset() if ignore_eos else frozenset(eos_ids)
        self._max_tokens = max_tokens
        self._detokenizer = Detokenizer(tokenizer)
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
        """Add one generated token.

        Raises:
          RuntimeError: the text is finished.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"the text is finished ({self.finish_reason}): no token can follow")
        ended = token_id in self._eos_ids
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

    def _place_token(self, token_id: int, text: str) -> None:
        """Note which characters the token holds, `text` being those that became certain with it."""
        if self._partial is not None and text.startswith(_REPLACEMENT):
            # The character under way turned out invalid: its U+FFFD belongs to the tokens before this one, whose
            # decoding ends with it.
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
            # The shortest prefix that holds the text given out: a stop string may follow right behind it.
            while self._ends[self._num_kept] < self._num_characters:
                self._num_kept += 1
        return self._num_kept - before
