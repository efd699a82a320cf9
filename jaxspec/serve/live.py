"""The live view of each round: the draft tree, which of it was accepted, and what came instead.

Where the draft has devices of its own, also when programs of both sides ran.
"""

import codecs
import collections
import queue
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec.methods.core.round import Models, StepOutput
from jaxspec.methods.core.verify import Draft
from jaxspec.runtime import hosts
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.trace.events import HOST
from jaxspec.trace.timeline import Timeline

MOST_NODES = 256  # of a tree that are shown
TIMELINE_ROUNDS, TIMELINE_SECONDS = 6, 0.25  # latest rounds that are shown as a timeline, and how often


class RoundWatcher:
    """A `runtime.trace.Recorder` that keeps the batch of every round of one answer, and describes it."""

    def __init__(self, tokenizer: Tokenizer, models: Models):
        """Nothing watched yet."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may be several tokens
        self._batch: Any = None  # of the round that is being launched
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._began = time.perf_counter()
        apart = models.draft is not None and not set(models.draft.plan.devices) & set(models.target.plan.devices)
        # A process sees when its own devices are done, not when others are.
        self._timeline = Timeline(models) if apart and not hosts.several() else None
        self._shown = 0.0  # when a timeline was

    def take(self) -> list[dict[str, Any]]:
        """Messages since the last call, as "round" or "timeline"; may be called in another thread."""
        return [self._events.get() for _ in range(self._events.qsize())]

    def close(self) -> None:
        """The answer has ended; its last rounds are part of a last timeline."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None and self._shown:
            timeline.end()
            self._show(timeline)

    def generation(self, state: Any, launch: Any, read: Any) -> tuple[Any, Any]:
        timeline = self._timeline
        if timeline is not None:
            timeline.begin()
            self._shown = time.perf_counter()
            launch, read = timeline.generation(state, launch, read)
        launched: collections.deque[Any] = collections.deque()

        def watched_launch(*args: Any) -> Any:
            self._batch = None
            result = launch(*args)
            launched.append(self._batch)
            return result

        def watched_read(round_: Any, *args: Any) -> Any:
            batch, outputs = launched.popleft(), read(round_, *args)
            for output in outputs:  # one: a round that is watched has its own dispatch
                self._events.put({"round": self._describe(output, batch)})
            if timeline is not None and time.perf_counter() - self._shown > TIMELINE_SECONDS:
                self._show(timeline)
            return outputs

        return watched_launch, watched_read

    def program(self, name: str, plan: MeshPlan, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name in ("verify", "verify open"):  # the second, of a streamed target, has no request
            self._batch = _copy_batch(args[2])  # parameters, state or its length, draft, request; no draft is donated
        return run(*args) if self._timeline is None else self._timeline.program(name, plan, run, args)

    def transfer(self, move: Callable[[], jax.Array], array: jax.Array, plan: MeshPlan) -> jax.Array:
        return move() if self._timeline is None else self._timeline.transfer(move, array, plan)

    def wait(self, array: jax.Array) -> None:
        if self._timeline is None:
            array.block_until_ready()
        else:
            self._timeline.wait(array)

    def _show(self, timeline: Timeline) -> None:
        """Spans of the latest rounds in milliseconds: row, program, start, end, round."""
        self._shown = time.perf_counter()
        last = timeline.rounds_read - TIMELINE_ROUNDS
        spans = [event for event in timeline.events if event.row != HOST and event.round >= last]
        if spans:
            begun = min(span.start for span in spans)

            def milliseconds(at: float) -> float:
                return round(1e3 * (at - begun), 3)

            shown = [(s.row, s.name, milliseconds(s.start), milliseconds(s.end), s.round) for s in spans]
            self._events.put({"timeline": shown})

    def _describe(self, output: StepOutput, batch: Any) -> dict[str, Any]:
        described: dict[str, Any] = {
            "at": round(time.perf_counter() - self._began, 4),
            "tokens": [self._next_text(token) for token in output.tokens],
            "accepted": output.accepted,
            "drafted": output.drafted,
            "tree_truncated": output.truncated,
        }
        if batch is not None and output.drafted:
            described["tree"] = self._tree(*_read_batch(batch), output)
        return described

    def _tree(self, token: np.ndarray, parent: np.ndarray, count: int, output: StepOutput) -> dict[str, Any]:
        """Nodes in order, the root first; `accepted` holds the rows of the path."""
        rows = [row for row in range(min(count, MOST_NODES)) if row == 0 or parent[row] != row]
        path, at = [0], 0
        for wanted in output.tokens[: output.accepted]:
            child = next((row for row in rows if row and parent[row] == at and token[row] == wanted), None)
            if child is None:
                break
            path.append(child)
            at = child
        return {
            "rows": rows,
            "text": [self._text(int(token[row])) for row in rows],
            "parent": [int(parent[row]) for row in rows],
            "accepted": path,
        }

    def _next_text(self, token: int) -> str:
        """Text that a token adds to the answer; its last token has the whole of a character."""
        return "" if token in self._tokenizer.special_ids else self._decoder.decode(self._tokenizer.token_bytes(token))

    def _text(self, token: int) -> str:
        """A token alone; bytes that are no character are shown as such."""
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="backslashreplace")


def _copy_batch(draft: Any) -> Any:
    """Let the batch of a pass travel to the host."""
    batch = draft.batch if isinstance(draft, Draft) else draft  # else packed, as SwiftSpec sends it
    if not all(leaf.addressable_shards for leaf in jax.tree.leaves(batch)):
        return None  # in another process
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), batch)
    return batch


def _read_batch(batch: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens and parents of the rows, and how many count."""
    if isinstance(batch, jax.Array):
        packed = np.asarray(batch)
        rows = (len(packed) - 1) // 2
        return packed[1 : 1 + rows], packed[1 + rows :], int(packed[0])
    return np.asarray(batch.token), np.asarray(batch.parent), int(batch.count)
