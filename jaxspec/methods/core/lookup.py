"""What followed where the text's last tokens occurred before: matches, what became of them, and drafts of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.methods.core.chunks import CHUNKS, split_chunks, usable_chunks
from jaxspec.methods.core.runner import outcome_shapes
from jaxspec.methods.core.verify import Draft, Outcome
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import History
from jaxspec.sampling.request import Request
from jaxspec.tree.select import Candidates, pack_best
from jaxspec.tree.tree import Batch

# How often the token that followed a match of n tokens follows again, before anything is known about this text, and
# how many observations that guess is worth. Longer matches count as the longest one here.
PRIOR_ACCEPTANCE = (0.0, 0.25, 0.45, 0.6, 0.7, 0.78, 0.83, 0.87, 0.9)
PRIOR_WEIGHT = 4.0
# What was observed loses weight each round, so that a copied passage behind a free one is found worth trying again.
FORGETTING = 0.99
# Behind so many rounds in a row that drafted nothing, a round without a draft decodes so many tokens: they share what a
# round costs besides its passes, and a match is noticed a little later.
CALM_ROUNDS, CALM_TOKENS = 4, 4


@dataclasses.dataclass(frozen=True)
class LookupSettings:
    """What is compared and copied; see `PromptLookup`.

    Attributes:
      batch: bs.
      ngram: longest suffix that is compared.
      candidates: earlier occurrences that are merged.
      length: most tokens copied from each.
      adaptive: False always drafts as much as the batch holds.
    """

    batch: int
    ngram: int
    candidates: int
    length: int
    adaptive: bool = True

    @property
    def longest_path(self) -> int:
        """P: a copied passage, as far as the batch holds it, and the bonus token."""
        return min(self.length, self.batch - 1) + 1


@struct.dataclass
class TokenBuffer:
    """The text so far, and what became of earlier drafts.

    Attributes:
      token: int32 [S], verified tokens in order.
      length: int32 [], how many.
      matched: int32 [bs], for each row of the last batch, the length of the match that proposed it.
      parent: int32 [bs], of the last batch.
      tried: float32 [ngram + 1], drafted tokens that were reached, by length of match, with forgetting.
      accepted: float32 [ngram + 1], those that the target confirmed.
      calm: int32 [], rounds in a row that drafted nothing.
      generated: int32 [], how many of the tokens are no prompt's.
    """

    token: jax.Array
    length: jax.Array
    matched: jax.Array
    parent: jax.Array
    tried: jax.Array
    accepted: jax.Array
    calm: jax.Array
    generated: jax.Array

    def plain(self, request: Request, most: int) -> jax.Array:
        """Tokens of a round without a draft, at most `most`, and none behind the end of the text; int32 []."""
        return jnp.where(self.calm >= CALM_ROUNDS, jnp.minimum(request.left(self.generated), most), 1)


class TextSide:
    """Compiled functions that start a text and add a prompt to it; `state` holds the shapes of a `TokenBuffer`."""

    def __init__(self, placement: Placement, slots: int, settings: LookupSettings):
        """Declare the programs; `slots` is the longest text, padding included."""
        self._slots = slots
        # Room for a padded chunk or path behind the last token.
        capacity = slots + max(CHUNKS) + settings.longest_path
        plan, scalar = placement.plan, placement.array((), jnp.int32)

        def create():
            zeros = jnp.zeros(settings.ngram + 1)
            text = jnp.zeros(capacity, jnp.int32)
            rows = jnp.arange(settings.batch, dtype=jnp.int32)
            # The first round brings the prompt's last token.
            matched, zero = jnp.zeros_like(rows), jnp.int32(0)
            return TokenBuffer(text, zero, matched, rows, zeros, zeros, calm=zero, generated=jnp.int32(-1))

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


class NGramDrafter:
    """See `pair.Drafter`; it has no model."""

    def __init__(self, placement: Placement, slots: int, settings: LookupSettings, costs: np.ndarray):
        """Declare the programs; for `costs` see `keep_worthwhile`."""
        self._side = TextSide(placement, slots, settings)
        scalar, row = placement.array((), jnp.int32), placement.array((settings.batch,), jnp.int32)
        plain = plain_tokens(placement, settings.longest_path)
        self.drafted = Draft(Batch(row, row, row, scalar), scalar, plain=scalar if plain else None)

        def draft(state, outcome, request):
            return look_up(state, outcome, request, settings, costs, plain)

        args = [self._side.state, outcome_shapes(placement, settings.longest_path), placement.request()]
        out = (self._side.state, self.drafted)
        self._draft = Program("lookup", draft, placement.plan, args, out, donate=[0])
        self.programs = (*self._side.programs, self._draft)

    def start(self, state: TokenBuffer | None) -> TokenBuffer:
        """See `Drafter.start`."""
        return self._side.start()

    def prefill(self, params: None, state: TokenBuffer, tokens: np.ndarray) -> TokenBuffer:
        """See `Drafter.prefill`."""
        return self._side.prefill(state, tokens)

    def draft(
        self, params: None, state: TokenBuffer, outcome: Outcome, history: History, request: Request
    ) -> tuple[TokenBuffer, Draft]:
        """See `Drafter.draft`."""
        return self._draft(state, outcome, request)


def plain_tokens(placement: Placement, longest_path: int) -> int:
    """Most tokens of a round without a draft; 0 where a batch is verified all the same.

    On an accelerator the host would have to wait for a number of passes that is data.
    """
    return min(CALM_TOKENS, longest_path) if placement.plan.kernels.platform == "cpu" else 0


def append(state: TokenBuffer, token: jax.Array, count: jax.Array) -> TokenBuffer:
    """Add the first `count` of `token` to the text."""
    text = jax.lax.dynamic_update_slice(state.token, token, (state.length,))
    return dataclasses.replace(state, token=text, length=state.length + count)


def look_up(
    state: TokenBuffer, outcome: Outcome, request: Request, settings: LookupSettings, costs: np.ndarray, most: int
) -> tuple[TokenBuffer, Draft]:
    """Learn from the last round, add its tokens to the text, and draft.

    Args:
      state: the text before the last round.
      outcome: of the last round.
      request: says where the text ends.
      settings: what is copied.
      costs: see `pass_costs`.
      most: see `plain_tokens`.
    """
    state, candidates, matched = find_candidates(state, outcome, settings)
    if settings.adaptive:
        candidates, _ = keep_worthwhile(candidates, costs)
    state, batch = draft_candidates(state, candidates, matched, settings)
    alone = batch.count == 1
    plain = jnp.where(alone, state.plain(request, most), 0) if most else None
    return dataclasses.replace(state, calm=jnp.where(alone, state.calm + 1, 0)), Draft(batch, jnp.int32(0), plain=plain)


def find_candidates(
    state: TokenBuffer, outcome: Outcome, settings: LookupSettings
) -> tuple[TokenBuffer, Candidates, jax.Array]:
    """Learn from the last round, add its tokens to the text, and merge what followed earlier occurrences of its end."""
    state = append(learn(state, outcome), outcome.tokens, outcome.count)
    state = dataclasses.replace(state, generated=state.generated + outcome.count)
    return state, *merge_matches(state, acceptance(state), settings)


def draft_candidates(
    state: TokenBuffer, candidates: Candidates, matched: jax.Array, settings: LookupSettings
) -> tuple[TokenBuffer, Batch]:
    """The best candidates as a batch, and a note of which match proposed which row; none proposed the root."""
    batch = pack_best(state.token[state.length - 1], candidates, settings.batch)
    # Which candidate became which row is known by path alone: ask the same selection for the match lengths.
    lengths = dataclasses.replace(candidates, token=matched)
    noted = pack_best(jnp.int32(settings.ngram + 1), lengths, settings.batch).token
    return dataclasses.replace(state, matched=noted, parent=batch.parent), batch


def learn(state: TokenBuffer, outcome: Outcome) -> TokenBuffer:
    """Count, by length of match, the drafted tokens that the last walk reached and those that it accepted."""
    ngram = state.tried.shape[0] - 1
    rows = jnp.arange(state.parent.shape[0], dtype=jnp.int32)
    steps = jnp.arange(outcome.path.shape[0])
    on_path = (steps >= 1) & (steps < outcome.count)
    accepted = jnp.where(on_path, state.matched[outcome.path], ngram + 1)
    # Where the walk left the tree, its best child was tried and refused.
    last = outcome.path[outcome.count - 1]
    refused = (state.parent == last) & (rows != state.parent)
    refused_length = jnp.where(refused.any(), jnp.max(jnp.where(refused, state.matched, 0)), ngram + 1)
    success = (state.accepted * FORGETTING).at[accepted].add(1.0, mode="drop")
    tried = (state.tried * FORGETTING).at[accepted].add(1.0, mode="drop").at[refused_length].add(1.0, mode="drop")
    return dataclasses.replace(state, tried=tried, accepted=success)


def acceptance(state: TokenBuffer) -> jax.Array:
    """Estimated chance that a token behind a match of n tokens is right, float32 [ngram + 1]; never decreasing in n."""
    longest = len(PRIOR_ACCEPTANCE) - 1
    prior = jnp.array(PRIOR_ACCEPTANCE)[jnp.minimum(jnp.arange(state.tried.shape[0]), longest)]
    chance = (state.accepted + PRIOR_WEIGHT * prior) / (state.tried + PRIOR_WEIGHT)
    return jax.lax.cummax(chance)


def merge_matches(state: TokenBuffer, chance: jax.Array, settings: LookupSettings) -> tuple[Candidates, jax.Array]:
    """Continuations of earlier occurrences of the text's suffix, merged into one tree.

    Returns:
      candidates: C * L of them, by occurrence and depth; a token shared by several occurrences is the first one's.
      matched: int32 [C * L], length of the match behind each.
    """
    C, L = min(settings.candidates, state.token.shape[0]), settings.longest_path - 1
    place = jnp.arange(state.token.shape[0], dtype=jnp.int32)
    last = state.length - 1
    # An occurrence is known by its last position; it is compared backwards with the end of the text.
    matched, going = jnp.zeros_like(place), place < last
    for back in range(settings.ngram):
        shifted = jnp.roll(state.token, back)
        going &= (shifted == state.token[jnp.maximum(last - back, 0)]) & (place >= back)
        matched += going
    # Longest first, then most recent.
    _, end = jax.lax.top_k(jnp.where(matched > 0, matched * place.size + place, -1), C)
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


def keep_worthwhile(candidates: Candidates, costs: np.ndarray | jax.Array) -> tuple[Candidates, jax.Array]:
    """Drop what does not pay: keep the number of tokens with the most expected output per time.

    The expected output of a batch is 1 + the sum of its tokens' probabilities (ALGORITHMS 10).

    Args:
      candidates: what there is to choose from.
      costs: [bs], of a batch of 1, 2, ... rows, each with its share of what a round costs besides.

    Returns:
      The candidates that stay, and the expected output per time, float32 [].
    """
    wanted = min(costs.shape[0] - 1, candidates.score.shape[0])
    best, _ = jax.lax.top_k(candidates.score, wanted)
    gain = 1 + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.exp(best))])
    rate = gain / jnp.asarray(costs[: wanted + 1])
    kept = jnp.argmax(rate)
    least = jnp.where(kept > 0, best[jnp.maximum(kept - 1, 0)], jnp.inf)
    score = jnp.where(candidates.score >= least, candidates.score, -jnp.inf)
    return dataclasses.replace(candidates, score=score), rate[kept]
