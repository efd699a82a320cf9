"""What a draft proposes behind a row: the contract, and the proposal that follows the target's own draw."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.methods.path_history import PathHistory
from jaxspec.sampling.choose import choose, choose_two
from jaxspec.sampling.request import Request
from jaxspec.sampling.vocab import VocabShard

# (logits [w, V_local], path histories, request, position int32 [w] of the proposed tokens) -> tokens int32 [w, k],
# log-probabilities float32 [w, k], at most 0.
Propose = Callable[[jax.Array, PathHistory, Request, jax.Array], tuple[jax.Array, jax.Array]]


def same_draw(vocab: VocabShard, *, scored: bool) -> Propose:
    """The one child is what plain decoding would draw if the draft were the target: same processors, same noise.

    Under R4 a tree may depend on anything (ALGORITHMS 2.3, C1), the noise of its own positions included.
    """

    def propose(
        logits: jax.Array, paths: PathHistory, request: Request, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        processors = request.processors
        if scored:
            processors = dataclasses.replace(processors, want_logprob=jnp.bool_(True))
        history = paths.build(processors, vocab)
        token, logprob = choose(logits, processors, history.seen, history.counts, request.key, position, vocab)
        return token[:, None], logprob[:, None]

    return propose


def same_two_draws(vocab: VocabShard) -> Propose:
    """The child of `same_draw`, and the one that plain decoding would draw if the first were ruled out."""

    def propose(
        logits: jax.Array, paths: PathHistory, request: Request, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        history = paths.build(request.processors, vocab)
        return choose_two(logits, request.processors, history.seen, history.counts, request.key, position, vocab)

    return propose
