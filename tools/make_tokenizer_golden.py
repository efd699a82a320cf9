"""Make tests/data/tokenizer_*.json: token ids from llama.cpp, which the tests compare jaxspec's tokenizer with.

Needs `pip install llama-cpp-python gguf` and the default model's GGUF file:

    python tools/make_tokenizer_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf tests/data

tokenizer_smollm2.json: ids of the file as it is. tokenizer_pre.json: ids of the same vocabulary under other names in
`tokenizer.ggml.pre`, which is not how those models encode, but exercises their splits. tokenizer_spm.json: a small
SentencePiece vocabulary made of the same tokens, with its metadata, and its ids.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp  # pyright: ignore[reportMissingImports] # too heavy for the test extra; see above

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    " leading space",
    "trailing space ",
    "  two  spaces   three    four  ",
    "\n",
    "\n\n\n",
    "line one\nline two\n\nline four\n",
    "windows\r\nline\r\nends\r\n",
    "\ttab\t\ttabs\t",
    " \t \n \t\n  mixed \n\t whitespace \r\n ",
    "0",
    "42",
    "1234567890",
    "3.14159265358979323846",
    "Call 555-0123 or +49 30 901820 by 12:30 on 2024-02-29.",
    "1,000,000 and 1.000.000,00 and 1e-5 and 0x1F600",
    "x1y22z333 4444a 55555",
    "½ ² ³ ① Ⅷ ٣ ४ 五 १२३",
    "I'm you're he's we'll they'd I've can't",
    "I'M YOU'RE HE'S WE'LL THEY'D I'VE CAN'T",
    "’tis the season; don’t “quote” me",
    "'s 's'd ''ll 'twas o'clock",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i] * b[i];\n}\n",
    "<html>\n  <body class=\"a\">&nbsp;</body>\n</html>",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\\n\"}}",
    "SELECT * FROM users WHERE id = 17 AND name LIKE '%o''brien%';",
    "snake_case camelCase PascalCase SCREAMING_SNAKE kebab-case",
    "https://example.com/path/to/page?query=1&other=%20two#fragment",
    "user.name+tag@sub.example.co.uk",
    "C:\\Users\\me\\file.txt and /usr/local/bin/python3.11",
    "!!!???...;;;:::---___===+++***",
    "a!b?c.d,e;f:g-h_i=j+k*l/m\\n|o^p~q`r",
    "(([[{{<<>>}}]]))",
    "$100 €50 £25 ¥1000 ₿0.5",
    "50% off @ store #1 & more",
    "naïve café résumé Zürich Ångström",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323",
    "ǅ ǆ ŉ ſt ﬁ ﬂ",
    "Привет, как дела? Всё хорошо.",
    "Γειά σου Κόσμε",
    "你好，世界！今天天气怎么样？",
    "東京タワーは高さ333メートルです。",
    "カタカナ ひらがな 漢字",
    "안녕하세요 세계",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Xin chào thế giới",
    "😀😃😄 🎉🎊",
    "👩‍👩‍👧‍👦 👨🏽‍💻 🏳️‍🌈",
    "🇩🇪🇫🇷🇯🇵 ☃️ ✌🏿",
    "math: ∀x∈ℝ, ∃y: x² + y² = 1 ⇒ |x| ≤ 1",
    "arrows → ← ↔ ⇒ box ─│┌┐ dots … bullets •",
    "English 中文 русский عربى 日本語 mixed123混合",
    "no\u00a0break thin\u2009space zero\u200bwidth ideographic\u3000space",
    "line\u2028separator paragraph\u2029separator next\u0085line",
    "control \x00 \x01 \x1b[31m \x7f characters",
    "\ufeffbyte order mark",
    "replacement \ufffd and private \ue000 and astral \U0001f9ff \U00020000",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababababababababababababababababababababab",
    "................................................................",
    "                                                                ",
    "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "before<|endoftext|>after",
    "almost <|im_start and im_end|> and <| im_start |>",
    "<repo_name>jaxspec<file_sep>main.py <gh_stars>100",
    "<|im_end|><|im_end|>  <|im_end|> 7",
    "THE END. the end. The End.",
    "Mr. Smith went to Washington, D.C., at 5 p.m.",
    "- item one\n- item two\n  - nested\n1. first\n2. second\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "```python\nprint('hi')\n```",
    "E=mc^2, H2O, CO2, C6H12O6",
    "word\n word\n  word\n   word",
]  # fmt: skip

PRE_TOKENIZERS = [
    "default", "gpt-2", "starcoder", "llama-bpe", "dbrx", "qwen2", "tekken", "deepseek-llm", "deepseek-coder",
]  # fmt: skip

SPM_TOKENS = 3000


def main() -> None:
    """Write the golden files into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the default model's GGUF file")
    parser.add_argument("folder", type=Path, help="where the golden files go")
    arguments = parser.parse_args()
    origin = f"llama-cpp-python {llama_cpp.__version__}"
    header = {"made_by": "tools/make_tokenizer_golden.py", "ids_from": origin}
    fields = gguf.GGUFReader(arguments.model).fields
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary = Path(scratch) / "vocabulary.gguf"
        cases = [{"text": text, "ids": ids} for text, ids in zip(TEXTS, encode(arguments.model), strict=True)]
        write_json(arguments.folder / "tokenizer_smollm2.json", {**header, "cases": cases})

        by_name = {}
        for name in PRE_TOKENIZERS:
            write_vocabulary(vocabulary, fields, {"tokenizer.ggml.pre": name})
            by_name[name] = encode(vocabulary)
        write_json(arguments.folder / "tokenizer_pre.json", {**header, "texts": TEXTS, "ids": by_name})

        metadata = make_spm_metadata(fields)
        variants = []
        for add_space_prefix in (True, False):
            metadata["tokenizer.ggml.add_space_prefix"] = add_space_prefix
            write_vocabulary(vocabulary, fields, metadata)
            variants.append({"add_space_prefix": add_space_prefix, "ids": encode(vocabulary)})
        del metadata["tokenizer.ggml.add_space_prefix"]
        write_json(
            arguments.folder / "tokenizer_spm.json",
            {**header, "metadata": metadata, "texts": TEXTS, "variants": variants},
        )


