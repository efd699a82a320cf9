"""Shared by the tests of the server: a tiny model that answers on a real socket."""

import contextlib
import dataclasses

import pytest
from native_models import LLAMA, write_model
from serving import Running

from jaxspec.llm import LLM, internals
from jaxspec.serve.app import Limits

CONTEXT = 400


@pytest.fixture(scope="session")
def served_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    return write_model(folder, dataclasses.replace(LLAMA, max_context=CONTEXT))


@pytest.fixture(scope="session")
def served_llm(served_model):
    return LLM(served_model, session_memory=2**30)


@pytest.fixture(scope="session")
def cold_llm(served_llm):
    """The same programs and weights, without what earlier requests left."""
    llm = served_llm.with_method(internals(served_llm).engine.method)
    internals(llm).engine.session_memory = 0
    return llm


@pytest.fixture(scope="session")
def server(served_llm):
    with Running(served_llm, Limits(active=4, waiting=64, body_bytes=100_000)) as running:
        yield running


@pytest.fixture
def start(served_llm):
    """Start a server with limits of its own; the model is shared, so only one may decode at a time."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(Running(served_llm, **options))
