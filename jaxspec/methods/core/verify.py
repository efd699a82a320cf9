"""The target's half of a round: one pass over a batch, the walk, the commit; and decoding without a draft."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.copies import Watch
from jaxspec.methods.core.round import Round, pack_round
from jaxspec.methods.core.sequence import ABSENT, NO_LIMIT, SequenceState
from jaxspec.models.kv_cache import KVCache, commit_path, commit_rows
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward_with_states, vocab_logits
from jaxspec.models.vocab import VocabShard
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.sampling import accept
from jaxspec.sampling.accept import Decide, RowLogits, Verified
from jaxspec.sampling.choose import choose_and_rank
from jaxspec.sampling.processors import Histories, History, allow, extend_history, update_history
from jaxspec.sampling.request import Request
from jaxspec.tree.tree import Batch, ancestor_matrix

# Above so many rows the head runs only for the rows that the walk reaches, a few of them, one at a time.
LAZY_HEAD_ROWS = 128
# Up to so many rows an accelerator decides all of them at once; above, it walks as a CPU does, in a captured loop.
ROWS_AT_ONCE = 64


@pytree
class Draft:
    """The batch that the draft's half hands to the target's."""

    batch: Batch  # rows to verify; the root alone asks for plain decoding
    passes: Array  # int32 [], draft passes that it took, with `TRUNCATED` where its search was cut short
    extra: Any = None  # what else the acceptance rule needs, such as the q of a sampled tree; None for `match_rule`
    watch: Watch | None = None  # what ends a round of several tokens without a draft; None for nothing


def draft_shapes(placement: Placement, num_rows: int, extra: Any = None) -> Draft:
    """Shapes of a `Draft` with a batch of `num_rows` rows on a model's devices."""
    row, scalar = placement.array((num_rows,), jnp.int32), placement.array((), jnp.int32)
    return Draft(Batch(row, row, row, scalar), scalar, extra)


def chain_draft(tokens: Sequence[int] | np.ndarray, num_rows: int) -> Draft:
    """A draft, on the host, of at least one token, each below the one before it, in a batch of `num_rows` rows."""
    row, count = np.arange(num_rows, dtype=np.int32), len(tokens)
    token = np.zeros(num_rows, np.int32)
    token[:count] = tokens
    batch = Batch(token, np.where(row < count, np.maximum(row - 1, 0), row), row * (row < count), np.int32(count))  # pyright: ignore
    return Draft(batch, np.int32(0))  # pyright: ignore[reportArgumentType]


# (logits of a row, draft, request, position of the root, vocab) -> decide
Rule = Callable[[RowLogits, Draft, Request, Array, VocabShard], Decide]


def match(logits: RowLogits, draft: Draft, request: Request, position: Array, vocab: VocabShard) -> Decide:
    """The `Rule` of every deterministic tree: `match_rule`."""
    return accept.match_rule(logits, draft.batch, request, position, vocab)


