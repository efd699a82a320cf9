"""How the target's passes run: declared once, used by every runner."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.methods.core.round import Round, pack_round, round_shapes, verified_shapes
from jaxspec.methods.core.sequence import ModelSequence, SequenceState
from jaxspec.methods.core.verify import Rule, decode_steps, match, verify
from jaxspec.models.params import Params
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import place_like
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import find_variant
from jaxspec.sampling.request import Request, make_request, request_shapes

# What `verify` and `decode` return.
Checked = tuple[SequenceState, Any, Round]
Decoded = tuple[SequenceState, Verified, Round, int]
Meanwhile = Callable[[], None] | None
# (parameters, state, draft, request, states that may be written over, or none) -> `Checked`
Check = Callable[..., Checked]


class TargetExecutor(abc.ABC):
    """The target's passes over one sequence; each call dispatches and returns, and donates the state that it takes."""

    placement: Placement
    state: SequenceState  # shapes
    verified: Any  # shapes of what a round verifies, a `Verified` or what is sent of it
    programs: Sequence[Program]  # everything that it may call
    in_flight: int  # dispatches that are worth making before the first of them is read
    check: Check | None = None  # what `verify` runs, for one shard; None where that is no single function
    verify_program: Program | None = None  # that `verify` dispatches; None where it has several, or cannot verify
    sequence: ModelSequence  # how its texts start, rewind and prefill

    @abc.abstractmethod
    def verify(
        self, params: Params, state: SequenceState, draft: Any, request: Request, meanwhile: Meanwhile = None
    ) -> Checked:
        """Verify what a draft proposes; the second result has the form of `verified`.

        Where a pass has several programs, it calls `meanwhile` between them, for what other devices may do.
        """

    @abc.abstractmethod
    def decode(self, params: Params, state: SequenceState, request: Request, steps: int) -> Decoded:
        """Decode about `steps` tokens without a draft; the last result says how many."""

    def place_request(self, sampling: SamplingParams, seed: int, prompt_tokens: int = 0) -> Request:
        """A request on the target's devices."""
        return place_request(self.placement, sampling, seed, self.placement.cfg.vocab_size, prompt_tokens)


class ResidentExecutor(TargetExecutor):
    """A `TargetExecutor` whose weights stay on the devices: a pass is one compiled program."""

    in_flight = 2

    def __init__(
        self, target: Placement, slots: int, *, steps: int, max_path: int = 1, draft: Any = None, rule: Rule = match,
        dynamic_rows: bool = False, idle_steps: int = 0, receive: Any = None, reply: Any = None,
        layers: tuple[int, ...] = (), chunk_slots: int = 0,
    ):  # fmt: skip
        """Declare the programs; nothing is compiled yet.

        Args:
          steps: most tokens of `decode`; 0 declares no program for it.
          max_path: P, the longest path of a batch and the bonus token.
          draft: shapes of what `verify` is given; None declares no program for it.
          rule, dynamic_rows, idle_steps: see `verify`; on accelerators `idle_steps` is 0, whatever is given.
          receive: from what `verify` is given to a `Draft`; None takes a `Draft` as it is.
          reply: from a `Verified` to what a draft on other devices is sent; None hands out the `Verified`.
          layers: hidden states of the target that the draft is fed, see `forward_with_states`; for `chunk_slots` see
            `ModelSequence`.
        """
        self.placement, self._steps = target, steps
        self.verified: Any = verified_shapes(target, max(max_path, steps), layers)
        max_path = self.verified.tokens.shape[0]
        self.max_path, self.reply = max_path, reply
        self.sequence = ModelSequence(target, slots, "target", layers=layers, path=max_path, chunk_slots=chunk_slots)
        self.state = self.sequence.state
        round_, request, params = round_shapes(target, max_path), request_shapes(target), target.params()
        # Whether the number of passes is data. Programs capture flags, not `self`: they become part of the stored key.
        self._counts_on_device, may_idle = target.plan.kernels.loops_are_free, target.plan.kernels.takes_cpu_forms
        self.programs: Sequence[Program] = tuple(self.sequence.programs)

        def decode(params, state, request, steps):
            state, verified = decode_steps(params, target, state, request, steps, max_path, layers)
            return state, dataclasses.replace(verified, top=None), pack_round(verified, 0, 0, 0)

        def check(params, state, draft, request, states=None):
            state, verified, round_ = verify(
                params, target, state, receive(draft) if receive else draft, request, max_path=max_path, rule=rule,
                dynamic_rows=dynamic_rows, idle_steps=idle_steps if may_idle else 0, layers=layers, states=states,
            )  # fmt: skip
            return state, reply(verified) if reply else verified, round_

        self.check = check if receive is None and reply is None else None
        out = (self.state, self.verified, round_)
        self._decode: dict[int, Program] = {}
        if steps and self._counts_on_device:
            args = [params, self.state, request, target.array((), jnp.int32)]
            self._decode[0] = Program("decode", decode, target.plan, args, out, donate=[1])
        elif steps:
            args = [params, self.state, request]
            for count in {1, steps}:
                fixed = functools.partial(decode, steps=count)
                self._decode[count] = Program(f"decode {count}", fixed, target.plan, args, out, donate=[1])
        self.programs = (*self.programs, *self._decode.values())
        if draft is not None:
            if reply is not None:
                self.verified = target.replicated(jax.eval_shape(reply, self.verified))
            args, out = [params, self.state, draft, request], (self.state, self.verified, round_)
            self.verify_program = Program("verify", check, target.plan, args, out, donate=[1])
            self.programs = (*self.programs, self.verify_program)

    def verify(
        self, params: Params, state: SequenceState, draft: Any, request: Request, meanwhile: Meanwhile = None
    ) -> Checked:
        assert self.verify_program is not None
        return self.verify_program(params, state, draft, request)

    def decode(self, params: Params, state: SequenceState, request: Request, steps: int) -> Decoded:
        steps = max(1, min(steps, self._steps))
        if self._counts_on_device:
            return *self._decode[0](params, state, request, np.int32(steps)), steps
        # What lies after the last wanted token is cut off by the engine.
        count = 1 if steps == 1 else self._steps
        return *self._decode[count](params, state, request), count


def make_executor(target: Placement, slots: int, **settings: Any) -> TargetExecutor:
    """The executor of a placement, resident unless it names another; `settings` are those of `ResidentExecutor`."""
    return (target.executor or ResidentExecutor)(target, slots, **settings)


def place_request(
    placement: Placement, sampling: SamplingParams, seed: int, vocab_size: int, prompt_tokens: int = 0
) -> Request:
    """A request on a model's devices; `vocab_size` is the target's, whose tokens a bias may name."""
    request = make_request(sampling, seed, vocab_size, placement.padded_vocab, prompt_tokens)
    request = place_like(request, request_shapes(placement, request))
    return request if placement.plan.kernels.takes_cpu_forms else request.of_variant(find_variant(sampling))
