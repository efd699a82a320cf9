"""Rounds of a draft that fills a block of places in one pass: what it finds likely there becomes the round's tree.

No token of the block is known to the pass, so a place says the same after every prefix, or after every token before it
where the head is of first order. Learned ratios correct that (docs/drafts.md).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.methods.core.copies import Copies, Nodes, concatenate, join, path_terms
from jaxspec.methods.core.cost_model import (
    AGREED,
    BESIDE,
    OTHERS,
    PLACES,
    SUREST,
    PlacedCosts,
    class_of,
    keep_best,
    place_kind,
    weigh_prospect,
)
from jaxspec.methods.core.draft_passes import DraftModel, PathHistory
from jaxspec.methods.core.tree_round import (
    TreeSettings,
    TreeState,
    find_and_join,
    note_draft,
    pack_wanted,
    take_in,
)
from jaxspec.methods.core.verify import Draft
from jaxspec.models.config import ModelConfig
from jaxspec.models.feature_draft import forward_block, logits_after
from jaxspec.models.features import FeatureConfig
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.params import Params
from jaxspec.models.transformer import vocab_logits
from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import History, clean
from jaxspec.tree.table import best_prefixes, pick_distinct
from jaxspec.tree.tree import pack_best


class Block(NamedTuple):
    """The first D places after the root."""

    hidden: Array  # float32 [D, H], what the head sees of each
    logits: Array  # float32 [D, V_local], what it makes of that, whatever stands before


def fill_block(
    params: Params, cfg: ModelConfig, vocab: VocabShard, root: Array, cache: KVCache, places: int, masked: Array | None
) -> tuple[Block, KVCache]:
    """The pass of a block after `root`, int32 []; of P-EAGLE its rows ran with what was verified and are `masked`."""
    with jax.named_scope("draft/block"):
        # The trained block is filled always: with fewer masks its places would say something else.
        hidden, cache = forward_block(params, cfg, root, cache) if masked is None else (masked, cache)
        hidden = hidden[:places]
        return Block(hidden, clean(vocab_logits(params, cfg, hidden), vocab)), cache


def place_logits(params: Params, cfg: ModelConfig, vocab: VocabShard, block: Block, place: int, before: Array) -> Array:
    """Logits of a place after each of int32 `before` [w], float32 [w, V_local]."""
    here = slice(place, place + 1)
    return logits_after(params, cfg, vocab, block.logits[here], block.hidden[here], before)


def make_table(model: DraftModel, block: Block, root: Array, history: History, produced: Array) -> tuple[Array, Array]:
    """What a block proposes: `token` and `logprob` of `best_prefixes`. `produced` is the position of its first place.

    What lies before a place is not known: penalties see the verified text alone. Of a head of first order, the tokens
    of a place are those that are likeliest with the best prefix before them.
    """
    cfg, vocab = model.placement.cfg, model.placement.vocab
    places = block.hidden.shape[0]

    def propose(logits: Array, position: Array) -> tuple[Array, Array]:
        paths = PathHistory(history, jnp.zeros(1, jnp.int32), jnp.zeros((logits.shape[0], 1), bool))
        return model.propose(logits, paths, model.request, position)

    assert cfg.features is not None
    if not cfg.features.first_order:
        return propose(block.logits, produced + jnp.arange(places, dtype=jnp.int32))
    token, reach = root[None], jnp.zeros(1)
    tokens, table = [], []
    for place in range(places):
        logits = place_logits(model.params, cfg, vocab, block, place, token)
        below, logprob = propose(logits, jnp.broadcast_to(produced + place, token.shape))
        branch = below.shape[1]
        token, reach = pick_distinct(below.reshape(-1), (reach[:, None] + logprob).reshape(-1), branch)
        same = below[:, :, None] == token
        rows = jnp.where(same, logprob[:, :, None], -jnp.inf).max(axis=1)
        # A token that was not picked twice has no second place.
        rows = jnp.where(reach > -jnp.inf, rows, -jnp.inf)
        tokens.append(token)
        table.append(jnp.broadcast_to(rows, (branch, branch)))
    return jnp.stack(tokens), jnp.stack(table)


def block_round(
    model: DraftModel, settings: TreeSettings, state: TreeState, verified: Verified, history: History,
    costs: PlacedCosts | None,
) -> tuple[TreeState, Draft]:  # fmt: skip
    """`tree_round.draft_round` of a draft that fills a block."""
    features = model.placement.cfg.features
    assert features is not None and state.sequence is not None
    masked = 0 if features.kind == "block" else features.block - 1
    state, _, taken = take_in(model.params, model.placement, state, verified, masked)
    fill = functools.partial(
        _fill, model, settings, verified.tokens[verified.count - 1], history, None if taken is None else taken[0]
    )
    if costs is not None:
        return _weigh(features, settings, state, verified, costs, fill)
    assert state.sequence is not None
    token, logprob, cache = fill(state)
    candidates, _ = best_prefixes(token, logprob, settings.num_rows - 1, settings.min_score)
    batch = pack_best(verified.tokens[verified.count - 1], candidates, settings.num_rows)
    sequence = dataclasses.replace(state.sequence, cache=cache)
    return dataclasses.replace(state, sequence=sequence), Draft(batch, jnp.int32(1))


def _fill(
    model: DraftModel, settings: TreeSettings, root: Array, history: History, masked: Array | None, state: TreeState
) -> tuple[Array, Array, KVCache]:
    """The table of a round, and the cache after the pass."""
    assert state.sequence is not None
    placement, cache = model.placement, state.sequence.cache
    block, cache = fill_block(model.params, placement.cfg, placement.vocab, root, cache, settings.places, masked)
    return *make_table(model, block, root, history, state.sequence.seen), cache


def _weigh(
    features: FeatureConfig, settings: TreeSettings, state: TreeState, verified: Verified, costs: PlacedCosts,
    fill: Any,
) -> tuple[TreeState, Draft]:  # fmt: skip
    """Draft as far as it pays: nothing, copies, or the best prefixes of a block that copies join."""
    stats, sequence = state.stats, state.sequence
    copied = find_and_join(settings, state, costs)
    assert stats is not None and sequence is not None
    beside = 1.0 if features.first_order else BESIDE
    first = [place_kind(1 + place, jnp.bool_(False), jnp.int32(0)) - PLACES for place in range(settings.places)]
    rates, ratios = copied.rates, stats.place_ratios(beside)
    chain = jnp.cumprod(jnp.minimum(stats.mean_rate() * ratios[jnp.stack(first)], SUREST))
    drafting, one, idle = costs.draft + costs.draft_overhead, jnp.ones(settings.places), state.idle + verified.count
    prospect = weigh_prospect(copied.candidates.score, chain, one, stats, costs, idle, state.patience)

    def draft(carry: tuple) -> tuple:
        cache, _, _, _ = carry
        here = dataclasses.replace(state, sequence=dataclasses.replace(sequence, cache=cache))
        token, logprob, cache = fill(here)
        correct = functools.partial(_correct, token, rates, ratios, copied.copies)
        candidates, notes = best_prefixes(token, logprob, settings.num_rows - 1, correct=correct)
        exists = (candidates.score > -jnp.inf).astype(jnp.float32)
        nodes = Nodes(notes["hash"], notes["above"], candidates.depth, notes["kind"], exists)
        # Each counts as what it was expected to be, and as accepted or not: the ratio of both is learned.
        placed = dataclasses.replace(nodes, kind=notes["place"], weight=exists * notes["expected"])
        observed = concatenate(nodes, placed)
        above = jnp.where((candidates.parent >= 0) & (exists > 0), candidates.parent, exists.size)
        has_row = jnp.zeros(exists.shape, bool).at[above].set(True, mode="drop")
        candidates, others = join(candidates, nodes.hash, has_row, jnp.bool_(True), copied.copies, rates)
        observed = concatenate(observed, others)
        return cache, keep_best(candidates, costs.rounds + drafting)[0], observed, jnp.bool_(False)

    # A loop of at most one turn: a conditional would copy the cache.
    plain = keep_best(copied.candidates, costs.rounds)[0]
    start = sequence.cache, plain, copied.nodes, prospect.wanted
    cache, candidates, nodes, _ = jax.lax.while_loop(lambda carry: carry[3], draft, start)
    root = verified.tokens[verified.count - 1]
    batch = pack_wanted(prospect, root, candidates, settings.num_rows)
    state = dataclasses.replace(state, sequence=dataclasses.replace(sequence, cache=cache), nodes=nodes)
    passes = prospect.wanted.astype(jnp.int32)
    return note_draft(state, prospect, candidates.score, passes, idle), Draft(batch, passes, watch=copied.watch)


def _correct(
    token: Array, rates: Array, ratios: Array, copies: Copies, ranks: Array, logprob: Array
) -> tuple[Array, dict[str, Array]]:
    """The `Correct` of learned rates: a token's class says how sure it was, its place how much that is worth there."""
    depth = ranks.shape[1]
    path = token[jnp.arange(depth), ranks] if depth else jnp.zeros(ranks.shape, jnp.int32)
    above = path_terms(path, jnp.arange(1, depth + 1)).sum(axis=1, dtype=jnp.uint32)
    here = above[:, None] + path_terms(token[depth], jnp.int32(depth + 1))[None]
    rank = jnp.broadcast_to(jnp.arange(token.shape[1]), logprob.shape)
    kind = class_of(logprob) + jnp.where(rank > 0, OTHERS, 0)
    known = jnp.where(copies.own, copies.hash, 0).reshape(-1)
    kind += jnp.where((here[..., None] == known).any(axis=-1), AGREED, 0)
    place = place_kind(depth + 1, (ranks > 0).any(axis=1)[:, None], rank)
    expected = rates[kind]
    chance = jnp.minimum(expected * ratios[place - PLACES], SUREST)
    notes = {
        "hash": here, "above": jnp.broadcast_to(above[:, None], here.shape), "kind": kind, "place": place,
        "expected": expected,
    }  # fmt: skip
    return jnp.where(logprob > -jnp.inf, jnp.log(chance), -jnp.inf), notes
