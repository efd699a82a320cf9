"""A generation's request to every round: processors and a random key, as traced values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxspec.config import MOST_TOKENS, SamplingParams
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.pytree import pytree
from jaxspec.runtime.placement import Placement
from jaxspec.sampling.choose import seed_key
from jaxspec.sampling.processors import Processors, Variant, from_sampling, processor_specs


@pytree
class Request:
    """Traced values, never a compile key."""

    processors: Processors  # logits processors
    key: jax.Array | np.ndarray  # uint32 [2], key of the seed
    max_tokens: jax.Array | np.int32 = np.int32(MOST_TOKENS)  # int32 [], where the text ends if nothing else ends it

    @property
    def variant(self) -> Variant | None:
        """The variant that a program is compiled for; see `Processors.variant`."""
        return self.processors.variant

    def of_variant(self, variant: Variant | None) -> "Request":
        """The same request for programs of a variant."""
        return dataclasses.replace(self, processors=dataclasses.replace(self.processors, variant=variant))

    def left(self, generated: jax.Array) -> jax.Array:
        """Tokens to come after so many, int32 []; at least 1, for a round that was launched ahead and is not read."""
        return jnp.maximum(self.max_tokens - generated, 1)


def make_request(
    sampling: SamplingParams, seed: int, vocab_size: int, padded_size: int, prompt_tokens: int = 0
) -> Request:
    """A request on the host; see `from_sampling`."""
    max_tokens = np.int32(MOST_TOKENS if sampling.max_tokens is None else sampling.max_tokens)
    return Request(from_sampling(sampling, vocab_size, padded_size, prompt_tokens), seed_key(seed), max_tokens)


def request_shapes(placement: Placement, example: Request | None = None) -> Request:
    """Shapes of a request on a model's mesh; any other one's are those of `example`."""
    if example is None:
        example = make_request(SamplingParams(), 0, placement.cfg.vocab_size, placement.padded_vocab)
    specs = Request(processor_specs(TENSOR_AXIS), PartitionSpec(), PartitionSpec())  # pyright: ignore[reportArgumentType]
    return placement.shapes(example, specs)
