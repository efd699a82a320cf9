"""The guarded process: limits, crashes and forks cost one request, and what is safe never goes there."""

import json
import os
import signal
import sys
import time

import pytest
from text_models import smollm2
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.text import guard
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.gguf_tokenizer import build_gguf_tokenizer
from jaxspec.text.hf_tokenizer import load_folder_tokenizer
from jaxspec.text.render import LONGEST_TEXT
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer
from jaxspec.text.tokenizer_risks import needs_guard

HI = [{"role": "user", "content": "Hi"}]
GREET = "{{ messages[0].content }}"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LETTERS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(guard, "RENDER_SECONDS", 0.5)
    monkeypatch.setattr(guard, "ENCODE_SECONDS", 0.5)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "s of processor time"),
        ("{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "it "),
        (
            "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
            "it ",
        ),
        ("{{ 'a' * 10 ** 12 }}", "more memory"),
        ("{{ 'a' | center(10 ** 12) }}", "more memory"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "does not compile: maximum recursion depth"),
        ("{% if true %}" * 600 + "x" + "{% endif %}" * 600, "does not compile"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", f"writes more than {LONGEST_TEXT} characters"),
        ("{{ raise_exception('a\nb') }}", "refuses these messages: a b"),
    ],
)
def test_templates_without_end_are_refused(short, source, message):
    with pytest.raises(ConfigError, match=message) as refused:
        ChatTemplate(source, {}).render(HI)
    assert len(str(refused.value).splitlines()) == 1
    assert ChatTemplate(GREET, {}).render(HI) == "Hi"


def test_a_process_that_was_killed_is_started_again():
    assert ChatTemplate(GREET, {}).render(HI) == "Hi"
    os.kill(guard._process._child.pid, signal.SIGKILL)
    time.sleep(0.05)
    assert ChatTemplate(GREET, {}).render(HI) == "Hi"


def test_an_interrupted_request_leaves_no_reply_for_the_next(monkeypatch):
    """A reply to another request would be another conversation's text."""

    def interrupted(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(guard, "read_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ChatTemplate("old", {}).render(HI)
    assert ChatTemplate("new", {}).render(HI) == "new"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_forked_process_has_its_own(tmp_path):
    assert ChatTemplate("parent", {}).render(HI) == "parent"
    child = os.fork()
    if not child:
        same = ChatTemplate("child", {}).render(HI) == "child"
        guard._process.stop()
        os._exit(0 if same else 1)
    assert [ChatTemplate(str(i), {}).render(HI) for i in range(20)] == [str(i) for i in range(20)]
    assert os.waitpid(child, 0)[1] == 0


def write_tokenizer(folder, **parts):
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    content = {"version": "1.0", "added_tokens": [], **empty, "decoder": BYTE_LEVEL, "model": LETTERS} | parts
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def precompiled(charsmap):
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}}, "Missing .UNK. token"),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}}, "`unk_id` is missing"),
        ({"model": LETTERS | {"continuing_subword_prefix": "é"}}, "is damaged: slice index"),
        ({"model": LETTERS | {"vocab": {"a": 0, "b": 1, "ab": 4294967295}}}, "the id 4294967295"),
        ({"normalizer": precompiled("AAAA")}, "is damaged: Precompiled"),
        ({"normalizer": precompiled("/" * 64)}, "needs more memory|is damaged"),
        ({"normalizer": precompiled("CAAAAP////////8BYWJj")}, "cannot encode this text: index out of bounds"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode this text: chunk size"),
        ({"pre_tokenizer": split("(a+)+$")}, "retry-limit-in-match over"),
        ({"pre_tokenizer": split("a+a+(?=[cd])")}, "s of processor time"),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
             "pair": [], "special_tokens": {}}},
            "no entry found for key",
        ),
    ],
)  # fmt: skip
def test_tokenizers_that_crash_or_hang_the_library(short, tmp_path, capfd, parts, message):
    write_tokenizer(tmp_path, **parts)
    with pytest.raises(CheckpointError, match=message):
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.token_strings()
        tokenizer.encode("a" * 4000 + "X漢")
    assert capfd.readouterr() == ("", "")


def test_an_unusual_tokenizer_encodes_as_the_library_does(tmp_path):
    write_tokenizer(tmp_path, pre_tokenizer=split("(ab)+|b"))
    tokenizer = load_tokenizer(tmp_path)
    assert needs_guard(load_folder_tokenizer(tmp_path).backend)
    text = "ababbaab"
    assert tokenizer.encode(text) == Backend.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids


def test_published_tokenizers_encode_in_this_process(tmp_path):
    """Those of the default model, of Llama 3 and of a SentencePiece model."""
    assert smollm2()._guarded is None
    common = {"tokenizer.ggml.tokens": ["a", "b", "ab", "▁"], "tokenizer.ggml.bos_token_id": 0}
    llama3 = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["a b"]}
    pieces = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, 0.0, -1.0, 0.0]}
    for metadata in (llama3, pieces):
        assert not needs_guard(build_gguf_tokenizer(common | metadata).backend)


@pytest.mark.parametrize("first", ["$B", "x:9", "$A:1", "a:b:c"])
def test_special_tokens_of_gguf_may_have_any_name(first):
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [first, "b"], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.token_type": [3, 1],
    }  # fmt: skip
    assert Tokenizer(build_gguf_tokenizer(metadata)).encode("b") == [0, 1]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.scores": ["0", "1"]}, "scores must be numbers"),
        ({"tokenizer.chat_template": 5}, "chat_template must be a str, got int"),
        ({"tokenizer.ggml.tokens": ["a", "b" * 30_000]}, "the longest has 30000 characters"),
    ],
)
def test_wrong_metadata_of_gguf(metadata, message):
    common = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.0, 1.0],
        "tokenizer.ggml.bos_token_id": 0,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        build_gguf_tokenizer(common | metadata)


def test_no_interpreter_to_start(monkeypatch):
    guard._process.stop()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="cannot be started"):
        ChatTemplate(GREET, {}).render(HI)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens_decoder": {"9": {"content": None}}}, "the content of 9 is no text"),
        ({"added_tokens_decoder": {"9": {"content": "\ud800"}}}, "the content of 9 is no text"),
        ({"bos_token": "\ud800"}, "bos_token must be a string"),
    ],
)
def test_tokens_of_the_configuration_that_are_no_text(tmp_path, files, message):
    Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(files))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_an_empty_prefix_is_not_safe():
    """The library panics on a text that begins with such a step."""
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    for prefix, guarded in (("", True), ("_", False)):
        backend.normalizer = normalizers.Prepend(prefix)
        assert needs_guard(backend) == guarded
