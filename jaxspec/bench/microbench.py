"""Times of single target and draft passes, and of one read of all weights: the parts that a round is made of."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxspec.methods.core.draft_passes import run_draft
from jaxspec.methods.core.timing import time_turns
from jaxspec.methods.core.verify import LAZY_HEAD_ROWS
from jaxspec.models.experts import ExpertsConfig
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.layer import multiply_heads, project_out
from jaxspec.models.mixture import mix_beside, mix_rows
from jaxspec.models.params import ROUTED_PARAMS, Params
from jaxspec.models.transformer import vocab_logits
from jaxspec.offload.executor import TargetPass, make_sequence
from jaxspec.offload.stream import LayerStream
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from pallas_kernels import registry
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.linear.blocks import Blocks, find_format
from pallas_kernels.registry import Kernels

if TYPE_CHECKING:
    from jaxspec.llm import LLM

# Takes a number of passes, 1 if not given, and returns the seconds of all of them.
PassTimer = Callable[..., float]


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """Median seconds of one pass, the output head included; those of the draft are 0 without a draft model."""

    target_s: Mapping[int, float]  # by number of rows; see `time_target_pass`
    draft_s: float  # with as many rows as the method evaluates at a time
    draft_root_s: float  # the first pass of a round: the root and a pending token


def measure_passes(llm: "LLM", context: int, rows: Iterable[int], repeats: int = 9) -> PassTimes:
    """Time target passes of `rows` and the method's draft passes, with `context` tokens in the caches."""
    from jaxspec.llm import internals  # only here: a bare machine has no packages for checkpoints

    inner = internals(llm)
    method, models, params = inner.engine.method, inner.models, inner.params
    timers: dict[Any, PassTimer] = {n: time_target_pass(models.target, params.target, n, context) for n in rows}
    if models.draft is not None and params.draft is not None and method.drafts:
        width, levels = method.draft_rows, method.max_path
        timers["draft"] = time_pass(models.draft, params.draft, width, context, levels=levels)
        timers["root"] = time_pass(models.draft, params.draft, 2, context)
    medians = median_times(timers, repeats)
    targets = {name: seconds for name, seconds in medians.items() if isinstance(name, int)}
    return PassTimes(targets, medians.get("draft", 0.0), medians.get("root", 0.0))


def median_times(timers: Mapping[Any, PassTimer], repeats: int, passes: int = 1) -> dict[Any, float]:
    """Median seconds of one pass of each timer; a sample holds `passes`, one after the other in one program."""
    return time_turns(lambda: {name: timer(passes) / passes for name, timer in timers.items()}, repeats)


def time_target_pass(placement: Placement, params: Params, rows: int, context: int) -> PassTimer:
    """`time_pass` of a verification; in a large one, logits are computed for visited rows only."""
    if placement.resident_layers is not None:
        return time_streamed_pass(placement, params, rows, context)
    return time_pass(placement, params, rows, context, head_rows=None if rows <= LAZY_HEAD_ROWS else 1)


