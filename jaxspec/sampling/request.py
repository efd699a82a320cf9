"""What one generation asks of every round: processors and a random key, as traced values."""

import jax
import numpy as np
from flax import struct

from jaxspec.config import SamplingParams
from jaxspec.sampling.noise import seed_key
from jaxspec.sampling.processors import Processors, from_sampling


@struct.dataclass
class Request:
    """Traced values, never a compile key.

    Attributes:
      processors: logits processors.
      key: uint32 [2], key of the seed.
    """

    processors: Processors
    key: jax.Array | np.ndarray


def make_request(sampling: SamplingParams, seed: int, vocab_size: int, padded_size: int) -> Request:
    """A request on the host; see `from_sampling`."""
    return Request(from_sampling(sampling, vocab_size, padded_size), seed_key(seed))
