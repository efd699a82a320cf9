"""Shared by the tests of the distillation tool: a tiny model that can chat."""

import pytest
from distil_cases import write_chat_tokenizer
from native_models import LLAMA, write_native

from jaxspec import LLM


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A tiny random llama with a chat template."""
    folder = tmp_path_factory.mktemp("distil") / "model"
    write_native(folder, LLAMA)
    write_chat_tokenizer(folder, LLAMA.vocab_size)
    return folder


@pytest.fixture(scope="session")
def chat_llm(chat_model):
    """The same, loaded as the tool loads a target."""
    return LLM(chat_model, method="ar", dtype="float32")
