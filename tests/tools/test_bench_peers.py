"""Other libraries beside jaxspec: fakes of them, in one interleaved run, and the table."""

import sys
from types import SimpleNamespace

import bench_fakes
import bench_peers
import numpy as np
import pytest
from bench_peers import INSTALL, Peer, load_llama, load_transformers, main, markdown, parse

from jaxspec.bench.columns import make_columns
from jaxspec.bench.prompts import BenchPrompt
from jaxspec.bench.report import make_report
from jaxspec.bench.run import Column, measure
from jaxspec.config import SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.llm import internals

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [BenchPrompt(name, "chat", (name * 50,)) for name in "abc"]


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    bench_fakes.install(monkeypatch)
    monkeypatch.setattr(bench_fakes.FakeTokenizer, "decode", lambda self, ids: "text", raising=False)


def clock(monkeypatch, step):
    """A clock that goes on by `step` with every look."""
    now = [0.0]

    def tick():
        now[0] += step
        return now[0]

    monkeypatch.setattr(bench_peers.time, "perf_counter", tick)


def test_a_peer_answers_like_an_llm(monkeypatch):
    clock(monkeypatch, 0.5)
    asked = []
    peer = Peer("other", bench_fakes.FakeLLM(), lambda ids, count: asked.append((ids, count)) or iter(range(count)))
    completion = peer.chat([{"role": "user", "content": "abcd"}], SAMPLING)
    assert asked == [([1] * 4, 12)] and completion.token_ids == tuple(range(12)) and completion.text == "text"
    stats = completion.stats
    assert (stats.prompt_tokens, stats.completion_tokens, stats.ttft_s, stats.decode_s) == (4, 12, 0.5, 5.5)
    engine = internals(peer).engine
    assert stats.tokens_per_s == 2 and engine.prepare(100) == 0 and engine.settle() is None

    for given in (0, 11, 13):
        peer = Peer("other", bench_fakes.FakeLLM(), lambda ids, count, given=given: iter(range(given)))
        with pytest.raises(ConfigError, match=f"other gave {given} tokens, 12 were asked for"):
            peer.generate("abcd", SAMPLING)


