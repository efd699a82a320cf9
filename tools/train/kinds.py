"""The kinds of draft that the tool trains, and the draft in training that a run's settings describe."""

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jaxspec import LLM
from jaxspec.files import vocabulary_digest
from jaxspec.llm import internals
from jaxspec.models.config import ModelConfig
from jaxspec.models.params import Params
from train.block import BlockTrainer, block_config, init_block, measure_block
from train.eagle import HeadTrainer, fed_config, head_config, init_fed, init_head, measure_head
from train.export import read_native
from train.shards import read_meta
from train.states import STATES, KeptStates, StateFolder, StateSource, TargetStates
from train.student import init_student, student_config
from train.train import Quality, Trainer, measure_quality


class Kind(enum.StrEnum):
    """One kind of draft."""

    LAYERS = "layers"
    EAGLE3 = "eagle3"
    ADDED = "added"
    BLOCK = "block"


# Those that are fed the target's hidden states.
FED = (Kind.EAGLE3, Kind.ADDED, Kind.BLOCK)


def _fills_blocks(cfg: ModelConfig) -> bool:
    return cfg.features is not None and cfg.features.kind == "block"


def _head_rows(llm: LLM, head_ids: np.ndarray) -> jax.Array:
    """The target's rows of a student's head, [V_head, D]."""
    params = internals(llm).params.target
    return jnp.asarray(np.asarray(params.get("head", params["embed"]))[head_ids])


@dataclasses.dataclass
class Student:
    """A draft in training.

    Attributes:
      cfg: its geometry.
      params: what it begins with.
      embed: the target's embedding.
      head: the target's rows of its head.
      states: gives the target's hidden states; None for a draft that is fed none.
      unroll: steps on its own states.
    """

    cfg: ModelConfig
    params: Params
    embed: jax.Array
    head: jax.Array
    states: StateSource | None = None
    unroll: int = 0

    def trainer(self, params: Params, *words: Any) -> Trainer:
        """`words` are those of `Trainer` from `packer` on."""
        if self.states is None:
            return Trainer(params, self.cfg, self.embed, self.head, *words)
        if _fills_blocks(self.cfg):
            return BlockTrainer(params, self.cfg, self.embed, self.head, self.states, self.unroll, *words)
        return HeadTrainer(params, self.cfg, self.embed, self.head, self.states, self.unroll, *words)

    def quality(self, params: Params, *words: Any) -> Quality:
        """`words` are those of `measure_quality` from `packer` on."""
        if self.states is None:
            return measure_quality(params, self.cfg, self.embed, self.head, *words)
        if _fills_blocks(self.cfg):
            return measure_block(params, self.cfg, self.embed, self.head, self.states, *words)
        return measure_head(params, self.cfg, self.embed, self.head, self.states, *words)


def open_student(
    llm: LLM, settings: dict[str, Any], length: int, keep_states: Path | None = None, data: Sequence[Path] = ()
) -> Student:
    """The student that a run's settings describe, for rows of `length` tokens.

    Without a length its states cannot be asked for. They are those that `sample` kept in one of the folders `data`,
    where it did.
    """
    target, own, layers = internals(llm).target.cfg, internals(llm).params.target, settings.get("layers", ())
    head_ids = settings["head_ids"]
    embed, head = own["embed"], _head_rows(llm, np.array(head_ids or range(target.vocab_size), np.int32))
    if settings["kind"] == Kind.LAYERS:
        return Student(student_config(target, layers, head_ids), init_student(own, layers), embed, head)
    if settings["kind"] == Kind.EAGLE3:
        cfg = head_config(target, settings["states"], head_ids)
        params = init_head(own, cfg) | ({"head": head.astype(jnp.float32)} if settings["learn_head"] else {})
    elif settings["kind"] == Kind.BLOCK:
        cfg = block_config(target, layers, settings["states"], head_ids, settings["block"], settings["markov"])
        params = init_block(own, cfg, layers)
    else:
        cfg = fed_config(target, layers, settings["states"], head_ids)
        params = init_fed(own, cfg, layers)
    states = _states_of(llm, settings["states"], length, keep_states, data)
    return Student(cfg, params, embed, head, states, settings["unroll"])


def native_student(llm: LLM, path: Path, length: int, data: Sequence[Path]) -> tuple[Student, Params]:
    """A native draft as one in training, for rows of `length` tokens, and its weights; see `open_student`."""
    cfg, params = read_native(path, vocabulary_digest(llm.tokenizer.token_strings()))
    ids = np.array(cfg.head_ids or range(cfg.vocab_size), np.int32)
    states = None if cfg.features is None else _states_of(llm, cfg.features.layers, length, None, data)
    return Student(cfg, params, internals(llm).params.target["embed"], _head_rows(llm, ids), states), params


def _states_of(
    llm: LLM, layers: Sequence[int], length: int, keep_states: Path | None, data: Sequence[Path]
) -> StateSource:
    computed = TargetStates(llm, layers, length)
    sampled = []
    for folder in data:
        found = read_meta(folder / STATES)
        # The target may have computed in another precision when it wrote the text.
        if found and any(found[name] != computed.made_of[name] for name in ("target", "layers")):
            theirs = ",".join(map(str, found["layers"]))
            typer.echo(f"{folder / STATES}: holds states of layers {theirs}; they are computed", err=True)
        elif found:
            sampled.append(StateFolder(folder / STATES, found))
    try:
        return KeptStates(computed, keep_states, sampled) if keep_states is not None or sampled else computed
    except ValueError as error:
        raise typer.BadParameter(f"--keep-states {error}") from error
