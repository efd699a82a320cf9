"""Compiling JSON schemas, regular expressions, choices and grammars with llguidance, for one tokenizer.

llguidance bounds the time and memory of its own work by `LIMITS`; what it reads is bounded here. JSON is written in one
line, with ", " and ": " between: nothing else lets a model write white space without end, and most tokens follow from
the schema. A schema says otherwise with `"x-guidance": {"whitespace_flexible": true}`.
"""

import collections
import functools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config import StructuredOutputs
from jaxspec.errors import ConfigError, shown
from jaxspec.structured.matcher import Matcher
from jaxspec.text.tokenizer import Tokenizer

MOST_CHARACTERS = 1 << 20  # of a schema or a grammar
MOST_KEPT = 64  # compiled shapes
MOST_STEPS = 1 << 20  # of the search for references without end, about a microsecond each
# Of llguidance: fuel is time (50,000 a millisecond at first, 14,000 in a step), a state of the lexer 2 kB.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _llguidance() -> Any:
    try:
        # Imported here: it is an extra.
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "structured_outputs need the package llguidance: pip install 'jaxspec-decode[structured]'"
        ) from error
    return llguidance


class _Compiled:
    """A shape that one thread compiles while others that ask for it wait."""

    def __init__(self):
        """Compile nothing yet."""
        self.lock = threading.Lock()
        self.matcher: Any = None


class Grammars:
    """Compiled shapes of answers for one tokenizer and model; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        """Compile nothing yet; `vocab_size` is the model's, and ids from there on are never allowed."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[str, _Compiled] = collections.OrderedDict()

    def match(self, shape: StructuredOutputs) -> Matcher:
        """A matcher at the beginning of an answer; each shape is compiled once and kept.

        ConfigError: the extra is missing, or the shape is malformed, not supported or too large.
        """
        source = read_shape(shape)
        with self._lock:
            tokens = self._tokens
            compiled = self._compiled.setdefault(source, _Compiled())
            self._compiled.move_to_end(source)
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        with compiled.lock:  # its own: one that takes long delays no other
            if compiled.matcher is None:
                compiled.matcher = _compile(tokens, source)
            return Matcher(compiled.matcher.deep_copy(), self._vocab_size, self._eos_ids)

    @functools.cached_property
    def _tokens(self) -> Any:
        """The vocabulary as llguidance takes it."""
        if not self._eos_ids:
            raise ConfigError("structured_outputs need a model with an end-of-sequence token, and this one has none")
        library = _llguidance()
        tokenizer = library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._eos_ids[0]))
        return library.LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)


def _compile(tokens: Any, source: str) -> Any:
    library = _llguidance()
    limits = library.LLParserLimits(verbose_errors=False, **LIMITS)
    matcher = library.LLMatcher(tokens, source, log_level=0, limits=limits)
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()  # some errors show here alone
    if first.is_error():
        reason = first.get_error().removesuffix("\n<non-verbose/>")
        reason = "no text matches it" if reason == "NoExtensionBias" else reason
        raise ConfigError(f"structured_outputs are not supported or malformed: {reason}")
    return matcher


class _Vocabulary:
    """A tokenizer as llguidance's wrapper takes it: the bytes of each token, and how a text is cut into tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int):
        self._tokenizer, self._size = tokenizer, min(tokenizer.vocab_size, vocab_size)
        self.eos_token_id, self.bos_token_id = eos_id, None
        self.tokens = [tokenizer.token_bytes(token) for token in range(self._size)]
        self.tokens += [b""] * (vocab_size - self._size)
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a part of a text, as the model reads them; the longest ones where they would add bytes."""
        ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        if all(token < self._size for token in ids) and b"".join(self.tokens[token] for token in ids) == text:
            return ids
        return self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._most_bytes), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), start + 1)
            ids.append(self._ids.get(text[start:end], self.eos_token_id))
            start = end
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: number for number, token in enumerate(self.tokens) if number not in self.special_token_ids}

    @functools.cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self.tokens))


def read_shape(shape: StructuredOutputs) -> str:
    """What llguidance compiles for a shape; ConfigError: no JSON, or too long."""
    if shape.json is not None or shape.json_object:
        schema = read_schema({"type": "object"} if shape.json is None else shape.json)
        return _llguidance().LLMatcher.grammar_from_json_schema(schema, defaults=JSON_FORM)
    if shape.regex is not None:
        return _llguidance().LLMatcher.grammar_from_regex(_check_length("regex", shape.regex))
    if shape.choice is not None:
        options = " | ".join(json.dumps(one) for one in shape.choice)
        return _llguidance().LLMatcher.grammar_from_lark(_check_length("choice", f"start: {options}"))
    assert shape.grammar is not None
    return _llguidance().LLMatcher.grammar_from_lark(_check_length("grammar", shape.grammar))


def write_json(schema: Mapping[str, Any] | str) -> str:
    """A JSON schema as a part of a Lark grammar; ConfigError: see `read_schema`."""
    return "%json " + json.dumps(read_schema(schema) | {"x-guidance": JSON_FORM}, ensure_ascii=False)


def read_schema(schema: Mapping[str, Any] | str) -> dict[str, Any]:
    """A JSON schema as an object; ConfigError where it is none, too long, or recursive without end."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found = json.loads(_check_length("json", text))
        if found is True:
            return {}
        if not isinstance(found, dict):
            raise ConfigError(f"structured_outputs.json must be a schema, an object, got {shown(found)}")
        if _Endings(found).never():
            raise ConfigError("structured_outputs.json is recursive without end: no finite text matches it")
    except RecursionError as error:
        raise ConfigError("structured_outputs.json is nested too deeply") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"structured_outputs.json is not JSON: {error}") from error
    return found


def _check_length(name: str, text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"structured_outputs.{name} has {len(text)} characters, at most {MOST_CHARACTERS} are read")
    return text


class _Endings:
    """Which references of a schema have finite texts; the work is bounded, whatever refers to what."""

    def __init__(self, root: dict[str, Any]):
        """Judge nothing yet."""
        self._root, self._steps = root, 0
        self._targets: dict[str, Any] = {}
        self._ended: set[str] = set()

    def never(self) -> bool:
        """Whether every text would contain itself; ConfigError: that takes too long to find out."""
        while not self._ends(self._root):
            known = len(self._ended)
            # A reference inside itself does not count at first; it may once another way out of it is known.
            for name in [name for name in self._targets if name not in self._ended]:
                self._judge(name)
            if len(self._ended) == known:
                return True
        return False

    def _judge(self, name: str) -> None:
        if self._ends(self._targets[name]):
            self._ended.add(name)

    def _ends(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return True
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ConfigError("structured_outputs.json has too many references that lead to each other")
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            if reference not in self._targets:
                self._targets[reference] = self._find(reference)
                self._judge(reference)
            if reference not in self._ended:
                return False
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            if isinstance(options, list) and options and not any(map(self._ends, options)):
                return False
        needed = [*schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
        if schema.get("type") == "object" and isinstance(properties := schema.get("properties"), dict):
            needed += [properties.get(name) for name in schema.get("required", ()) if isinstance(name, str)]
        if schema.get("type") == "array" and isinstance(count := schema.get("minItems"), int) and count > 0:
            needed.append(schema.get("items"))
        return all(map(self._ends, needed))

    def _find(self, reference: str) -> Any:
        target: Any = self._root
        for name in filter(None, reference[1:].split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        return target
