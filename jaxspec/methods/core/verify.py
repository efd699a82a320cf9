"""The target's half of a round: one pass over a batch, the walk, the commit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.methods.base import Round, pack_round
from jaxspec.methods.core.sequence import TargetState, next_token
from jaxspec.models.kv_cache import commit_path
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.accept import Decide, RowLogits, match_rule, walk
from jaxspec.sampling.request import Request
from jaxspec.sampling.vocab import VocabShard
from jaxspec.tree.tree import Batch, ancestor_matrix

# Above so many rows the head runs only for the rows that the walk reaches, a few of them, one at a time.
LAZY_HEAD_ROWS = 128


@struct.dataclass
class Draft:
    """What the draft's half hands to the target's.

    Attributes:
      batch: rows to verify.
      passes: int32 [], draft passes that it took.
      extra: what the acceptance rule needs besides, such as the q of a sampled tree; None for `match_rule`.
      plain: int32 [], tokens to decode without a draft, at most P, where the batch is but a root; else 0. None in
        methods that always verify.
    """

    batch: Batch
    passes: jax.Array
    extra: Any = None
    plain: jax.Array | None = None


@struct.dataclass
class Outcome:
    """What the target's half hands back.

    Attributes:
      tokens: int32 [P], the new verified tokens.
      count: int32 [], how many.
      path: int32 [P], batch rows of the root and of the accepted tokens; its first `count` entries count. Of tokens
        without a draft, all are the root's.
    """

    tokens: jax.Array
    count: jax.Array
    path: jax.Array


# (logits of a row, drafted, request, position of the root, vocab) -> decide
Rule = Callable[[RowLogits, Draft, Request, jax.Array, VocabShard], Decide]


def match(logits: RowLogits, drafted: Draft, request: Request, position: jax.Array, vocab: VocabShard) -> Decide:
    """The `Rule` of every deterministic tree: `match_rule`."""
    return match_rule(logits, drafted.batch, request, position, vocab)


def verify(
    params: Params,
    target: Placement,
    state: TargetState,
    drafted: Draft,
    request: Request,
    *,
    steps: int,
    rule: Rule,
    varies: bool,
) -> tuple[TargetState, Outcome, Round]:
    """Run the batch through the target, accept what its distribution confirms, commit; written for one shard.

    Args:
      params: the target's.
      target: its placement.
      state: its state; the batch's root is `state.root`.
      drafted: the batch.
      request: processors and seed.
      steps: P.
      rule: which tokens are accepted.
      varies: whether batches of few rows are so common that a pass should cost less then (more to compile).
    """
    if drafted.plain is None:
        return _verify_batch(params, target, state, drafted, request, steps, rule, varies)
    plain = drafted.plain

    def decode(index: jax.Array, done: Any) -> Any:
        state, outcome, round_ = done
        state, logprob = next_token(params, target, state, request)
        tokens, logprobs = outcome.tokens.at[index].set(state.root), round_.logprob.at[index].set(logprob)
        outcome = Outcome(tokens, plain, outcome.path)
        return state, outcome, pack_round(tokens, plain, 0, 0, drafted.passes, logprobs)

    def verify_(_: jax.Array, done: Any) -> Any:
        return _verify_batch(params, target, done[0], drafted, request, steps, rule, varies)

    # A pass of one row costs less than a batch of which one row is live. For branches XLA would copy the cache.
    zeros = jnp.zeros(steps, jnp.int32)
    none = state, Outcome(zeros, jnp.int32(0), zeros), pack_round(zeros, 0, 0, 0, 0, jnp.zeros(steps))
    done = jax.lax.fori_loop(0, plain, decode, none)
    return jax.lax.fori_loop(0, (plain == 0).astype(jnp.int32), verify_, done)


def _verify_batch(
    params: Params,
    target: Placement,
    state: TargetState,
    drafted: Draft,
    request: Request,
    steps: int,
    rule: Rule,
    varies: bool,
) -> tuple[TargetState, Outcome, Round]:
    batch = drafted.batch
    position = state.cache.length + batch.depth
    mask = ancestor_matrix(batch.parent, steps - 1)
    live = batch.count if varies else None
    hidden, cache = forward(params, target.cfg, batch.token, position, state.cache, mask, live=live)
    if batch.rows > LAZY_HEAD_ROWS:

        def logits(row: jax.Array) -> jax.Array:
            return vocab_logits(params, jax.lax.dynamic_slice_in_dim(hidden, row, 1))
    else:
        every = vocab_logits(params, hidden, live)

        def logits(row: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(every, row, 1)

    decide = rule(logits, drafted, request, state.cache.length, target.vocab)
    verified, history = walk(decide, state.history, steps, target.vocab)
    with jax.named_scope("commit"):
        cache = commit_path(cache, verified.path, verified.count)
    state = TargetState(cache, history, verified.tokens[verified.count - 1])
    proposed = (batch.parent != jnp.arange(batch.rows)).sum()
    round_ = pack_round(verified.tokens, verified.count, proposed, batch.depth.max(), drafted.passes, verified.logprob)
    return state, Outcome(verified.tokens, verified.count, verified.path), round_
