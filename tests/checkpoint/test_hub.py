"""Models by name, against a stand-in of the hub."""

import dataclasses
import json

import huggingface_hub.constants as constants
import pytest
from hub_standin import StandIn
from native_models import LLAMA, write_model

from jaxspec.checkpoint.hub import fetch, parse_name
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.loading import open_model

WEIGHTS = bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    standin = StandIn()
    monkeypatch.setattr(constants, "ENDPOINT", standin.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", standin.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield standin
    standin.close()


def fetched(name, revision=None):
    parsed = parse_name(name, revision)
    assert parsed is not None
    return fetch(parsed)


def transfers(hub):
    return sorted(path.rpartition("/")[2] for verb, path, _ in hub.asked if verb == "GET" and "/resolve/" in path)


def test_what_is_a_name_and_what_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    for path in ("org/model", "./org/none", "/org/none", "~/none", "none", "a/b/c", "x y/z", str(tmp_path)):
        assert parse_name(path) is None
    assert str(parse_name("hf://org/model")) == "org/model"
    name = parse_name("org/other@v1:q4_k_m", "main")
    assert name is not None and (name.repo, name.revision, name.file) == ("org/other", "v1", "q4_k_m")
    assert str(parse_name("https://huggingface.co/org/x", "v2")) == "org/x@v2"
    with pytest.raises(CheckpointError, match="hf://org/name"):
        parse_name("hf://nothing")
    with pytest.raises(ConfigError, match="revision 'v1' is for a model on the hub"):
        open_model("model", "./none", "v1")


def test_only_needed_files_come_and_only_once(hub):
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    shards = {
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": WEIGHTS + b"2",
        "model.safetensors.index.json": index,
    }
    small = {"config.json": b"{}", "tokenizer.json": b"{ }"}
    others = {"consolidated.safetensors": WEIGHTS, "pytorch_model.bin": WEIGHTS, "README.md": b"#", "onnx/m.onnx": b"1"}
    hub.add("org/model", shards | small | others)
    folder = fetched("org/model")
    assert transfers(hub) == sorted(shards | small)
    assert (folder / "model-2.safetensors").read_bytes() == WEIGHTS + b"2"
    hub.asked.clear()
    assert fetched("hf://org/model") == folder and transfers(hub) == []


def test_revisions(hub):
    old = hub.add("org/model", {"config.json": b"1", "model.safetensors": WEIGHTS}, "v1")
    hub.add("org/model", {"config.json": b"2", "model.safetensors": WEIGHTS})
    assert (fetched("org/model") / "config.json").read_bytes() == b"2"
    for folder in (fetched("org/model@v1"), fetched("org/model", "v1"), fetched("org/model", old)):
        assert (folder / "config.json").read_bytes() == b"1"
    with pytest.raises(CheckpointError, match="no revision 'v9'"):
        fetched("org/model@v9")


def test_gguf_files(hub):
    hub.add("org/one", {"m.gguf": WEIGHTS, "mmproj-m.gguf": b"1"})
    assert fetched("org/one").name == "m.gguf"
    hub.add("org/many", {f"m-{quant}.gguf": WEIGHTS for quant in ("Q4_K_M", "Q8_0", "IQ4_K_M-x")})
    assert fetched("org/many:q8_0").name == "m-Q8_0.gguf"
    assert fetched("org/many:m-Q4_K_M.gguf").name == fetched("org/many").name == "m-Q4_K_M.gguf"
    hub.add("org/several", {"a-Q8_0.gguf": WEIGHTS, "b-Q5_0.gguf": WEIGHTS})
    with pytest.raises(
        CheckpointError, match="several GGUF files; there is org/several:a-Q8_0.gguf, org/several:b-Q5_0"
    ):
        fetched("org/several")
    with pytest.raises(CheckpointError, match="no GGUF file 'Q3_K'"):
        fetched("org/several:Q3_K")
    hub.add("org/split", {f"m-Q8_0-0000{i}-of-00002.gguf": WEIGHTS for i in (1, 2)})
    with pytest.raises(CheckpointError, match="one of 2 parts of a split GGUF"):
        fetched("org/split:Q8_0")
    hub.add("org/torch", {"config.json": b"{}", "pytorch_model.bin": WEIGHTS})
    with pytest.raises(CheckpointError, match="no safetensors.*it has bin, json"):
        fetched("org/torch")


def test_no_access(hub, monkeypatch):
    with pytest.raises(CheckpointError, match="org/none: is no file or folder here, and no public repository"):
        fetched("org/none")
    hub.add("org/gated", {"m.gguf": WEIGHTS})
    hub.gated.add("org/gated")
    with pytest.raises(CheckpointError, match="accept the conditions at https://huggingface.co/org/gated"):
        fetched("org/gated")
    hub.tokens.add("Bearer hf_secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetched("org/gated").read_bytes() == WEIGHTS


def test_a_cut_connection_is_resumed(hub):
    content = WEIGHTS * 5000  # the library keeps what came in pieces of ten megabytes
    hub.add("org/model", {"m.gguf": content})
    hub.cut.add("m.gguf")
    assert fetched("org/model").read_bytes() == content
    ranges = [wanted for verb, path, wanted in hub.asked if verb == "GET" and path.endswith("m.gguf")]
    assert len(ranges) == 2 and int(ranges[1].removeprefix("bytes=").split("-")[0]) > 0


def test_a_wrong_checksum_leaves_nothing(hub):
    hub.add("org/model", {"m.gguf": WEIGHTS})
    hub.damaged.add("m.gguf")
    with pytest.raises(CheckpointError, match="m.gguf was damaged on its way"):
        fetched("org/model")
    hub.damaged.clear()
    assert fetched("org/model").read_bytes() == WEIGHTS


@pytest.mark.parametrize("how", ["offline", "no connection", "broken"])
def test_without_the_hub_the_cache_answers(hub, monkeypatch, how):
    hub.add("org/model", {"config.json": b"{}", "model.safetensors": WEIGHTS})
    hub.add("org/quants", {"a-Q8_0.gguf": WEIGHTS, "a-Q5_0.gguf": WEIGHTS})
    folder, file = fetched("org/model"), fetched("org/quants:Q8_0")
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "broken":
        hub.broken = True
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetched("org/model") == folder and fetched("org/quants:q8_0") == fetched("org/quants") == file
    for name in ("org/quants:Q5_0", "org/never", "org/model@v1"):
        with pytest.raises(CheckpointError, match="cache") as caught:
            fetched(name)
        assert len(str(caught.value).splitlines()) == 1


def test_a_pickle_is_fetched_for_a_draft_only(hub):
    hub.add("org/head", {"config.json": b"{}", "pytorch_model.bin": WEIGHTS, "training.bin": WEIGHTS})
    with pytest.raises(CheckpointError, match="no safetensors, no GGUF file"):
        fetched("org/head")
    assert transfers(hub) == []
    name = parse_name("org/head")
    assert name is not None
    folder = fetch(dataclasses.replace(name, takes_pickle=True))
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "pytorch_model.bin"]


def test_a_model_is_opened_by_its_name(hub, tmp_path):
    folder = tmp_path / "native"
    write_model(folder, LLAMA)
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    hub.add("org/native", files)
    assert open_model("model", "org/native").config == LLAMA
