"""Times of single target and draft passes, for the split of a round into its parts."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.llm import LLM
from jaxspec.methods.core.verify import LAZY_HEAD_ROWS
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """Seconds of one pass, the head included and nothing else: medians.

    Attributes:
      target_s: target, by number of rows; see `time_target_pass`.
      draft_s: draft, with as many rows as the method evaluates at a time; 0 without a draft model.
      draft_root_s: draft, the first pass of a round: the root and a pending token, two rows; 0 without a draft model.
    """

    target_s: Mapping[int, float]
    draft_s: float
    draft_root_s: float


def measure_passes(llm: LLM, context: int, rows: Iterable[int], repeats: int = 9) -> PassTimes:
    """Time the passes that a method's rounds are made of.

    Args:
      llm: its method gives the numbers of rows of draft passes.
      context: tokens in the caches.
      rows: of target passes.
      repeats: samples behind each median; target and draft are taken in turn.
    """
    method, models = llm.engine.method, llm.engine.models
    runs: dict[str | int, Callable[..., float]] = {
        count: time_target_pass(models.target, llm.params, count, context) for count in rows
    }
    if models.draft is not None and llm.draft_params is not None and method.drafts:
        width, levels = method.draft_rows, method.longest_path
        runs["draft"] = time_pass(models.draft, llm.draft_params, width, context, levels=levels)
        runs["root"] = time_pass(models.draft, llm.draft_params, 2, context)
    samples: dict[str | int, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(run())
    medians = {name: statistics.median(values) for name, values in samples.items()}
    targets = {name: seconds for name, seconds in medians.items() if isinstance(name, int)}
    return PassTimes(targets, medians.get("draft", 0.0), medians.get("root", 0.0))


def time_target_pass(placement: Placement, params: Params, rows: int, context: int) -> Callable[..., float]:
    """`time_pass` of a verification: of a large batch, logits are only computed where the walk comes by."""
    return time_pass(placement, params, rows, context, head_rows=None if rows <= LAZY_HEAD_ROWS else 1)


def time_pass(
    placement: Placement, params: Params, rows: int, context: int, *, levels: int = 1, head_rows: int | None = None
) -> Callable[..., float]:
    """Passes over the levels of a growing tree behind `context` tokens, one after the other in one program.

    Args:
      placement: of the model.
      params: its parameters.
      rows: of a pass; each sees the root and itself.
      context: tokens in the cache.
      levels: passes that the window holds; further ones write over the last.
      head_rows: rows whose logits are computed; None for all.

    Returns:
      A function that takes the number of passes, 1 if not given, and returns the seconds of all of them.
    """
    cfg, plan = placement.cfg, placement.plan
    slots = -(-(context + rows * levels) // 64) * 64
    cache_shapes = placement.cache(slots)
    count, scalar = placement.array((), jnp.int32), placement.array((), jnp.float32)

    def run(params: Any, cache: Any, count: Any) -> Any:
        slot = jnp.arange(rows * levels, dtype=jnp.int32)
        depth = slot // rows

        def once(index: Any, carry: Any) -> Any:
            cache, largest = carry
            level = jnp.minimum(index, levels - 1)
            own = level * rows + jnp.arange(rows, dtype=jnp.int32)
            mask = (slot == own[:, None]) | (slot == 0)
            # Other tokens in every pass, so that no part of it can move out of the loop.
            hidden, cache = forward(
                params, cfg, jnp.full(rows, index, jnp.int32), cache.length + depth[own], cache, mask,
                window_position=cache.length + depth, offset=level * rows,
            )  # fmt: skip
            return cache, jnp.maximum(largest, vocab_logits(params, hidden[:head_rows]).max())

        cache, largest = jax.lax.fori_loop(0, count, once, (cache, jnp.float32(-jnp.inf)))
        return largest, cache

    def create() -> Any:
        cache = init_cache(cfg, placement.local_kv_heads, slots, placement.dtype)
        return dataclasses.replace(cache, length=jnp.int32(context))

    args = [placement.params(), cache_shapes, count]
    program = Program("pass", run, plan, args, (scalar, cache_shapes), donate=[1])
    state = [Program("create", create, plan, [], cache_shapes)()]

    def sample(passes: int = 1) -> float:
        start = time.perf_counter()
        out, state[0] = program(params, state[0], np.int32(passes))
        np.asarray(jax.block_until_ready(out))
        return time.perf_counter() - start

    return sample
