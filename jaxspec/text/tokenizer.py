"""A model's tokenizer and chat template: text to token ids and back."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.gguf_header import read_header
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.text.detokenizer import Detokenizer, TokenBytes
from jaxspec.text.gguf_tokenizer import build_gguf_tokenizer
from jaxspec.text.hf_tokenizer import (
    TokenizerParts,
    copy_folder_tokenizer,
    load_folder_tokenizer,
    save_folder_tokenizer,
)
from jaxspec.text.tokenizer_risks import encode_with_limits, is_safe, naming_failures

_MAX_IDS = 1 << 24  # no vocabulary has as many; an id beyond would ask for a table of that size


def load_tokenizer(path: Path | str) -> "Tokenizer":
    """Load the tokenizer of a model: a Hugging Face folder, a native checkpoint or a GGUF file.

    CheckpointError: nothing is there, or it is damaged. ConfigError: a tokenizer that is not supported, which it names.
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
    """Text to token ids and back, for one model; `special_ids` steer the model, and decoding leaves them out.

    `bos_id` and `eos_ids` are those of `TokenizerParts`.
    """

    def __init__(self, parts: TokenizerParts):
        """Make a tokenizer of what `load_folder_tokenizer` or `build_gguf_tokenizer` read."""
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self._backend = parts.backend
        self._parts = parts
        self._bytes = TokenBytes(parts.backend)
        self._is_safe = is_safe(parts.backend)
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`; what reads like a special token becomes that token, as in Hugging Face.

        `add_special_tokens` puts the tokens around it that the model expects around a text (BOS, seldom EOS).
        ConfigError: `text` is not a string, or holds a lone surrogate, which no encoding can represent.
        CheckpointError: the tokenizer fails, or exceeds a limit (`jaxspec.text.tokenizer_risks`).
        """
        if not isinstance(text, str):
            raise ConfigError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text holds a lone surrogate at character {error.start}") from error
        if not self._is_safe:
            return encode_with_limits(self._backend, text, add_special_tokens)
        with naming_failures("the model's tokenizer cannot encode this text"):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, U+FFFD for bytes that are not UTF-8; unknown ids (embedding padding) are no text."""
        detokenizer = self.make_detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def make_detokenizer(self, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A detokenizer that leaves out special tokens, but for those in `shown`."""
        return Detokenizer(self._bytes, self.special_ids - shown if skip_special_tokens else frozenset())

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, special or not; none for an id that is no token."""
        return self._bytes[token_id]

    @functools.cached_property
    def _token_strings(self) -> tuple[str, ...]:
        vocab = self._backend.get_vocab(with_added_tokens=True)
        if (highest := max(vocab.values(), default=-1)) >= _MAX_IDS:
            raise CheckpointError(f"the tokenizer gives a token the id {highest}; ids below {_MAX_IDS} are supported")
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
        return self._parts.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The template's source; ConfigError where the model has none."""
        if self._parts.chat_template is None:
            raise ConfigError("the model has no chat template; give it plain text (generate, or --raw)")
        return self._parts.chat_template

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **more: Any
    ) -> str:
        """The text of a conversation (dicts with `role` and `content`), as the model's template writes it.

        `more` are the further arguments of `ChatTemplate.render`.

        ConfigError: the model has no template, the messages are malformed, or the template refuses them.
        """
        # Imported here: Jinja takes tens of milliseconds, and some commands render nothing.
        from jaxspec.text.chat_template import ChatTemplate

        return ChatTemplate(self.chat_template, self._parts.special_tokens).render(
            messages, add_generation_prompt, **more
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The token ids of a conversation; the template itself writes what special tokens it needs."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)
