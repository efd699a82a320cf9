"""Text from tokens: the bytes of each token, and whole characters as tokens come.

The text is the bytes of all tokens, one after the other, read as UTF-8 with U+FFFD for what is not UTF-8. This equals
the decoders of the `tokenizers` library with one exception: where a SentencePiece model writes byte tokens that are not
UTF-8, the library replaces every byte of the run. Here the valid characters among them are kept.
"""

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from jaxspec.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of single tokens, by the rules of a tokenizer's decoder."""

    def __init__(self, backend: Tokenizer):
        """Read the decoder's rules; raises ConfigError, naming the step, where bytes depend on other tokens."""
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        self.leading_spaces = 0  # that the decoder takes off the front of the whole text
        if backend.decoder is None:
            raise ConfigError("the tokenizer has no decoder, so its tokens cannot be turned into text")
        rules = json.loads(backend.decoder.__getstate__())
        for step in rules["decoders"] if rules["type"] == "Sequence" else [rules]:
            self._read_step(step)

    def _read_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass  # joins tokens into one text, which is what happens here anyway
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                self.leading_spaces += start
            case _:
                raise ConfigError(f"the tokenizer's decoder has the step {json.dumps(step)}, which is not supported")

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not have (padding rows of the embedding)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._make(token_id)
        return known

    def _make(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # A token with a character outside the alphabet was added as it reads, not in the alphabet.
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()
        for old, new in self._replace:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()


class Detokenizer:
    """Text from tokens as they come: `push` and `finish`, joined, give `tokenizer.decode` of all ids.

    A token takes constant time. The bytes of a character that is not complete, three at most, are held back.
    """

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int] = frozenset()):
        """Start an empty text; the ids in `skipped` are no text."""
        self._bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = token_bytes.leading_spaces

    @property
    def holds_bytes(self) -> bool:
        """Whether the text so far ends within a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, ids: Iterable[int]) -> str:
        """The characters that `ids` complete; may be empty."""
        skipped, token_bytes = self._skipped, self._bytes
        return self._strip(self._decoder.decode(b"".join(token_bytes[i] for i in ids if i not in skipped)))

    def finish(self) -> str:
        """Text that was held back, at the end of the tokens: U+FFFD for an incomplete character, or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while text and self._leading_spaces:
            if text[0] != " ":
                self._leading_spaces = 0
            else:
                text = text[1:]
                self._leading_spaces -= 1
        return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


_BYTE_OF = _byte_alphabet()
