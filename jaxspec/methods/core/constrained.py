"""Rounds under a constraint: the host reads what is drafted, and masks each row's choice (docs/structured_output.md).

A round is three dispatches: draft, the target's pass, the choice of tokens. The host computes the masks between the
last two, while the pass runs, and may draft the next round before it reads this one. Plain decoding dispatches forced
tokens and the one after them together, since their masks are known before; each has a pass of its own. Requests without
a constraint run other programs, which know nothing of masks.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.methods.core.executor import ResidentExecutor, TargetExecutor
from jaxspec.methods.core.round import Round, pack_round, round_shapes
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.methods.core.verify import Draft, batch_rows, decode_steps, draft_shapes, judge_batch, match
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward_with_states
from jaxspec.runtime.program import Program
from jaxspec.sampling.request import Request, request_shapes

if TYPE_CHECKING:
    from jaxspec.structured.matcher import Matcher


class ConstrainedPasses:
    """The target's half of rounds under a constraint, for batches of `num_rows` rows."""

    def __init__(
        self, executor: TargetExecutor, num_rows: int, *, dynamic_rows: bool = False, layers: tuple[int, ...] = ()
    ):
        """Declare the programs; `dynamic_rows` and `layers` are those of `verify`.

        ConfigError: the target's layers are streamed.
        """
        executor = _resident(executor)
        target, verified, max_path, reply = executor.placement, executor.verified, executor.max_path, executor.reply
        self.num_rows, self.max_path = num_rows, max_path
        self._columns = target.padded_vocab

        def run(params, state, draft):
            position, mask, active = batch_rows(state.cache.length, draft, max_path, dynamic_rows)
            hidden, cache, states = forward_with_states(
                params, target.cfg, draft.batch.token, position, state.cache, mask, layers, active
            )
            return dataclasses.replace(state, cache=cache), hidden, states

        def choose(params, state, draft, request, hidden, states, masks):
            active = draft.batch.count if dynamic_rows else None
            state, verified, round_ = judge_batch(
                params, target, state, draft, request, max_path, match, active, hidden, state.cache, masks
            )
            if states is not None:
                verified = dataclasses.replace(verified, states=states[verified.path])
            return state, reply(verified) if reply else verified, round_

        draft, width = draft_shapes(target, num_rows), target.cfg.embed_dim
        hidden = target.array((num_rows, width), jnp.float32)
        states = target.array((num_rows, len(layers) * width), jnp.float32) if layers else None
        masks = target.array((num_rows, -(-self._columns // 32)), jnp.uint32)
        args = [target.params(), executor.state, draft]
        self._run = Program("constrained pass", run, target.plan, args, (executor.state, hidden, states), donate=[1])
        args = [*args, request_shapes(target), hidden, states, masks]
        out = executor.state, verified, round_shapes(target, max_path)
        self._choose = Program("constrained choice", choose, target.plan, args, out, donate=[1])
        self.programs: Sequence[Program] = (self._run, self._choose)

    def verify(
        self, params: Params, state: SequenceState, draft: Draft, request: Request, matcher: "Matcher"
    ) -> tuple[SequenceState, Any, Round]:
        """Run a batch, and take what target and matcher confirm; `state` is donated.

        The pass is dispatched before the host reads the batch, where that is still being drafted. The second
        result has the form of the executor's `verified`.
        """
        state, hidden, states = self._run(params, state, draft)
        masks = matcher.masks(np.asarray(draft.batch.token), np.asarray(draft.batch.parent), self._columns)
        return self._choose(params, state, draft, request, hidden, states, masks)


class ConstrainedSteps:
    """Plain decoding under a constraint: at most `steps` tokens a dispatch, all but the last one forced."""

    def __init__(self, executor: TargetExecutor, steps: int):
        """Declare the program; ConfigError: the target's layers are streamed."""
        executor = _resident(executor)
        target, max_path = executor.placement, executor.max_path
        self._steps, self._columns = steps, target.padded_vocab

        def run(params, state, request, masks, count):
            state, verified = decode_steps(params, target, state, request, count, max_path, masks=masks)
            return state, pack_round(verified, 0, 0, 0)

        masks = target.array((steps, -(-self._columns // 32)), jnp.uint32)
        args = [target.params(), executor.state, request_shapes(target), masks, target.array((), jnp.int32)]
        out = executor.state, round_shapes(target, max_path)
        self.programs: Sequence[Program] = (Program("constrained decode", run, target.plan, args, out, donate=[1]),)

    def decode(
        self, params: Params, state: SequenceState, request: Request, matcher: "Matcher", root: int
    ) -> tuple[SequenceState, Round]:
        """Decode the forced tokens after the root, and one more; `state` is donated."""
        path = [root, *matcher.chain(self._steps - 1)]
        parent = np.arange(self._steps, dtype=np.int32)
        parent[1 : len(path)] -= 1
        token = np.pad(np.array(path, np.int32), (0, self._steps - len(path)))
        return self.programs[0](
            params, state, request, matcher.masks(token, parent, self._columns), np.int32(len(path))
        )


def _resident(executor: TargetExecutor) -> ResidentExecutor:
    if not isinstance(executor, ResidentExecutor):
        raise ConfigError("structured_outputs need a target whose layers stay on the devices: leave out offload")
    return executor
