"""The tokenizer that a GGUF file describes in its metadata, built with the `tokenizers` library.

Two of GGUF's models are supported: "gpt2" (byte-level BPE, split first as `tokenizer.ggml.pre` says) and "llama"
(SentencePiece BPE with byte fallback). Key names: ggml's docs/gguf.md; splits: src/llama-vocab.cpp of llama.cpp.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.text.hf_tokenizer import TokenizerParts
from jaxspec.text.tokenizer_risks import (
    GPT2_SPLIT,
    LLAMA3_SPLIT,
    O200K_SPLIT,
    QWEN2_SPLIT,
    TEKKEN_SPLIT,
    naming_failures_quietly,
)

_MAX_CUTTING = 500_000_000  # a vocabulary of 256,000 tokens of 10 characters takes 25,600,000

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types; the others (normal, unknown, unused, byte) need no treatment

_CJK_SPLIT = "[一-龥ࠀ-一가-퟿]+"
# The letters that DeepSeek's tokenizer lists one range at a time: what \p{L} was to it, CJK left out.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴ"
    "ᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """The steps that a name in `tokenizer.ggml.pre` stands for."""

    splits: tuple[str, ...]  # patterns, one after the other; each match, and each text between, becomes a word
    # The text is brought to Unicode form C first. Hugging Face's tokenizers of these models do so, and with them
    # training did; llama.cpp leaves it out, so its ids differ on text that is not in form C.
    nfc: bool = False
    whole_words: bool = False  # a word that is a token becomes that token, whatever the merges would make of it
    add_bos: bool = False  # a beginning-of-sequence token comes first unless the file says otherwise


_GPT2 = _PreTokenizer((GPT2_SPLIT,))
_DIGITS_THEN_GPT2 = _PreTokenizer((r"\p{N}", GPT2_SPLIT))
_LLAMA3 = _PreTokenizer((LLAMA3_SPLIT,), whole_words=True, add_bos=True)
_QWEN2 = _PreTokenizer((QWEN2_SPLIT,), nfc=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "exaone4": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _PreTokenizer((LLAMA3_SPLIT,))),
    "gpt-4o": _PreTokenizer((O200K_SPLIT,)),
    # Marks take no line ends with them.
    "seed-coder": _PreTokenizer((QWEN2_SPLIT.replace(r"+[\r\n]*", "+"),)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreTokenizer((TEKKEN_SPLIT,), whole_words=True, add_bos=True),
    "deepseek-llm": _PreTokenizer(
        ("[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK_SPLIT, r"\p{N}+")
    ),
    "deepseek-coder": _PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_SPLIT, r"\p{N}")),
}


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer from a GGUF file's metadata; CheckpointError if this is missing or contradicts itself.

    ConfigError: the file asks for a tokenizer that is not supported; the message names it.
    """
    tokens = _take_tokens(metadata)
    model = _take(metadata, "model", str)
    if model == "gpt2":
        pre = _take_pre_tokenizer(metadata)
        backend = _build_byte_level(metadata, tokens, pre)
        add_bos = pre.add_bos
    elif model == "llama":
        backend = _build_sentencepiece(metadata, tokens)
        add_bos = True
    else:
        raise ConfigError(f"tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are")
    types = _take(metadata, "token_type", list, [])
    if types and len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, types, strict=False) if k == kind]
        )
    ids = {
        name: _take_id(metadata, f"{key}_token_id", tokens)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    add_bos = _take(metadata, "add_bos_token", bool, add_bos)
    _add_ends(
        backend,
        bos=_token_at_end(tokens, ids["bos"], "bos") if add_bos else None,
        eos=_token_at_end(tokens, ids["eos"], "eos") if _take(metadata, "add_eos_token", bool, False) else None,
    )
    # A turn may end otherwise than the text: Llama 3 writes <|eot_id|>, and <|eom_id|> before a tool's answer.
    ends = (ids["eos"], *(_take_id(metadata, f"{key}_token_id", tokens) for key in ("eot", "eom")))
    return TokenizerParts(
        backend=backend,
        bos_id=ids["bos"],
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        special_tokens={f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
        chat_template=_take_chat_template(metadata),
    )


_REQUIRED: Any = object()


def _take(metadata: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """The value of `tokenizer.ggml.<key>`, which must be a `kind`."""
    name = f"tokenizer.ggml.{key}"
    value = metadata.get(name, default)
    if value is _REQUIRED:
        raise CheckpointError(f"{name} is missing: the file holds no tokenizer")
    if not isinstance(value, kind) and value is not default:
        raise CheckpointError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def _take_chat_template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer.chat_template must be a str, got {type(template).__name__}")
    return template


def _take_tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _take(metadata, "tokens", list)
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError("tokenizer.ggml.tokens must be a list of strings, at least one")
    if len(set(tokens)) != len(tokens):
        twice, _ = collections.Counter(tokens).most_common(1)[0]
        raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} more than once")
    return tokens


def _take_id(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    value = _take(metadata, key, int, None)
    # Some converters write -1 or 2**32 - 1 for a token that the model does not have.
    if value is None or value in (-1, 2**32 - 1):
        return None
    if not 0 <= value < len(tokens):
        raise CheckpointError(f"tokenizer.ggml.{key} is {value}, beyond the {len(tokens)} tokens")
    return value


def _take_pre_tokenizer(metadata: Mapping[str, Any]) -> _PreTokenizer:
    name = _take(metadata, "pre", str, None)
    if name is None:
        raise ConfigError(
            "tokenizer.ggml.pre is missing: the file does not say how text is split, and a guess would give the model "
            "other tokens than it was trained on; convert the model again with a recent llama.cpp"
        )
    if name not in _PRE_TOKENIZERS:
        raise ConfigError(f"tokenizer.ggml.pre {name!r} is not supported; these are: {', '.join(_PRE_TOKENIZERS)}")
    return _PRE_TOKENIZERS[name]


def _build_byte_level(metadata: Mapping[str, Any], tokens: list[str], pre: _PreTokenizer) -> Tokenizer:
    merges = []
    for merge in _take(metadata, "merges", list):
        left, _, right = str(merge).partition(" ")
        merges.append((left, right))
    if any(not left or not right or " " in right for left, right in merges):
        raise CheckpointError("tokenizer.ggml.merges must hold pairs of tokens, with one space between")
    backend = _make_bpe(tokens, merges, ignore_merges=pre.whole_words)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _build_sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = _take(metadata, "scores", list)
    if len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = _take_id(metadata, "unknown_token_id", tokens)
    backend = _make_bpe(
        tokens,
        _merges_by_score(tokens, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = [normalizers.Replace(" ", "▁")]
    if _take(metadata, "add_space_prefix", bool, True):
        # Applied to each stretch of text between special tokens, as llama.cpp adds its space.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest: merges of all pairs, best union first."""
    if any(isinstance(score, bool) or not isinstance(score, int | float) for score in scores):
        raise CheckpointError("tokenizer.ggml.scores must be numbers, one for each token")
    # Every cut of every token is tried, and a cut copies the token.
    if (effort := sum(len(token) ** 2 for token in tokens)) > _MAX_CUTTING:
        longest = max(map(len, tokens))
        raise CheckpointError(
            f"tokenizer.ggml.tokens are too long to be cut into pairs: the longest has {longest} characters, and the "
            f"squares of all lengths add up to {effort}, {_MAX_CUTTING} at most"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, -len(left), ids[token], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _make_bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    with naming_failures_quietly("the file's tokens and merges do not fit together"):
        return Tokenizer(BPE(vocab=vocab, merges=merges, **options))


def _token_at_end(tokens: list[str], token_id: int | None, name: str) -> tuple[str, int]:
    if token_id is None:
        raise CheckpointError(f"tokenizer.ggml.{name}_token_id is missing, and each text must have that token")
    return tokens[token_id], token_id


def _add_ends(backend: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Put the tokens `bos` and `eos` around every text that is encoded with special tokens."""
    # Under names of their own: the library reads "$B" or "x:9" in a template as something else than a token.
    ends = {name: end for name, end in (("bos", bos), ("eos", eos)) if end is not None}
    if ends:
        single = [*(["bos"] if bos else []), "$A", *(["eos"] if eos else [])]
        tokens: Any = [{"id": name, "ids": [end[1]], "tokens": [end[0]]} for name, end in ends.items()]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
