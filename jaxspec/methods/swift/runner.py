"""Runner of `Swift`: a draft by some layers, a pass of all of them, and now and then a pass of the search between."""

import collections
import dataclasses
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.methods.base import ROUND_HEADER, ModelParams, Round, place_request
from jaxspec.methods.core.chunks import cache_slots
from jaxspec.methods.core.cost_model import pass_costs, relative_set_cost
from jaxspec.methods.core.lookup import plain_tokens
from jaxspec.methods.core.runner import outcome_shapes
from jaxspec.methods.core.sequence import TargetSide, TargetState
from jaxspec.methods.core.timing import Finished, RoundTimer
from jaxspec.methods.core.verify import Draft, Outcome, match, verify
from jaxspec.methods.swift.score import matchness_program
from jaxspec.methods.swift.search import Asked, LayerSearch
from jaxspec.methods.swift.self_draft import (
    Control,
    SpineMemory,
    SpineSettings,
    draft_nothing,
    draft_spine,
    init_memory,
    restart,
)
from jaxspec.models.layer_set import LayerSet
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.request import Request
from jaxspec.tree.tree import Batch

# Compiled drafts that are kept, of the latest sets.
KEPT_PROGRAMS = 16
# Rounds of other generations after which one is taken to have ended.
ABANDONED = 8


class Launched(NamedTuple):
    """A round in flight, whether it was allowed to draft, and whether a search pass runs before it."""

    round_: Round
    allowed: bool
    delayed: bool


class HostText:
    """What the host knows of one generation: verified tokens, a round or two late.

    Attributes:
      tokens: prompt and verified tokens.
      prompt: how many of them are the prompt's.
      waiting: rounds that were not read yet.
      launched: number of its latest round among all rounds of the runner; 0 before the first.
      delayed: whether the next round runs behind a search pass.
    """

    def __init__(self, root: int):
        """A prompt of one token; `prefill` brings the others."""
        self.tokens = [root]
        self.prompt = 1
        self.waiting: collections.deque[Launched] = collections.deque()
        self.launched = 0
        self.delayed = False


@struct.dataclass
class SwiftState:
    """State of a sequence: on the devices, and what the host knows of it."""

    target: TargetState
    memory: SpineMemory
    outcome: Outcome
    host: HostText = struct.field(pytree_node=False)


class Window(NamedTuple):
    """Verified tokens on which sets are scored: the generation that they are of, and their first position."""

    text: HostText
    start: int


