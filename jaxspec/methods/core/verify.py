"""The target's half of a round: one pass over a batch, the walk, the commit; and decoding without a draft."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.methods.core.round import Round, pack_round
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.models.kv_cache import commit_path, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.sampling import accept
from jaxspec.sampling.accept import Decide, RowLogits, Verified
from jaxspec.sampling.choose import choose, rank_tokens
from jaxspec.sampling.processors import update_history
from jaxspec.sampling.request import Request
from jaxspec.sampling.vocab import VocabShard
from jaxspec.tree.tree import Batch, ancestor_matrix

# Above so many rows the head runs only for the rows that the walk reaches, a few of them, one at a time.
LAZY_HEAD_ROWS = 128
# After so many rounds in a row to which no draft added a token, a round whose batch is the root alone decodes several
# tokens. Before, it decodes one: a draft that appears is noticed at once.
IDLE_ROUNDS = 4


@struct.dataclass
class Draft:
    """What the draft's half hands to the target's."""

    batch: Batch  # rows to verify; the root alone asks for plain decoding
    passes: Array  # int32 [], draft passes that it took
    extra: Any = None  # what the acceptance rule needs besides, such as the q of a sampled tree; None for `match_rule`


def draft_shapes(placement: Placement, num_rows: int, extra: Any = None) -> Draft:
    """Shapes of a `Draft` with a batch of `num_rows` rows on a model's devices."""
    row, scalar = placement.array((num_rows,), jnp.int32), placement.array((), jnp.int32)
    return Draft(Batch(row, row, row, scalar), scalar, extra)


# (logits of a row, draft, request, position of the root, vocab) -> decide
Rule = Callable[[RowLogits, Draft, Request, Array, VocabShard], Decide]


def match(logits: RowLogits, draft: Draft, request: Request, position: Array, vocab: VocabShard) -> Decide:
    """The `Rule` of every deterministic tree: `match_rule`."""
    return accept.match_rule(logits, draft.batch, request, position, vocab)


def verify(
    params: Params, target: Placement, state: SequenceState, draft: Draft, request: Request, *, max_path: int,
    rule: Rule, dynamic_rows: bool, idle_steps: int,
) -> tuple[SequenceState, Verified, Round]:  # fmt: skip
    """Run a batch through the target, accept what its distribution confirms, commit; written for one shard.

    `max_path` (P) is the size of the results; `rule` says which tokens are accepted. `dynamic_rows` makes passes of few
    rows cost less, for batches that often have few; it takes more to compile. `idle_steps` is the most tokens that are
    decoded where the batch is the root alone; 0 verifies that batch like any other. It takes a loop of data-dependent
    length, for which the host of an accelerator would wait.
    """
    alone = draft.batch.count == 1
    before = state.idle

    def verify_batch(state: SequenceState) -> tuple[SequenceState, Verified, Round]:
        return _verify_batch(params, target, state, draft, request, max_path, rule, dynamic_rows)

    if not idle_steps:
        state, verified, round_ = verify_batch(state)
        return dataclasses.replace(state, idle=_count_idle(before, alone, verified)), verified, round_
    # A pass of one row costs less than a batch of which one row is active.
    several = jnp.where(state.idle >= IDLE_ROUNDS, jnp.minimum(request.left(state.generated), idle_steps), 1)
    steps = jnp.where(alone, several, 0)
    state, verified = decode_steps(params, target, state, request, steps, max_path)
    round_, verified = pack_round(verified, 0, 0, draft.passes), dataclasses.replace(verified, top=None)
    # A loop of at most one turn: XLA would copy the cache for a conditional.
    state, verified, round_ = jax.lax.fori_loop(
        0, (~alone).astype(jnp.int32), lambda _, done: verify_batch(done[0]), (state, verified, round_)
    )
    return dataclasses.replace(state, idle=_count_idle(before, alone, verified)), verified, round_