def verify(
    params: Params, target: Placement, state: SequenceState, draft: Draft, request: Request, *, max_path: int,
    rule: Rule, dynamic_rows: bool, idle_steps: int, layers: tuple[int, ...] = (), states: Array | None = None,
) -> tuple[SequenceState, Verified, Round]:  # fmt: skip
    """Run a batch through the target, accept what its distribution confirms, commit; written for one shard.

    `max_path` (P) is the size of the results; `rule` says which tokens are accepted. `dynamic_rows` makes passes of few
    rows cost less, for batches that often have few; it takes more to compile. `idle_steps` is the most tokens that are
    decoded where the batch is the root alone, within what `state.most` and the draft's `watch` allow; 0 verifies that
    batch like any other. It takes a loop of data-dependent length, for which the host of an accelerator would wait.
    One token is decoded after a draft that took passes and found nothing. `layers` are the hidden states that a draft
    takes, see `forward_with_states`; `states`, those of the round before, may be written over and stay after `count`.
    """
    alone = draft.batch.count == 1

    def verify_batch(state: SequenceState, turn: Array | int = 0) -> tuple[SequenceState, Verified, Round]:
        # The batch depends on the turn, which is 0: else XLA embeds it before the loop, and plain rounds pay for that.
        batch = jax.tree.map(lambda leaf: leaf + turn, draft.batch)
        own = dataclasses.replace(draft, batch=batch)
        return _verify_batch(params, target, state, own, request, max_path, rule, dynamic_rows, layers)

    if not idle_steps:
        return verify_batch(state)
    # A pass of one row costs less than a batch of which one row is active.
    several = jnp.minimum(request.left(state.generated), jnp.minimum(state.most, idle_steps))
    # A draft that was asked and found nothing may find something after the next token.
    steps = jnp.where(alone, jnp.where(draft.passes > 0, 1, several), 0)
    state, verified = decode_steps(
        params, target, state, request, steps, max_path, layers, states=states, watch=draft.watch
    )
    state = dataclasses.replace(state, most=jnp.int32(NO_LIMIT))
    round_, verified = pack_round(verified, 0, 0, draft.passes), dataclasses.replace(verified, top=None)
    # A loop of at most one turn: XLA would copy the cache for a conditional.
    return jax.lax.fori_loop(
        0, (~alone).astype(jnp.int32), lambda turn, done: verify_batch(done[0], turn), (state, verified, round_)
    )


def decode_steps(
    params: Params, target: Placement, state: SequenceState, request: Request, steps: Array | int, max_path: int,
    layers: tuple[int, ...] = (), masks: Array | None = None, states: Array | None = None, watch: Watch | None = None,
) -> tuple[SequenceState, Verified]:  # fmt: skip
    """Decode `steps` tokens without a draft, at most `max_path`; for one shard. For `layers` and `states` see `verify`.

    `masks`, uint32 [>= steps, words], say which tokens each step may take (`allow`); None allows all of them. Where
    `steps` is data and all tokens are allowed, it stops after one that ends the text, or one token after such a root,
    and after what `watch` finds.
    """
    before, ends = state.history, masks is None and not isinstance(steps, int)

    def step(index: Array, done: tuple[SequenceState, Verified]) -> tuple[SequenceState, Verified]:
        state, verified = done
        histories = extend_history(before, verified.tokens, verified.count, target.vocab)
        state, logprob, ranked, states = next_token(
            params, target, state, request, histories, layers,
            None if masks is None else jax.lax.dynamic_slice_in_dim(masks, index, 1),
        )  # fmt: skip
        kept = verified.states
        return state, dataclasses.replace(
            verified,
            tokens=verified.tokens.at[index].set(state.root),
            count=verified.count + 1,
            logprob=verified.logprob.at[index].set(logprob),
            top=accept.set_top(verified.top, index, ranked),
            states=None if states is None or kept is None else kept.at[index].set(states[0]),
        )

    blank = accept.blank_verified(max_path, target.vocab)
    if layers:
        empty = (max_path, target.cfg.states_dim(layers))
        blank = dataclasses.replace(blank, states=jnp.zeros(empty) if states is None else states)
    start = dataclasses.replace(state, history=ABSENT), blank
    with jax.named_scope("decode"):
        if not ends:
            state, verified = jax.lax.fori_loop(0, steps, step, start)
        else:
            most = jnp.where(has_ended(state, request, target.vocab), jnp.minimum(steps, 1), steps)

            def run(carry: tuple) -> tuple:
                done = step(carry[0][1].count, carry[0])
                stops = has_ended(done[0], request, target.vocab)
                return done, stops if watch is None else stops | watch.finds(done[1])

            (state, verified), _ = jax.lax.while_loop(
                lambda carry: (carry[0][1].count < most) & ~carry[1], run, (start, jnp.bool_(False))
            )
    new = jnp.arange(max_path) < verified.count
    history = update_history(before, verified.tokens, new, target.vocab, generated=True)
    return dataclasses.replace(state, history=history), verified


