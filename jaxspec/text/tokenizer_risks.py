"""Bounds for foreign tokenizers: panics and hangs of the tokenizer library become errors.

The library answers some files and texts with a panic of Rust, which prints a backtrace and is no Exception in Python.
Its regular expressions can backtrack without end, and its normalizers can multiply a text. A tokenizer whose steps are
known to be safe encodes directly. Any other encodes with limits (`encode_with_limits`).
"""

import base64
import json
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from jaxspec.errors import CheckpointError

# Seconds by the clock; a text is split at some megabytes a second.
ENCODE_SECONDS, ENCODE_SECONDS_PER_CHARACTER = 10.0, 1e-4

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
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_LINEAR = frozenset((
    GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT, TEKKEN_SPLIT, O200K_SPLIT,
    r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\s+", "[0-9][0-9][0-9]", r"[\p{P}\$\+<=>\^~\|]+",
))  # fmt: skip

_SAFE_STEPS = frozenset({
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "Nmt",
    "ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace", "CharDelimiterSplit", "Digits",
    "Punctuation", "UnicodeScripts", "RobertaProcessing", "BertProcessing",
})  # fmt: skip
_SAFE_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")

_MAX_STEPS = 16
_MAX_GROWTH = 1000  # how many times as long normalizers make a text, in bytes, before its length is checked
_MAX_BYTES = 1 << 28  # of a normalized text
_MAX_WORD = 1000  # characters of a word that WordPiece tries all prefixes of
_MAX_ADDED = 256  # characters of an added token that passes through steps that are not known to be safe

# A character map begins with the size of its table, which the library believes. A name can be spelled with escapes.
_MAY_HOLD_CHARSMAP = re.compile(rb"Precompiled|\\u00[2-7]")

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
def naming_failures_quietly(what: object) -> Iterator[None]:
    """As `naming_failures`, and without the lines that Rust writes to standard error about a panic.

    They cannot be switched off. Standard error of the whole process goes to a file meanwhile, and from there to where
    it belongs if nothing fails.
    """
    with naming_failures(what), _standard_error, tempfile.TemporaryFile() as file:
        try:
            kept = os.dup(2)
        except OSError:  # closed: what is written there is lost anyway
            yield
            return
        os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            if not failed and (written := file.read()):
                os.write(2, written)


def run_within(seconds: float, function: Callable[[], Any]) -> Any:
    """The result of `function`, which runs in a thread of its own; TimeoutError if it takes longer.

    The thread then goes on until it ends by itself: no library can be stopped from outside.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"it takes more than the {seconds:g} s that it may take")
    return results[0]


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def check_charsmaps(content: bytes, name: object) -> None:
    """CheckpointError if a tokenizer.json has a character map whose size is wrong: the library would reserve it."""
    if _MAY_HOLD_CHARSMAP.search(content) is None:
        return
    with naming_failures(f"{name} is damaged"):
        normalizer = json.loads(content).get("normalizer")
        for step in _steps(normalizer) if isinstance(normalizer, dict) else ():
            if step.get("type") == "Precompiled":
                charsmap = base64.b64decode(step["precompiled_charsmap"])
                if int.from_bytes(charsmap[:4], "little") > len(charsmap) - 4:
                    raise ValueError("Precompiled: the table is longer than the character map")


def is_safe(backend: Tokenizer) -> bool:
    """Whether a tokenizer ends on every text in time and memory proportional to its length, without a panic."""
    steps = _all_steps(backend)
    return (
        type(backend.model).__name__ in _SAFE_MODELS
        and getattr(backend.model, "max_input_chars_per_word", 0) <= _MAX_WORD
        and len(steps) <= _MAX_STEPS
        and math.prod(map(_growth, steps)) <= _MAX_GROWTH
        and all(map(_is_safe, steps))
    )


def encode_with_limits(backend: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode with a tokenizer that is not known to be safe; CheckpointError if it fails or exceeds a limit."""
    with naming_failures_quietly("the model's tokenizer cannot encode this text"):
        size = len(text.encode()) * math.prod(map(_growth, _all_steps(backend)))
        if size > _MAX_BYTES:
            raise ValueError(f"its normalizers may make {size:.3g} bytes of it, {_MAX_BYTES} at most")
        seconds = ENCODE_SECONDS + len(text) * ENCODE_SECONDS_PER_CHARACTER
        # Unlike `encode`, `encode_batch` leaves the interpreter to other threads.
        options = {"add_special_tokens": add_special_tokens}
        return run_within(seconds, lambda: backend.encode_batch([text], **options)[0].ids)


def check_added_tokens(backend: Tokenizer, contents: list[str]) -> None:
    """ValueError if a token that is added is too long for a tokenizer that is not known to be safe."""
    longest = max(map(len, contents), default=0)
    if longest > _MAX_ADDED and not is_safe(backend):
        raise ValueError(f"an added token has {longest} characters, {_MAX_ADDED} at most with such a tokenizer")


def _all_steps(backend: Tokenizer) -> list[dict[str, Any]]:
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    return [step for part in parts if part is not None for step in _steps(json.loads(part.__getstate__()))]


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
        case {"type": "Split" | "Replace", "pattern": pattern}:
            return bool(pattern.get("String")) or pattern.get("Regex") in _LINEAR
        case {"type": "Prepend", "prepend": text}:
            return text != ""  # else the library panics
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": tokens}:
            return all(
                piece["SpecialToken"]["id"] in tokens if "SpecialToken" in piece else piece["Sequence"]["id"] == "A"
                for piece in pieces
            )
    return step.get("type") in _SAFE_STEPS


def _growth(step: dict[str, Any]) -> float:
    """How many times as long as before a text can be after a step, in bytes."""
    match step:
        case {"type": "Replace", "pattern": pattern, "content": content}:
            replaced = len(pattern.get("String", "").encode())
            # A regular expression can match nothing, between all characters.
            return max(1, len(content.encode()) / replaced) if replaced else 1 + len(content.encode())
        case {"type": "Prepend", "prepend": text}:
            return 1 + len(text.encode())
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
            return 11  # U+FDFA: 3 bytes become 33
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            return max(map(len, base64.b64decode(charsmap).split(b"\0")))
    return 1
