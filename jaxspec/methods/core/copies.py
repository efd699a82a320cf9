"""Copies: the tokens that followed earlier occurrences of the text's last tokens, as drafts without a model."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.cost_model import CONTRADICTED, COPIES, AcceptanceStats, PlacedCosts, copy_kind
from jaxspec.pytree import pytree, static
from jaxspec.sampling.accept import Verified
from jaxspec.tree.tree import Candidates, Tree

# Multipliers of path hashes, odd: one for tokens, one for each level of depth.
_TOKEN_FACTOR, _DEPTH_FACTOR = 2654435761, 1640531527
# Tokens of earlier answers that are kept, and how many must match there: fewer match everywhere.
EARLIER_TOKENS, EARLIER_MATCH = 4096, 4
NO_ANSWERS = np.zeros(0, np.int32)
# Gain over plain decoding that copies must promise to end a round of several tokens, and a match that no text has.
WORTH_A_ROUND, NO_MATCH = 1.3, 1 << 20


@dataclasses.dataclass(frozen=True)
class CopySettings:
    """Limits of what is compared and copied."""

    ngram: int  # longest suffix that is compared
    candidates: int  # C, earlier occurrences that are merged
    length: int  # L, most tokens copied from each


@pytree
class Text:
    """The text so far, and before it tokens of earlier texts, each of which ends with -1, which is no token."""

    token: Array  # int32 [S], verified tokens in order
    length: Array  # int32 [], how many, those of earlier texts included
    start: Array  # int32 [], how many of these belong to earlier texts

    def append(self, verified: Verified) -> "Text":
        """Add what a round verified."""
        token = jax.lax.dynamic_update_slice(self.token, verified.tokens, (self.length,))
        return dataclasses.replace(self, token=token, length=self.length + verified.count)


def keep_answer(earlier: np.ndarray, answer: Sequence[int]) -> np.ndarray:
    """Earlier answers, int32 [n], with a further one; the oldest go. One that is there already is kept once."""
    added = np.array([*answer[-EARLIER_TOKENS + 1 :], -1], np.int32)
    if len(added) <= EARLIER_MATCH:
        return earlier
    starts = np.flatnonzero(earlier[: max(0, len(earlier) - len(added) + 1)] == added[0])
    if any(np.array_equal(earlier[start : start + len(added)], added) for start in starts):
        return earlier
    return np.concatenate([earlier, added])[-EARLIER_TOKENS:]


def match_lengths(text: Text, ngram: int) -> Array:
    """How many tokens before each place of the text are its last ones, int32 [S], at most `ngram`; 0 where too few.

    An occurrence is known by its last place; it is compared backwards with the end of the text.
    """
    place, last = jnp.arange(text.token.shape[0], dtype=jnp.int32), text.length - 1
    matched, going = jnp.zeros_like(place), place < last
    for back in range(ngram):
        # Nothing is compared past the beginning of this text or of an earlier one: no token of this text equals -1.
        shifted = jax.lax.pad(text.token, jnp.int32(-1), [(back, -back, 0)])
        going &= (shifted == text.token[jnp.maximum(last - back, 0)]) & (last - back >= text.start)
        matched += going
    return jnp.where((place < text.start) & (matched < min(EARLIER_MATCH, ngram)), 0, matched)


@pytree
class Watch:
    """What ends plain decoding: the last tokens of the text stand in it already, so that copies are worth a round."""

    text: Text
    least: Array  # int32 [], tokens that must match
    ngram: int = static()  # most that are compared

    def finds(self, verified: Verified) -> Array:
        """Whether it is so after what was decoded since, bool []."""
        return match_lengths(self.text.append(verified), self.ngram).max() >= self.least


@pytree
class Copies:
    """Continuations of C occurrences; a token that several occurrences share stands at the first one of them."""

    token: Array  # int32 [C, L]
    first: Array  # int32 [C, L], the occurrence that stands for the token
    own: Array  # bool [C, L], whether that is this one
    hash: Array  # uint32 [C, L], of the path, see `path_terms`
    kind: Array  # int32 [C, L], class of each, see `rates`
    share: (
        Array  # float32 [C, L], weight of the occurrences that go on like this, among those that share the path above
    )
    logprob: Array  # float32 [C, L], log of the chance of each where all before it was accepted


@pytree
class Nodes:
    """All that was proposed in a round, N nodes: what the verified text says of each is learned from it."""

    hash: Array  # uint32 [N], of the path
    above: Array  # uint32 [N], of the parent's path
    depth: Array  # int32 [N]
    kind: Array  # int32 [N]
    weight: Array  # float32 [N], how much each counts; 0 where there is none


def no_nodes(count: int) -> Nodes:
    """Room for so many nodes, of which none is there."""
    zeros = jnp.zeros(count, jnp.int32)
    return Nodes(zeros.astype(jnp.uint32), zeros.astype(jnp.uint32), zeros, zeros, jnp.zeros(count))


def concatenate(first: Nodes, second: Nodes) -> Nodes:
    """All nodes of both."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)