def time_streamed_pass(placement: Placement, params: Params, rows: int, context: int) -> PassTimer:
    """`time_target_pass` of a target whose layers are streamed: each pass reads them."""
    cfg, scalar = placement.cfg, placement.array((), jnp.int32)
    sequence = make_sequence(placement, -(-(context + rows) // 64) * 64, "pass")
    head_rows = None if rows <= LAZY_HEAD_ROWS else 1

    def begin(length: Any, first: Any) -> Any:
        own = jnp.arange(rows, dtype=jnp.int32)
        mask = (own[None, :] == own[:, None]) | (own[None, :] == 0)
        return (first + own) % cfg.vocab_size, length + jnp.minimum(own, 1), mask, None

    def finish(params: Any, state: Any, hidden: Any, cache: Any, first: Any) -> Any:
        largest = vocab_logits(params, cfg, hidden[:head_rows]).max()
        cache = dataclasses.replace(cache, length=jnp.int32(context))
        return dataclasses.replace(state, cache=cache), largest

    out = (sequence.state, placement.array((), jnp.float32))
    run = TargetPass(f"pass {rows}", sequence, rows, [scalar], out, begin=begin, finish=finish)
    state = [sequence.rewind(sequence.start(0, None), np.zeros(context, np.int32), 0)]

    def sample(passes: int = 1) -> float:
        start = time.perf_counter()
        for index in range(passes):
            state[0], largest = run(params, state[0], np.int32(index * rows))
            np.asarray(jax.block_until_ready(largest))
        return time.perf_counter() - start

    return sample


def time_pass(
    placement: Placement, params: Params, rows: int, context: int, *, levels: int = 1, head_rows: int | None = None
) -> PassTimer:
    """Passes over the levels of a growing tree after `context` tokens, one after the other in one program.
    Each of the `rows` sees the root and itself. The window holds `levels` passes; further ones write over the last.
    Logits are computed for `head_rows` rows, None for all. A draft that is fed states gets zeros.
    """
    cfg, plan = placement.cfg, placement.plan
    states = None if cfg.features is None else np.zeros((rows, cfg.features.own_dim(cfg.embed_dim)), np.float32)
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
            # Other tokens in every pass: otherwise XLA moves parts of it out of the loop. And in every row: a mixture
            # of experts sends equal ones to the same experts.
            hidden, _, cache = run_draft(
                params, cfg, (index * rows + own) % cfg.vocab_size, None if states is None else jnp.asarray(states),
                cache.length + depth[own], cache, mask, window_position=cache.length + depth, offset=level * rows,
            )  # fmt: skip
            return cache, jnp.maximum(largest, vocab_logits(params, cfg, hidden[:head_rows]).max())

        cache, largest = jax.lax.fori_loop(0, count, once, (cache, jnp.float32(-jnp.inf)))
        return largest, cache

    def create() -> Any:
        cache = init_cache(cfg, placement.local_kv_heads, slots, placement.kv_dtype)
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


def roofline_pass(
    params: Params, kernels: Kernels, passes: int = 8, experts: ExpertsConfig | None = None
) -> Callable[[], float] | None:
    """A timer of a chain of matrix-vector products that reads every weight of a decoding step once, and nothing else.
    It runs `passes` and returns the seconds of one; its first call compiles. On several devices each reads its own
    shard, and nothing is exchanged between them. Of a streamed target the layers are read once, and not multiplied.
    Of a mixture, whose `experts` are given, each layer reads its router and the experts of one row. None for a streamed
    mixture: what it reads depends on the experts that are kept.
    """
    layers = params["layers"]
    if isinstance(layers, LayerStream) and not layers.store.experts:
        return lambda: _time_stream(layers)
    if isinstance(layers, LayerStream):
        return None
    leaves, treedef = jax.tree.flatten(params)
    specs = jax.tree.unflatten(treedef, [leaf.sharding.spec for leaf in leaves])
    mesh = leaves[0].sharding.mesh
    width = params["final_norm"].size

    def chain(params: Params, x: jax.Array) -> jax.Array:
        for layer in params["layers"]:
            # The sum keeps keys and values alive: XLA removes products without a use.
            read = [multiply_heads(layer[name], x, None) for name in ("qkv", "attn_gate") if name in layer]
            mixes = [layer[name] for name in ("mix_in", "mix_gate") if name in layer]
            read += [linear(x, as_matrix(weight, weight.shape[0] * weight.shape[1])) for weight in mixes]
            heads = jnp.concatenate([rows.reshape(1, -1) for rows in read], axis=1)  # any numbers will do
            out = as_matrix(layer["out"], width)
            block_format = find_format(out.format) if isinstance(out, Blocks) else None
            inputs = out.shape[1] * (block_format.values if block_format else 1)
            x = project_out(layer, heads[:, :inputs], None) + jnp.sum(heads[:, inputs:])
            if "router" in layer:
                assert experts is not None  # a mixture has them
                x = mix_beside(layer, experts, x, 1e-6, None) if experts.beside else mix_rows(layer, experts, x, None)
                continue
            gate_up = layer["gate_up"]
            hidden = linear(x, as_matrix(gate_up, 2 * gate_up.shape[1]))
            gate, up = jnp.split(hidden, 2, axis=1)
            x = linear(gate * up, as_matrix(layer["down"], width))
        head = params["head"] if "head" in params else params["embed"]
        return jnp.max(linear(x, as_matrix(head, head.shape[0])))[None]

    out_spec = PartitionSpec(mesh.axis_names)
    run_chain = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=out_spec, check_vma=False)
    )
    x = jnp.full((1, width), 1e-3, jnp.float32)

    def run() -> float:
        start = time.perf_counter()
        with registry.using(kernels):
            for _ in range(passes):
                jax.block_until_ready(run_chain(params, x))
        return (time.perf_counter() - start) / passes

    return run


def _time_stream(stream: LayerStream) -> float:
    start = time.perf_counter()
    with stream.weights() as layers:
        for index in range(stream.num_layers):
            layer = layers.take(index)
            layers.used(index, jax.tree.leaves(layer)[0])
    return time.perf_counter() - start


def weight_bytes(params: Params, experts: ExpertsConfig | None = None) -> int:
    """Bytes that a decoding step reads: all weights, less the embedding where the output has a matrix of its own.

    Of a mixture, whose `experts` are given, those of one row.
    """
    if isinstance(stream := params["layers"], LayerStream):
        return stream.nbytes
    read = {name: leaf for name, leaf in params.items() if name != "embed" or "head" not in params}
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(read))
    if experts is None:
        return total
    routed = [
        {leaf: layer[leaf] for leaf in ROUTED_PARAMS if leaf in layer} for layer in read["layers"] if "router" in layer
    ]
    left_out = sum(leaf.nbytes for leaf in jax.tree.leaves(routed)) * (experts.count - experts.per_token)
    return total - left_out // experts.count
