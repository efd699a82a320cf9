"""Sample conversations from the target: many at once, as branches of one tree window after the template's beginning.

Each branch holds a conversation of its own; where one ends, the next starts in the same branch. All of them attend to
the same committed prefix, the chat template's text before the user's turn, so a pass of B rows moves B conversations on
by a token. Tokens are drawn on the host from the teacher's top logits, which are what is kept of them anyway.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec import LLM
from jaxspec.llm import internals
from jaxspec.models.kv_cache import KVCache, init_cache
from jaxspec.models.transformer import forward_with_states, prefill, prefill_with_states, vocab_logits
from jaxspec.runtime.program import Program
from train.batches import split_held_out
from train.corpus import Documents, Opening, draw_opening
from train.shards import Conversation, read_shard, shard_path, write_meta, write_shard
from train.states import STATE_DTYPE, STATES, StateFolder, states_meta, target_digest

# Longest question that the target asks itself, in tokens.
LONGEST_QUESTION = 60


@dataclasses.dataclass(frozen=True)
class SampleSettings:
    """How a shard is sampled.

    Attributes:
      branches: B, conversations side by side.
      steps: passes of a shard.
      top: K, teacher logits kept per token, and what is sampled from.
      longest: most tokens of one conversation.
      seed: of everything; a shard depends on it and on its number alone.
    """

    branches: int = 64
    steps: int = 320
    top: int = 32
    longest: int = 256
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Turns:
    """A chat template around one user's turn, in token ids.

    Attributes:
      prefix: before the user's text.
      suffix: between it and the answer; its first token ends a turn.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def find_turns(llm: LLM) -> Turns:
    """The tokens that the template puts around a user's text: those that two conversations share.

    Raises:
      ValueError: nothing before the text or after it, so that there is nothing to begin or to end a turn with.
    """
    one, other = (llm.encode([{"role": "user", "content": word}]) for word in ("X", "7"))
    differing = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    behind = next((i for i, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b), 0)
    if not differing or not differing[0] or not behind:
        raise ValueError(f"the chat template puts no tokens around a user's text, or hides it: {one}, {other}")
    return Turns(tuple(one[: differing[0]]), tuple(one[len(one) - behind :]))


class Branch:
    """One conversation in the making: says which token comes next."""

    def __init__(self, opening: Opening, llm: LLM, turns: Turns, longest: int, started: int):
        """`started` is the pass that takes its first token, the last of the prefix."""
        self.opening = opening
        self.started = started
        self._turns = turns
        self._ends = set(llm.eos_ids) | {turns.suffix[0]}
        self._longest = longest
        self._forced = [turns.prefix[-1], *(llm.tokenizer.encode(opening.question, False) if opening.question else [])]
        self._asked = len(self._forced)
        self._answering = False
        if not opening.asks_on:
            self._end_question()
        self.answer = 0
        self.token: list[int] = []
        self.teacher_id: list[np.ndarray] = []
        self.teacher_logprob: list[np.ndarray] = []
        self.states: list[np.ndarray] = []

    @property
    def next_token(self) -> int:
        """The token that the next pass takes."""
        return self._forced[0]

    def take(self, ids: np.ndarray, logprob: np.ndarray, rng: np.random.Generator) -> bool:
        """Take the teacher's top logits [K] after `next_token`; returns whether the conversation goes on."""
        self.token.append(self._forced.pop(0))
        self.teacher_id.append(ids)
        self.teacher_logprob.append(logprob)
        if len(self.token) >= self._longest:
            return False
        if self._forced:
            return True
        if self._answering and not self.answer:
            self.answer = len(self.token)
        temperature = self.opening.answer_temperature if self._answering else self.opening.question_temperature
        token = int(ids[_draw(logprob, temperature, rng)])
        if self._answering:
            self._forced.append(token)
            # The token that ends the answer is part of it; nothing is predicted after it.
            return len(self.token) == self.answer or self.token[-1] not in self._ends
        if token in self._ends or len(self.token) >= self._asked + LONGEST_QUESTION:
            self._end_question()
        else:
            self._forced.append(token)
        return True

    def conversation(self, shard: int) -> Conversation:
        """One conversation."""
        return Conversation(
            np.array(self.token, np.int32),
            np.stack(self.teacher_id),
            np.stack(self.teacher_logprob),
            self.answer or len(self.token),
            self.opening.kind,
            self.opening.answer_temperature,
            shard,
        )

    def _end_question(self) -> None:
        self._forced.extend(self._turns.suffix)
        self._answering = True


