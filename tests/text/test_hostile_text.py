"""Templates and tokenizers that would hang, crash or fill memory give one line; what is safe has no limits."""

import json
import threading
import time

import pytest
from text_models import smollm2
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.text import chat_template, sandbox, tokenizer_risks
from jaxspec.text.chat_template import ChatTemplate
from jaxspec.text.gguf_tokenizer import build_gguf_tokenizer
from jaxspec.text.hf_tokenizer import load_folder_tokenizer
from jaxspec.text.sandbox import LONGEST_TEXT
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer
from jaxspec.text.tokenizer_risks import is_safe

HI = [{"role": "user", "content": "Hi"}]
GREET = "{{ messages[0].content }}"
LONG = "{% set n = namespace(s='ab' * 5000000, l=[1], t=(1,)) %}"
TIME, MEMORY = "s of processor time", "it needs more memory than it may take|s of processor time"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LETTERS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "_MAX_BYTES", 1 << 28)
    monkeypatch.setattr(tokenizer_risks, "ENCODE_SECONDS", 2.0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
        ("{% for a in range(9) recursive %}{% if loop.depth < 15 %}{{ loop(range(9)) }}{% endif %}{% endfor %}", TIME),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
        ("{{ range(99999) | map('string') | map('center', 99) | map('list') | map('sort') | list }}", "it "),
        (LONG + "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", MEMORY),
        (LONG + "{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}", MEMORY),
        (LONG + "{% set x %}{% for i in range(99999) %}{{ n.s }}{% endfor %}{% endset %}", MEMORY),
        (LONG + "{% set x = [" + "n.s[1:], " * 200 + "] %}", MEMORY),
        (LONG + "{{ n.s" + " ~ n.s" * 1000 + " }}", MEMORY),
        (LONG + "{{ ([n] * 999) | map(attribute='s') | join }}", MEMORY),
        (LONG + "{{ ''.join(([n] * 999) | map(attribute='s')) }}", MEMORY),
        (LONG + "{{ n.s | replace('a', n.s) }}", MEMORY),
        (LONG + "{{ n.s.replace('a', n.s) }}", MEMORY),
        (LONG + "{{ n.s | urlize }}", MEMORY),
        (LONG + "{{ n.s.split('a') | length }}", MEMORY),
        ("{{ 'a' * 10 ** 12 }}", MEMORY),
        ("{{ 10 ** 1000000000 }}", MEMORY),
        ("{{ 'a' | center(10 ** 12) }}", MEMORY),
        ("{{ '%999999999999d' % 1 }}", MEMORY),
        ("{{ '{:999999999999}'.format(1) }}", MEMORY),
        ("{{ '{:{}}'.format(1, 10 ** 12) }}", MEMORY),
        ("{{ (5).to_bytes(10 ** 12, 'big') }}", MEMORY),
        ("{{ 1.5 | round(10 ** 8, 'ceil') }}", MEMORY),
        ("{{ messages | tojson(indent=10 ** 9) }}", "more than 100 characters"),
        ("{{ lipsum(10 ** 9) }}", "undefined"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "does not compile: maximum recursion depth"),
        ("{#" + "x" * (1 << 20) + "#}", "has 1048580 characters, 1048576 at most"),
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


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s-%5.2f' % ('a', 1.5) }}{{ '{} {a!r:>6}'.format(1, a='x') }}{{ '%(a)s' % {'a': 1} }}",
         "a- 1.501    'x'1"),
        ("{{ [1, 2][1:] }}{{ 'abc'[::-1] }}{{ {'a': 1} }}{{ (1, 2) }}{{ 1 == 1 == 1 }}", "[2]cba{'a': 1}(1, 2)True"),
        ("{{ 'b' not in 'abc' }}{{ [[1], [2]] | sum(start=[]) }}{{ 1.26 | round(1) }}{{ 2 ** 70 }}",
         "False[1, 2]1.31180591620717411303424"),
        ("{% for a, b in {'x': 1}.items() %}{{ loop.index ~ loop.length ~ loop.last ~ a ~ b }}{% endfor %}",
         "11Truex1"),
        ("{% for a in [[], [[]]] recursive %}<{{ loop(a) }}>{% else %}-{% endfor %}", "<-><<->>"),
        ("{% for x in nothing %}{% else %}none{% endfor %}{{ 'a\nb' | indent(2) }}", "nonea\n  b"),
        ("{% autoescape true %}{{ '<' ~ '>' }}{{ '<' | safe ~ '&' }}{% endautoescape %}{{ '<' ~ '&' | e }}",
         "&lt;&gt;&lt;&amp;<&amp;"),
        ("{{ messages | map(attribute='role') | join('|') }}{{ messages | tojson(indent=1) | length }}", "user45"),
    ],
)  # fmt: skip
def test_limits_change_no_text(source, text):
    assert ChatTemplate(source, {}).render(HI) == text


