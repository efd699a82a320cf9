"""Prometheus metrics, under vLLM's names."""

import functools
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxspec.results import Completion
from jaxspec.scheduler import Observer

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics(Observer):
    """Counts and times of one server; each instance has a registry of its own."""

    def __init__(self, model: str):
        """All metrics carry the labels of vLLM: the name of the model, and the number of the engine, 0."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}

        def make(kind: Any, name: str, what: str, **more: Any) -> Any:
            return kind(f"vllm:{name}", what, [*self._labels], registry=self.registry, **more).labels(**self._labels)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return make(Histogram, name, what, buckets=buckets)

        gauge, counter = functools.partial(make, Gauge), functools.partial(make, Counter)

        self._running = gauge("num_requests_running", "Requests that are decoded.")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = counter("generation_tokens", "Tokens of answers.")
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens that were looked for in earlier sessions.")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens whose keys and values were there.")
        self._drafts = counter("spec_decode_num_drafts", "Target passes of answers of methods that draft.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._ended = Counter(
            "vllm:request_success", "Requests by what ended them.", [*self._labels, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._failed = Counter(
            "jaxspec:request_failure", "Requests that were answered with an error, by status.",
            [*self._labels, "status"], registry=self.registry,
        )  # fmt: skip
        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self._queued = histogram("request_queue_time_seconds", "In the queue.", SECONDS)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "For each token after the first.", PER_TOKEN
        )
        self._prompts = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answers = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)

    def queue(self, waiting: int, running: int) -> None:
        self._waiting.set(waiting)
        self._running.set(running)

    def finish(self, completion: Completion, queued_s: float, first_s: float, whole_s: float) -> None:
        """Count a finished answer; times in seconds since it arrived."""
        stats = completion.stats
        self._ended.labels(**self._labels, finished_reason=completion.finish_reason).inc()
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._generation_tokens.inc(stats.completion_tokens)
        self._cache_queries.inc(stats.prompt_tokens)
        self._cache_hits.inc(stats.cached_prompt_tokens)
        if stats.speculative_decoding is not None:
            counters = stats.speculative_decoding
            self._drafts.inc(counters.num_spec_steps)
            self._drafted.inc(counters.num_draft_tokens)
            self._accepted.inc(counters.num_accepted_draft_tokens)
        self._queued.observe(queued_s)
        self._first_token.observe(first_s)
        self._whole.observe(whole_s)
        self._decode.observe(whole_s - first_s)
        if stats.completion_tokens > 1:
            self._per_token.observe((whole_s - first_s) / (stats.completion_tokens - 1))
        self._prompts.observe(stats.prompt_tokens)
        self._answers.observe(stats.completion_tokens)

    def cancel(self) -> None:
        """Count an answer whose client went away."""
        self._ended.labels(**self._labels, finished_reason="abort").inc()

    def fail(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._failed.labels(**self._labels, status=str(status)).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
