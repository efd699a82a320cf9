"""Shared by the tests of commands."""

import pytest
from native_models import LLAMA, write_native, write_tokenizer


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "model"
    write_native(folder, LLAMA)
    write_tokenizer(folder, LLAMA.vocab_size)
    return str(folder)