def test_threads_have_limits_of_their_own(short):
    """The clock is the processor time of the thread that renders."""
    found = {}

    def hang():
        try:
            ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", {}).render(
                HI
            )
        except ConfigError as error:
            found["hang"] = str(error)

    thread = threading.Thread(target=hang)
    thread.start()
    assert all(ChatTemplate(str(i) + GREET, {}).render(HI) == f"{i}Hi" for i in range(20))
    thread.join()
    assert TIME in found["hang"]


def write_tokenizer(folder, **parts):
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    content = {"version": "1.0", "added_tokens": [], **empty, "decoder": BYTE_LEVEL, "model": LETTERS} | parts
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old, new):
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


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
        ({"normalizer": precompiled("/" * 64)}, "is damaged: Precompiled"),
        ({"normalizer": {"type": "Sequence", "normalizers": [replace("a", "aaaa")] * 12}}, "may make .* bytes of it"),
        ({"normalizer": precompiled("CAAAAP////////8BYWJj")}, "cannot encode this text: index out of bounds"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode this text: chunk size"),
        ({"pre_tokenizer": split("(a+)+$")}, "retry-limit-in-match over"),
        ({"pre_tokenizer": split("a+a+(?=[cd])")}, "takes more than the .* s that it may take"),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q", "type_id": 0}}],
             "pair": [], "special_tokens": {}}},
            "no entry found for key",
        ),
    ],
)  # fmt: skip
def test_tokenizers_that_crash_or_hang_the_library(short, tmp_path, capfd, parts, message):
    write_tokenizer(tmp_path, **parts)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=message) as refused:
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.token_strings()
        tokenizer.encode("a" * 4000 + "X漢")
    assert len(str(refused.value).splitlines()) == 1 and time.monotonic() - begun < 60
    assert capfd.readouterr() == ("", "")


def test_an_unusual_tokenizer_encodes_as_the_library_does(tmp_path):
    write_tokenizer(tmp_path, pre_tokenizer=split("(ab)+|b"))
    tokenizer = load_tokenizer(tmp_path)
    assert not is_safe(load_folder_tokenizer(tmp_path).backend)
    text = "ababbaab"
    assert tokenizer.encode(text) == Backend.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids


def test_published_tokenizers_are_safe(tmp_path):
    """Those of the default model, of Llama 3 and of a SentencePiece model."""
    assert smollm2()._is_safe
    common = {"tokenizer.ggml.tokens": ["a", "b", "ab", "▁"], "tokenizer.ggml.bos_token_id": 0}
    llama3 = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["a b"]}
    pieces = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, 0.0, -1.0, 0.0]}
    for metadata in (llama3, pieces):
        assert is_safe(build_gguf_tokenizer(common | metadata).backend)


@pytest.mark.parametrize("first", ["$B", "x:9", "$A:1", "a:b:c"])
def test_special_tokens_of_gguf_may_have_any_name(first):
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [first, "b"], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.token_type": [3, 1],
    }  # fmt: skip
    assert Tokenizer(build_gguf_tokenizer(metadata)).encode("b") == [0, 1]


def test_an_empty_prefix_is_not_safe():
    """The library panics on a text that begins with such a step."""
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    for prefix, safe in (("", False), ("_", True)):
        backend.normalizer = normalizers.Prepend(prefix)
        assert is_safe(backend) == safe


def test_added_tokens_are_short_where_steps_may_not_end(tmp_path):
    content = {"added_tokens_decoder": {"3": {"content": "a" * 300, "normalized": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    write_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).encode("a" * 300) == [3]
    write_tokenizer(tmp_path, pre_tokenizer=split("(ab)+|b"))
    with pytest.raises(CheckpointError, match="an added token has 300 characters, 256 at most"):
        load_tokenizer(tmp_path)
