"""Copies: the tokens that followed earlier occurrences of the text's last tokens, as drafts without a model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxspec.methods.core.cost_model import PRIOR_WEIGHT, CostModel, keep_worthwhile
from jaxspec.methods.core.drafter import Drafter
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, ModelParams
from jaxspec.methods.core.sequence import CHUNKS, PromptStates, SequenceState, split_chunks, usable_chunks
from jaxspec.methods.core.verify import Draft, draft_shapes
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.request import Request
from jaxspec.tree.select import Candidates, pack_best
from jaxspec.tree.tree import Batch

# How often the token that followed a match of n tokens follows again, before anything is known about this text.
# Longer matches count as the longest one here.
PRIOR_ACCEPTANCE = (0.0, 0.25, 0.45, 0.6, 0.7, 0.78, 0.83, 0.87, 0.9)
# Observations lose weight each round, so that a copied passage after a free one is found worth trying again.
FORGETTING = 0.99


@dataclasses.dataclass(frozen=True)
class LookupSettings:
    """Limits of what is compared and copied."""

    num_rows: int  # bs
    ngram: int  # longest suffix that is compared
    candidates: int  # earlier occurrences that are merged
    length: int  # most tokens copied from each, below `num_rows`
    adaptive: bool = True  # whether only what pays is drafted


@struct.dataclass
class TokenBuffer:
    """The text so far, and what became of earlier copies."""

    token: Array  # int32 [S], verified tokens in order
    length: Array  # int32 [], how many
    matched: Array  # int32 [bs], for each row of the last batch, the length of the match that proposed it
    parent: Array  # int32 [bs], of the last batch
    tried: Array  # float32 [ngram + 1], drafted tokens that were reached, by length of match, with forgetting
    accepted: Array  # float32 [ngram + 1], those that the target confirmed

    def forget_batch(self) -> "TokenBuffer":
        """The next round verifies nothing that was copied."""
        rows = jnp.arange(self.parent.shape[0], dtype=jnp.int32)
        return dataclasses.replace(self, matched=jnp.full_like(rows, self.tried.shape[0]), parent=rows)


class TokenText:
    """Compiled functions that start a `TokenBuffer` and add a prompt to it; `state` holds its shapes."""

    def __init__(self, placement: Placement, slots: int, settings: LookupSettings, path: int):
        """Declare the programs; `slots` is the longest text, padding included, `path` the tokens of a round."""
        self._slots = slots
        # Room for a padded chunk or path after the last token.
        capacity = slots + max(CHUNKS) + path
        plan, scalar = placement.plan, placement.array((), jnp.int32)

        def create():
            zeros, rows = jnp.zeros(settings.ngram + 1), jnp.arange(settings.num_rows, dtype=jnp.int32)
            return TokenBuffer(jnp.zeros(capacity, jnp.int32), jnp.int32(0), jnp.zeros_like(rows), rows, zeros, zeros)

        self.state = placement.replicated(jax.eval_shape(create))
        self._create = Program("lookup create", create, plan, [], self.state)
        self._fill = {}
        for size in usable_chunks(slots):
            args = [self.state, placement.array((size,), jnp.int32), scalar]
            self._fill[size] = Program(f"lookup prefill {size}", append, plan, args, self.state, donate=[0])
        self.programs = (self._create, *self._fill.values())

    def start(self) -> TokenBuffer:
        """An empty text."""
        return self._create()

    def prefill(self, state: TokenBuffer, tokens: np.ndarray) -> TokenBuffer:
        """Add int32 `tokens` `[n]`."""
        for chunk, count in split_chunks(tokens, self._slots):
            state = self._fill[len(chunk)](state, chunk, np.int32(count))
        return state


class NGramDrafter(Drafter):
    """Copies; it has no model."""

    idle_steps = STEPS_PER_DISPATCH

    def __init__(
        self, placement: Placement, slots: int, settings: LookupSettings, costs: CostModel, verified: Verified
    ):
        """Declare the programs; `verified` are shapes."""
        self._placement = placement
        self.use_costs(costs)
        self._text = TokenText(placement, slots, settings, verified.tokens.shape[0])
        self.shapes = draft_shapes(placement, settings.num_rows)

        def draft(state, verified, costs):
            state, candidates, matched = find_candidates(state, verified, settings)
            if settings.adaptive:
                candidates, _ = keep_worthwhile(candidates, costs.rounds)
            state, batch = draft_candidates(state, candidates, matched, settings)
            return state, Draft(batch, jnp.int32(0))

        def skip(state, verified):
            return take_in(state, verified).forget_batch()

        self.state = state = self._text.state
        plan = placement.plan
        args = [state, verified, costs.shapes(placement)]
        self.draft_program = Program("lookup", draft, plan, args, (state, self.shapes), donate=[0])
        self.propose = lambda _, state, verified, history, request, costs: draft(state, verified, costs)
        self._skip = Program("lookup skip", skip, plan, [state, verified], state, donate=[0])
        self.programs = (*self._text.programs, self.draft_program, self._skip)

    def use_costs(self, costs: CostModel) -> None:
        """Weigh copies with these figures from now on."""
        self.operands = costs.place(self._placement)

    def start(self, root: int, state: TokenBuffer | None) -> TokenBuffer:
        return self._text.start()

    def prefill(
        self, params: ModelParams, state: TokenBuffer, tokens: np.ndarray, states: PromptStates | None = None
    ) -> TokenBuffer:
        return self._text.prefill(state, tokens)

    def draft(
        self, params: ModelParams, target: SequenceState, state: TokenBuffer, verified: Verified, request: Request
    ) -> tuple[SequenceState, TokenBuffer, Draft]:
        assert self.draft_program is not None
        return target, *self.draft_program(state, verified, self.operands)

    def skip(self, params: ModelParams, state: TokenBuffer, verified: Verified) -> TokenBuffer:
        return self._skip(state, verified)


def append(state: TokenBuffer, token: Array, count: Array) -> TokenBuffer:
    """Add the first `count` of `token` to the text."""
    text = jax.lax.dynamic_update_slice(state.token, token, (state.length,))
    return dataclasses.replace(state, token=text, length=state.length + count)


def take_in(state: TokenBuffer, verified: Verified) -> TokenBuffer:
    """Learn from the last round, and add its tokens to the text."""
    return append(learn(state, verified), verified.tokens, verified.count)


def find_candidates(
    state: TokenBuffer, verified: Verified, settings: LookupSettings
) -> tuple[TokenBuffer, Candidates, Array]:
    """Take in the last round, and merge what followed earlier occurrences of the text's end."""
    state = take_in(state, verified)
    return state, *merge_matches(state, acceptance(state), settings)


