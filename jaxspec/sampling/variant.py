"""The parts of a request's sampling that the host may decide, and where.

On a CPU one program serves every request: a branch on the device's data costs nothing there. The host of an accelerator
waits for each such branch. So it picks a program that was compiled for the kind of request, its variant, in which every
branch of `decide` is taken already.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from jax import Array, lax
from jax.typing import ArrayLike

from jaxspec.config import SamplingParams

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Variant:
    """The sampling steps that a request needs; static, so that it keys compiled programs.

    Attributes:
      draws: whether tokens are drawn: a temperature above 0.
      penalised: whether there are penalties, biases, or tokens that are impossible before `min_tokens`.
      top_k: whether there is a cut by top-k.
      top_p: whether there is a cut by top-p.
      logprob: whether the log-probability of each token is wanted.
      ranked: whether the most probable tokens at each place are wanted.
    """

    draws: bool = False
    penalised: bool = False
    top_k: bool = False
    top_p: bool = False
    logprob: bool = False
    ranked: bool = False


GREEDY = Variant()


def find_variant(sampling: SamplingParams) -> Variant:
    """The variant of checked sampling parameters."""
    penalties = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return Variant(
        draws=sampling.temperature > 0,
        penalised=bool(penalties or sampling.logit_bias or (sampling.stop_token_ids and sampling.min_tokens)),
        top_k=sampling.top_k > 0,
        top_p=sampling.top_p < 1,
        logprob=sampling.wants_logprobs,
        ranked=sampling.num_logprobs > 0,
    )


def decide(known: bool | None, traced: ArrayLike, yes: Callable[[], Result], no: Callable[[], Result]) -> Result:
    """One of two results, which the program computes alone where the variant is `known`, else by a branch on `traced`.

    Args:
      known: of the request's variant; None where the program serves every request.
      traced: bool [], the same as data.
      yes, no: make the results.
    """
    if known is not None:
        return yes() if known else no()
    branch: Array = lax.cond(traced, yes, no)
    return branch  # pyright: ignore[reportReturnType]