def encode(model: Path) -> list[list[int]]:
    """The ids of every text, special tokens parsed, none added."""
    llama = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    ids = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS]
    llama.close()
    return ids


def write_vocabulary(path: Path, fields: dict[str, gguf.ReaderField], changes: dict[str, Any]) -> None:
    """Write a GGUF file without tensors: the metadata of `fields`, with `changes`."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in fields.items():
        if name.startswith("GGUF.") or name in changes or name == "general.architecture":
            continue
        if "tokenizer.ggml.model" in changes and name == "tokenizer.ggml.merges":
            continue
        kind, *element = field.types
        writer.add_key_value(name, field.contents(), kind, element[0] if element else None)
    for name, value in changes.items():
        # Python's integers say nothing of GGUF's, where ids are unsigned: take the type that the key has.
        kind = fields[name].types[0] if name in fields else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def make_spm_metadata(fields: dict[str, gguf.ReaderField]) -> dict[str, Any]:
    """A SentencePiece vocabulary: special and byte tokens, then the first tokens of `fields` that are whole text."""
    normal, control, byte = 1, 3, 6
    tokens, types = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"], [2, *[control] * 4]
    tokens += [f"<0x{value:02X}>" for value in range(256)]
    types += [byte] * 256
    alphabet = {chr(value): value for value in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    others = [value for value in range(256) if chr(value) not in alphabet]
    alphabet.update((chr(0x100 + index), value) for index, value in enumerate(others))
    pieces = list("éüö你好。привет")
    source = zip(*(fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type")), strict=True)
    for token, kind in source:
        # "Ā" is NUL, at which llama.cpp stops reading.
        if kind == normal and token != "Ā" and all(character in alphabet for character in token):
            try:
                pieces.append(bytes(alphabet[character] for character in token).decode().replace(" ", "▁"))
            except UnicodeDecodeError:
                continue
    pieces = [piece for piece in dict.fromkeys(pieces) if piece not in tokens][: SPM_TOKENS - len(tokens)]
    tokens += pieces
    types += [normal] * len(pieces)
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one line per entry of the outermost object."""
    lines = (f"{json.dumps(key)}: {json.dumps(entry, ensure_ascii=True)}" for key, entry in value.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
