"""The engine: parameters on a mesh and one method. Token ids in, rounds out; `LLM` handles text."""

import collections
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.config import DEFAULT_MAX_TOKENS, SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.round import ModelParams, Models, Round, StepOutput, read_round
from jaxspec.methods.core.runner import Runner
from jaxspec.runtime import trace
from jaxspec.runtime.program import compile_programs
from jaxspec.sampling.request import make_request

# Cache capacities in tokens: few, far apart, because each compiles its own programs. 2,048 hold a chat; attention cost
# follows the live prefix, so unused slots cost memory only.
FIRST_CAPACITY = 2048
CAPACITY_GROWTH = 4
IN_FLIGHT = 2  # rounds that run or wait on the devices while one is read


class Engine:
    """Runs one method; sessions may be interleaved, but in one thread only.

    A second generation within the same capacity compiles and allocates nothing: programs and idle buffers are kept.
    """

    def __init__(self, models: Models, method: Method, max_context: int | None = None, store: Store = NO_STORE):
        """Bind a method to placed models; nothing is compiled before `prepare`.

        `max_context` is the most tokens of prompt plus output; None takes the model's own limit and starts small.
        ConfigError: `max_context` exceeds the model's own, or the method does not fit the models.
        """
        method.check(models)
        limit = models.target.cfg.max_context
        if max_context is not None and max_context > limit:
            raise ConfigError(f"max_context {max_context} exceeds the model's context of {limit} tokens")
        self.models = models
        self.target = models.target
        self.store = store
        self.method = method.configure(models, store)
        self.given_context = max_context
        self.max_context = max_context or limit
        self._first_capacity = max_context or min(limit, FIRST_CAPACITY)
        self._capacity = 0  # tokens that the runner's caches hold
        self._runner: Runner | None = None
        self._idle: Any = None  # buffers of a finished sequence

    @property
    def runner(self) -> Runner:
        """The method bound to the models at the present capacity; `prepare` must have been called."""
        if self._runner is None:
            raise RuntimeError("the engine is not prepared: call prepare() first")
        return self._runner

    @property
    def num_programs(self) -> int:
        """Compiled programs of the method at its present capacity; 0 before `prepare`."""
        return 0 if self._runner is None else len(self._runner.programs)

    def check_request(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Refuse what cannot be decoded, before any compute.

        ConfigError: an empty prompt or one that does not fit, or an id (also of a bias) outside the vocabulary.
        """
        vocab = self.target.cfg.vocab_size
        if not len(prompt):
            raise ConfigError("the prompt is empty: it has 0 tokens and at least 1 is needed")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab:
                raise ConfigError(f"prompt token id {token!r} is not in the vocabulary of {vocab} tokens")
        make_request(sampling, 0, vocab, self.target.padded_vocab)  # a bias may name what is not there
        room = self.max_context - len(prompt)
        if room < 1:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.max_context}: "
                f"at most {self.max_context - 1} leave room for an answer"
            )
        for name, wanted in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
            if wanted is not None and wanted > room:
                raise ConfigError(
                    f"the prompt's {len(prompt)} tokens and {name} {wanted} exceed the context of {self.max_context}: "
                    f"{name} can be at most {room} here"
                )

    def token_limit(self, prompt: Sequence[int], sampling: SamplingParams) -> int:
        """Most tokens to generate: what was asked for, else `DEFAULT_MAX_TOKENS` or what the context has room for."""
        if sampling.max_tokens is not None:
            return sampling.max_tokens
        return min(max(DEFAULT_MAX_TOKENS, sampling.min_tokens), self.max_context - len(prompt))

    def prepare(self, tokens: int | None = None) -> float:
        """Compile for sequences of up to `tokens` tokens; returns the wall time in seconds. The capacity never shrinks.

        ConfigError: `tokens` exceeds the context.
        """
        if tokens is not None and tokens > self.max_context:
            raise ConfigError(f"{tokens} tokens exceed the context of {self.max_context}")
        capacity = self._first_capacity
        while tokens is not None and capacity < tokens:
            capacity = min(capacity * CAPACITY_GROWTH, self.max_context)
        if self._runner is None or capacity > self._capacity:
            self._idle = None
            self._runner = self.method.bind(self.models, capacity, self.store, self._runner)
            self._capacity = capacity
        seconds = compile_programs(self._runner.programs)
        if self._idle is None:
            # Allocated now, beside what the caller still loads, and not when the first token is waited for.
            self._idle = self._runner.start(0, None)
        return seconds

    def open(self, params: ModelParams, prompt: Sequence[int], sampling: SamplingParams, seed: int) -> "Session":
        """Begin a session with checked token ids: their prefill is dispatched; `prepare` must have been called."""
        idle, self._idle = self._idle, None
        return Session(self, params, prompt, sampling, seed, idle)

    def settle(self) -> None:
        """Wait until nothing runs: a text that ends leaves a round in flight, which is not read."""
        jax.block_until_ready(self._idle)

    def give_back(self, runner: Runner, state: Any) -> None:
        """Take over a closed session's buffers. One set is kept; those of interleaved sessions are freed."""
        if runner is self._runner and self._idle is None:
            self._idle = state


class Session:
    """One generation: its tokens, and its buffers until it is closed.

    Round r is read while round r + 1 runs, so a session that is closed early wastes that one.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        buffers: Any,
    ):
        """Dispatch the prefill; see `Engine.open`. `buffers` of a finished sequence are reused."""
        self._engine, self._runner, self._params = engine, engine.runner, params
        self.tokens = [int(token) for token in prompt]  # and, later, emitted tokens
        self.limit = engine.token_limit(prompt, sampling)  # most tokens that it emits
        self.num_emitted = 0
        runner = self._runner
        self._request = runner.place_request(dataclasses.replace(sampling, max_tokens=self.limit), seed, len(prompt))
        state = runner.start(self.tokens[-1], buffers)
        self._wants_top = sampling.num_logprobs > 0
        self._state = runner.prefill(params, state, np.asarray(self.tokens[:-1], np.int32))
        self._launch, self._read = self._launch_round, read_round
        if trace.active is not None:
            self._launch, self._read = trace.active.generation(self._state, self._launch_round, read_round)
        self._in_flight: collections.deque[Round] = collections.deque()
        self._launched = 0  # least number of tokens that the launched rounds bring
        self._closed = False

    @property
    def done(self) -> bool:
        return self.num_emitted >= self.limit

    def step(self) -> StepOutput:
        """Keep the devices busy and wait for one round; its tokens are cut to the asked-for length.

        RuntimeError: the session is closed or done.
        """
        if self._closed or self.done:
            raise RuntimeError("the session has ended: open another one")
        try:
            # A round yields at least one token: no more are launched than can still be wanted.
            while len(self._in_flight) < IN_FLIGHT and self._launched < self.limit:
                room = self.limit - self._launched if self._launched else 1  # the first token comes alone
                self._state, round_, least = self._launch(self._params, self._state, self._request, room)
                self._in_flight.append(round_)
                self._launched += least
            output = self._read(self._in_flight.popleft())
            self._runner.observe(self._state, output)
        except BaseException:
            # A failed or interrupted dispatch may have consumed the buffers: they are not used again.
            self._closed = True
            raise
        output = output.cut(self.limit - self.num_emitted)
        self.num_emitted += len(output.tokens)
        self.tokens += output.tokens
        return output

    def close(self) -> None:
        """End the session and give its buffers back; to be called once the text has ended, or to abort it."""
        if not self._closed:
            self._closed = True
            self._engine.give_back(self._runner, self._state)
        self._runner.close()

    abort = close

    def report(self) -> dict[str, Any] | None:
        return self._runner.report()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch_round(self, params: ModelParams, state: Any, request: Any, room: int) -> tuple[Any, Round, int]:
        state, round_, least = self._runner.round(params, state, request, room)
        if not self._wants_top:
            round_ = dataclasses.replace(round_, top=None)
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), round_)
        return state, round_, least


def derive_seed(seed: int, index: int) -> int:
    """The seed of the completion `index` of a prompt; that of the first is the request's own."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def fresh_seed() -> int:
    """A random seed for a request that named none."""
    return secrets.randbits(31)
