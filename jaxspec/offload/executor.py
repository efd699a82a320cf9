"""A target whose layers pass by: weights come from host memory or disk, a layer at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.executor import (
    Checked,
    Decoded,
    Meanwhile,
    TargetExecutor,
)
from jaxspec.methods.core.round import pack_round, round_shapes, verified_shapes
from jaxspec.methods.core.sequence import (
    ModelSequence,
    PromptStates,
    SequenceState,
    note_tokens,
    split_chunks,
    states_before,
    usable_chunks,
)
from jaxspec.methods.core.verify import Rule, batch_rows, judge_batch, match, take_token
from jaxspec.models.features import NORMED
from jaxspec.models.kv_cache import commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import (
    Frame,
    Window,
    begin_rows,
    finish_rows,
    forward,
    join_states,
    make_tables,
    rope_settings,
)
from jaxspec.offload.layer_programs import LayerPrograms
from jaxspec.offload.stream import LayerStream
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.accept import blank_verified, set_top
from jaxspec.sampling.processors import update_history
from jaxspec.sampling.request import Request, request_shapes


class StreamedSequence(ModelSequence):
    """A `ModelSequence` whose prompts are committed layer by layer: one pass over the weights for all chunks."""

    def _declare_fill(self, role: str) -> Sequence[Program]:
        placement, cfg, vocab, plan = self.placement, self.placement.cfg, self.placement.text_vocab, self.placement.plan
        scalar, resident = placement.array((), jnp.int32), resident_shapes(placement)
        keeps_text, layers, path = self._keeps_text, self._layers, self._path
        self._open: dict[int, Program] = {}
        self._note: dict[int, Program] = {}
        self._join: dict[int, Program] = {}
        self.layer_programs = LayerPrograms(placement, self.state, layers)
        programs: list[Program] = []

        def begin(params, token, length, offset, count):
            position = length + offset + jnp.arange(token.shape[0], dtype=jnp.int32)
            return begin_rows(params, cfg, token, position, length + offset, None, live=count)

        def note(state, token, count):
            state = dataclasses.replace(state, cache=commit_rows(state.cache, count))
            return note_tokens(state, token, count, vocab) if keeps_text else state

        def join(params, states, count):
            joined = join_streamed(params, placement, states, layers)
            assert joined is not None  # there are layers
            return joined, states_before(joined, count, path)

        for size in usable_chunks(self.slots):
            token, rows = placement.array((size,), jnp.int32), row_shapes(placement, size, windowed=False)
            args = [resident, token, scalar, scalar, scalar]
            self._open[size] = Program(f"{role} open {size}", begin, plan, args, rows)
            args = [self.state, token, scalar]
            self._note[size] = Program(f"{role} note {size}", note, plan, args, self.state, donate=[0])
            programs += [self._open[size], self._note[size], *self.layer_programs.declare(size, rows[1])]
            if layers:
                width = cfg.states_dim(layers)
                out = tuple(placement.array((count, width), jnp.float32) for count in (size, path))
                args = [resident, [rows[0]] * (len(layers) + 1), scalar]
                self._join[size] = Program(f"{role} states {size}", join, plan, args, out)
        return *programs, *self._join.values()

    def prefill(
        self, params: Params, state: SequenceState, tokens: np.ndarray, start: int = 0,
        states: PromptStates | None = None,
    ) -> tuple[SequenceState, PromptStates | None]:  # fmt: skip
        chunks = list(split_chunks(tokens, self.chunk_slots - start))
        resident, stream = split_params(params)
        rows, offset = [], 0
        for chunk, count in chunks:
            where = state.cache.length, np.int32(offset), np.int32(count)
            rows.append(self._open[len(chunk)](resident, chunk, *where))
            offset += count
        passed, state = self.layer_programs.run(stream, state, rows) if rows else ([], state)
        joined, last = [], None
        for (chunk, count), hidden in zip(chunks, passed, strict=True):
            state = self._note[len(chunk)](state, chunk, np.int32(count))
            if self._layers:
                one, last = self._join[len(chunk)](resident, hidden, np.int32(count))
                joined.append(one)
        return state, PromptStates(joined, last) if self._layers else None


def make_sequence(target: Placement, slots: int, role: str) -> ModelSequence:
    """The sequence of a target, whether its layers are streamed or not; a cache alone, without its text."""
    kind = ModelSequence if target.resident_layers is None else StreamedSequence
    return kind(target, slots, role, keeps_text=False)


class TargetPass:
    """A pass over any target outside of a method's rounds, such as one that scores a text.

    Called with parameters, the state of `sequence`, which is donated, and `args`; it gives what `finish` gives.
    """

    def __init__(
        self, name: str, sequence: ModelSequence, rows: int, args: Sequence[Any], out: Any, *,
        begin: Callable[..., tuple[Array, Array, Array, Array | None]], finish: Callable[..., Any],
    ):  # fmt: skip
        """Declare the programs; nothing is compiled yet.

        Args:
          sequence: of `make_sequence`.
          rows: T.
          args: shapes of what the pass is given; `out` are those of what it gives, the state first.
          begin: from the cache's length and `args` to tokens and positions, int32 [T]; the mask among the rows, bool
            [T, T]; and the number of active rows, None for all of them.
          finish: from parameters, state, hidden rows [T, D], the cache with them written, and `args` to `out`.
        """
        target, state = sequence.placement, sequence.state
        cfg, plan = target.cfg, target.plan

        def run(params, state, *args):
            token, position, mask, active_rows = begin(state.cache.length, *args)
            hidden, cache = forward(params, cfg, token, position, state.cache, mask, active_rows=active_rows)
            return finish(params, state, hidden, cache, *args)

        def open_rows(params, length, *args):
            token, position, mask, active_rows = begin(length, *args)
            return begin_rows(params, cfg, token, position, length, Window(mask, position, None, active_rows))

        def close_rows(params, state, x, *args):
            return finish(params, state, finish_rows(params, cfg, x), state.cache, *args)

        self._layers = sequence.layer_programs if isinstance(sequence, StreamedSequence) else None
        if self._layers is None:
            self._run = Program(name, run, plan, [target.params(), state, *args], out, donate=[1])
            self.programs: Sequence[Program] = (self._run,)
            return
        scalar, resident = target.array((), jnp.int32), resident_shapes(target)
        active = jax.eval_shape(begin, scalar, *args)[3] is not None
        x, frame = row_shapes(target, rows, windowed=True, dynamic_rows=active)
        self._open = Program(f"{name} open", open_rows, plan, [resident, scalar, *args], (x, frame))
        self._close = Program(f"{name} close", close_rows, plan, [resident, state, x, *args], out, donate=[1])
        self.programs = (self._open, self._close, *self._layers.declare(rows, frame))

    def __call__(self, params: Params, state: SequenceState, *args: Any) -> Any:
        if self._layers is None:
            return self._run(params, state, *args)
        resident, stream = split_params(params)
        rows = self._open(resident, state.cache.length, *args)
        ((x,),), state = self._layers.run(stream, state, [rows])
        return self._close(resident, state, x, *args)


class StreamingExecutor(TargetExecutor):
    """A `TargetExecutor` whose layers come from a `LayerStream`; `params["layers"]` is one.

    A pass is a program that embeds, one for each layer (two for a mixture), and one with head, walk and commit. The
    host waits for reads between them: a call returns when all but the last program has been dispatched. A token without
    a draft takes a pass, so `decode` gives one token.
    """

    in_flight = 1  # a further round would only wait for the pass

    def __init__(
        self, target: Placement, slots: int, *, steps: int, max_path: int = 1, draft: Any = None, rule: Rule = match,
        dynamic_rows: bool = False, idle_steps: int = 0, receive: Any = None, reply: Any = None,
        layers: tuple[int, ...] = (), chunk_slots: int = 0,
    ):  # fmt: skip
        """Declare the programs; see `ResidentExecutor`, whose `idle_steps` have no counterpart here."""
        self.placement = target
        self.verified: Any = verified_shapes(target, max(max_path, steps), layers)
        path = self.verified.tokens.shape[0]
        self.sequence = StreamedSequence(target, slots, "target", layers=layers, path=path, chunk_slots=chunk_slots)
        self._layers = self.sequence.layer_programs
        self.state = self.sequence.state
        resident, request, scalar = resident_shapes(target), request_shapes(target), target.array((), jnp.int32)
        out = (self.state, self.verified, round_shapes(target, path))
        cfg, plan, programs = target.cfg, target.plan, [*self.sequence.programs]

        if steps:

            def open_root(params, root, length):
                window = Window(jnp.ones((1, 1), bool), length[None], None, None)
                return begin_rows(params, cfg, root[None], length[None], length, window)

            def close_root(params, state, states, request):
                history, hidden = state.history, finish_rows(params, cfg, states[-1])
                state, logprob, ranked = take_token(params, target, state, request, history.row, hidden, state.cache)
                history = update_history(history, state.root[None], jnp.ones(1, bool), target.vocab, generated=True)
                state = dataclasses.replace(state, history=history)
                blank = blank_verified(path, target.vocab)
                fed = join_streamed(params, target, states, layers)
                verified = dataclasses.replace(
                    blank,
                    states=None if fed is None else jnp.zeros((path, fed.shape[1])).at[0].set(fed[0]),
                    tokens=blank.tokens.at[0].set(state.root), count=jnp.int32(1),
                    logprob=blank.logprob.at[0].set(logprob), top=set_top(blank.top, jnp.int32(0), ranked),
                )  # fmt: skip
                return state, dataclasses.replace(verified, top=None), pack_round(verified, 0, 0, 0)

            rows = row_shapes(target, 1, windowed=True)
            self._open_root = Program("decode open", open_root, plan, [resident, scalar, scalar], rows)
            args = [resident, self.state, [rows[0]] * (len(layers) + 1), request]
            self._close_root = Program("decode close", close_root, plan, args, out, donate=[1])
            programs += [self._open_root, self._close_root, *self._layers.declare(1, rows[1])]
        if draft is not None:
            taken: Callable[[Any], Any] = receive or (lambda draft: draft)
            if reply is not None:
                self.verified = target.replicated(jax.eval_shape(reply, self.verified))
                out = (self.state, self.verified, out[2])

            def open_batch(params, length, draft):
                given = taken(draft)
                position, mask, active_rows = batch_rows(length, given, path, dynamic_rows)
                window = Window(mask, position, None, active_rows)
                return begin_rows(params, cfg, given.batch.token, position, length, window, live=given.batch.count)

            def close_batch(params, state, states, draft, request):
                given = taken(draft)
                active_rows = given.batch.count if dynamic_rows else None
                hidden, fed = finish_rows(params, cfg, states[-1]), join_streamed(params, target, states, layers)
                state, verified, round_ = judge_batch(
                    params, target, state, given, request, path, rule, active_rows, hidden, state.cache
                )
                verified = verified if fed is None else dataclasses.replace(verified, states=fed[verified.path])
                return state, reply(verified) if reply else verified, round_

            count = jax.eval_shape(taken, draft).batch.rows
            rows = row_shapes(target, count, windowed=True, dynamic_rows=dynamic_rows, live=True)
            self._open_batch = Program("verify open", open_batch, plan, [resident, scalar, draft], rows)
            args = [resident, self.state, [rows[0]] * (len(layers) + 1), draft, request]
            self._close_batch = Program("verify close", close_batch, plan, args, out, donate=[1])
            programs += [self._open_batch, self._close_batch, *self._layers.declare(count, rows[1])]
        self.programs: Sequence[Program] = tuple(programs)

    def verify(
        self, params: Params, state: SequenceState, draft: Any, request: Request, meanwhile: Meanwhile = None
    ) -> Checked:
        resident, stream = split_params(params)
        rows = self._open_batch(resident, state.cache.length, draft)
        (states,), state = self._layers.run(stream, state, [rows], meanwhile)
        return self._close_batch(resident, state, states, draft, request)

    def decode(self, params: Params, state: SequenceState, request: Request, steps: int) -> Decoded:
        resident, stream = split_params(params)
        rows = self._open_root(resident, state.root, state.cache.length)
        (states,), state = self._layers.run(stream, state, [rows])
        return *self._close_root(resident, state, states, request), 1


def stream_layers(target: Placement, resident_layers: int, kept_experts: int = 0) -> Placement:
    """The placement of the same target with all layers streamed but `resident_layers` of them."""
    return dataclasses.replace(
        target, resident_layers=resident_layers, kept_experts=kept_experts, executor=StreamingExecutor
    )


def join_streamed(params: Params, target: Placement, states: Sequence[Array], layers: tuple[int, ...]) -> Array | None:
    """The result of `join_states`, from the rows that `LayerPrograms.run` gives for `layers`; None without any."""
    hidden = finish_rows(params, target.cfg, states[-1]) if NORMED in layers else states[-1]
    return join_states(dict(zip(layers, states, strict=False)), hidden, layers)


def row_shapes(
    target: Placement, rows: int, *, windowed: bool, dynamic_rows: bool = False, live: bool = False
) -> tuple[Any, Frame]:
    """Shapes of what `begin_rows` gives for a pass of `rows` rows, with a tree window or as a chunk of a prompt.

    Of a chunk, or with `live`, the number of rows that matter is known.
    """
    cfg, position, scalar = target.cfg, target.array((rows,), jnp.int32), target.array((), jnp.int32)

    def tables(position: Array) -> Any:
        return tuple(make_tables(rope, width, position) for rope, width in rope_settings(cfg))

    ropes = target.replicated(jax.eval_shape(tables, position))
    mask: Any = target.array((rows, rows), jnp.bool_)
    window = Window(mask, position, None, scalar if dynamic_rows else None) if windowed else None
    frame = Frame(ropes, position, scalar, window, scalar if live or not windowed else None)
    return target.array((rows, cfg.embed_dim), jnp.float32), frame


def resident_shapes(target: Placement) -> Params:
    """Shapes of the parameters that no pass has to wait for: all but the layers'."""
    return {name: leaf for name, leaf in target.params().items() if name != "layers"}


def split_params(params: Params) -> tuple[Params, LayerStream]:
    """The parameters apart from the layers, and the stream of those."""
    return {name: leaf for name, leaf in params.items() if name != "layers"}, params["layers"]
