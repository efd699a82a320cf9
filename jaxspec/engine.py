"""The engine: parameters on a mesh and one method. Token ids in, rounds out; text is somebody else's business."""

import collections
import dataclasses
import functools
import secrets
from collections.abc import Generator, Iterator
from typing import Any

import jax
import numpy as np

from jaxspec.config import DEFAULT_MAX_TOKENS, SamplingParams
from jaxspec.errors import ConfigError
from jaxspec.methods.base import ROUND_HEADER, Method, ModelParams, Models, Round, Runner
from jaxspec.methods.swiftspec.messages import DraftCounts
from jaxspec.runtime import trace as recording
from jaxspec.runtime.program import compile_programs
from jaxspec.sampling.request import make_request

# Cache capacities in tokens: few, far apart, because each compiles its own programs. 2,048 hold a chat; attention cost
# follows the live prefix, so unused slots cost memory only.
FIRST_CAPACITY = 2048
CAPACITY_GROWTH = 4


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Tokens of one round, on the host.

    Attributes:
      tokens: new tokens; those beyond the asked-for length are cut off.
      logprobs: of each of them.
      accepted: how many of them, the first ones, a draft proposed.
      drafted: tokens that the target verified; those that a cut hides are not counted.
      depth: of their tree.
      draft_passes: passes of the draft model.
      draft: what a draft whose tree outlives the rounds did for this one; None elsewhere.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    accepted: int = 0
    drafted: int = 0
    depth: int = 0
    draft_passes: int = 0
    draft: DraftCounts | None = None

    def cut(self, count: int) -> "StepOutput":
        """The first `count` tokens; what lies behind is counted nowhere."""
        if count >= len(self.tokens):
            return self
        accepted = min(self.accepted, count)
        return dataclasses.replace(
            self, tokens=self.tokens[:count], logprobs=self.logprobs[:count],
            accepted=accepted, drafted=accepted, depth=accepted,
        )  # fmt: skip

    def steps(self) -> Iterator["StepOutput"]:
        """One for each target pass: tokens that nobody drafted took one each."""
        if self.drafted or len(self.tokens) == 1:
            yield self
            return
        for index, (token, logprob) in enumerate(zip(self.tokens, self.logprobs, strict=True)):
            yield StepOutput((token,), (logprob,), draft_passes=0 if index else self.draft_passes)


