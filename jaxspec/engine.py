"""The engine: parameters on a mesh and one method. Token ids in, rounds out; `LLM` handles text.

The file exceeds 400 lines because sessions and the engine that keeps their buffers are read together.
"""

import collections
import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.config import DEFAULT_MAX_TOKENS, SamplingParams
from jaxspec.errors import ConfigError, shown
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.copies import NO_ANSWERS, keep_answer
from jaxspec.methods.core.round import ModelParams, Models, Round, StepOutput, read_rounds
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.core.sequence import CHUNKS
from jaxspec.results import Choice
from jaxspec.runtime import hosts, trace
from jaxspec.runtime.program import compile_programs
from jaxspec.runtime.transfer import everywhere
from jaxspec.sampling.processors import GREEDY, find_variant
from jaxspec.sampling.request import make_request
from jaxspec.structured.matcher import Matcher

# Cache capacities in tokens: few, far apart, because each compiles its own programs. 2,048 hold a chat; attention cost
# follows the live prefix, so unused slots cost memory only.
FIRST_CAPACITY = 2048
CAPACITY_GROWTH = 4
# Tokens of a prompt that are read between rounds of other texts. On a CPU they cost in proportion, on an accelerator a
# whole chunk costs little more than a small one. One less than whole chunks: for a draft that is fed hidden states the
# token before runs again.
CPU_PIECE = 2 * min(CHUNKS) - 1

# Engines and sessions have numbers, by which several processes name them.
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class IdleSession:
    """Buffers that a session leaves, and the text that its caches hold."""

    runner: Runner
    params: ModelParams | None  # that the caches were computed with
    tokens: tuple[int, ...]  # the caches hold all but the last; empty where nothing is to be reused
    state: Any

    @functools.cached_property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def common(self, params: ModelParams, prompt: Sequence[int]) -> int:
        """First tokens of a prompt whose keys and values are here; its last token has to run in any case."""
        if self.params is None or any(one is not other for one, other in zip(self.params, params, strict=True)):
            return 0
        most = min(len(prompt), len(self.tokens)) - 1
        return next((i for i in range(most) if self.tokens[i] != prompt[i]), max(most, 0))