class SwiftRunner:
    """Compiled functions of a model that drafts for itself; see `Runner`.

    Attributes:
      layers: the set that drafts.
      meter: of its rounds.
    """

    def __init__(
        self,
        target: Placement,
        tokens: int,
        search: LayerSearch,
        *,
        fixed: LayerSet | None,
        spine: SpineSettings,
        costs: np.ndarray,
        branching: bool,
        sets: int,
        context: str,
        share: float,
        meter: RoundTimer,
    ):
        """Declare the programs.

        Args:
          target: the model.
          tokens: longest sequence.
          search: finds the layers; it may have been going on for long.
          fixed: the layers, if nothing is to be searched.
          spine: how drafts are grown.
          costs: of target passes; see `draft_spine`.
          branching: one program for all sets, which leaves out what is skipped by branches on the device.
          sets: scored in one pass.
          context: "recent" or "first" tokens are scored.
          share: most of the time that the search may take.
          meter: of the rounds, those of earlier runners included.
        """
        self._target, self._search, self._spine, self._costs = target, search, spine, costs
        self._branching, self._sets, self._context, self._share = branching, sets, context, share
        self._searches = fixed is None and share > 0 and search.stopped is None
        self.meter = meter
        window = search.settings.window
        rows = sets * window if self._searches else 0
        steps = spine.length + 1
        self.slots = cache_slots(tokens, max(steps, spine.batch_rows, rows))
        self._steps, self._rows = steps, rows
        self._side = TargetSide(target, self.slots)
        self._outcome = outcome_shapes(target, steps)
        self._memory = target.replicated(jax.eval_shape(lambda: init_memory(spine)))
        batch, scalar, plan = target.array((spine.batch_rows,), jnp.int32), target.array((), jnp.int32), target.plan
        self._most_plain = most_plain = plain_tokens(target, steps)
        self._drafted = Draft(Batch(batch, batch, batch, scalar), scalar, plain=scalar if most_plain else None)
        units = target.array((target.cfg.num_layers, 2), jnp.bool_)
        self._control_shapes = Control(units, target.array((), jnp.float32), scalar)

        def check(params, state, drafted, request):
            return verify(params, target, state, drafted, request, steps=steps, rule=match, varies=True)

        round_ = Round(target.array((ROUND_HEADER + steps,), jnp.int32), target.array((steps,), jnp.float32))
        args = [target.params(), self._side.state, self._drafted, target.request()]
        out = (self._side.state, self._outcome, round_)
        self._verify = Program("verify", check, plan, args, out, donate=[1])
        self._create = Program("draft create", lambda: init_memory(spine), plan, [], self._memory)

        def skip(root, memory, outcome, request):
            return draft_nothing(root, memory, outcome, request, settings=spine, most_plain=most_plain)

        args = [scalar, self._memory, self._outcome, target.request()]
        self._skip = Program("draft nothing", skip, plan, args, (self._memory, self._drafted), donate=[1])
        self._restart = Program("draft restart", restart, plan, [self._memory], self._memory, donate=[0])
        self._score = matchness_program(target, self._side.state, sets, window, branching) if self._searches else None
        meter.pass_cost = float(pass_costs(target, max(rows, 1))[-1])

        self._worker = ThreadPoolExecutor(1, thread_name_prefix="swift") if self._searches else None
        self._pending: tuple[Asked, jax.Array] | None = None  # scores on their way
        self._window: Window | None = None
        self._compiling: tuple[LayerSet, Future[Program]] | None = None
        self._drafts: dict[LayerSet | None, Program] = {}
        self._failed: set[LayerSet] = set()  # sets whose programs could not be compiled
        self._serial = self._launched = 0
        layers = fixed or search.incumbent.layers
        key = None if branching else layers
        self._drafts[key] = self._declare(key)
        self._use(layers)

    @property
    def programs(self) -> tuple[Program, ...]:
        """See `Runner.programs`."""
        own = (*self._side.programs, self._create, self._restart, self._skip, *self._drafts.values(), self._verify)
        return own if self._score is None else (*own, self._score)

    def start(self, root: int, state: SwiftState | None) -> SwiftState:
        """See `Runner.start`."""
        tokens = np.zeros(self._steps, np.int32)
        tokens[0] = root
        # What a sequence begins with: its root, verified by definition.
        first = Outcome(tokens, np.int32(1), np.zeros(self._steps, np.int32))  # pyright: ignore[reportArgumentType]
        return SwiftState(
            self._side.start(root, None if state is None else state.target),
            # What was learned of the draft outlives a text.
            self._create() if state is None else self._restart(state.memory),
            jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), first, self._outcome),
            HostText(root),
        )

    def prefill(self, params: ModelParams, state: SwiftState, tokens: np.ndarray) -> SwiftState:
        """See `Runner.prefill`."""
        state.host.tokens[:0] = tokens.tolist()
        state.host.prompt = len(state.host.tokens)
        return dataclasses.replace(state, target=self._side.prefill(params.target, state.target, tokens))

    def place_request(self, sampling: SamplingParams, seed: int) -> Request:
        """See `Runner.place_request`."""
        return place_request(self._target, sampling, seed, self._target.cfg.vocab_size)

    def round(self, params: ModelParams, state: SwiftState, request: Request) -> tuple[SwiftState, Round]:
        """See `Runner.round`."""
        text = state.host
        self._read(text)
        self._adopt()
        # A draft that costs what the target costs cannot pay, whatever it says.
        allowed = not self._spine.adaptive or (self.meter.may_draft() and self._cost < 1)
        target = state.target
        if allowed:
            target, memory, drafted = self._draft(
                params.target, target, state.memory, state.outcome, request, self._control
            )
        else:
            memory, drafted = self._skip(target.root, state.memory, state.outcome, request)
        target, outcome, round_ = self._verify(params.target, target, drafted, request)
        self._launched += 1
        text.launched = self._launched
        text.waiting.append(Launched(round_, allowed, text.delayed))
        text.delayed = False
        target = self._dispatch_scores(params.target, target, text)
        return SwiftState(target, memory, outcome, text), round_

    def _read(self, text: HostText) -> None:
        """Take in what has finished meanwhile; nothing is waited for."""
        finished, is_ready = [], self.meter.clock.is_ready
        while text.waiting and is_ready(text.waiting[0].round_.packed):
            launched = text.waiting.popleft()
            packed = np.asarray(launched.round_.packed).tolist()
            count, _, _, passes = packed[:ROUND_HEADER]
            text.tokens += packed[ROUND_HEADER : ROUND_HEADER + count]
            finished.append(Finished(count, launched.allowed, passes > 0, launched.delayed))
        meter, search = self.meter, self._search
        total_s, search_s = meter.total_s, meter.search_s
        meter.lap(finished, first=not text.launched)
        if self._searches and search.stopped is None:
            search.decoded_s += meter.total_s - total_s
            search.spent_s += meter.search_s - search_s
        if self._pending is not None and is_ready(self._pending[1]):
            asked, matches = self._pending
            search.tell(asked, np.asarray(matches).tolist())
            self._pending = None

    def _dispatch_scores(self, params: Params, target: TargetState, text: HostText) -> TargetState:
        """A step of the search, if it is due: it runs behind the round that was launched last."""
        search = self._search
        if self._score is None or search.stopped is not None or self._pending is not None:
            return target
        spare_s = float("inf")
        if self._share < 1:
            if (cost := self.meter.pass_s) is None:
                return target
            # What is on its way has not been counted yet.
            unread = sum(launched.delayed for launched in text.waiting)
            spare_s = self._share * search.decoded_s - search.spent_s - unread * cost
            if cost > spare_s:
                return target
        if (window := self._next_window(text)) is None:
            return target
        asked = search.next_sets(self._sets)
        units = np.stack([layers.runs for layers in asked.layers])
        tokens = np.array(text.tokens[window.start : window.start + search.settings.window + 1], np.int32)
        target, matches = self._score(params, target, tokens, np.int32(window.start), units)
        matches.copy_to_host_async()
        self._pending = asked, matches
        text.delayed = True
        return target

    def _next_window(self, text: HostText) -> Window | None:
        """Tokens to score on, the same ones while candidates are compared on them; None if there are none."""
        search, width, known = self._search, self._search.settings.window, self._window
        used_up = search.window_is_used_up and self._context == "recent"
        if known is not None and not used_up:
            if known.text is text:
                return known
            if self._launched - known.text.launched < ABANDONED:
                return None  # interleaved generations: candidates are compared on one of them
        # The last token is the root, or a former one: the keys of all before it are in the cache.
        start = text.prompt if self._context == "first" else len(text.tokens) - 1 - width
        if start < text.prompt or start + width >= len(text.tokens) or (known is not None and known == (text, start)):
            return None
        self._window = Window(text, start)
        search.open_window()
        return self._window

    def _adopt(self) -> None:
        """Draft with the search's best set, once its program is there."""
        wanted = self._search.incumbent.layers if self._searches else self.layers
        if self._compiling is not None and self._compiling[1].done():
            (layers, program), self._compiling = self._compiling, None
            if (error := program.exception()) is None:
                self._drafts[layers] = program.result()
            else:
                # There is a set to go on with: the text at hand must not end here.
                self._failed.add(layers)
                logging.getLogger(__name__).warning("the draft of %s could not be compiled: %s", layers, error)
        if wanted == self.layers or wanted in self._failed:
            return
        key = None if self._branching else wanted
        if key in self._drafts:
            self._use(wanted)
            self.meter.forget_drafts()
            for stale in [*self._drafts][:-KEPT_PROGRAMS]:
                if stale != wanted:
                    del self._drafts[stale]
        elif self._compiling is None:
            assert self._worker is not None
            self._compiling = (wanted, self._worker.submit(self._compile, wanted))

    def _compile(self, layers: LayerSet) -> Program:
        program = self._declare(layers)
        program.finish(program.lower())
        return program

    def _declare(self, layers: LayerSet | None) -> Program:
        target, settings = self._target, {"settings": self._spine, "costs": self._costs, "most_plain": self._most_plain}

        def draft(params, *rest):
            return draft_spine(params, target, *rest, layers=layers, **settings)

        args: list[Any] = [
            target.params(), self._side.state, self._memory, self._outcome, target.request(), self._control_shapes,
        ]  # fmt: skip
        out = (self._side.state, self._memory, self._drafted)
        return Program("draft", draft, target.plan, args, out, donate=[1, 2])

    def _use(self, layers: LayerSet) -> None:
        """Draft with a set whose program is there."""
        self.layers, self._draft = layers, self._drafts[None if self._branching else layers]
        self._serial += 1
        self._cost = relative_set_cost(self._target, layers)
        values: Any = (layers.runs, np.float32(self._cost), np.int32(self._serial))
        self._control = jax.tree.map(
            lambda leaf, shape: jax.device_put(leaf, shape.sharding), Control(*values), self._control_shapes
        )
