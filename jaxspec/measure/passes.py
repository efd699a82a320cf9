"""Times of single target and draft passes, for the split of a round into its parts."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import init_cache
from jaxspec.llm import LLM
from jaxspec.methods.program import Program
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.placement import Placement


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """Seconds of one pass, the head included and nothing else: medians.

    Attributes:
      target_s: target, with as many rows as the method verifies.
      draft_s: draft, with as many rows as the method evaluates at a time; 0 without a draft model.
      draft_root_s: draft, the first pass of a round: the root and a pending token, two rows; 0 without a draft model.
    """

    target_s: float
    draft_s: float
    draft_root_s: float


def measure_passes(llm: LLM, context: int, repeats: int = 9) -> PassTimes:
    """Time the passes that a method's rounds are made of.

    Args:
      llm: its method gives the numbers of rows.
      context: tokens in the caches.
      repeats: samples behind each median; target and draft are taken in turn.
    """
    method, models = llm.engine.method, llm.engine.models
    runs = {"target": time_pass(models.target, llm.params, method.batch_rows, context)}
    if models.draft is not None and llm.draft_params is not None and method.drafts:
        runs["draft"] = time_pass(models.draft, llm.draft_params, method.draft_rows, context)
        runs["root"] = time_pass(models.draft, llm.draft_params, 2, context)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(run())
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return PassTimes(medians["target"], medians.get("draft", 0.0), medians.get("root", 0.0))


def time_pass(placement: Placement, params: Params, rows: int, context: int) -> Callable[[], float]:
    """A pass over a star-shaped tree of `rows` rows behind `context` tokens; returns its seconds."""
    cfg, plan = placement.cfg, placement.plan
    slots = -(-(context + rows) // 64) * 64
    cache_shapes = placement.cache(slots)
    scalar = placement.array((), jnp.float32)

    def run(params: Any, cache: Any) -> Any:
        own = jnp.eye(rows, dtype=bool).at[:, 0].set(True)
        position = cache.length + jnp.minimum(jnp.arange(rows, dtype=jnp.int32), 1)
        hidden, cache = forward(params, cfg, jnp.zeros(rows, jnp.int32), position, cache, own)
        return vocab_logits(params, hidden).max(), cache

    def create() -> Any:
        cache = init_cache(cfg, placement.local_kv_heads, slots, placement.dtype)
        return dataclasses.replace(cache, length=jnp.int32(context))

    program = Program("pass", run, plan, [placement.params(), cache_shapes], (scalar, cache_shapes), donate=[1])
    state = [Program("create", create, plan, [], cache_shapes)()]

    def sample() -> float:
        start = time.perf_counter()
        out, state[0] = program(params, state[0])
        np.asarray(jax.block_until_ready(out))
        return time.perf_counter() - start

    return sample
