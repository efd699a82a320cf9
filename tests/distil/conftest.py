"""Shared by the tests of the distillation tool: where it is, and a tiny model that can chat."""

import sys
from pathlib import Path

import pytest
from native_models import LLAMA, write_native
from tiny_models import quick_compilation

from jaxspec import LLM

# The tool is no part of the package.
TOOLS = str(Path(__file__).parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)

from distil_cases import write_chat_tokenizer  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def quickly():
    with quick_compilation():
        yield


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
    with quick_compilation():
        return LLM(chat_model, method="ar", dtype="float32")