def _count_idle(idle: Array, alone: Array, verified: Verified) -> Array:
    """Rounds in a row to which no draft added a token; a refused draft promises nothing of the next one."""
    return jnp.where(alone | (verified.count == 1), idle + 1, 0)


def decode_steps(
    params: Params, target: Placement, state: SequenceState, request: Request, steps: Array | int, max_path: int
) -> tuple[SequenceState, Verified]:
    """Decode `steps` tokens without a draft, at most `max_path`; for one shard."""

    def step(index: Array, done: tuple[SequenceState, Verified]) -> tuple[SequenceState, Verified]:
        state, verified = done
        state, logprob, ranked = next_token(params, target, state, request)
        return state, dataclasses.replace(
            verified,
            tokens=verified.tokens.at[index].set(state.root),
            count=verified.count + 1,
            logprob=verified.logprob.at[index].set(logprob),
            top=accept.set_top(verified.top, index, ranked),
        )

    blank = accept.blank_verified(max_path, accept.num_ranked(target.vocab))
    with jax.named_scope("decode"):
        return jax.lax.fori_loop(0, steps, step, (state, blank))


def next_token(
    params: Params, target: Placement, state: SequenceState, request: Request
) -> tuple[SequenceState, Array, tuple[Array, Array]]:
    """Run the root through the target and draw the token after it, the new root; for one shard.

    The root sits at position n - 1, which is the cache's length; the new token gets absolute position n. Returns the
    state; the token's log-probability under the processed distribution, float32 []; and the most probable tokens in its
    place with theirs, [1, K] each, see `rank_tokens`.
    """
    position = state.cache.length[None]
    hidden, cache = forward(params, target.cfg, state.root[None], position, state.cache, jnp.ones((1, 1), bool))
    logits = vocab_logits(params, hidden)
    seen, counts = state.history.seen[None], state.history.counts[None]
    processors, vocab = request.processors, target.vocab
    token, logprob = choose(logits, processors, seen, counts, request.key, position + 1, vocab)
    ranked = rank_tokens(lambda: logits, processors, seen, counts, position + 1, vocab, accept.num_ranked(vocab))
    history = update_history(state.history, token, jnp.ones(1, bool), target.vocab, generated=True)
    state = dataclasses.replace(
        state, cache=commit_rows(cache, jnp.int32(1)), history=history, root=token[0], generated=state.generated + 1
    )
    return state, logprob[0], ranked


def _verify_batch(
    params: Params, target: Placement, state: SequenceState, draft: Draft, request: Request, max_path: int,
    rule: Rule, dynamic_rows: bool,
) -> tuple[SequenceState, Verified, Round]:  # fmt: skip
    batch = draft.batch
    position = state.cache.length + batch.depth
    mask = ancestor_matrix(batch.parent, max_path - 1)
    active_rows = batch.count if dynamic_rows else None
    hidden, cache = forward(params, target.cfg, batch.token, position, state.cache, mask, active_rows=active_rows)
    if batch.rows > LAZY_HEAD_ROWS:

        def logits(row: Array) -> Array:
            return vocab_logits(params, jax.lax.dynamic_slice_in_dim(hidden, row, 1))
    else:
        every = vocab_logits(params, hidden, active_rows)

        def logits(row: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(every, row, 1)

    decide = rule(logits, draft, request, state.cache.length, target.vocab)
    rank = accept.rank_rows(logits, draft.batch, request, state.cache.length, target.vocab)
    verified, history = accept.walk(decide, state.history, max_path, target.vocab, rank)
    with jax.named_scope("commit"):
        cache = commit_path(cache, verified.path, verified.count)
    root, generated = verified.tokens[verified.count - 1], state.generated + verified.count
    state = dataclasses.replace(state, cache=cache, history=history, root=root, generated=generated)
    proposed = (batch.parent != jnp.arange(batch.rows)).sum()
    round_ = pack_round(verified, proposed, batch.depth.max(), draft.passes)
    return state, dataclasses.replace(verified, top=None), round_
