"""Tokenizers: ids equal llama.cpp's and transformers', files round-trip, bad ones are refused by name."""

import json
import unicodedata

import pytest
from text_models import default_model, read_golden, smollm2
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordPiece

from jaxspec.checkpoint.gguf_header import read_header
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.text.gguf_tokenizer import build_gguf_tokenizer
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer, save_tokenizer

GOLDEN = read_golden("tokenizer_smollm2.json")["cases"]
PRE = read_golden("tokenizer_pre.json")
SPM = read_golden("tokenizer_spm.json")


def make_metadata(**changes):
    """Metadata of a tiny byte-level tokenizer; a change to None removes the key."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġab", "<s>", "</s>", "<eot>", "<tool>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 4) + [3, 3, 3, 4],
        "merges": ["a b", "Ġ ab"],
        "bos_token_id": len(tokens) - 4,
        "eos_token_id": len(tokens) - 3,
    }
    metadata.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def make_tokenizer(**changes) -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(make_metadata(**changes)))


def make_folder(folder, *, config=None, generation=None, backend=None):
    """A Hugging Face folder with a tiny byte-level tokenizer."""
    if backend is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(BPE(vocab={c: i for i, c in enumerate([*alphabet, "ab"])}, merges=[("a", "b")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_ids_equal_llama_cpp():
    tokenizer = smollm2()
    assert len(GOLDEN) >= 60
    for case in GOLDEN:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


# Other names of splits whose ids the golden file has.
SAME_SPLITS = {"glm4": "dbrx", "chatglm-bpe": "dbrx", "exaone4": "gpt-2"}


@pytest.mark.parametrize("pre", [*PRE["ids"], *SAME_SPLITS])
def test_splits_equal_llama_cpp(pre):
    metadata = read_header(default_model()).metadata | {"tokenizer.ggml.pre": pre}
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata))
    for text, ids in zip(PRE["texts"], PRE["ids"][SAME_SPLITS.get(pre, pre)], strict=True):
        # Qwen's own tokenizer normalises, llama.cpp does not; jaxspec does as Qwen.
        if pre == "qwen2" and not unicodedata.is_normalized("NFC", text):
            continue
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("seed-coder", "ab 12!?\n\nx  y", ["ab", " ", "1", "2", "!?", "\n\n", "x", " ", " y"]),
        ("gpt-4o", "fooBar's 1234!\n\n", ["foo", "Bar's", " ", "123", "4", "!\n\n"]),
    ],
)
def test_splits_of_published_patterns(pre, text, words):
    found = build_gguf_tokenizer(make_metadata(pre=pre)).backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == words


@pytest.mark.parametrize("variant", SPM["variants"], ids=lambda v: f"prefix={v['add_space_prefix']}")
def test_sentencepiece_ids_equal_llama_cpp(variant):
    metadata = SPM["metadata"] | {"tokenizer.ggml.add_space_prefix": variant["add_space_prefix"]}
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata))
    for text, ids in zip(SPM["texts"], variant["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        if "<|im_" not in text:
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == [1, *ids]


def test_default_model_tokens():
    tokenizer = smollm2()
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 49152)
    assert tokenizer.special_ids == frozenset(range(17))
    strings = tokenizer.token_strings()
    assert len(strings) == 49152 and strings[2] == "<|im_end|>" and len(set(strings)) == 49152
    assert tokenizer.token_bytes(tokenizer.encode(" the")[0]) == b" the"
    assert tokenizer.decode([2, 49152, 10**6]) == "" and tokenizer.token_bytes(10**6) == b""


def test_ends_are_added_as_the_file_says():
    text = make_tokenizer().encode("ab")
    bos, eos = 258, 259
    assert make_tokenizer(add_bos_token=True).encode("ab") == [bos, *text]
    assert make_tokenizer(add_eos_token=True).encode("ab") == [*text, eos]
    both = make_tokenizer(add_bos_token=True, add_eos_token=True)
    assert both.encode("ab") == [bos, *text, eos] and both.encode("ab", add_special_tokens=False) == text
    assert both.encode("") == [bos, eos]
    assert make_tokenizer(pre="llama-bpe").encode("ab") == [bos, *text]
    assert make_tokenizer(pre="llama-bpe", add_bos_token=False).encode("ab") == text


def test_token_types():
    tokenizer = make_tokenizer()
    assert tokenizer.special_ids == {258, 259, 260}
    assert tokenizer.encode("ab<tool>ab</s>") == [256, 261, 256, 259]
    assert tokenizer.decode([256, 261, 256, 259]) == "ab<tool>ab"


def test_several_end_tokens():
    assert make_tokenizer(eot_token_id=260, eom_token_id=259).eos_ids == (259, 260)
    assert make_tokenizer(eos_token_id=None).eos_ids == ()
    assert make_tokenizer(eot_token_id=2**32 - 1).eos_ids == (259,)


LONG = {"model": "llama", "tokens": ["a", "b" * 30_000], "scores": [0.0, 1.0], "token_type": None, "bos_token_id": 0}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokens": []}, CheckpointError, "at least one"),
        ({"tokens": ["a", "b", "a"]}, CheckpointError, "'a' more than once"),
        ({"model": "bert"}, ConfigError, "'bert' is not supported"),
        ({"pre": "unheard-of"}, ConfigError, "'unheard-of' is not supported"),
        ({"merges": ["a b c"]}, CheckpointError, "pairs"),
        ({"merges": ["q zz"]}, CheckpointError, "do not fit"),
        ({"token_type": [1]}, CheckpointError, "1 entries for 262"),
        ({"eos_token_id": 262}, CheckpointError, "262, beyond the 262"),
        ({"bos_token_id": None, "add_bos_token": True}, CheckpointError, "bos_token_id is missing"),
        ({"model": "llama"}, CheckpointError, "scores is missing"),
        ({"model": "llama", "scores": [0.0]}, CheckpointError, "1 entries for 262"),
        ({"model": "llama", "scores": ["0"] * 262}, CheckpointError, "scores must be numbers"),
        (LONG, CheckpointError, "the longest has 30000 characters"),
    ],
)
def test_bad_metadata_is_refused_by_name(changes, error, words):
    with pytest.raises(error, match=words):
        build_gguf_tokenizer(make_metadata(**changes))


def test_encode_refuses_what_is_no_text():
    for text, message in (
        (7, "must be a string"),
        (b"a", "must be a string"),
        ("ab\ud800", "surrogate at character 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_tokenizer().encode(text)


def test_a_saved_gguf_tokenizer_encodes_the_same(tmp_path):
    save_tokenizer(default_model(), tmp_path)
    loaded, original = load_tokenizer(tmp_path), smollm2()
    for case in GOLDEN:
        assert loaded.encode(case["text"]) == case["ids"]
    messages = [{"role": "user", "content": "Hi"}]
    assert loaded.encode_chat(messages) == original.encode_chat(messages)
    assert (loaded.eos_ids, loaded.bos_id, loaded.special_ids) == ((2,), 1, original.special_ids)
    assert loaded.token_strings() == original.token_strings()


def test_a_folder_is_copied(tmp_path):
    source = make_folder(tmp_path / "source", config={"eos_token": "</s>"}, generation={"eos_token_id": [258, 97]})
    (source / "model.safetensors").write_bytes(b"not a tokenizer file")
    (source / "added_tokens.json").mkdir()
    copy = tmp_path / "copy"
    copy.mkdir()
    save_tokenizer(source, copy)
    assert {p.name for p in copy.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert load_tokenizer(copy).encode("ab ab") == load_tokenizer(source).encode("ab ab")
    assert load_tokenizer(copy).eos_ids == (258, 97)


def test_older_files_become_a_tokenizer_json(tmp_path):
    pytest.importorskip("transformers")
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "ab", "<|endoftext|>"])}
    (source / "vocab.json").write_text(json.dumps(vocab))
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 257}))
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("ab<|endoftext|>") == [256, 257] and tokenizer.eos_ids == (257,)
    save_tokenizer(source, copy)
    assert load_tokenizer(copy).encode("ab<|endoftext|>") == [256, 257]


def test_folder_details(tmp_path):
    folder = make_folder(
        tmp_path / "model",
        config={
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": "</s>",
            "added_tokens_decoder": {"259": {"content": "<extra>", "special": True}},
            "add_bos_token": False,
        },
        generation={"eos_token_id": 97},
    )
    tokenizer = load_tokenizer(folder)
    # tokenizer.json decides on BOS, whatever the configuration says: transformers does the same.
    assert tokenizer.encode("ab<extra>") == [257, 256, 259]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (257, (97, 258))
    assert tokenizer.special_ids == {257, 258, 259}


def test_truncation_in_a_file_does_not_count(tmp_path):
    folder = make_folder(tmp_path / "model")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    make_folder(folder, backend=backend)
    assert len(load_tokenizer(folder).encode("a" * 100)) == 101


def test_eos_of_config_json_is_second_choice(tmp_path):
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(folder).eos_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert load_tokenizer(folder).eos_ids == (6, 7)


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"tokenizer.json": "{"}, CheckpointError, "tokenizer.json is damaged"),
        ({"tokenizer_config.json": "[]"}, CheckpointError, "must hold a JSON object"),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, CheckpointError, "chat_template must be a string"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": {}}}'}, CheckpointError, "malformed"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"300": {"content": "<x>"}}}'}, CheckpointError, "id 300"),
        (
            {"tokenizer_config.json": '{"added_tokens_decoder": {"9": {"content": "\\ud800"}}}'},
            CheckpointError,
            "no text",
        ),
        ({"tokenizer_config.json": '{"bos_token": "\\ud800"}'}, CheckpointError, "bos_token must be a string"),
        ({"generation_config.json": '{"eos_token_id": "2"}'}, CheckpointError, "eos_token_id must be"),
        ({"chat_template.jinja": b"\xff\xfe"}, CheckpointError, "chat_template.jinja is damaged"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, files, error, words):
    folder = make_folder(tmp_path / "model")
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(error, match=words):
        load_tokenizer(folder)


def test_missing_tokenizers_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path / "file.gguf")
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"no tokenizer.json"):
        load_tokenizer(tmp_path)


def test_unsupported_decoders_are_named(tmp_path):
    backend = Backend(WordPiece(vocab={"a": 0}, unk_token="a"))
    make_folder(tmp_path / "none", backend=backend)
    with pytest.raises(ConfigError, match="no decoder"):
        load_tokenizer(tmp_path / "none")
    backend.decoder = decoders.WordPiece()
    make_folder(tmp_path / "wordpiece", backend=backend)
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(tmp_path / "wordpiece")


def test_tokens_that_were_added_as_they_read():
    # An added token may hold characters that the byte alphabet lacks: those are themselves.
    tokenizer = make_tokenizer(tokens=[*make_metadata()["tokenizer.ggml.tokens"][:-1], "<tool é x>"])
    assert tokenizer.token_bytes(261) == "<tool é x>".encode()
