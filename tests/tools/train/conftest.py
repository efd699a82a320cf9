"""Shared by the tests of the distillation tool: a tiny model that can chat, its conversations, and the command."""

import functools

import pytest
from distil_cases import SAMPLE, draw_words, no_documents, succeed, write_chat_tokenizer
from native_models import LLAMA, write_native
from typer.testing import CliRunner

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


@pytest.fixture(scope="module")
def tiny_corpus():
    """Conversations begin with made-up words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.sample.draw_opening", draw_words)
        patch.setattr("train.sample.Documents", no_documents)
        yield


@functools.cache
def open_once(*words, **options):
    """A model that commands share."""
    return LLM(*words, **options)


@pytest.fixture(scope="module")
def command(chat_model, tiny_corpus):
    """Runs a command of the tool on the tiny model, which is loaded once."""
    distil_draft = pytest.importorskip("distil_draft")
    runner = CliRunner()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distil_draft, "LLM", open_once)

        def run(name, *words, model=chat_model):
            return runner.invoke(distil_draft.app, [name, *map(str, words), "--model", str(model)])

        yield run


@pytest.fixture(scope="session")
def sampled(tmp_path_factory):
    """The folder where `data` puts its conversations, once for all files."""
    return tmp_path_factory.mktemp("sampled") / "data"


@pytest.fixture(scope="module")
def data(command, sampled):
    """Sampled conversations."""
    if not sampled.exists():
        succeed(command("sample", sampled, *SAMPLE))
    return sampled
