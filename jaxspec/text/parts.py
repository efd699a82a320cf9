"""What every tokenizer source gives: the parts that jaxspec.text.tokenizer makes a Tokenizer of."""

import dataclasses

from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer as read from a folder or a GGUF file.

    Attributes:
      backend: the `tokenizers` object: text to ids and ids to tokens.
      bos_id: the beginning-of-sequence token, if the model has one.
      eos_ids: the tokens that end a text or a turn, the usual one first.
      special_tokens: `bos_token`, `eos_token` and the like by name, for chat templates.
      chat_template: Jinja source, if the model has one.
    """

    backend: Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None