def has_ended(state: SequenceState, request: Request, vocab: VocabShard) -> Array:
    """Whether the text ended with its root, bool []: nothing after it counts.

    Where devices share the vocabulary none of them knows, and the host alone ends the text.
    """
    if vocab.num_shards > 1:
        return jnp.bool_(False)
    return (state.generated > 0) & jnp.asarray(request.processors.ends)[vocab.local(state.root)]


def next_token(
    params: Params, target: Placement, state: SequenceState, request: Request, histories: Histories,
    layers: tuple[int, ...] = (), mask: Array | None = None,
) -> tuple[SequenceState, Array, tuple[Array, Array], Array | None]:  # fmt: skip
    """Run the root through the target and draw the token after it, the new root; for one shard.

    The root sits at position n - 1, which is the cache's length; the new token gets absolute position n. `histories`
    hold the text up to the root; that of the state stays as it is; `mask`, uint32 [1, words], is that of `allow`.
    Returns the state; the token's log-probability under the processed distribution, float32 []; the most probable
    tokens in its place with theirs, [1, K] each, see `choose_and_rank`; and the root's hidden states of `layers`, None
    for none.
    """
    position = state.cache.length[None]
    hidden, cache, states = forward_with_states(
        params, target.cfg, state.root[None], position, state.cache, jnp.ones((1, 1), bool), layers
    )
    return *take_token(params, target, state, request, histories, hidden, cache, mask), states


def take_token(
    params: Params, target: Placement, state: SequenceState, request: Request, histories: Histories, hidden: Array,
    cache: KVCache, mask: Array | None = None,
) -> tuple[SequenceState, Array, tuple[Array, Array]]:  # fmt: skip
    """The steps of `next_token` after the pass: `hidden` float32 [1, D] is its result, `cache` has its row written."""
    position = state.cache.length[None]
    logits = row_logits(params, target, hidden, mask)
    processors, vocab = request.processors, target.vocab
    given = logits, processors, histories, request.key, position + 1, vocab
    token, logprob, ranked = choose_and_rank(*given, accept.num_ranked(vocab))
    state = dataclasses.replace(
        state, cache=commit_rows(cache, jnp.int32(1)), root=token[0], generated=state.generated + 1
    )
    return state, logprob[0], ranked


def row_logits(params: Params, target: Placement, hidden: Array, mask: Array | None) -> Array:
    """Logits [1, V_local] of a row, float32 [1, D], under its mask, uint32 [1, words]; None allows all tokens.

    Where the mask leaves one token, logits decide nothing: on a CPU the head is not run, and they are 0.
    """
    if mask is None or not target.plan.kernels.takes_cpu_forms:
        logits = vocab_logits(params, target.cfg, hidden)
        return logits if mask is None else allow(logits, mask, target.vocab)
    blank = jnp.zeros((1, target.vocab.local_size), jnp.float32)
    logits = jax.lax.cond(has_choice(mask)[0], lambda: vocab_logits(params, target.cfg, hidden), lambda: blank)
    return allow(logits, mask, target.vocab)


def has_choice(masks: Array) -> Array:
    """Whether masks, uint32 [T, words], leave more than one token: bool [T]."""
    return jax.lax.population_count(masks).astype(jnp.int32).sum(axis=1) > 1


def _verify_batch(
    params: Params, target: Placement, state: SequenceState, draft: Draft, request: Request, max_path: int,
    rule: Rule, dynamic_rows: bool, layers: tuple[int, ...],
) -> tuple[SequenceState, Verified, Round]:  # fmt: skip
    batch = draft.batch
    position, mask, active_rows = batch_rows(state.cache.length, draft, max_path, dynamic_rows)
    hidden, cache, states = forward_with_states(
        params, target.cfg, batch.token, position, state.cache, mask, layers, active_rows
    )
    state, verified, round_ = judge_batch(
        params, target, state, draft, request, max_path, rule, active_rows, hidden, cache
    )
    return state, verified if states is None else dataclasses.replace(verified, states=states[verified.path]), round_


