"""Acceptance: the walk from the root along the tokens that the target's own distribution confirms.

| rule | children of a row | what is offered here |
|---|---|---|
| R1 greedy, R4 draw and match | any | `match_rule` |
| R2 chain rejection | one, drawn from q | `rejection_rule` with one draw |
| R3 multi-round rejection | several, drawn independently from q | `rejection_rule` |
| R3' without replacement | several, drawn in turn without replacement | `rejection_rule`, `replacement=False` |

The rejection rules compare p with the q that a child was really drawn from. Children that were picked in any other way
(the k most probable ones, say) make their distribution wrong. Such trees need `match_rule`, which is exact for every
tree. Its output equals plain sampling with the same seed, token for token. docs/algorithms.md states the rules.

Only rows on the path are looked at, one after the other, by the code that plain decoding runs: penalties see the
path's own tokens, and nothing is drawn for rows that are not reached.

Letters: bs rows of a batch, P = longest path + 1, V_local columns of this device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.config import MAX_LOGPROBS
from jaxspec.models.vocab import VocabShard
from jaxspec.pytree import pytree
from jaxspec.sampling.choose import choose_and_rank, gumbel_rows, rank_tokens, role_key, uniform_at
from jaxspec.sampling.processors import Histories, History, Processors, decide, extend_history, process, update_history
from jaxspec.sampling.request import Request
from jaxspec.tree.tree import Batch, ancestor_matrix

# Streams of the seed; 0 is the noise that chooses tokens.
ACCEPT_ROLE, DRAFT_ROLE = 1, 2


@pytree
class Verified:
    """Decisions of a round."""

    tokens: Array  # int32 [P], accepted tokens and then the bonus token; arbitrary after `count`
    count: Array  # int32 [], at least 1 after a round; 0 where all was taken in already
    path: Array  # int32 [P], batch rows of the root and of the accepted tokens; its first `count` entries count
    logprob: Array  # float32 [P], of each token under the processed target distribution; see `choose`
    # The most probable tokens at the place of each token: int32 [P, K] and their log-probabilities, float32 [P, K]; see
    # `choose_and_rank`. None once the round is packed.
    top: tuple[Array, Array] | None = None
    # float32 [P, n * D], hidden states of the target beside each other, of the row that each token was drawn after;
    # arbitrary after `count`. None where no draft takes them.
    states: Array | None = None


class Decision(NamedTuple):
    """What follows a batch row."""

    token: Array  # int32 []
    logprob: Array  # float32 [], of that token
    child: Array  # int32 [], batch row of the child that has the token, or -1
    top: tuple[Array, Array]  # the most probable tokens, [1, K], and their log-probabilities, see `choose_and_rank`


# (row, its history) -> what follows it
Decide = Callable[[Array, Histories], Decision]
# Logits of one batch row, [1, V_local].
RowLogits = Callable[[Array], Array]


def num_ranked(vocab: VocabShard) -> int:
    """K: tokens that are reported at each place, where they are asked for."""
    return min(MAX_LOGPROBS, vocab.vocab_size)


def blank_verified(steps: int, vocab: VocabShard) -> Verified:
    """A `Verified` without tokens and with room for `steps`."""
    blank, shape = jnp.zeros(steps, jnp.int32), (steps, num_ranked(vocab))
    top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    return Verified(blank, jnp.int32(0), blank, jnp.zeros(steps, jnp.float32), top)


def walk(decide: Decide, history: History, steps: int, vocab: VocabShard) -> tuple[Verified, History]:
    """Follow decisions from the root until one leads out of the tree.

    `history` holds the text so far, the root included; the second result holds the path, too. No path through the batch
    may be longer than `steps` (P).
    """

    def go_on(state: tuple) -> Array:
        verified, row = state
        return (row >= 0) & (verified.count < steps)

    def step(state: tuple) -> tuple:
        verified, row = state
        at = verified.count
        extended = extend_history(history, verified.tokens, at, vocab)
        token, logprob, child, ranked = decide(row, extended)
        verified = Verified(
            tokens=verified.tokens.at[at].set(token),
            count=at + 1,
            path=verified.path.at[at].set(row),
            logprob=verified.logprob.at[at].set(logprob),
            top=set_top(verified.top, at, ranked),
        )
        return verified, child

    start = blank_verified(steps, vocab)
    with jax.named_scope("accept/walk"):
        verified, _ = lax.while_loop(go_on, step, (start, jnp.int32(0)))
    live = jnp.arange(steps) < verified.count
    return verified, update_history(history, verified.tokens, live, vocab, generated=True)


def walk_at_once(
    decide_row: Callable[[Array, Array, Histories], Decision], logits: Callable[[Any], Array], hidden: Any,
    batch: Batch, history: History, steps: int, vocab: VocabShard,
) -> tuple[Verified, History]:  # fmt: skip
    """The result of `walk`, without a loop whose end depends on data: every row decides, and the path is picked out.

    An accelerator decides a few dozen rows as fast as one, and each turn of a loop is a few launches after each other.

    Args:
      decide_row: from a row, its logits [1, V_local] and its history to what follows it; mapped over all rows.
      logits: from what `hidden` has of n rows to logits [n, V_local].
      hidden: what the logits of the batch's rows follow from: arrays [bs, ...], such as hidden states.
      batch, history, steps, vocab: as for `walk`.
    """
    ancestors = ancestor_matrix(batch.parent, steps - 1)
    place = jnp.arange(batch.rows, dtype=jnp.int32)
    below_root = ancestors & (place > 0)[None, :]  # the root is in the history

    def decide_with(row: Array, row_logits: Array, path: Array) -> Any:
        return decide_row(
            row, row_logits, lambda: update_history(history, batch.token, path, vocab, generated=True).row()
        )

    with jax.named_scope("accept/rows"):
        token, logprob, child, ranked = jax.vmap(decide_with)(place, logits(hidden)[:, None], below_root)
    with jax.named_scope("accept/path"):
        # A row is reached if each row on its path, itself included, is the child that its parent decided for.
        chosen = (child[batch.parent] == place) & (batch.parent != place)
        reached = (chosen[None, :] | ~below_root).all(axis=1) & (chosen | (place == 0))
        count = reached.sum(dtype=jnp.int32)
        depth = jnp.arange(steps, dtype=jnp.int32)
        here = reached[None, :] & (batch.depth[None, :] == depth[:, None])  # one row of each depth up to the last
        path = jnp.argmax(here, axis=1).astype(jnp.int32)
        live = depth < count
        top = jax.tree.map(lambda x: x[path, 0], ranked)
        verified = Verified(jnp.where(live, token[path], 0), count, path, jnp.where(live, logprob[path], 0.0), top)
        return verified, update_history(history, verified.tokens, live, vocab, generated=True)


def set_top(top: Any, index: Array, ranked: tuple[Array, Array]) -> Any:
    """`Verified.top` with what `choose_and_rank` gave for one row, [1, K], at `index`."""
    return tuple(all_.at[index].set(one[0]) for all_, one in zip(top, ranked, strict=True))


def find_child(batch: Batch, row: Array, token: Array) -> Array:
    """Batch row of the child of `row` that carries `token`, the first one; -1 if there is none."""
    hit = children_mask(batch, row) & (batch.token == token)
    return jnp.where(hit.any(), jnp.argmax(hit), -1).astype(jnp.int32)


def children_mask(batch: Batch, row: Array) -> Array:
    """Which batch rows are children of `row`, bool [bs]; unused rows are their own parents and no children."""
    rows = jnp.arange(batch.rows)
    return (batch.parent == row) & (rows != batch.parent)


def match_rule(logits: RowLogits, batch: Batch, request: Request, position: Array, vocab: VocabShard) -> Decide:
    """R1 and R4: draw the token as plain decoding does, and follow the child that has it.

    The batch may be any tree; `position`, int32 [], is the absolute position of its root.
    """

    def decide(row: Array, histories: Histories) -> Decision:
        produced = (position + batch.depth[row] + 1)[None]
        given = logits(row), request.processors, histories, request.key, produced, vocab
        token, logprob, top = choose_and_rank(*given, num_ranked(vocab))
        return Decision(token[0], logprob[0], find_child(batch, row, token[0]), top)

    return decide


def rejection_rule(
    logits: RowLogits, batch: Batch, draft_logprob: Array, request: Request, position: Array, vocab: VocabShard, *,
    draws: int, replacement: bool,
) -> Decide:  # fmt: skip
    """R2, R3 and R3': accept a drawn child x with probability min(1, p(x) / q(x)), else draw from the residual.

    At temperature 0, where nothing is drawn, `match_rule` decides. Children of a row in ascending order are its draws,
    at most `draws`, in the order in which they were drawn: independently (R3), or without `replacement` (R3').
    `draft_logprob`, float32 [rows, V_local], are the log q that the children of each inner row of the batch were drawn
    from; rows of leaves may be missing at the end. `position`, int32 [], is the absolute position of the root.
    """
    match = match_rule(logits, batch, request, position, vocab)

    def reject(row: Array, histories: Histories) -> Decision:
        produced = position + batch.depth[row] + 1
        logprob = process(logits(row), request.processors, histories, vocab, produced[None])
        rows = jnp.arange(batch.rows)
        children = jnp.sort(jnp.where(children_mask(batch, row), rows, batch.rows))[:draws]
        uniform = uniform_at(role_key(request.key, ACCEPT_ROLE), produced, jnp.arange(draws))
        drawn_from = draft_logprob[jnp.minimum(row, draft_logprob.shape[0] - 1)]

        def test(draw: int, state: tuple) -> tuple:
            p, q, accepted = state
            child = children[draw]
            open_ = (accepted < 0) & (child < batch.rows)
            token = batch.token[jnp.minimum(child, batch.rows - 1)][None]
            # Strict, so that what p rules out is never accepted.
            passed = uniform[draw] * vocab.take(q, token)[0] < vocab.take(p, token)[0]
            left = _normalise(jnp.maximum(p - q, 0.0), p, vocab)
            p = jnp.where(open_ & ~passed, left, p)
            if not replacement:
                others = _normalise(jnp.where(vocab.ids()[None] == token[:, None], 0.0, q), q, vocab)
                q = jnp.where(open_ & ~passed, others, q)
            return p, q, jnp.where(open_ & passed, child, accepted)

        start = (jnp.exp(logprob), jnp.exp(drawn_from)[None], jnp.int32(-1))
        p, _, accepted = lax.fori_loop(0, draws, test, start)
        noise = gumbel_rows(request.key, produced[None], vocab)
        drawn = vocab.argmax(lax.optimization_barrier(jnp.log(p) + noise))
        token = jnp.where(accepted >= 0, batch.token[jnp.maximum(accepted, 0)], drawn[0])
        top = rank_tokens(logprob, 0.0, request.processors, vocab, num_ranked(vocab))
        return Decision(token, vocab.take(logprob, token[None])[0], accepted.astype(jnp.int32), top)

    def choose_child(row: Array, histories: Histories) -> Decision:
        hot = jnp.asarray(request.processors.temperature) > 0
        ways = (lambda: reject(row, histories)), (lambda: match(row, histories))
        return decide(request.processors.knows("draws"), hot, *ways)

    return choose_child


def draw_children(
    logprob: Array, key: Array | np.ndarray, position: Array, draws: int, replacement: bool,
    processors: Processors, vocab: VocabShard,
) -> tuple[Array, Array]:  # fmt: skip
    """Draw children for `rejection_rule` from log q, [T, V_local]; at temperature 0, take the most probable tokens.

    `position`, int32 [T], are the absolute positions of the drawn tokens. Without replacement, the order of perturbed
    log-probabilities is a sequential draw (Gumbel-top-k). Returns tokens int32 [T, draws], in the order in which they
    were drawn, and bool [T, draws], False where q has no further token.
    """
    stream = role_key(key, DRAFT_ROLE)

    def top(scores: Array) -> tuple[Array, Array]:
        value, token = vocab.top_k(scores, draws)
        return token, value > -jnp.inf

    def independent() -> tuple[Array, Array]:
        tokens = [
            vocab.argmax(lax.optimization_barrier(logprob + gumbel_rows(stream, position, vocab, draw)))
            for draw in range(draws)
        ]
        return jnp.stack(tokens, axis=-1), jnp.broadcast_to(vocab.row_max(logprob) > -jnp.inf, (len(logprob), draws))

    sampled = independent if replacement else lambda: top(logprob + gumbel_rows(stream, position, vocab))
    hot = jnp.asarray(processors.temperature) > 0
    return decide(processors.knows("draws"), hot, sampled, lambda: top(logprob))


def _normalise(weights: Array, fallback: Array, vocab: VocabShard) -> Array:
    """Scale [1, V_local] to sum 1; a sum of 0 only comes from rounding and gives `fallback`."""
    total = vocab.sum(weights.sum(axis=-1, keepdims=True))
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), fallback)
