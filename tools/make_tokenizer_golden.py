"""Make tests/data/tokenizer_*.json: token ids from llama.cpp, which the tests compare jaxspec's tokenizer with.

Needs `pip install llama-cpp-python gguf` and the default model's GGUF file:

    python tools/make_tokenizer_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf tests/data

tokenizer_smollm2.json: ids of the file as it is, and the texts: a case with a new text and no ids is filled in.
tokenizer_pre.json: ids of the same vocabulary under other names in
`tokenizer.ggml.pre`, which is not how those models encode, but exercises their splits. tokenizer_spm.json: a small
SentencePiece vocabulary made of the same tokens, with its metadata, and its ids.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp  # pyright: ignore[reportMissingImports] # too heavy for the test extra; see above

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
    whole = arguments.folder / "tokenizer_smollm2.json"
    texts = [case["text"] for case in json.loads(whole.read_text(encoding="utf-8"))["cases"]]
    with tempfile.TemporaryDirectory() as scratch:
        vocabulary = Path(scratch) / "vocabulary.gguf"
        ids_of_texts = encode(arguments.model, texts)
        cases = [{"text": text, "ids": ids} for text, ids in zip(texts, ids_of_texts, strict=True)]
        write_json(whole, {**header, "cases": cases})

        by_name = {}
        for name in PRE_TOKENIZERS:
            write_vocabulary(vocabulary, fields, {"tokenizer.ggml.pre": name})
            by_name[name] = encode(vocabulary, texts)
        write_json(arguments.folder / "tokenizer_pre.json", {**header, "texts": texts, "ids": by_name})

        metadata = make_spm_metadata(fields)
        variants = []
        for add_space_prefix in (True, False):
            metadata["tokenizer.ggml.add_space_prefix"] = add_space_prefix
            write_vocabulary(vocabulary, fields, metadata)
            variants.append({"add_space_prefix": add_space_prefix, "ids": encode(vocabulary, texts)})
        del metadata["tokenizer.ggml.add_space_prefix"]
        write_json(
            arguments.folder / "tokenizer_spm.json",
            {**header, "metadata": metadata, "texts": texts, "variants": variants},
        )


def encode(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of every text, special tokens parsed, none added."""
    llama = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    ids = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
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
