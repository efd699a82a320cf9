"""Traces: what a target wrote, and what its draft proposes after every context that a replay may ask for.

A trace is a table of *nodes*. A node is a context: the prompt, then some tokens. Node i, for i up to L, is the prompt
and the first i tokens of the target's text; further nodes lie off that text. Each holds the draft's K most probable
next tokens and their log-probabilities, both as the draft model computed them.

A *proposal* is numbered node * K + place. The number names the whole path, so a replay needs no vocabulary: its trees
hold proposals where an engine's hold tokens.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "jaxspec swiftspec trace"
# Numbers from here on stand for tokens of the text that the draft does not propose.
UNPROPOSED = 1 << 30


@dataclasses.dataclass
class Trace:
    """One text.

    Attributes:
      question_id: of its prompt.
      category: of its prompt.
      text: int32 [L], what the target wrote.
      parent: int32 [N], node that each node follows; -1 for node 0.
      token: int32 [N], each node's last token; -1 for node 0.
      child_token: int32 [N, K], distinct within a node.
      child_logprob: float32 [N, K], never increasing; -inf where there is no proposal.
    """

    question_id: str
    category: str
    text: np.ndarray
    parent: np.ndarray
    token: np.ndarray
    child_token: np.ndarray
    child_logprob: np.ndarray

    @property
    def keep(self) -> int:
        """K."""
        return self.child_token.shape[1]

    def child_nodes(self) -> np.ndarray:  # int32 [N, K]
        """The node of each proposal, -1 where none was recorded."""
        found = np.full(self.child_token.shape, -1, np.int32)
        nodes = np.arange(1, len(self.parent))
        parent = self.parent[1:]
        row, place = np.nonzero(self.child_token[parent] == self.token[1:, None])
        found[parent[row], place] = nodes[row]
        return found

    def truth(self) -> np.ndarray:  # int32 [L]
        """The proposal that each token of the text is; from `UNPROPOSED` on where the draft does not propose it."""
        steps = np.arange(len(self.text))
        same = self.child_token[: len(self.text)] == self.text[:, None]
        return np.where(same.any(1), steps * self.keep + same.argmax(1), UNPROPOSED + steps).astype(np.int32)

    def stand_ins(self) -> np.ndarray:  # int32 [N, K]
        """The node whose log-probabilities stand in for those of a proposal that has no node.

        The most probable recorded sibling, which is as deep and shares all but its last token; else the parent.
        """
        recorded = self.child_nodes() >= 0
        sibling = self.child_nodes()[np.arange(len(self.parent)), recorded.argmax(1)]
        stand_in = np.where(recorded.any(1), sibling, np.arange(len(self.parent)))
        return np.repeat(stand_in[:, None], self.keep, axis=1).astype(np.int32)


def save_traces(path: Path, traces: Sequence[Trace], about: dict[str, Any]) -> None:
    """Write an .npz file; `about` says how the traces were made."""
    arrays = {}
    names = []
    for index, trace in enumerate(traces):
        fields = dataclasses.asdict(trace)
        names.append({"question_id": fields.pop("question_id"), "category": fields.pop("category")})
        arrays |= {f"{index}.{name}": array for name, array in fields.items()}
    meta = json.dumps({"format": FORMAT, "about": about, "traces": names})
    with path.open("wb") as file:
        np.savez_compressed(file, meta=np.array(meta), **arrays)


def load_traces(path: Path) -> tuple[list[Trace], dict[str, Any]]:
    """What `save_traces` wrote.

    Raises:
      ValueError: the file is something else.
    """
    with np.load(path) as file:
        meta = json.loads(str(file["meta"])) if "meta" in file else {}
        if meta.get("format") != FORMAT:
            raise ValueError(f"{path} is not a trace of this tool")
        fields = [f.name for f in dataclasses.fields(Trace) if f.name not in ("question_id", "category")]
        traces = [
            Trace(**name, **{field: file[f"{index}.{field}"] for field in fields})
            for index, name in enumerate(meta["traces"])
        ]
    return traces, meta["about"]
