"""The children that a draft proposes after a row, and the history that a row's penalties see."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.params import Params
from jaxspec.models.vocab import VocabShard
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.choose import choose, rank_draws
from jaxspec.sampling.processors import Histories, History, clean, decide, log_mass, penalise, shift, update_history
from jaxspec.sampling.request import Request


@pytree
class PathHistory:
    """Histories of w rows, in the form from which they can be made."""

    text: History  # tokens of the verified text, the root included; over the whole vocabulary
    token: Array  # int32 [M], tokens of the tree
    on_path: Array  # bool [w, M], which of them lie below the root on each row's path, the row included

    def over(self, vocab: VocabShard) -> Histories:
        """Histories of the w rows over the columns of `vocab`."""

        def build() -> History:
            text = jax.tree.map(vocab.narrow, self.text)
            return jax.vmap(lambda mask: update_history(text, self.token, mask, vocab, generated=True))(self.on_path)

        return build


# (logits [w, V_local], path histories, request, position int32 [w] of the proposed tokens) -> tokens int32 [w, k],
# log-probabilities float32 [w, k], at most 0.
Propose = Callable[[Array, PathHistory, Request, Array], tuple[Array, Array]]


# What the prefixes of a tree are ranked by; see `tree_proposals`.
Ranking = Literal["noise", "probability", "sampling"]
RANKINGS = get_args(Ranking)


class DraftModel(NamedTuple):
    """A draft model inside a program: what its passes need in addition to a cache and rows."""

    params: Params
    placement: Placement
    propose: Propose
    request: Request


def same_draw(vocab: VocabShard, *, scored: bool) -> Propose:
    """The one child is what plain decoding would draw if the draft were the target: same processors, same noise.

    Under rule R4 a tree may depend on anything, the noise of its own positions included (docs/algorithms.md).
    """

    def propose(logits: Array, paths: PathHistory, request: Request, position: Array) -> tuple[Array, Array]:
        processors = request.processors
        if scored:
            variant = processors.variant and dataclasses.replace(processors.variant, logprob=True)
            processors = dataclasses.replace(processors, want_logprob=jnp.bool_(True), variant=variant)
        token, logprob = choose(logits, processors, paths.over(vocab), request.key, position, vocab)
        return token[:, None], logprob[:, None]

    return propose


def tree_proposals(ranking: Ranking, vocab: VocabShard, branch: int, *, loss: float = 0.0) -> Propose:
    """The children of a tree's nodes, `branch` (k) of them, and what they are ranked by.

    "noise" is `same_draws`, "probability" is `most_probable`, and "sampling" too, at the request's temperature. `loss`,
    at most 0, is added to every log-probability: the logarithm of a decay per level.
    """
    if ranking == "noise":
        return same_draws(vocab, branch, loss=loss)
    return most_probable(vocab, branch, loss=loss, sampling_temperature=ranking == "sampling")


def same_draws(vocab: VocabShard, branch: int, *, loss: float = 0.0) -> Propose:
    """Children are the `branch` likeliest tokens given the noise that the target chooses with, after all processors.

    A child's log-probability is its chance to be the target's choice, see `rank_draws`; `loss` is added to it. At
    temperature 0 these are the children of `most_probable`.
    """

    def propose(logits: Array, paths: PathHistory, request: Request, position: Array) -> tuple[Array, Array]:
        histories = paths.over(vocab)
        token, chance = rank_draws(logits, request.processors, histories, request.key, position, vocab, branch)
        return token, chance + loss

    return propose


def most_probable(vocab: VocabShard, branch: int, *, loss: float = 0.0, sampling_temperature: bool = False) -> Propose:
    """Children are the draft's `branch` most probable tokens, after the request's penalties and bias.

    `loss` is added to every log-probability, at most 0: the logarithm of a decay per level. Probabilities are at
    temperature 1, or at the request's with `sampling_temperature`.
    """

    def propose(logits: Array, paths: PathHistory, request: Request, position: Array) -> tuple[Array, Array]:
        processors = request.processors
        z = decide(
            processors.knows("penalised"),
            processors.penalised,
            lambda: penalise(logits, processors, paths.over(vocab), vocab, position),
            lambda: clean(logits, vocab),
        )
        if not sampling_temperature:
            processors = dataclasses.replace(processors, temperature=jnp.float32(1))
        scores = shift(z, processors, vocab)
        best, token = vocab.top_k(scores - log_mass(scores, vocab), branch)
        return token, best + loss

    return propose