def draft_candidates(
    state: TokenBuffer, candidates: Candidates, matched: Array, settings: LookupSettings
) -> tuple[TokenBuffer, Batch]:
    """The best candidates as a batch, and a note of which match proposed which row; none proposed the root."""
    batch = pack_best(state.token[state.length - 1], candidates, settings.num_rows)
    # Which candidate became which row is known by path alone: ask the same selection for the match lengths.
    lengths = dataclasses.replace(candidates, token=matched)
    noted = pack_best(jnp.int32(settings.ngram + 1), lengths, settings.num_rows).token
    return dataclasses.replace(state, matched=noted, parent=batch.parent), batch


def learn(state: TokenBuffer, verified: Verified) -> TokenBuffer:
    """Count, by length of match, the drafted tokens that the last walk reached and those that it accepted."""
    ngram = state.tried.shape[0] - 1
    rows = jnp.arange(state.parent.shape[0], dtype=jnp.int32)
    steps = jnp.arange(verified.path.shape[0])
    on_path = (steps >= 1) & (steps < verified.count)
    accepted = jnp.where(on_path, state.matched[verified.path], ngram + 1)
    # Where the walk left the tree, its best child was tried and refused.
    last = verified.path[verified.count - 1]
    refused = (state.parent == last) & (rows != state.parent)
    refused_length = jnp.where(refused.any(), jnp.max(jnp.where(refused, state.matched, 0)), ngram + 1)
    success = (state.accepted * FORGETTING).at[accepted].add(1.0, mode="drop")
    tried = (state.tried * FORGETTING).at[accepted].add(1.0, mode="drop").at[refused_length].add(1.0, mode="drop")
    return dataclasses.replace(state, tried=tried, accepted=success)