class Engine:
    """Runs one method; sessions may be interleaved, but in one thread only.

    A second generation within the same capacity compiles and allocates nothing: programs and idle buffers are kept.
    """

    def __init__(
        self, models: Models, method: Method, max_context: int | None = None, store: Store = NO_STORE,
        session_memory: int | None = 0, check_room: Callable[[Method, Runner, Models, int], None] | None = None,
    ):  # fmt: skip
        """Bind a method to placed models; nothing is compiled before `prepare`.

        `max_context` is the most tokens of prompt plus output; None takes the model's own limit and starts small.
        `session_memory` is how many bytes of caches finished sessions may keep, the latest one in any case, for prompts
        that begin with the same tokens. None keeps the latest only; with 0 every prompt is computed from its beginning.
        `check_room` refuses a bound method whose caches for so many tokens do not fit beside the weights.
        ConfigError: `max_context` exceeds the model's own, or the method does not fit the models.
        """
        self.number = next(_numbers)
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
        self.session_memory = session_memory
        self.check_room = check_room
        self.traced = False  # whether programs of single rounds, which traces take, are compiled before they are needed
        self._idle: list[IdleSession] = []  # of finished sessions, the latest last
        self._answers = NO_ANSWERS  # of finished sessions, from which drafts are copied

    @property
    def runner(self) -> Runner:
        """The method bound to the models at the present capacity; `prepare` must have been called."""
        if self._runner is None:
            raise RuntimeError("the engine is not prepared: call prepare() first")
        return self._runner

    @property
    def capacity(self) -> int:
        """Tokens that the caches hold now, or will hold at first."""
        return self._capacity or self._first_capacity

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
                raise ConfigError(f"prompt token id {shown(token)} is not in the vocabulary of {vocab} tokens")
        if sampling.structured_outputs is not None:
            if hosts.several():
                raise ConfigError("structured_outputs need one process")
            if self._runner is not None:
                self._runner.constrain()
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

    def prepare(self, tokens: int | None = None, sampling: SamplingParams | None = None) -> float:
        """Compile for sequences of up to `tokens` tokens; returns the wall time in seconds. The capacity never shrinks.

        On a CPU programs serve all `sampling`. Accelerators have some of their own for each kind, and None is greedy.
        ConfigError: `tokens` exceeds the context.
        """
        if tokens is not None and tokens > self.max_context:
            raise ConfigError(f"{tokens} tokens exceed the context of {self.max_context}")
        if hosts.several():
            asked = sampling and dataclasses.asdict(sampling)
            hosts.command("prepare", engine=self.number, tokens=tokens, sampling=asked)
        capacity = self._first_capacity
        while tokens is not None and capacity < tokens:
            capacity = min(capacity * CAPACITY_GROWTH, self.max_context)
        if self._runner is None or capacity > self._capacity:
            runner = self.method.bind(self.models, capacity, self.store, self._runner)
            if self.check_room is not None:
                self.check_room(self.method, runner, self.models, capacity)
            # Buffers of a smaller capacity are of use for their text only.
            self._idle = [idle for idle in self._idle if idle.tokens]
            runner.copy_from(self._answers)
            self._runner, self._capacity = runner, capacity
        variant = find_variant(sampling) if sampling else GREEDY
        traced = self._runner.single if self.traced or trace.active is not None else ()
        programs = tuple(dict.fromkeys((*self._runner.programs, *traced)))
        seconds = compile_programs(programs, variant, background=True)
        if sampling and sampling.structured_outputs is not None:
            seconds += compile_programs(self._runner.constrain().programs, variant)
        if not self._idle:
            # Allocated now, beside what the caller still loads, and not when the first token is waited for.
            self._idle = [IdleSession(self._runner, None, (), self._runner.start(0, None))]
        return seconds

    def calibrate(self, params: ModelParams) -> float:
        """Let the method measure its passes with the loaded weights, and compile what it chooses by them.

        Returns the wall time of compiling in seconds. `open` does so where the method cannot start without.
        """
        if self._runner is None:
            return 0.0  # `open` will
        if self._runner.measures or not self._runner.calibrated:
            self.settle()  # programs that are loaded beside a measured pass would slow it
        fresh = next((idle for idle in self._idle if idle.runner is self._runner and not idle.tokens), None)
        if fresh is not None:
            self._idle.remove(fresh)
        state = self._runner.calibrate(params, None if fresh is None else fresh.state)
        if state is not None:
            self._idle.append(IdleSession(self._runner, None, (), state))
        return compile_programs(self._runner.programs, GREEDY)

    def open(
        self, params: ModelParams, prompt: Sequence[int], sampling: SamplingParams, seed: int,
        matcher: Matcher | None = None, in_pieces: bool = False,
    ) -> "Session":  # fmt: skip
        """Begin a session with checked token ids: their prefill is dispatched; `prepare` must have been called.

        `matcher`, at the beginning of an answer, is that of `structured_outputs`. `in_pieces` dispatches the beginning
        of a long prompt only, see `Session.read`. Of several processes all take the request of process 0.
        """
        if hosts.several():
            given = hosts.command(
                "open", engine=self.number, prompt=[int(token) for token in prompt],
                sampling=dataclasses.asdict(sampling), seed=seed, in_pieces=in_pieces,
            )  # fmt: skip
            prompt, sampling, seed = given["prompt"], read_sampling(given["sampling"]), given["seed"]
        if not self.runner.calibrated:
            self.calibrate(params)
        buffers, common = self._take_buffers(params, prompt)
        piece = self._piece() if in_pieces else None
        return Session(self, params, prompt, sampling, seed, buffers, common, matcher, piece)

    def _piece(self) -> int | None:
        """Tokens of a prompt's pieces; None where it is read at once, since each pass streams all layers."""
        if self.target.resident_layers is not None:
            return None
        return CPU_PIECE if self.target.plan.kernels.platform == "cpu" else max(CHUNKS) - 1

    def settle(self) -> None:
        """Wait until nothing runs or loads: a text that ends leaves a round in flight, which is not read."""
        for program in () if self._runner is None else self._runner.programs:
            program.wait()
        jax.block_until_ready([idle.state for idle in self._idle])

    def with_method(self, method: Any) -> "Engine":
        """An engine of another method on the same models; ConfigError: it does not fit them."""
        method.check(self.models)
        if hosts.several():
            hosts.command("method", engine=self.number, name=method.name, settings=dataclasses.asdict(method))
        return Engine(self.models, method, self.given_context, self.store, self.session_memory, self.check_room)

    def give_back(self, idle: IdleSession, answer: Sequence[int]) -> None:
        """Take over a closed session's buffers, and free those that were not used for longest beyond the budget.

        `answer`, token ids, is what it decoded; later texts may copy from it.
        """
        if self.session_memory == 0:
            idle = dataclasses.replace(idle, params=None, tokens=())
        self._answers = NO_ANSWERS if self.session_memory == 0 else keep_answer(self._answers, answer)
        self.runner.copy_from(self._answers)
        if idle.tokens or idle.runner is self._runner:
            self._idle.append(idle)
        while len(self._idle) > 1 and not self._has_room(0):
            del self._idle[0]

    def _take_buffers(self, params: ModelParams, prompt: Sequence[int]) -> tuple[Any, int]:
        """Buffers for a prompt, None for new ones, and how many of its tokens their caches hold."""
        idle = self._idle
        common, best = max(((one.common(params, prompt), at) for at, one in enumerate(idle)), default=(0, -1))
        if common and self.session_memory != 0:
            kept, copies = idle[best], common >= min(CHUNKS)
            # A text of which less than half stays may be asked for again: it is copied, in place of older ones.
            if 2 * common >= len(kept.tokens) - 1:
                idle.remove(kept)
                return kept.state, common
            while copies and idle[0] is not kept and not self._has_room(kept.num_bytes):
                del idle[0]
            if idle[0] is kept and not self._has_room(kept.num_bytes):
                del idle[0]
                return kept.state, common
            if copies:
                return jax.tree.map(_copy, kept.state), common
        usable = [one for one in idle if one.runner is self._runner]
        if not usable or (usable[0].tokens and self._has_room(usable[0].num_bytes)):
            return None, 0
        unused = next((one for one in usable if not one.tokens), usable[0])
        idle.remove(unused)
        return unused.state, 0

    def _has_room(self, more: int) -> bool:
        return sum(idle.num_bytes for idle in self._idle) + more <= (self.session_memory or 0)


