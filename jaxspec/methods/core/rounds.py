"""Several rounds of a draft and a target in one program, where both have the same CPU.

A dispatch costs the host about half a millisecond of a core, and devices wait between two programs. Beside passes of a
few milliseconds that is a fifth of a round. So rounds share dispatches, as the tokens of plain decoding do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.methods.core.executor import TargetExecutor
from jaxspec.methods.core.round import round_shapes
from jaxspec.methods.core.verify import Draft
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program

# Most rounds of one dispatch; most rows of a batch and bytes of the target: passes over more of them take so long that
# a dispatch is little beside them, and tokens should not wait for each other.
ROUNDS_PER_DISPATCH, MOST_ROWS, MOST_BYTES = 4, 32, 256 << 20

# How a drafter makes a batch, for one shard: (parameters of the draft, state, what the last round verified, history,
# request, further operands) -> state, batch.
Propose = Callable[..., tuple[Any, Draft]]


def share_dispatches(target: Placement, draft: Placement | None, num_rows: int) -> bool:
    """Whether rounds of batches of `num_rows` rows share dispatches.

    Not on accelerators, whose hosts would wait for a loop that ends where the text does; nor on several devices.
    """
    alone = len(target.plan.devices) == 1 and (draft is None or draft.plan.mesh == target.plan.mesh)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target.params()))
    small = num_rows <= MOST_ROWS and nbytes <= MOST_BYTES
    return target.plan.kernels.branches and alone and small


def declare_rounds(executor: TargetExecutor, propose: Propose, params: Any, state: Any, operands: Any) -> Program:
    """The program of up to `ROUNDS_PER_DISPATCH` rounds; fewer where the text ends before.

    `params` and `state` are shapes of what `propose` takes, `operands` arrays. The program takes parameters of target
    and draft, state of both, what was verified, the request, the operands and the number of rounds. It returns both
    states, what was verified, and a `Round` whose arrays have the rounds in front; those that did not run have no
    tokens.
    """
    target, check = executor.placement, executor.check
    assert check is not None
    one = round_shapes(target, executor.verified.tokens.shape[0])
    several = jax.tree.map(lambda leaf: target.array((ROUNDS_PER_DISPATCH, *leaf.shape), leaf.dtype), one)

    def rounds(params, draft_params, target_state, draft_state, verified, request, operands, count):
        def goes_on(done: tuple) -> Array:
            number, target_state, *_ = done
            # The first one runs in any case: it may have been launched ahead.
            return (number < count) & ((number == 0) | (target_state.generated < request.max_tokens))

        def run(done: tuple) -> tuple:
            number, target_state, draft_state, verified, found = done
            draft_state, batch = propose(draft_params, draft_state, verified, target_state.history, request, operands)
            target_state, verified, round_ = check(params, target_state, batch, request)
            found = jax.tree.map(lambda all_, new: all_.at[number].set(new), found, round_)
            return number + 1, target_state, draft_state, verified, found

        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), several)
        start = jnp.int32(0), target_state, draft_state, verified, blank
        return jax.lax.while_loop(goes_on, run, start)[1:]

    args = [
        target.params(), params, executor.state, state, executor.verified, target.request(),
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), operands),
        target.array((), jnp.int32),
    ]  # fmt: skip
    out = executor.state, state, executor.verified, several
    return Program("rounds", rounds, target.plan, args, out, donate=[2, 3])
