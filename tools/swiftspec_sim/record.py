"""Recording: the draft runs wherever a replay asks for a context that the table does not hold yet."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.methods.core.executor import place_request
from jaxspec.methods.core.proposals import PathHistory, most_probable
from jaxspec.methods.core.sequence import ModelSequence, cache_slots
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.models.params import Params
from jaxspec.models.transformer import forward, vocab_logits
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.sampling.processors import init_history
from swiftspec_sim.replay import begin, grow, growth_of, make_table, turn, unrecorded
from swiftspec_sim.trace import Trace

# Contexts that one pass evaluates.
ROWS = 32


class Recorder:
    """Evaluates contexts of one text after the other; all of a text's nodes lie in one tree window of the cache."""

    def __init__(self, placement: Placement, params: Params, *, keep: int, nodes: int, context: int):
        """Declare the program.

        Args:
          placement: the draft.
          params: its parameters.
          keep: K.
          nodes: most nodes of a text; what a replay asks for beyond them stays approximated.
          context: most tokens of a prompt.
        """
        self._params, self._nodes, self._keep = params, nodes, keep
        self._sequence = ModelSequence(placement, cache_slots(context + nodes, ROWS), "draft", keeps_text=False)
        self._request = place_request(placement, SamplingParams(), 0, placement.cfg.vocab_size)
        self._state = None
        propose = most_probable(placement.vocab, keep)

        def evaluate(params, state, token, depth, mask, node_depth, first, request):
            cache = state.cache
            hidden, cache = forward(
                params, placement.cfg, token, cache.length + depth, cache, mask,
                window_position=cache.length + node_depth, offset=first,
            )  # fmt: skip
            nowhere = PathHistory(init_history(placement.text_vocab), jnp.zeros(nodes, jnp.int32), mask & False)
            return state.replace(cache=cache), *propose(
                vocab_logits(params, placement.cfg, hidden), nowhere, request, cache.length + 1 + depth
            )

        rows, per_node = placement.array((ROWS,), jnp.int32), placement.array((nodes,), jnp.int32)
        mask = placement.array((ROWS, nodes), jnp.bool_)
        args = [
            placement.params(), self._sequence.state, rows, rows, mask, per_node,
            placement.array((), jnp.int32), placement.request(),
        ]  # fmt: skip
        out = tuple(placement.array((ROWS, keep), dtype) for dtype in (jnp.int32, jnp.float32))
        self._evaluate = Program("evaluate", evaluate, placement.plan, args, (self._sequence.state, *out), donate=[1])

    def begin(self, question_id: str, category: str, prompt: Sequence[int], text: Sequence[int]) -> Trace:
        """A trace whose nodes are those along the text."""
        state = self._sequence.start(0, self._state)
        self._state = self._sequence.prefill(self._params, state, np.asarray(prompt[:-1], np.int32))
        self._root = int(prompt[-1])
        self._depth = np.zeros(self._nodes, np.int32)
        self._ancestors = np.zeros((self._nodes, self._nodes), bool)
        nowhere = np.zeros((0, self._keep))
        empty = np.zeros(0, np.int32)
        written = np.asarray(text, np.int32)
        trace = Trace(
            question_id, category, written, empty, empty, nowhere.astype(np.int32), nowhere.astype(np.float32)
        )
        chain = np.arange(-1, len(text), dtype=np.int32)
        return self._append(trace, chain, np.concatenate([[-1], written]).astype(np.int32))

    def extend(self, trace: Trace, wanted: Sequence[int]) -> Trace:
        """A trace with nodes for some of its proposals, as many as there is room for."""
        wanted = list(dict.fromkeys(wanted))[: self._nodes - len(trace.parent)]
        parent = np.asarray(wanted, np.int32) // trace.keep
        return self._append(trace, parent, trace.child_token.reshape(-1)[wanted])

    def is_full(self, trace: Trace) -> bool:
        """Whether there is room for no more nodes."""
        return len(trace.parent) >= self._nodes

    def _append(self, trace: Trace, parent: np.ndarray, token: np.ndarray) -> Trace:
        first = len(trace.parent)
        nodes = np.arange(first, first + len(parent))
        if nodes[-1] >= self._nodes:
            raise ValueError(f"a text of {len(trace.text)} tokens needs more than {self._nodes} nodes")
        for node, above in zip(nodes.tolist(), parent.tolist(), strict=True):
            if above >= 0:
                self._depth[node] = self._depth[above] + 1
                self._ancestors[node] = self._ancestors[above]
            self._ancestors[node, node] = True
        found = [self._run(nodes[i : i + ROWS], token[i : i + ROWS]) for i in range(0, len(nodes), ROWS)]
        return dataclasses.replace(
            trace,
            parent=np.concatenate([trace.parent, parent]),
            token=np.concatenate([trace.token, token]),
            child_token=np.concatenate([trace.child_token, *(tokens for tokens, _ in found)]),
            child_logprob=np.concatenate([trace.child_logprob, *(logprobs for _, logprobs in found)]),
        )

    def _run(self, nodes: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Proposals of consecutive nodes."""
        count = len(nodes)
        fill = (0, ROWS - count)
        # Fillers repeat the last row; the next pass overwrites what they write.
        token = np.pad(np.where(token < 0, self._root, token), fill, mode="edge").astype(np.int32)
        rows = np.pad(nodes, fill, mode="edge")
        self._state, child_token, child_logprob = self._evaluate(
            self._params, self._state, token, self._depth[rows], self._ancestors[rows], self._depth,
            np.int32(nodes[0]), self._request,
        )  # fmt: skip
        return np.asarray(child_token)[:count], np.asarray(child_logprob)[:count]


def cover(
    recorder: Recorder, trace: Trace, method: SwiftSpec, nodes: int, room: int = 0, branch_free: bool = False
) -> Trace:
    """Replay a text with `method`, and record every context that it evaluates, as far as there is room.

    Methods that differ in `depth` alone share their compiled functions, given the same `room` for passes.
    """
    assert method.depth is not None
    growth, depth = growth_of(method, max(room, method.depth), branch_free), jnp.int32(method.depth)
    within, beside = (jnp.int32(0), depth) if method.overlap else (depth, jnp.int32(0))
    state, tokens = begin(growth), len(trace.text) + growth.num_rows
    table = make_table(trace, nodes, tokens)
    while int(state.root + state.count) < len(trace.text):
        while True:
            turned, _ = turn(table, state, within, growth)
            grown = grow(table, turned, beside, growth)
            wanted = unrecorded(trace, grown.tree)
            if not wanted or recorder.is_full(trace):
                break
            trace = recorder.extend(trace, wanted)
            table = make_table(trace, nodes, tokens)
        state = grown
    return trace
