"""Whether a target's logits depend on the number of rows in a pass, on which losslessness rests.
A text is decoded token by token, then verified in passes of many rows: as chains, and as random trees with its tokens
among the nodes. With row-invariant kernels every logit has the same bits each time.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.methods.core.sequence import cache_slots
from jaxspec.models.config import TENSOR_AXIS
from jaxspec.models.kv_cache import commit_path
from jaxspec.models.params import Params
from jaxspec.models.transformer import vocab_logits
from jaxspec.offload.executor import TargetPass, make_sequence
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import compile_programs
from jaxspec.sampling.processors import GREEDY

# Equal bits of fewer tokens say nothing: too few of them share a pass.
FEW_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Invariance:
    """How the logits of a text change when its tokens are verified together."""

    tokens: int  # each was verified in a chain and in a tree
    rows: int  # of a pass, at most
    differing_chain: int  # tokens whose logits differ in any bit from those of a one-row pass, in chains
    differing_tree: int  # the same in trees
    largest: float  # difference of any logit

    @property
    def bitwise(self) -> bool | None:
        """Whether every bit is the same; None where the text is too short to tell."""
        if self.differing_chain + self.differing_tree:
            return False
        return None if self.tokens < FEW_TOKENS else True


def measure_invariance(
    target: Placement, params: Params, prompt: Sequence[int], tokens: Sequence[int], rows: int = 16, seed: int = 0
) -> Invariance:
    """Score `tokens` after `prompt` one by one, as chains and as random trees, and compare.
    The prompt's last token is scored too (so there is one), the text's last is not. Passes have at most `rows` rows.
    `seed` decides the trees' shapes and the tokens beside the text. Raises `ConfigError` if the text does not fit into
    the model's context, or `rows` is below 2.
    """
    if rows < 2:
        raise ConfigError(f"rows must be at least 2, got {rows}")
    if len(prompt) + len(tokens) > target.cfg.max_context:
        raise ConfigError(
            f"{len(prompt)} + {len(tokens)} tokens exceed the model's context of {target.cfg.max_context}"
        )
    passes = _Passes(target, params, len(prompt) + len(tokens), rows)
    text = np.array([prompt[-1], *tokens[:-1]], np.int32)
    rng = np.random.default_rng(seed)
    alone = passes.score(prompt, text, [_chain(1, text[i:]) for i in range(len(text))], 1)
    together = [passes.score(prompt, text, list(_cut_chains(text, rows, rng)), rows)]
    together.append(passes.score(prompt, text, list(_cut_trees(text, rows, rng, target.cfg.vocab_size)), rows))
    chain, tree = (int((alone.view(np.int32) != other.view(np.int32)).any(axis=1).sum()) for other in together)
    largest = max(float(np.abs(alone - other).max()) for other in together)
    return Invariance(len(text), rows, chain, tree, largest)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Rows of one pass; `path` are those that hold the next tokens of the text, in order."""

    token: np.ndarray  # int32 [n]
    depth: np.ndarray  # int32 [n]
    ancestors: np.ndarray  # bool [n, n]
    path: np.ndarray  # int32 [P]


def _chain(rows: int, text: np.ndarray) -> _Batch:
    order = np.arange(rows, dtype=np.int32)
    return _Batch(text[:rows], order, np.tril(np.ones((rows, rows), bool)), order)


def _cut_chains(text, most, rng):
    start = 0
    while start < len(text):
        rows = min(int(rng.integers(2, most + 1)), len(text) - start)
        yield _chain(rows, text[start:])
        start += rows


def _cut_trees(text, most, rng, vocab):
    """Trees through which the text runs, with other tokens on side branches."""
    start = 0
    while start < len(text):
        rows = int(rng.integers(2, most + 1))
        on_path = np.sort(rng.choice(np.arange(1, rows), int(rng.integers(0, rows)), replace=False))
        path = np.concatenate([[0], on_path])[: len(text) - start].astype(np.int32)
        token = rng.integers(0, vocab, rows).astype(np.int32)
        token[path] = text[start : start + len(path)]
        ancestors, depth = np.eye(rows, dtype=bool), np.zeros(rows, np.int32)
        for row in range(1, rows):
            place = np.searchsorted(path, row)
            parent = path[place - 1] if row in path else int(rng.integers(0, row))
            ancestors[row] |= ancestors[parent]
            depth[row] = depth[parent] + 1
        yield _Batch(token, depth, ancestors, path)
        start += len(path)


class _Passes:
    """Compiled passes of one row and of `rows`."""

    def __init__(self, target: Placement, params: Params, tokens: int, rows: int):
        self._target, self._params = target, params
        cfg = target.cfg
        self._sequence = make_sequence(target, cache_slots(tokens, rows), "invariance")
        state, scalar = self._sequence.state, target.array((), jnp.int32)

        def begin(length, token, depth, ancestors, active_rows, path, count):
            return token, length + depth, ancestors, active_rows

        def finish(params, state, hidden, cache, token, depth, ancestors, active_rows, path, count):
            state = dataclasses.replace(state, cache=commit_path(cache, path, count, rows))
            return state, vocab_logits(params, cfg, hidden, active_rows)

        self._verify = {}
        for size in {1, rows}:
            row, mask = target.array((size,), jnp.int32), target.array((size, size), bool)
            logits = target.array((size, target.padded_vocab), jnp.float32, None, TENSOR_AXIS)
            args = [row, row, mask, scalar, row, scalar]
            self._verify[size] = TargetPass(
                f"verify {size}", self._sequence, size, args, (state, logits), begin=begin, finish=finish
            )
        passes = [program for verify in self._verify.values() for program in verify.programs]
        compile_programs([*self._sequence.programs, *passes], GREEDY)

    def score(self, prompt: Sequence[int], text: np.ndarray, batches: Sequence[_Batch], size: int) -> np.ndarray:
        """Logits `[len(text), V]` after every token of the text."""
        sequence = self._sequence
        state, _ = sequence.prefill(self._params, sequence.start(0, None), np.asarray(prompt[:-1], np.int32))
        scored = []
        for batch in batches:
            active_rows, count = len(batch.token), len(batch.path)
            ancestors = np.eye(size, dtype=bool)
            ancestors[:active_rows, :active_rows] = batch.ancestors
            state, logits = self._verify[size](
                self._params, state, _pad(batch.token, size), _pad(batch.depth, size), ancestors,
                np.int32(active_rows), _pad(batch.path, size), np.int32(count),
            )  # fmt: skip
            scored.append(np.asarray(logits)[batch.path, : self._target.cfg.vocab_size])
        return np.concatenate(scored)[: len(text)]


def _pad(array: np.ndarray, size: int) -> np.ndarray:
    return np.pad(array, (0, size - len(array))).astype(np.int32)
