"""Compiled sampling functions of small shapes, for each number of vocabulary shards, and random cases for them."""

import functools

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.config import SamplingParams
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.vocab import VocabShard
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.sampling.choose import choose, gumbel_rows, seed_key
from jaxspec.sampling.processors import (
    History,
    from_sampling,
    init_history,
    process,
    processor_specs,
    update_history,
)

VOCAB, PADDED, ROWS, TEXT = 21, 24, 2, 5
SHARDS = (1, 2, 3, 4, 8)


def shard_call(function, num_shards, vocab_size, padded_size, in_specs, out_specs):
    """Jit `function(vocab, *args)`; 0 shards means no mesh at all."""
    if num_shards == 0:
        return jax.jit(functools.partial(function, VocabShard(vocab_size, padded_size)))
    vocab = VocabShard(vocab_size, -(-padded_size // num_shards), TENSOR_AXIS)
    mesh = plan_mesh(num_shards).mesh
    local = functools.partial(function, vocab)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs, is_leaf=lambda x: isinstance(x, P))
    compiled = jax.jit(sharded)
    return lambda *args: compiled(*jax.device_put(args, shardings))


def _all(vocab, logits, processors, prompt, output, valid, key, positions):
    history = update_history(init_history(vocab), prompt, valid[0], vocab, generated=False)
    history = update_history(history, output, valid[1], vocab, generated=True)
    rows = logits, processors, history.row
    return process(*rows, vocab), *choose(*rows, key, positions, vocab), history


@functools.cache
def _compiled(num_shards):
    columns = P(None, TENSOR_AXIS)
    history = History(P(TENSOR_AXIS), P(TENSOR_AXIS))
    in_specs = columns, processor_specs(TENSOR_AXIS), P(), P(), P(), P(), P()
    return shard_call(_all, num_shards, VOCAB, PADDED, in_specs, (columns, P(), P(), history))


def run(logits, params, prompt=(), output=(), seed=0, positions=(7, 8), num_shards=0):
    """Log-probabilities [ROWS, PADDED], tokens, their log-probabilities and the history, as numpy."""
    texts = np.full((2, TEXT), 10**6, np.int32)  # what is not valid may hold any id
    valid = np.zeros((2, TEXT), bool)
    for i, text in enumerate((prompt, output)):
        texts[i, : len(text)], valid[i, : len(text)] = text, True
    processors = from_sampling(params, VOCAB, PADDED)
    logits = np.asarray(logits, np.float32)
    out = _compiled(num_shards)(
        logits, processors, texts[0], texts[1], valid, seed_key(seed), np.array(positions, np.int32)
    )
    return jax.tree.map(np.asarray, out)


@functools.cache
def noise_function(num_shards, vocab_size, padded_size):
    """(key, positions) -> noise [T, padded_size]."""

    def noise(vocab, key, positions):
        return gumbel_rows(key, positions, vocab)

    return shard_call(noise, num_shards, vocab_size, padded_size, (P(), P()), P(None, TENSOR_AXIS))


# Logits on a coarse grid tie often, and stay tied or apart under penalties that float32 represents exactly.
_GRID = st.integers(-24, 24).map(lambda x: x / 4)
_TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=TEXT)
_ROW = st.lists(_GRID | st.sampled_from([-np.inf, np.nan]), min_size=PADDED, max_size=PADDED)
LOGITS = st.lists(_ROW, min_size=ROWS, max_size=ROWS)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 5, VOCAB, 1000]),
    top_p=st.sampled_from([1e-30, 0.1, 0.5, 0.9, 0.99, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    presence_penalty=st.sampled_from([0.0, 0.25, -1.5]),
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-np.inf, -2.0, 0.25, 3.0]), max_size=4),
    logprobs=st.booleans(),
)
CASES = st.fixed_dictionaries({"logits": LOGITS, "params": PARAMS, "prompt": _TOKENS, "output": _TOKENS})
