"""Sampled conversations and the teacher's logits on disk: one compressed-free `.npz` per shard, written whole or not.

A conversation is the tokens after the chat template's fixed beginning (`prefix` in the folder's `meta.json`), the last
token of which is its first. Row i of the teacher's logits is its distribution over the token after token i.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

META = "meta.json"


@dataclasses.dataclass
class Conversation:
    """One conversation.

    Attributes:
      token: int32 [n].
      teacher_id: [n, K] the teacher's K most probable tokens, most probable first.
      teacher_logprob: float16 [n, K].
      answer: index of the first token of the answer; n where there is none.
      kind: see `Opening`.
      temperature: of the answer.
      shard: number of the shard that it is from.
      states: bfloat16 [m, n * D_target], hidden states of the whole text, prefix and all, right after it is sampled;
        they are not in the shard, see `StateFolder`.
    """

    token: np.ndarray
    teacher_id: np.ndarray
    teacher_logprob: np.ndarray
    answer: int
    kind: str
    temperature: float
    shard: int = 0
    states: np.ndarray | None = None


def shard_path(folder: Path, index: int) -> Path:
    """The path of a shard."""
    return folder / f"shard-{index:05d}.npz"


def write_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write a shard; it is there whole or not at all."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(
            file,
            count=np.array([len(c.token) for c in conversations], np.int32),
            answer=np.array([c.answer for c in conversations], np.int32),
            kind=np.array([c.kind for c in conversations]),
            temperature=np.array([c.temperature for c in conversations], np.float32),
            token=np.concatenate([c.token for c in conversations]),
            teacher_id=np.concatenate([c.teacher_id for c in conversations]),
            teacher_logprob=np.concatenate([c.teacher_logprob for c in conversations]),
        )
    os.replace(partial, path)


def read_shard(path: Path) -> list[Conversation]:
    """Every conversation of a shard."""
    with np.load(path, allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    ends = np.cumsum(data["count"])
    shard = int(path.stem.rpartition("-")[2])
    conversations = []
    for i, end in enumerate(ends):
        part = slice(end - data["count"][i], end)
        conversations.append(
            Conversation(
                data["token"][part],
                data["teacher_id"][part],
                data["teacher_logprob"][part],
                int(data["answer"][i]),
                str(data["kind"][i]),
                float(data["temperature"][i]),
                shard,
            )
        )
    return conversations


def read_meta(folder: Path) -> dict[str, Any]:
    """Settings that a folder of shards was made with; empty where there is none yet."""
    path = folder / META
    return json.loads(path.read_text()) if path.is_file() else {}


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Say what a folder's shards are made with.

    Raises:
      ValueError: there are shards that were made with something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = read_meta(folder)
    # What was noted before the first shard has no effect.
    if old and old != meta and any(folder.glob("shard-*.npz")):
        differing = sorted(key for key in {*old, *meta} if old.get(key) != meta.get(key))
        raise ValueError(
            f"{folder}: holds shards that were sampled with other settings ({', '.join(differing)}); use another folder"
        )
    if old != meta:
        replace_text(folder / META, json.dumps(meta, indent=1, sort_keys=True) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