class Engine:
    """Runs one method for one sequence at a time; generations may be interleaved, but in one thread only.

    Compiled functions and idle cache buffers are kept between calls, so a second generation of any length within
    the same capacity compiles and allocates nothing.
    """

    def __init__(self, models: Models, method: Method, max_context: int | None = None):
        """Bind a method to placed models; nothing is compiled before `prepare`.

        Args:
          models: the target, which decides every token, and the draft, if the method uses one.
          method: how tokens are proposed and verified.
          max_context: most tokens of prompt plus output; None takes the model's own limit and starts small.

        Raises:
          ConfigError: `max_context` exceeds the model's own, or the method does not fit the models.
        """
        method.check(models)
        limit = models.target.cfg.max_context
        if max_context is not None and max_context > limit:
            raise ConfigError(f"max_context {max_context} exceeds the model's context of {limit} tokens")
        self.models = models
        self.target = models.target
        self.method = method
        self.given_context = max_context
        self.max_context = max_context or limit
        self._first_capacity = max_context or min(limit, FIRST_CAPACITY)
        self._capacity = 0  # tokens that the runner's caches hold
        self._runner: Runner | None = None
        self._idle: Any = None  # buffers of a finished sequence

    @property
    def num_programs(self) -> int:
        """Compiled programs of the method at its present capacity; 0 before `prepare`."""
        return 0 if self._runner is None else len(self._runner.programs)

    def check_request(self, prompt: list[int], sampling: SamplingParams) -> None:
        """Refuse what cannot be decoded, before any compute.

        Raises:
          ConfigError: an empty prompt, an id (of the prompt or of a bias) outside the vocabulary, or a prompt that
            does not fit.
        """
        vocab = self.target.cfg.vocab_size
        if not prompt:
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
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            raise ConfigError(
                f"the prompt's {len(prompt)} tokens and max_tokens {sampling.max_tokens} exceed the context of "
                f"{self.max_context}: max_tokens can be at most {room} here"
            )

    def token_limit(self, prompt: list[int], sampling: SamplingParams) -> int:
        """Most tokens to generate: what was asked for, else `DEFAULT_MAX_TOKENS` or what the context has room for."""
        if sampling.max_tokens is not None:
            return sampling.max_tokens
        return min(DEFAULT_MAX_TOKENS, self.max_context - len(prompt))

    def prepare(self, tokens: int | None = None) -> float:
        """Compile for sequences of up to `tokens` tokens; returns the wall time spent, in seconds.

        The capacity never shrinks: what was compiled for a longer sequence serves shorter ones.

        Raises:
          ConfigError: `tokens` exceeds the context.
        """
        if tokens is not None and tokens > self.max_context:
            raise ConfigError(f"{tokens} tokens exceed the context of {self.max_context}")
        capacity = self._first_capacity
        while tokens is not None and capacity < tokens:
            capacity = min(capacity * CAPACITY_GROWTH, self.max_context)
        if self._runner is None or capacity > self._capacity:
            self._idle = None
            self._runner = self.method.bind(self.models, capacity)
            self._capacity = capacity
        seconds = compile_programs(self._runner.programs)
        if self._idle is None:
            # Allocated now, beside whatever the caller still loads, and not when the first token is waited for.
            self._idle = self._runner.start(0, None)
        return seconds

    def rounds(
        self, params: ModelParams, prompt: list[int], sampling: SamplingParams, seed: int
    ) -> Generator[StepOutput, None, None]:
        """Decode until the caller stops listening or `max_tokens` tokens have come.

        Round r is read while round r + 1 runs, so a caller that stops wastes that one, and what lies behind the last
        token of its own. `prepare` must have been called for this length.

        Args:
          params: the models' parameters, placed.
          prompt: checked token ids.
          sampling: temperature, processors and length.
          seed: names the random stream.
        """
        assert self._runner is not None
        runner = self._runner
        limit = self.token_limit(prompt, sampling)
        request = runner.place_request(dataclasses.replace(sampling, max_tokens=limit), seed)
        idle, self._idle = self._idle, None
        state = runner.start(prompt[-1], idle)
        state = runner.prefill(params, state, np.asarray(prompt[:-1], np.int32))
        launch, read = functools.partial(_launch, runner), _read
        if recording.active is not None:
            launch, read = recording.active.generation(state, launch, read)
        in_flight: collections.deque[Round] = collections.deque()
        launched = emitted = 0
        try:
            while emitted < limit:
                # A round yields at least one token: no more are launched than can still be wanted.
                while len(in_flight) < 2 and launched < limit:
                    state, round_ = launch(params, state, request)
                    in_flight.append(round_)
                    launched += 1
                result = read(in_flight.popleft(), limit - emitted)
                emitted += len(result.tokens)
                yield from result.steps()
        except GeneratorExit:
            self._keep(runner, state)
            raise
        # Not in a `finally`: a failed or interrupted dispatch may have consumed the buffers.
        self._keep(runner, state)

    def settle(self) -> None:
        """Wait until nothing runs: a text that ends leaves a round in flight, which no one reads."""
        jax.block_until_ready(self._idle)

    def _keep(self, runner: Runner, state: Any) -> None:
        # One set of buffers is kept; those of interleaved generations are freed.
        if runner is self._runner and self._idle is None:
            self._idle = state


def fresh_seed() -> int:
    """A random seed for a request that named none."""
    return secrets.randbits(31)


def _launch(runner: Runner, params: ModelParams, state: Any, request: Any) -> tuple[Any, Round]:
    state, round_ = runner.round(params, state, request)
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), round_)
    return state, round_


def _read(round_: Round, room: int) -> StepOutput:
    packed = np.asarray(round_.packed).tolist()
    count, drafted, depth, passes = packed[:ROUND_HEADER]
    tokens = tuple(packed[ROUND_HEADER : ROUND_HEADER + count])
    logprobs = tuple(np.asarray(round_.logprob)[:count].tolist())
    counts = None if round_.draft is None else DraftCounts(*np.asarray(round_.draft).tolist())
    passes += 0 if counts is None else counts.passes
    accepted = count - 1 if drafted else 0
    return StepOutput(tokens, logprobs, accepted, drafted, depth, passes, counts).cut(room)