def _draw(logprob: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    noise = rng.gumbel(size=logprob.shape)  # drawn always, so that one branch's temperature moves no other's
    return int(np.argmax(logprob / temperature + noise)) if temperature else 0


class Sampler:
    """Compiled passes of one target."""

    def __init__(self, llm: LLM, settings: SampleSettings, prose: Sequence[str] = (), layers: Sequence[int] = ()):
        """Compile; nothing is sampled yet. `prose` are passages to work on, see `Documents`.

        The hidden states of `layers` are given with each conversation, see `forward_with_states`.

        Raises:
          ValueError: settings that this target cannot be sampled with.
        """
        self.llm = llm
        self.settings = settings
        self.layers = tuple(layers)
        self.turns = find_turns(llm)
        _check_settings(settings, self.turns, llm)
        self.documents = Documents(prose)
        target, cfg = internals(llm).target, internals(llm).target.cfg
        B, K = settings.branches, settings.top
        window = B * settings.steps
        self.shared = np.array(self.turns.prefix[:-1], np.int32)  # what every conversation begins with
        slots = len(self.turns.prefix) + window
        width = len(self.layers) * cfg.embed_dim
        self._id_type = np.uint16 if cfg.vocab_size <= 2**16 else np.int32

        def create(params, prefix):
            cache, count = init_cache(cfg, target.local_kv_heads, slots, target.kv_dtype), jnp.int32(prefix.shape[0])
            if not self.layers:
                return prefill(params, cfg, prefix, count, cache) if prefix.shape[0] else cache, None
            if not prefix.shape[0]:
                return cache, jnp.zeros((0, width), STATE_DTYPE)
            cache, states = prefill_with_states(params, cfg, prefix, count, cache, self.layers)
            assert states is not None
            return cache, states.astype(STATE_DTYPE)

        def step(params, cache: KVCache, token, index, started):
            slot, branch = jnp.arange(window, dtype=jnp.int32), jnp.arange(B, dtype=jnp.int32)
            taken_at = slot // B
            mask = (slot[None] % B == branch[:, None]) & (taken_at[None] <= index)
            mask &= taken_at[None] >= started[:, None]
            position = cache.length + index - started
            slot_position = cache.length + taken_at - started[slot % B]
            hidden, cache, states = forward_with_states(
                params, cfg, token, position, cache, mask, self.layers, None, slot_position, index * B
            )
            logits = jnp.where(target.vocab.ids() < cfg.vocab_size, vocab_logits(params, cfg, hidden), -jnp.inf)
            top, ids = target.vocab.top_k(logits, K)
            largest = target.vocab.row_max(logits)
            total = target.vocab.sum(jnp.exp(logits - largest).sum(-1, keepdims=True))
            logprob = (top - largest - jnp.log(total)).astype(jnp.float16)
            return cache, ids, logprob, None if states is None else states.astype(STATE_DTYPE)

        cache = target.cache(slots)
        row, scalar = target.array((B,), jnp.int32), target.array((), jnp.int32)
        prefix = target.array(self.shared.shape, jnp.int32)
        states, first = (target.array((n, width), STATE_DTYPE) if layers else None for n in (B, len(self.shared)))
        tops = (target.array((B, K), jnp.int32), target.array((B, K), jnp.float16), states)
        self._create = Program("sample start", create, target.plan, [target.params(), prefix], (cache, first))
        args = [target.params(), cache, row, scalar, row]
        self._step = Program("sample step", step, target.plan, args, (cache, *tops), donate=[1])

    def meta(self) -> dict[str, Any]:
        """Settings that determine the shards."""
        turns = dataclasses.asdict(self.turns)
        settings = dataclasses.asdict(self.settings)
        made_of = {"documents": self.documents.digest, "target": target_digest(self.llm)}
        if (weights := str(internals(self.llm).target.weights)) != "float32":
            made_of["weights"] = weights
        return settings | {name: list(ids) for name, ids in turns.items()} | made_of

    def shard(self, index: int, progress: Callable[[int], None] = lambda tokens: None) -> list[Conversation]:
        """Sample one shard; `progress` is told of each pass's tokens."""
        settings, llm = self.settings, self.llm
        rng = np.random.default_rng([settings.seed, index])

        def begin(step: int) -> Branch:
            return Branch(draw_opening(rng, self.documents), llm, self.turns, settings.longest, step)

        cache, first = self._create(internals(llm).params.target, self.shared)
        first = None if first is None else np.asarray(first)

        def finish(branch: Branch) -> Conversation:
            states = None if first is None else np.concatenate([first, *branch.states])
            return dataclasses.replace(branch.conversation(index), states=states)

        branches, done = [begin(0) for _ in range(settings.branches)], []
        for step in range(settings.steps):
            token = np.array([b.next_token for b in branches], np.int32)
            started = np.array([b.started for b in branches], np.int32)
            params = internals(llm).params.target
            cache, ids, logprob, states = self._step(params, cache, token, np.int32(step), started)
            ids, logprob = np.asarray(ids).astype(self._id_type), np.array(logprob)
            states = None if states is None else np.array(states)
            for i, branch in enumerate(branches):
                if states is not None:
                    branch.states.append(states[i : i + 1])
                if not branch.take(ids[i], logprob[i], rng):
                    done.append(finish(branch))
                    branches[i] = begin(step + 1)
            progress(settings.branches)
        # Those that the shard's end cut off are conversations too, as far as they came.
        return done + [finish(b) for b in branches if len(b.token) > 1]


def _check_settings(settings: SampleSettings, turns: Turns, llm: LLM) -> None:
    cfg = internals(llm).target.cfg
    # The first token of a question's turn, the template's text after it, and a token of an answer, at least.
    shortest, longest = 2 + len(turns.suffix), cfg.max_context - len(turns.prefix) + 1
    if not shortest <= settings.longest <= longest:
        raise ValueError(f"longest is {settings.longest}: must be from {shortest} to {longest} for this target")
    if not 1 <= settings.top <= cfg.vocab_size:
        raise ValueError(f"top is {settings.top}: must be from 1 to {cfg.vocab_size} for this target")


def answers_of(llm: LLM, folder: Path) -> list[str]:
    """Finished answers that are learned from, of 40 to 140 tokens, which may serve as passages."""
    learned, _ = split_held_out([c for path in sorted(folder.glob("shard-*.npz")) for c in read_shard(path)])
    found = set()
    for c in learned:
        answer = c.token[c.answer :]
        finished = len(answer) > 0 and int(answer[-1]) in llm.eos_ids
        if c.kind == "own" and c.temperature <= 0.7 and finished and 40 <= len(answer) <= 140:
            found.add(llm.tokenizer.decode(answer.tolist()).strip())
    return sorted(found)


def check_states(sampler: Sampler, folder: Path, shards: Sequence[int]) -> None:
    """Raise `ValueError` where the folder's shards are there and the states that are asked for are not."""
    if not sampler.layers:
        return
    kept = _open_states(sampler, folder)
    for path in (shard_path(folder, index) for index in shards):
        if path.is_file() and not all(kept.has(_text_of(sampler, c)) for c in read_shard(path)):
            raise ValueError(f"{folder}: holds {path.name} without its states; use another folder")


def _open_states(sampler: Sampler, folder: Path) -> StateFolder:
    return StateFolder(folder / STATES, states_meta(sampler.llm, sampler.layers))


def _text_of(sampler: Sampler, conversation: Conversation) -> np.ndarray:
    return np.concatenate([sampler.shared, conversation.token])


def sample_shards(sampler: Sampler, folder: Path, shards: Sequence[int], progress: Callable[[int], None]) -> None:
    """Sample the shards that are not there yet; safe to kill and to run again.

    Raises:
      ValueError: the folder holds shards made with other settings.
    """
    write_meta(folder, sampler.meta())
    kept = _open_states(sampler, folder) if sampler.layers else None
    per_shard = sampler.settings.branches * sampler.settings.steps
    for index in shards:
        path = shard_path(folder, index)
        if path.is_file():
            progress(per_shard)
        else:
            conversations = sampler.shard(index, progress)
            for c in conversations:
                if kept is not None and c.states is not None:
                    kept.add(_text_of(sampler, c), c.states)
            write_shard(path, conversations)