class Session:
    """One generation: its tokens, and its buffers until it is closed.

    One dispatch is read while the next one runs, so a session that is closed early wastes that one.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        buffers: Any,
        common: int = 0,
        matcher: Matcher | None = None,
        piece: int | None = None,
    ):
        """Dispatch the prefill; see `Engine.open`.

        `buffers` of a finished sequence are reused; their caches hold the `common` first tokens of the prompt. With
        `piece` at most that many others are read at a time, and `read` goes on.
        """
        self.number, self.seed = next(_numbers), seed
        self._engine, self._runner, self._params = engine, engine.runner, params
        self.tokens: list[int] = []  # of the prompt as far as it is read, and later emitted ones; caches lack the last
        self._prompt, self._piece = [int(token) for token in prompt], piece
        self.limit = engine.token_limit(prompt, sampling)  # most tokens that it emits
        self.num_emitted = 0
        runner = self._runner
        self._wants_top = sampling.num_logprobs > 0
        tokens = self._next_piece(common)
        buffers = runner.start(0, None) if buffers is None else buffers
        self.num_cached = runner.num_cached(buffers, common, len(tokens) - 1)  # prompt tokens not computed again
        self._state = runner.resume(params, buffers, tokens, common)
        # After the dispatch, so that the prompt does not wait for it.
        self._request = runner.place_request(dataclasses.replace(sampling, max_tokens=self.limit), seed, len(prompt))
        self._matcher = matcher
        # Under a constraint the host needs the tokens of a round before it can dispatch the next.
        self._most_in_flight = runner.in_flight if matcher is None else 1
        self._launch, self._read = self._launch_round, read_rounds
        if trace.active is not None:
            self._launch, self._read = trace.active.generation(self._state, self._launch_round, read_rounds)
        # Dispatches that were not read yet, with the least number of tokens that each brings.
        self._in_flight: collections.deque[tuple[Round, int]] = collections.deque()
        self.ready: collections.deque[StepOutput] = collections.deque()  # rounds that were read with the last one
        self._closed = False

    @property
    def done(self) -> bool:
        return self.num_emitted >= self.limit

    @property
    def reading(self) -> bool:
        """Whether more of the prompt is to be read before `step`."""
        return not self.num_emitted and len(self.tokens) < len(self._prompt)

    def read(self) -> None:
        """Wait for the latest piece of the prompt, and dispatch the next one."""
        hosts.command("read", session=self.number)
        common = len(self.tokens) - 1
        try:
            self._state = self._runner.resume(self._params, self._state, self._next_piece(common), common)
        except BaseException:
            self._closed = True
            raise

    def _next_piece(self, common: int) -> np.ndarray:
        """The prompt up to the end of its next piece, where the caches hold `common` tokens: int32 [n]."""
        self.tokens = self._prompt[: None if self._piece is None else common + self._piece + 1]
        return np.asarray(self.tokens, np.int32)

    def step(self) -> StepOutput:
        """Keep the devices busy and wait for one round; its tokens are cut to the asked-for length.

        RuntimeError: the session is closed, done, or still reading.
        """
        if self._closed or self.done or self.reading:
            raise RuntimeError("the session has ended or reads its prompt: open another one, or read on")
        hosts.command("step", session=self.number)
        with hosts.naming_losses():
            return self._step()

    def _step(self) -> StepOutput:
        try:
            coming = self.num_emitted + sum(len(output.tokens) for output in self.ready)
            coming += sum(min_tokens for _, min_tokens in self._in_flight)
            # The first token comes alone: the host's work for later rounds takes processor time from the prompt's pass.
            most = self._most_in_flight if coming else 1
            while len(self._in_flight) < most and coming < self.limit:
                room = self.limit - coming if coming else 1
                self._state, round_, min_tokens = self._launch(self._params, self._state, self._request, room)
                self._in_flight.append((round_, min_tokens))
                coming += min_tokens
            if not self.ready:
                outputs = self._read(self._in_flight.popleft()[0])
                self._runner.observe(self._state, outputs)
                self.ready.extend(outputs)
                if self._matcher is not None:
                    self._matcher.take([token for output in outputs for token in output.tokens])
        except BaseException:
            # A failed or interrupted dispatch may have consumed the buffers: they are not used again.
            self._closed = True
            raise
        output = self.ready.popleft().cut(self.limit - self.num_emitted)
        self.num_emitted += len(output.tokens)
        self.tokens += output.tokens
        return output

    def close(self) -> None:
        """End the session and give its buffers back; to be called once the text has ended, or to abort it."""
        hosts.command("close", session=self.number)
        state = None if self._closed else self._state
        if not self._closed:
            self._closed = True
            answer = self.tokens[len(self.tokens) - self.num_emitted :]
            self._engine.give_back(IdleSession(self._runner, self._params, tuple(self.tokens), self._state), answer)
        self._runner.close(state)

    abort = close

    def report(self) -> Choice | None:
        return self._runner.report()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch_round(self, params: ModelParams, state: Any, request: Any, room: int) -> tuple[Any, Round, int]:
        if self._matcher is not None:
            last = self.ready[-1].tokens[-1] if self.ready else self.tokens[-1]
            state, round_ = self._runner.constrained_round(params, state, request, self._matcher, last)
            min_tokens = 1
        else:
            state, round_, min_tokens = self._runner.round(params, state, request, room)
        if not self._wants_top:
            round_ = dataclasses.replace(round_, top=None)
        round_ = everywhere(round_)
        for leaf in jax.tree.leaves(round_):
            leaf.copy_to_host_async()
        return state, round_, min_tokens


def _copy(leaf: Any) -> Any:
    # What no program has taken yet may be on the host; nothing changes it there.
    return jax.device_put(leaf, leaf.sharding, may_alias=False) if isinstance(leaf, jax.Array) else leaf


def read_sampling(values: dict[str, Any]) -> SamplingParams:
    """Sampling parameters as another process wrote them, in JSON."""
    bias = values["logit_bias"] or {}
    read: dict[str, Any] = {**values, "logit_bias": {int(token): value for token, value in bias.items()} or None}
    return SamplingParams(**read)


def derive_seed(seed: int, index: int) -> int:
    """The seed of the completion `index` of a prompt; that of the first is the request's own."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def fresh_seed() -> int:
    """A random seed for a request that named none."""
    return secrets.randbits(31)