def batch_rows(length: Array, draft: Draft, max_path: int, dynamic_rows: bool) -> tuple[Array, Array, Array | None]:
    """Positions, mask and number of active rows of a batch after `length` tokens; see `forward`."""
    batch = draft.batch
    mask = ancestor_matrix(batch.parent, max_path - 1)
    return length + batch.depth, mask, batch.count if dynamic_rows else None


def judge_batch(
    params: Params, target: Placement, state: SequenceState, draft: Draft, request: Request, max_path: int,
    rule: Rule, active_rows: Array | None, hidden: Array, cache: KVCache, masks: Array | None = None,
) -> tuple[SequenceState, Verified, Round]:  # fmt: skip
    """The walk and the commit after a pass over a batch; `hidden` is its result, `cache` has its rows written.

    `masks`, uint32 [bs, words], say which tokens may follow each row (`allow`); None allows all of them.
    """
    batch, vocab = draft.batch, target.vocab
    # The walk runs plain decoding's own choice of one row, whose bits exact numerics promises.
    if not target.plan.kernels.takes_cpu_forms and batch.rows <= ROWS_AT_ONCE and not target.plan.kernels.exact:

        def decide_row(row: Array, row_logits: Array, histories: Histories) -> Any:
            # Of the one row that it is mapped over.
            return rule(lambda _: row_logits, draft, request, state.cache.length, target.vocab)(row, histories)

        def all_logits(rows: tuple[Array, Array | None]) -> Array:
            logits = vocab_logits(params, target.cfg, rows[0])
            return logits if rows[1] is None else allow(logits, rows[1], vocab)

        verified, history = accept.walk_at_once(
            decide_row, all_logits, (hidden, masks), batch, state.history, max_path, target.vocab
        )
        return _commit(state, cache, draft, verified, history)
    if batch.rows > LAZY_HEAD_ROWS:

        def logits(row: Array) -> Array:
            own = None if masks is None else jax.lax.dynamic_slice_in_dim(masks, row, 1)
            return row_logits(params, target, jax.lax.dynamic_slice_in_dim(hidden, row, 1), own)
    elif masks is None:
        every = vocab_logits(params, target.cfg, hidden, active_rows)

        def logits(row: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(every, row, 1)
    else:
        # Rows with a choice come first, and the head runs for them alone.
        open_ = has_choice(masks)
        order = jnp.argsort(~open_)
        place = jnp.argsort(order)
        count = None if active_rows is None else jnp.maximum(open_.sum(), 1)
        every = vocab_logits(params, target.cfg, hidden[order], count)

        def logits(row: Array) -> Array:
            own = jnp.where(open_[row], jax.lax.dynamic_slice_in_dim(every, place[row], 1), 0.0)
            return allow(own, jax.lax.dynamic_slice_in_dim(masks, row, 1), vocab)

    decide = rule(logits, draft, request, state.cache.length, target.vocab)
    verified, history = accept.walk(decide, state.history, max_path, target.vocab)
    return _commit(state, cache, draft, verified, history)


def _commit(
    state: SequenceState, cache: KVCache, draft: Draft, verified: Verified, history: History
) -> tuple[SequenceState, Verified, Round]:
    """The state after a walk, with the path's rows in the cache's prefix, and the round."""
    batch = draft.batch
    with jax.named_scope("commit"):
        cache = commit_path(cache, verified.path, verified.count, batch.rows)
    root, generated = verified.tokens[verified.count - 1], state.generated + verified.count
    state = dataclasses.replace(state, cache=cache, history=history, root=root, generated=generated)
    proposed = (batch.parent != jnp.arange(batch.rows)).sum()
    round_ = pack_round(verified, proposed, batch.depth.max(), draft.passes)
    return state, dataclasses.replace(verified, top=None), round_
