"""Hidden states of the target for packed texts: computed for each batch, or kept on disk after the first time.

The states are what an EAGLE-3 head is fed: the residual stream that enters a few layers, before any norm, side by side.
They are bfloat16 wherever they come from, so that keeping them changes nothing.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec import LLM
from jaxspec.files import vocabulary_digest
from jaxspec.llm import internals
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.transformer import forward_with_states
from jaxspec.runtime.program import Program
from train.batches import Rows
from train.shards import read_meta, write_meta

INDEX, NUMBERS = "index.jsonl", "states.bin"
# Where `sample` keeps them, within the folder of the shards.
STATES = "states"
STATE_DTYPE = ml_dtypes.bfloat16


def target_digest(llm: LLM) -> str:
    """The identity of a target: its vocabulary, its geometry and a few of its weights."""
    digest = hashlib.sha256(vocabulary_digest(llm.tokenizer.token_strings()).encode())
    # No target has this field, and text that was sampled before there was one stays valid.
    digest.update(repr(internals(llm).target.cfg).replace(", features=None", "").encode())
    params = internals(llm).params.target
    for leaf in jax.tree.leaves([params["final_norm"], params["layers"][0]["attn_norm"]]):
        digest.update(np.asarray(leaf, np.float32).tobytes())
    return digest.hexdigest()


def states_meta(llm: LLM, layers: Sequence[int]) -> dict[str, Any]:
    """Settings that determine the states of a text."""
    target = internals(llm).target
    made_of = {"target": target_digest(llm), "layers": list(layers)}
    named = {"dtype": jnp.dtype(target.dtype).name, "weights": str(target.weights), "activations": target.activations}
    made_of |= {name: value for name, value in named.items() if value != "float32"}
    return made_of


class StateSource(Protocol):
    """Gives the states of packed texts."""

    def __call__(self, rows: Rows) -> jax.Array:
        """States of R rows of T tokens, bfloat16 [R, T, n * D_target]; those of padding are arbitrary but finite."""
        ...


class TargetStates:
    """Runs the target over packed texts, row by row."""

    def __init__(self, llm: LLM, layers: Sequence[int], length: int):
        """Compile for rows of `length` tokens; `layers` are those of `forward_with_states`."""
        self.layers = tuple(layers)
        self._params = internals(llm).params.target
        self.made_of = states_meta(llm, layers)
        target, cfg = internals(llm).target, internals(llm).target.cfg

        def run(params, token, position, segment):
            order = jnp.arange(length)
            seen = (segment[:, None] == segment[None, :]) & (order[:, None] >= order[None, :])
            cache = init_cache(cfg, target.local_kv_heads, length, target.kv_dtype)
            _, _, states = forward_with_states(params, cfg, token, position, cache, seen, self.layers)
            assert states is not None
            return states.astype(jnp.bfloat16)

        row = target.array((length,), jnp.int32)
        self.width = len(self.layers) * cfg.embed_dim
        out = target.array((length, self.width), jnp.bfloat16)
        self._run = Program("states", run, target.plan, [target.params(), row, row, row], out)

    def __call__(self, rows: Rows) -> jax.Array:
        """See `StateSource`."""
        texts = zip(rows.token, rows.position, rows.segment, strict=True)
        return jnp.stack([self._run(self._params, *text) for text in texts])


class StateFolder:
    """States of texts on disk. Texts are known by their tokens; what a killed process had written is used again."""

    def __init__(self, folder: Path, made_of: dict[str, Any]):
        """Open a folder or begin one; `made_of` is a `states_meta`.

        Raises:
          ValueError: it holds states of another target or of other layers, or in another dtype.
        """
        if (old := read_meta(folder)) and old != made_of:
            differing = ", ".join(sorted(key for key in {*old, *made_of} if old.get(key) != made_of.get(key)))
            raise ValueError(f"{folder}: holds other states ({differing})")
        write_meta(folder, made_of)
        self._index, self._numbers = folder / INDEX, folder / NUMBERS
        self._places: dict[str, int] = {}
        lines = self._index.read_text().splitlines(keepends=True) if self._index.exists() else []
        # What was cut off in the middle of a line has no end of line.
        for entry in (json.loads(line) for line in lines if line.endswith("\n")):
            self._places[entry["text"]] = entry["place"]
        if lines and not lines[-1].endswith("\n"):
            self._index.write_text("".join(lines[:-1]))

    def has(self, text: np.ndarray) -> bool:
        """Whether the states of a text, int32 [n], are there."""
        return _key(text) in self._places

    def add(self, text: np.ndarray, states: np.ndarray) -> None:
        """Append the states [n, W] of a text that is new; the index names them only after they are in the file."""
        key = _key(text)
        if key in self._places:
            return
        with open(self._numbers, "ab") as file, open(self._index, "a") as index:
            self._places[key] = file.seek(0, 2)
            file.write(np.ascontiguousarray(states).tobytes())
            file.flush()
            index.write(json.dumps({"text": key, "place": self._places[key]}) + "\n")

    def read(self, text: np.ndarray, width: int) -> np.ndarray:
        """States [n, `width`] of a text that is there."""
        kept = np.fromfile(self._numbers, np.uint16, len(text) * width, offset=self._places[_key(text)])
        return kept.view(STATE_DTYPE).reshape(-1, width)


class KeptStates:
    """States that are computed once for each text and then read; a folder of them serves any number of runs."""

    def __init__(self, source: TargetStates, folder: Path | None, others: Sequence[StateFolder] = ()):
        """Keep in `folder` (nothing is kept without one) what is not in one of the `others`; see `StateFolder`."""
        self._source = source
        self._kept = None if folder is None else StateFolder(folder, source.made_of)
        self._folders = [*others, *([] if self._kept is None else [self._kept])]

    def __call__(self, rows: Rows) -> jax.Array:
        """See `StateSource`."""
        found = [(row, place, self._find(text)) for row, place, text in _texts(rows)]
        states = np.zeros((*rows.token.shape, self._source.width), STATE_DTYPE)
        if any(folder is None for *_, folder in found):
            computed = np.asarray(self._source(rows))
        for row, place, folder in found:
            text = rows.token[row, place]
            if folder is not None:
                states[row, place] = folder.read(text, self._source.width)
                continue
            states[row, place] = computed[row, place]
            if self._kept is not None:
                self._kept.add(text, computed[row, place])
        return jnp.asarray(states)

    def _find(self, text: np.ndarray) -> StateFolder | None:
        return next((folder for folder in self._folders if folder.has(text)), None)


def _key(text: np.ndarray) -> str:
    return hashlib.sha256(text.astype(np.int32).tobytes()).hexdigest()[:32]


def _texts(rows: Rows) -> Iterator[tuple[int, slice, np.ndarray]]:
    """Row, place and tokens of each text."""
    for row, (token, segment) in enumerate(zip(rows.token, rows.segment, strict=True)):
        for number in range(int(segment.max()) + 1):
            places = np.flatnonzero(segment == number)
            place = slice(int(places[0]), int(places[-1]) + 1)
            yield row, place, token[place]