def test_all_are_interleaved_and_the_table_has_one_row_each(monkeypatch):
    clock(monkeypatch, 0.02)
    llm, order = bench_fakes.FakeLLM(draft="d"), []
    peers = [
        Column(n, None, Peer(n, llm, lambda ids, k, n=n: order.append(n) or iter(range(k)))) for n in ("one", "two")
    ]
    measured = measure(llm, [*make_columns(["specexec"]), *peers], PROMPTS, SAMPLING, 2)
    orders = [[a.label for a in measured.answers[i : i + 4]] for i in range(0, 24, 4)]
    assert [first[0] for first in orders] == ["ar", "specexec", "one", "specexec", "one", "two"]
    assert order == ["one", "two"] + [n for labels in orders for n in labels if n in ("one", "two")]
    report = make_report(measured, "x", "folder/model.gguf", None)
    rows = report["overall"]["columns"]
    assert rows["one"]["exact"]["promise"] == "none" and rows["one"]["split"] is None
    assert rows["one"]["speedup"]["mean"] == pytest.approx(0.5)  # 20 ms a token, plain decoding 10 ms
    text = markdown(report, "python tools/bench_peers.py")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]] == ["ar", "specexec", "one", "two"]
    assert all(line.count("|") == len(bench_peers.NAMES) + 1 for line in table)
    assert " 0.50" in table[4] and "model.gguf" in text and "interrupted" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "vllm"], "unknown peer 'vllm'; known: llama.cpp, llama.cpp-lookup"),
        (["--peers", "llama.cpp"], f"not installed: llama_cpp; run: {INSTALL}"),
        (["--peers", "", "--out", "no/such/folder/x.md"], "must lie in a folder that exists"),
    ],
)
def test_what_cannot_run_is_refused_at_once(monkeypatch, capsys, words, message):
    monkeypatch.setattr(bench_peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        parse(words)
    assert left.value.code == 2 and message in capsys.readouterr().err.replace("\n", " ")


def test_llama_from_a_fresh_state_with_lookup_or_requantised(monkeypatch):
    made, wanted = [], []

    class Llama:
        def __init__(self, path, **options):
            made.append((path, options))

        def reset(self):
            made.append("reset")

        def generate(self, ids, **options):
            made.append((ids, options))
            while True:
                yield 7

    def quantize(source, out, settings):
        wanted.append((source, settings.ftype, settings.allow_requantize))
        return int(source != b"model.gguf")

    module = SimpleNamespace(
        Llama=Llama,
        llama_model_quantize=quantize,
        llama_model_quantize_default_params=SimpleNamespace,
        LLAMA_FTYPE_MOSTLY_Q4_0=2,
    )
    lookup = SimpleNamespace(LlamaPromptLookupDecoding=lambda num_pred_tokens: num_pred_tokens)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", lookup)
    assert [*load_llama("model.gguf", 128, 2)([1, 2], 3)] == [7, 7, 7]
    assert made[0][1]["n_ctx"] == 128 and made[0][1]["n_threads"] == 2
    assert made[1:] == ["reset", ([1, 2], {"top_k": 1, "temp": 0.0, "repeat_penalty": 1.0})]
    made.clear()
    load_llama("model.gguf", 128, 2, "llama.cpp-lookup")
    assert made[0][0] == "model.gguf" and made[0][1]["draft_model"] == bench_peers.LOOKUP_TOKENS and not wanted
    load_llama("model.gguf", 128, 2, "llama.cpp-q4_0")
    assert made[1][0].endswith("requantised.gguf") and wanted == [(b"model.gguf", 2, True)]
    with pytest.raises(ConfigError, match="llama.cpp-q4_0: llama.cpp cannot requantise other.gguf"):
        load_llama("other.gguf", 128, 2, "llama.cpp-q4_0")


def test_transformers_steps_with_its_cache(monkeypatch):
    """The next token is the sum of all tokens so far, which the cache carries."""

    class Array(np.ndarray):
        def argmax(self, dim, keepdim):
            return np.argmax(np.asarray(self), axis=dim, keepdims=keepdim)

    class Inference:
        __enter__ = __exit__ = lambda *_: None

    def model(input_ids, past_key_values, use_cache, logits_to_keep):
        total = int(np.sum(input_ids)) + (past_key_values or 0)
        logits = np.zeros((1, 1, 100)).view(Array)
        logits[0, 0, total] = 1
        return SimpleNamespace(past_key_values=total, logits=logits)

    threads = []
    torch = SimpleNamespace(tensor=np.array, inference_mode=Inference, set_num_threads=threads.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "make_golden", SimpleNamespace(load_reference=lambda path: model))
    assert list(load_transformers("model.gguf", 2)([1, 2], 4)) == [3, 6, 12, 24] and threads == [2]


def test_one_table_of_peers_and_two_drafts(monkeypatch, tmp_path, capsys):
    opened = []

    class Opened(bench_fakes.FakeLLM):
        def __init__(self, model=None, *, draft=None, **options):
            super().__init__(model, draft=draft, **options)
            opened.append(self)

    monkeypatch.setattr("jaxspec.llm.LLM", Opened)
    monkeypatch.setattr("jaxspec.loading.has_draft", lambda model, draft: True)
    monkeypatch.setattr(bench_peers, "missing_packages", lambda peers: [])
    monkeypatch.setattr(bench_peers, "load_llama", lambda *_: lambda ids, count: iter(range(100, 100 + count)))
    out = tmp_path / "peers.md"
    words = ["--peers", "llama.cpp", "--max-prompts", "2", "-n", "12", "--out", str(out), "--beside", "other"]
    main([*words, "--methods", "ar,specexec"])
    text = out.read_text()
    assert text in capsys.readouterr().out and "| llama.cpp |" in text and "--max-prompts 2" in text
    assert [llm.draft_path for llm in opened] == [None, "other"]
    used = [{method.name for method, *_ in llm.calls} for llm in opened]
    assert used == [{"ar", "specexec"}, {"specexec"}]
    assert "| specexec |" in text and "| specexec, other draft |" in text and "ar, other draft" not in text
    with pytest.raises(SystemExit) as refused:
        main([*words, "--methods", "ar,lookup"])
    assert refused.value.code == 2 and "none of --methods ar,lookup uses a draft" in capsys.readouterr().err
