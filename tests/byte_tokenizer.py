"""A tokenizer of bytes and some longer tokens, for tests."""


class BytesTokenizer:
    """The first ids are `singles`, each a byte, then come `words`, then two ends of a text; cuts longest first."""

    def __init__(self, words, singles=range(256)):
        self._tokens = [bytes([byte]) for byte in singles] + [word.encode() for word in words]
        self.eos_ids = (len(self._tokens), len(self._tokens) + 1)
        self._tokens += [b"<end>", b"<turn>"]
        self.special_ids = frozenset(self.eos_ids)
        self.vocab_size = len(self._tokens)

    def token_bytes(self, token):
        return self._tokens[token] if token < len(self._tokens) else b""

    def encode(self, text, add_special_tokens=True):
        content, ids = text.encode(), []
        while content:
            token = max(
                (t for t in range(self.eos_ids[0]) if content.startswith(self._tokens[t])),
                key=lambda t: len(self._tokens[t]),
            )
            ids.append(token)
            content = content[len(self._tokens[token]) :]
        return ids
