"""Hidden states of the target for packed texts: computed for each batch, or kept on disk after the first time.

The states are what an EAGLE-3 head is fed: the residual stream that enters a few layers, before any norm, side by side.
They are bfloat16 wherever they come from, so that keeping them changes nothing.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from distil.batches import Rows
from distil.sample import target_digest
from distil.shards import read_meta, write_meta
from jaxspec import LLM
from jaxspec.models.kv_cache import init_cache
from jaxspec.models.transformer import forward_with_states
from jaxspec.runtime.program import Program

INDEX, STATES = "index.jsonl", "states.bin"


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
        self._params = llm.params
        self.made_of = {"target": target_digest(llm), "layers": list(layers)}
        if (dtype := jnp.dtype(llm.engine.target.dtype).name) != "float32":
            self.made_of["dtype"] = dtype
        target, cfg = llm.engine.target, llm.engine.target.cfg

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


class KeptStates:
    """States that are computed once for each text and then read; a folder of them serves any number of runs.

    Texts are known by their tokens. What a killed run had written is used again.
    """

    def __init__(self, source: TargetStates, folder: Path):
        """Open a folder or begin one.

        Raises:
          ValueError: it holds states of another target or of other layers, or in another dtype.
        """
        made_of, old = source.made_of, read_meta(folder)
        if old and old != made_of:
            differing = ", ".join(sorted(key for key in {*old, *made_of} if old.get(key) != made_of.get(key)))
            raise ValueError(f"{folder}: holds other states ({differing})")
        write_meta(folder, made_of)
        self._source = source
        self._index, self._states = folder / INDEX, folder / STATES
        self._places: dict[str, int] = {}
        lines = self._index.read_text().splitlines(keepends=True) if self._index.exists() else []
        # What was cut off in the middle of a line has no end of line.
        for entry in (json.loads(line) for line in lines if line.endswith("\n")):
            self._places[entry["text"]] = entry["place"]
        if lines and not lines[-1].endswith("\n"):
            self._index.write_text("".join(lines[:-1]))

    def __call__(self, rows: Rows) -> jax.Array:
        """See `StateSource`."""
        texts = list(_texts(rows))
        if any(key not in self._places for _, _, key in texts):
            self._keep(np.asarray(self._source(rows)), texts)
        states = np.zeros((*rows.token.shape, self._source.width), ml_dtypes.bfloat16)
        for row, place, key in texts:
            size = (place.stop - place.start) * self._source.width
            kept = np.fromfile(self._states, np.uint16, size, offset=self._places[key])
            states[row, place] = kept.view(ml_dtypes.bfloat16).reshape(-1, self._source.width)
        return jnp.asarray(states)

    def _keep(self, states: np.ndarray, texts: list[tuple[int, slice, str]]) -> None:
        """Append what is new; the index names states only after they are in the file."""
        with open(self._states, "ab") as file, open(self._index, "a") as index:
            for row, place, key in texts:
                if key in self._places:
                    continue
                self._places[key] = file.seek(0, 2)
                file.write(np.ascontiguousarray(states[row, place]).tobytes())
                file.flush()
                index.write(json.dumps({"text": key, "place": self._places[key]}) + "\n")
                index.flush()


def _texts(rows: Rows) -> Iterator[tuple[int, slice, str]]:
    """Row, place and name of each text."""
    for row, (token, segment) in enumerate(zip(rows.token, rows.segment, strict=True)):
        for number in range(int(segment.max()) + 1):
            places = np.flatnonzero(segment == number)
            place = slice(int(places[0]), int(places[-1]) + 1)
            yield row, place, hashlib.sha256(token[place].tobytes()).hexdigest()[:32]