def path_terms(token: Array, depth: Array) -> Array:
    """Terms of path hashes, uint32: a node's hash is the sum over its path, root excluded.

    Nodes of equal paths have equal hashes. Others of the same depth hardly ever have: then a draft is worse for it.
    """
    powers = jnp.uint32(_DEPTH_FACTOR) * (2 * depth.astype(jnp.uint32) + 1)
    mixed = (token.astype(jnp.uint32) + 1) * jnp.uint32(_TOKEN_FACTOR)
    return (mixed ^ (mixed >> 15)) * powers


def learn(stats: AcceptanceStats, nodes: Nodes, verified: Verified) -> AcceptanceStats:
    """Count what the verified text says of the nodes: those below its path were tried, whether verified or not."""
    depth = jnp.arange(1, verified.tokens.shape[0] + 1, dtype=jnp.int32)
    path = jnp.cumsum(path_terms(verified.tokens, depth), dtype=jnp.uint32)
    path = jnp.concatenate([jnp.zeros(1, jnp.uint32), path])
    known = (nodes.depth <= verified.count) & (nodes.weight > 0)
    place = jnp.where(known, nodes.depth, 1)
    tried = known & (path[place - 1] == nodes.above)
    accepted = tried & (path[place] == nodes.hash)
    stats = stats.note_outcome((accepted & (nodes.kind < COPIES)).sum(), verified.count)
    return stats.update(nodes.kind, jnp.where(tried, nodes.weight, 0.0), accepted)


