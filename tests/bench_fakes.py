"""A stand-in for `LLM` with invented methods: what comes out of a benchmark of it can be worked out by hand."""

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

from jaxspec.errors import ConfigError, suggest
from jaxspec.llm import internals
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.core.round import StepOutput
from jaxspec.results import Completion, DecodeStats
from jaxspec.stream_events import count_speculation
from pallas_kernels.registry import Kernels


@dataclasses.dataclass(frozen=True)
class Tree:
    """Accepts `num_draft_tokens` draft tokens in every round."""

    name: ClassVar[str] = "specexec"
    own_devices: ClassVar[bool] = False
    drafts: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True
    exact: ClassVar[str] = "tokens"
    num_draft_tokens: int = 1
    width: int | None = None
    shape: tuple[int, ...] = (2, 1)
    decay: float = 0.5
    limit: int | None = None

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ConfigError(f"num_draft_tokens must be at least 1, got {self.num_draft_tokens}")
        object.__setattr__(self, "width", self.width or 4 * self.num_draft_tokens)

    @property
    def num_rows(self):
        return 1 + 2 * self.num_draft_tokens


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Accepts nothing."""

    num_rows: ClassVar[int] = 2
    name: ClassVar[str] = "lookup"
    drafts: ClassVar[bool] = False
    needs_draft: ClassVar[bool] = False
    own_devices: ClassVar[bool] = False
    exact: ClassVar[str] = "tokens"


@dataclasses.dataclass(frozen=True)
class Sampled(Tree):
    """Keeps the distribution, not the text."""

    name: ClassVar[str] = "specinfer"
    exact: ClassVar[str] = "distribution"


@dataclasses.dataclass(frozen=True)
class Apart(Tree):
    """Its draft may have devices of its own."""

    name: ClassVar[str] = "swiftspec"
    own_devices: ClassVar[bool] = True


METHODS = {method.name: method for method in (Autoregressive, Lookup, Tree, Sampled, Apart)}


def make_method(name, settings=None):
    """As the registry does."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; {suggest(name, METHODS)}")
    return METHODS[name](**(settings or {}))


@dataclasses.dataclass(frozen=True)
class PassTimes:
    target_s: dict
    draft_s: float
    draft_root_s: float


class FakeEngine:
    max_context = 1000
    target = SimpleNamespace(weights="float32", cfg=SimpleNamespace(experts=None))

    def __init__(self, method):
        self.method = method
        self.prepared = []
        self.settled = 0

    def prepare(self, tokens):
        self.prepared.append(tokens)
        return 0.5

    def settle(self):
        self.settled += 1


class FakeTokenizer:
    has_chat_template = True


class FakeLLM:
    """A round takes 10 ms in plain decoding and 15 ms with drafts; the first one 100 ms.

    An answer has as many tokens as the first message has characters, at most `max_tokens`.
    """

    model_path = "fake"

    def __init__(self, model=None, *, draft=None, method=None, calls=None, wrong=(), **options):
        self.engine = FakeEngine(method or Autoregressive())
        inner = {"engine": self.engine, "params": SimpleNamespace(target=None), "kernels": Kernels("xla", "cpu")}
        self._internals = SimpleNamespace(**inner, target=self.engine.target)
        self.tokenizer = FakeTokenizer()
        self.draft_path = draft
        self.calls = [] if calls is None else calls
        self.wrong = wrong  # names of methods that get a token wrong

    def with_method(self, method):
        method = Autoregressive() if method == "ar" else method
        return FakeLLM(method=method, calls=self.calls, wrong=self.wrong)

    def encode(self, prompt):
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        return [1] * sum(map(len, texts))

    def chat(self, messages, sampling):
        method = self.engine.method
        self.calls.append((method, tuple(message["content"] for message in messages), sampling))
        count = min(sampling.max_tokens, len(messages[0]["content"]))
        tokens = list(range(100, 100 + count))
        if method.name in self.wrong and count > 3:
            tokens[3] = 0
        stats = plain_stats(len(self.encode(messages)), count)
        if method.name != "ar":
            stats = spec_stats(stats, method.num_draft_tokens if method.drafts else 0)
        reason = "length" if count == sampling.max_tokens else "stop"
        return Completion(f"answer {len(messages)}", tuple(tokens), reason, stats, method.name)

    def generate(self, prompt, sampling):
        return self.chat([{"role": "user", "content": prompt}], sampling)


def plain_stats(prompt_tokens, count):
    decode_s = 0.010 * (count - 1)
    return DecodeStats(prompt_tokens, count, 0.1, decode_s, (count - 1) / decode_s if decode_s else None, 0.0)


def spec_stats(stats, accepted):
    """Counters of rounds that each bring `accepted` draft tokens and a bonus token, cut at the end of the text."""
    left, per_step = stats.completion_tokens, []
    while left:
        per_step.append(min(left, 1 + accepted) - 1)
        left -= per_step[-1] + 1
    steps = len(per_step)
    decode_s = 0.015 * (steps - 1)
    after_first = stats.completion_tokens - per_step[0] - 1
    passes = 3 if accepted else 0
    rounds = [StepOutput((0,) * (n + 1), (0.0,) * (n + 1), n, 2 * accepted, n, passes) for n in per_step]
    counters = count_speculation(rounds, stats.completion_tokens, max(1, accepted))
    rate = after_first / decode_s if decode_s else None
    return dataclasses.replace(stats, decode_s=decode_s, tokens_per_s=rate, speculative_decoding=counters)


def install(monkeypatch):
    """Let `jaxspec.bench` see the invented methods, and no weights."""
    from jaxspec.bench import columns, microbench
    from jaxspec.bench import run as bench

    monkeypatch.setattr(columns, "METHODS", METHODS)
    monkeypatch.setattr(columns.registry, "method_class", METHODS.__getitem__)
    monkeypatch.setattr(columns.registry, "make_method", make_method)
    monkeypatch.setattr(microbench, "roofline_pass", lambda params, kernels, passes, experts: lambda: 0.008)
    monkeypatch.setattr(microbench, "weight_bytes", lambda params, experts: 10**9)
    monkeypatch.setattr(bench, "_time_passes", time_passes)


def time_passes(llm, context, rows):
    return PassTimes(dict.fromkeys(rows, 0.009), 0.001 * internals(llm).engine.method.drafts, 0.001)