def acceptance(state: TokenBuffer) -> Array:
    """Estimated chance that a token after a match of n tokens is right, float32 [ngram + 1]; never decreasing in n."""
    longest = len(PRIOR_ACCEPTANCE) - 1
    prior = jnp.array(PRIOR_ACCEPTANCE)[jnp.minimum(jnp.arange(state.tried.shape[0]), longest)]
    chance = (state.accepted + PRIOR_WEIGHT * prior) / (state.tried + PRIOR_WEIGHT)
    return jax.lax.cummax(chance)


def merge_matches(state: TokenBuffer, chance: Array, settings: LookupSettings) -> tuple[Candidates, Array]:
    """Continuations of earlier occurrences of the text's suffix, merged into one tree.

    Returns:
      candidates: C * L of them, by occurrence and depth; a token shared by several occurrences is the first one's.
      matched: int32 [C * L], length of the match that proposed each.
    """
    C, L = min(settings.candidates, state.token.shape[0]), settings.length
    place = jnp.arange(state.token.shape[0], dtype=jnp.int32)
    last = state.length - 1
    # An occurrence is known by its last position; it is compared backwards with the end of the text.
    matched, going = jnp.zeros_like(place), place < last
    for back in range(settings.ngram):
        shifted = jnp.roll(state.token, back)
        going &= (shifted == state.token[jnp.maximum(last - back, 0)]) & (place >= back)
        matched += going
    # Longest first, then most recent. XLA sorts all of an array of integers on a CPU, and none of floats, which hold
    # these integers exactly up to 2**24: for 8 tokens that match in a text of 1.8 million.
    order = jnp.where(matched > 0, matched * place.size + place, -1).astype(jnp.float32)
    _, end = jax.lax.top_k(order, C)
    end = end.astype(jnp.int32)
    length = matched[end]  # [C], 0 where there is no further occurrence
    # A passage that runs into the end of the text goes on with itself: the text repeats.
    period = jnp.maximum(last - end, 1)
    step = jnp.arange(L, dtype=jnp.int32)
    copied = state.token[end[:, None] + 1 + step[None, :] % period[:, None]]  # [C, L]

    # agree[c, e, d]: the first d + 1 tokens of c and e are the same.
    agree = jnp.cumprod(copied[:, None] == copied[None, :], axis=-1).astype(bool)
    agree &= ((length > 0)[:, None] & (length > 0)[None, :])[:, :, None]
    first = jnp.argmax(agree, axis=1)  # [C, L], the occurrence that stands for the token
    weight = 2.0 ** (length - length.max()).astype(jnp.float32) * 0.9 ** jnp.arange(C)
    votes = jnp.einsum("ced,e->cd", agree.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
    everyone = jnp.full((C, 1), jnp.sum(jnp.where(length > 0, weight, 0.0)))
    share = votes / jnp.maximum(jnp.concatenate([everyone, votes[:, :-1]], axis=1), 1e-30)
    depth_matched = jnp.minimum(length[first] + step[None, :], settings.ngram)
    score = jnp.cumsum(jnp.log(chance[depth_matched]) + jnp.log(jnp.minimum(share, 1.0)), axis=1)
    own = (first == jnp.arange(C)[:, None]) & (length > 0)[:, None]

    flat = jnp.arange(C * L, dtype=jnp.int32).reshape(C, L)
    above = jnp.concatenate([jnp.full((C, 1), -1), first[:, :-1] * L + step[None, :-1]], axis=1)
    candidates = Candidates(
        token=copied.reshape(-1),
        parent=above.reshape(-1).astype(jnp.int32),
        depth=(flat % L + 1).reshape(-1),
        score=jnp.where(own, score, -jnp.inf).reshape(-1),
    )
    return candidates, depth_matched.reshape(-1).astype(jnp.int32)
