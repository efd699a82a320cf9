"""The draft model's side: how a sequence starts, prefill, and catching up with what the target verified."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.methods.core.sequence import make_fill, run_fill
from jaxspec.models.config import ModelConfig
from jaxspec.models.kv_cache import KVCache, commit_rows, init_cache
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, prefill, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program


class DraftSide:
    """Compiled functions that start a draft's sequence and commit a prompt.

    The state is the draft's cache; what a method keeps besides comes from its own `Drafter`.
    """

    def __init__(self, placement: Placement, slots: int):
        """Declare the programs; nothing is compiled yet."""
        self.placement = placement
        self.slots = slots
        cfg = placement.cfg
        self.state = placement.cache(slots)

        def create():
            return init_cache(cfg, placement.local_kv_heads, slots, placement.dtype)

        def restart(cache):
            return cache.replace(length=jnp.int32(0))

        def fill(params, cache, token, count):
            return prefill(params, cfg, token, count, cache)

        self._create = Program("draft create", create, placement.plan, [], self.state)
        self._restart = Program("draft restart", restart, placement.plan, [self.state], self.state, donate=[0])
        self._fill = make_fill("draft", fill, placement, self.state, slots)
        self.programs = (self._create, self._restart, *self._fill.values())

    def start(self, cache: KVCache | None) -> KVCache:
        """An empty cache; `cache` is donated."""
        return self._create() if cache is None else self._restart(cache)

    def prefill(self, params: Params, cache: KVCache, tokens: np.ndarray) -> KVCache:
        """Commit int32 `tokens` `[n]`."""
        return run_fill(self._fill, params, cache, tokens, self.slots)


def catch_up(
    params: Params, cfg: ModelConfig, cache: KVCache, pending: jax.Array, num_pending: jax.Array
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Run the verified tokens that the draft has not seen, one or two, the last of which is the new root.

    Args:
      params: the draft's.
      cfg: its geometry.
      cache: holds every verified token but these.
      pending: int32 [2]
      num_pending: int32 [], 1 or 2.

    Returns:
      The root, int32 []; the logits behind it, [1, V_local]; and the cache, whose window slot 0 is the root.
    """
    position = cache.length + jnp.arange(2, dtype=jnp.int32)
    hidden, cache = forward(params, cfg, pending, position, cache, jnp.tril(jnp.ones((2, 2), bool)))
    logits = vocab_logits(params, jax.lax.dynamic_slice_in_dim(hidden, num_pending - 1, 1))
    return pending[num_pending - 1], logits, commit_rows(cache, num_pending - 1)
