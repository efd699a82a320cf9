"""Tokenizers: crafted, mutated and damaged files of a model folder, loaded and used."""

import json
import random
from pathlib import Path
from typing import Any

from fuzz.templates import REAL
from fuzz.wild import TEXTS, mutate_bytes, mutate_json, wild_json
from jaxspec.text.tokenizer import load_tokenizer

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
PATTERNS = (
    "(a+)+$", "(a|aa)+c", "a*a*a*a*b", "(?:a?){30}a{30}", "((", "", r"\s+$", "[0-9][0-9][0-9]", r"\p{N}{1,3}",
    r"(.*)\1", "(?<=a)b", "[^a]+", "a{1,99999}", "((a{1,50}){1,50}){1,50}",
)  # fmt: skip
CHARSMAPS = ("", "AAAA", "CAAAAP////////8BYWJj", "/" * 64, "BAAAAAAAAAA=", "!")


def make_model(rng: random.Random) -> dict[str, Any]:
    """A random model of the library."""
    words = ["<unk>", "a", "b", "ab", "é", "▁", "Ġ", "##a"][: rng.choice((0, 2, 8, 8, 8, 8))]
    ids = rng.choice(
        (range(99), range(99), range(99), range(99), [*range(7), 4294967295], [0] * 9, [*range(5), 2**24 - 1, 9, 8])
    )
    vocab = dict(zip(words, ids, strict=False))
    unknown = rng.choice((None, "<unk>", "<unk>", "<unk>", "<unk>", "zz"))
    return rng.choice(
        (
            {"type": "BPE", "vocab": vocab, "merges": rng.choice(([], [["a", "b"]], ["a b"], [["a", "zz"]])),
             "unk_token": unknown, "byte_fallback": rng.random() < 0.5, "dropout": rng.choice((None, None, None, 5.0)),
             "continuing_subword_prefix": rng.choice((None, "##", "é"))},
            {"type": "WordLevel", "vocab": vocab, "unk_token": unknown or ""},
            {"type": "WordPiece", "vocab": vocab, "unk_token": unknown or "", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": rng.choice((0, 5, 100, 10**9))},
            {"type": "Unigram", "vocab": [[word, rng.choice((-1.0, 0.0, 1e308))] for word in words],
             "unk_id": rng.choice((None, 0, 0, 0, 2**32)), "byte_fallback": rng.random() < 0.5},
        )
    )  # fmt: skip


def make_pattern(rng: random.Random) -> dict[str, str]:
    """A pattern of Split or Replace."""
    return {"Regex": rng.choice(PATTERNS)} if rng.random() < 0.7 else {"String": rng.choice(TEXTS[:8])}


def make_step(rng: random.Random, part: str) -> Any:
    """A random normalizer, pre-tokenizer, post-processor or decoder."""
    replace = {"type": "Replace", "pattern": make_pattern(rng), "content": rng.choice(TEXTS[:24])}
    strip = {"type": "Strip", "content": " ", "start": rng.choice((0, 1, 10**12)), "stop": 0}
    pieces = [{"SpecialToken": {"id": rng.choice(("q", "$B", "x:9")), "type_id": 0}},
              {"Sequence": {"id": rng.choice("AB"), "type_id": rng.choice((0, 9))}}]  # fmt: skip
    special = {"q": {"id": "q", "ids": [rng.choice((0, 4294967295))], "tokens": rng.choice((["q"], []))}}
    steps: dict[str, tuple[Any, ...]] = {
        "normalizer": (
            replace, {"type": "NFKC"}, {"type": "Prepend", "prepend": rng.choice(TEXTS[:8])},
            {"type": "Precompiled", "precompiled_charsmap": rng.choice(CHARSMAPS)},
            {"type": "Sequence", "normalizers": [replace] * rng.randrange(6)}, {"type": "Lowercase"},
        ),
        "pre_tokenizer": (
            {"type": "Split", "pattern": make_pattern(rng), "behavior": rng.choice(("Isolated", "Removed", "?")),
             "invert": rng.random() < 0.5},
            {"type": "FixedLength", "length": rng.choice((0, 1, 5, -1))},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Metaspace", "replacement": rng.choice(("▁", "▁", "ab")), "prepend_scheme": "always"},
            {"type": "Digits", "individual_digits": True}, {"type": "CharDelimiterSplit", "delimiter": "a"},
        ),
        "post_processor": (
            {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special},
            {"type": "BertProcessing", "sep": ["q", 4294967295], "cls": ["a", 0]},
        ),
        "decoder": (
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, replace, strip,
            {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        ),
    }  # fmt: skip
    return rng.choice(steps[part])


def make_tokenizer(rng: random.Random) -> dict[str, Any]:
    """The content of a tokenizer.json."""
    added = [
        {"id": rng.choice((0, 9, 4294967295)), "content": rng.choice(("a", "zz", "<s>", "$A", "x:9", " ", ""))} | FLAGS
        for _ in range(rng.randrange(3))
    ]
    made: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        made[part] = make_step(rng, part) if rng.random() < 0.5 else None
    made["decoder"] = make_step(rng, "decoder") if rng.random() < 0.5 else {"type": "Fuse"}
    return made | {"model": make_model(rng)}


def make_config(rng: random.Random) -> dict[str, Any]:
    """The content of a tokenizer_config.json."""
    config: dict[str, Any] = {
        "bos_token": "a",
        "eos_token": {"content": "b"},
        "chat_template": rng.choice((*REAL, 5, [{"name": "default", "template": REAL[0]}], [1], {"a": 1})),
        "added_tokens_decoder": {"9": {"content": "zz"} | FLAGS},
    }
    return mutate_json(rng, config, rng.choice((0, 0, 1, 2)))


def run(rng: random.Random, folder: Path) -> None:
    """One model folder."""
    content = json.dumps(mutate_json(rng, make_tokenizer(rng), rng.choice((0, 0, 0, 0, 1, 2)))).encode()
    if rng.random() < 0.1:
        content = mutate_bytes(rng, content)
    (folder / "tokenizer.json").write_bytes(content)
    for name, value in (
        ("tokenizer_config.json", make_config(rng)),
        ("generation_config.json", {"eos_token_id": rng.choice((1, [1], -1, "a", 10**400))}),
        ("special_tokens_map.json", wild_json(rng)),
    ):
        if rng.random() < 0.2:
            (folder / name).write_text(json.dumps(value))
    tokenizer = load_tokenizer(folder)
    tokenizer.token_strings()
    use(rng, tokenizer)


def use(rng: random.Random, tokenizer: Any) -> None:
    """Encode and decode with what was loaded."""
    for text in rng.sample(("a", "ab zz", "a" * 28 + "X", "aé漢" * 50, "a" * 3000, "  \n\t ", "x:9 $B"), 3):
        ids = tokenizer.encode(text, add_special_tokens=rng.random() < 0.5)
        tokenizer.decode(ids + [rng.choice((0, 10**9, 4294967295))], skip_special_tokens=rng.random() < 0.5)
    if tokenizer.has_chat_template and rng.random() < 0.3:
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