def find_copies(text: Text, rates: Array, settings: CopySettings) -> Copies:
    """Continuations of earlier occurrences of the text's suffix: longest matches first, then the most recent.

    `rates` are those of `AcceptanceStats`.
    """
    C, L = min(settings.candidates, text.token.shape[0]), settings.length
    place, last = jnp.arange(text.token.shape[0], dtype=jnp.int32), text.length - 1
    matched = match_lengths(text, settings.ngram)
    # XLA sorts all of an array of integers on a CPU, and none of floats, which hold these integers exactly up to 2**24:
    # for 8 tokens that match in a text of 1.8 million.
    order = jnp.where(matched > 0, matched * place.size + place, -1).astype(jnp.float32)
    _, end = jax.lax.top_k(order, C)
    end = end.astype(jnp.int32)
    length = matched[end]  # [C], 0 where there is no further occurrence
    # A passage that runs into the end of the text goes on with itself: the text repeats.
    period = jnp.maximum(last - end, 1)
    step = jnp.arange(L, dtype=jnp.int32)
    token = text.token[end[:, None] + 1 + step[None, :] % period[:, None]]  # [C, L]
    exists = (length > 0)[:, None] & (jnp.cumsum(token < 0, axis=1) == 0)  # an earlier text may end

    hashes = jnp.cumsum(path_terms(token, step + 1), axis=1, dtype=jnp.uint32)
    # agree[c, e, d]: the first d + 1 tokens of c and e are the same.
    agree = (hashes[:, None] == hashes[None, :]) & exists[:, None] & exists[None, :]
    first = jnp.argmax(agree, axis=1).astype(jnp.int32)
    weight = 2.0 ** (length - length.max()).astype(jnp.float32) * 0.9 ** jnp.arange(C)
    votes = jnp.einsum("ced,e->cd", agree.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    all_votes = jnp.full((C, 1), jnp.sum(jnp.where(length > 0, weight, 0.0)))
    share = votes / jnp.maximum(jnp.concatenate([all_votes, votes[:, :-1]], axis=1), 1e-30)
    share = jnp.where(exists, jnp.minimum(share, 1.0), 0.0)
    kind = copy_kind(length[first] + step[None, :])
    own = (first == jnp.arange(C)[:, None]) & exists
    logprob = jnp.log(rates[kind]) + jnp.log(share)
    return Copies(token, first, own, hashes, kind, share, logprob)


def least_match(rates: Array, costs: PlacedCosts, length: int) -> Array:
    """How many tokens must match so that copies of up to `length` tokens pay well, int32 []."""
    rows = jnp.arange(min(length, costs.rounds.shape[0] - 1))
    chances = jnp.cumprod(rates[copy_kind(jnp.arange(1, CONTRADICTED)[:, None] + rows)], axis=1)
    gain = ((1 + jnp.cumsum(chances, axis=1)) / costs.rounds[1 + rows]).max(axis=1) * costs.rounds[0]
    pays = gain > WORTH_A_ROUND
    return jnp.where(pays.any(), 1 + jnp.argmax(pays), NO_MATCH).astype(jnp.int32)


def proposal_hashes(tree: Tree) -> tuple[Array, Array]:
    """Hashes of the paths of a tree's proposals, and of their parents', uint32 [M * k] each."""
    rows = jnp.where(tree.ancestors & (tree.depth > 0)[None], path_terms(tree.token, tree.depth)[None], 0)
    above = jnp.repeat(rows.sum(axis=1, dtype=jnp.uint32), tree.branch)
    depth = jnp.repeat(tree.depth + 1, tree.branch)
    return above + path_terms(tree.child_token.reshape(-1), depth), above


def join(
    own: Candidates, own_hash: Array, has_row: Array, planted: Array, copies: Copies, rates: Array
) -> tuple[Candidates, Nodes]:
    """The proposals of a draft, N of them, and copies as one tree: what both propose is the draft's node.

    `own_hash`, uint32 [N], are hashes of the proposals' paths. `has_row`, bool [N], marks those below which the draft
    proposed something, too: what copies alone have there is contradicted; `planted`, bool [], is that of the root.
    Returns candidates, N + C * L, and of the copies what is learned from.
    """
    C, L = copies.token.shape
    total, step = own.token.shape[0], jnp.arange(L, dtype=jnp.int32)
    # Hashes of paths may be equal by chance; that of another depth would put rows in wrong places of the text.
    exists = (own.score > -jnp.inf) & (own.depth == step[:, None] + 1)  # [L, N]
    same = (own_hash[None, None] == copies.hash[..., None]) & exists[None]  # [C, L, N]
    # A path that the draft has is one whose beginning it has: the first `met` tokens of each occurrence.
    met = jnp.cumprod(same.any(axis=2) & (copies.token >= 0), axis=1).sum(axis=1)  # [C]
    at = jnp.take_along_axis(jnp.argmax(same, axis=2), jnp.maximum(met - 1, 0)[:, None], axis=1)[:, 0]
    above = jnp.where(met > 0, at, -1)  # [C], the draft's node that the rest goes on from
    base = jnp.where(met > 0, own.score[at], 0.0)
    refuted = jnp.where(met > 0, has_row[at], planted)
    meets = step[None] == met[:, None]
    kind = copies.kind + CONTRADICTED * (meets & refuted[:, None])
    logprob = jnp.where(meets & refuted[:, None], jnp.log(rates[kind]) + jnp.log(copies.share), copies.logprob)
    new = step[None] >= met[:, None]
    score = base[:, None] + jnp.cumsum(jnp.where(new, logprob, 0.0), axis=1)
    alone = new & copies.own
    before = jnp.concatenate([jnp.full((C, 1), -1), copies.first[:, :-1] * L + step[None, :-1] + total], axis=1)
    parent = jnp.where(meets, above[:, None], before)
    depth = jnp.broadcast_to(step + 1, (C, L))

    def both(first: Array, second: Array) -> Array:
        return jnp.concatenate([first, second.reshape(-1).astype(first.dtype)])

    joined = Candidates(
        both(own.token, copies.token), both(own.parent, parent), both(own.depth, depth),
        both(own.score, jnp.where(alone, score, -jnp.inf)),
    )  # fmt: skip
    above_hash = copies.hash - path_terms(copies.token, step + 1)
    weight = jnp.where(alone, copies.share, 0.0)
    flat = (array.reshape(-1) for array in (copies.hash, above_hash, depth, kind, weight))
    return joined, Nodes(*flat)
