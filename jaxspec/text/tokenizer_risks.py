"""What of a foreign tokenizer is safe to run in this process.

The tokenizer library answers some files with a panic of Rust, which prints a backtrace and is no Exception in Python,
and its regular expressions can backtrack without end. A tokenizer of steps that are known to be safe encodes here. Any
other encodes in the guarded process (`jaxspec.text.guard`), which costs a process start.
"""

import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from jaxspec.errors import CheckpointError

# Patterns of published tokenizers that read a text in linear time: an alternative that backtracks over a run is
# followed by one that takes the run. Those of `gguf_tokenizer` are named there and listed here.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_LINEAR = frozenset((GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT, TEKKEN_SPLIT, _O200K_SPLIT, "[0-9][0-9][0-9]", r"\s+"))
# One class of characters, a run of it or a few of it: it never gives up what it has read.
_ONE_CLASS = re.compile(r"(?:\[\^?(?:[^\[\]\\&]|\\p\{\w+\}|\\.)+\]|\\p\{\w+\}|\\[sdw])(?:\+|\{\d{1,2}(?:,\d{1,2})?\})?")

_SAFE_STEPS = frozenset({
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "Nmt",
    "ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace", "CharDelimiterSplit", "Digits",
    "Punctuation", "UnicodeScripts", "RobertaProcessing", "BertProcessing",
})  # fmt: skip
_SAFE_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")

_MAX_STEPS = 16
_MAX_GROWTH, _MAX_GROWING_STEPS = 4, 3  # bytes that replace one byte, and how many steps may do so
_MAX_WORD = 1000  # characters of a word that WordPiece tries all prefixes of

# The library panics, or takes all memory, while it loads these steps if they are damaged. A name can be spelled with
# escapes.
_PANICS_AT_LOAD = re.compile(rb'Precompiled|continuing_subword_prefix"\s*:\s*"[^"]|\\u00[2-7]')

_standard_error = threading.Lock()


@contextmanager
def naming_failures(what: object) -> Iterator[None]:
    """Raise whatever the tokenizer library raises, its panics included, as a CheckpointError with `what` in front."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or _is_panic(error):
            raise CheckpointError(f"{what}: {str(error) or type(error).__name__}") from error
        raise


@contextmanager
def naming_failures_at_load(what: object) -> Iterator[None]:
    """As `naming_failures`, and without the lines that Rust writes to standard error about a panic.

    They cannot be switched off. Standard error of the whole process goes to a file meanwhile, and from there to where
    it belongs if nothing panics.
    """
    with naming_failures(what), _standard_error, tempfile.TemporaryFile() as file:
        try:
            kept = os.dup(2)
        except OSError:  # closed: what is written there is lost anyway
            yield
            return
        os.dup2(file.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = _is_panic(error)
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            if not panicked and (written := file.read()):
                os.write(2, written)


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def may_panic_at_load(content: bytes) -> bool:
    """Whether a tokenizer.json has to be tried in the guarded process before it is loaded here."""
    return _PANICS_AT_LOAD.search(content) is not None


def needs_guard(backend: Tokenizer) -> bool:
    """Whether a tokenizer has a step that might not end, or might crash, on some text."""
    model = backend.model
    if type(model).__name__ not in _SAFE_MODELS or getattr(model, "max_input_chars_per_word", 0) > _MAX_WORD:
        return True
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    steps = [step for part in parts if part is not None for step in _steps(json.loads(part.__getstate__()))]
    growing = sum(step.get("type") == "Replace" and _growth(step) > 1 for step in steps)
    return len(steps) > _MAX_STEPS or growing > _MAX_GROWING_STEPS or not all(map(_is_safe, steps))


def _steps(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a part, those of sequences one by one."""
    if state.get("type") != "Sequence":
        yield state
        return
    for key in ("normalizers", "pretokenizers", "processors"):
        for step in state.get(key, ()):
            yield from _steps(step)


def _is_safe(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Split", "pattern": pattern}:
            return _is_linear(pattern)
        case {"type": "Replace", "pattern": pattern}:
            return _is_linear(pattern) and _growth(step) <= _MAX_GROWTH
        case {"type": "FixedLength", "length": length}:
            return length > 0
        case {"type": "Prepend", "prepend": text}:
            return text != ""
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": tokens}:
            return all(_fits(piece, tokens) for piece in pieces)
    return step.get("type") in _SAFE_STEPS


def _is_linear(pattern: dict[str, str]) -> bool:
    regex = pattern.get("Regex", "")
    return bool(pattern.get("String")) or regex in _LINEAR or _ONE_CLASS.fullmatch(regex) is not None


def _growth(step: dict[str, Any]) -> float:
    """How many times as long as what it replaces a replacement can be, in bytes."""
    return len(step.get("content", "").encode()) / max(1, len(step["pattern"].get("String", "").encode()))


def _fits(piece: dict[str, Any], tokens: dict[str, Any]) -> bool:
    """Whether the library finds what a piece of a template names."""
    match piece:
        case {"Sequence": {"id": "A"}}:
            return True
        case {"SpecialToken": {"id": name}}:
            return name in tokens
    return False
