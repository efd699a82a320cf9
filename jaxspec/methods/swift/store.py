"""Results of layer searches in one small JSON file: by model, task and skip ratio."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.files import write_whole
from jaxspec.methods.swift.search import LayerSearch
from jaxspec.runtime.program import warn_once

FORMAT = "jaxspec layer sets 5"
KEY = ("digest", "task", "ratio")


@dataclasses.dataclass(frozen=True)
class LayerStore:
    """The layer sets of one model. A `strict` store raises ConfigError where a file cannot be used, others warn."""

    path: Path  # it need not exist
    digest: str  # identifies the model; entries of other models stay as they are
    model: str = ""  # its name, for messages
    strict: bool = False  # the user named the file; it is not the one in the cache

    def check(self) -> None:
        """Refuse, if `strict`, a file that is not writable, is of another format, or holds other models only.

        This is before anything is loaded. A file that can only be read is accepted.
        """
        writable = os.access(self.path.absolute().parent, os.W_OK) or self.path.is_file()
        if self.strict and (self.path.is_dir() or not writable):
            raise ConfigError(
                f"layer sets {self.path} cannot be written: it must be a file in a folder that exists and is writable"
            )
        entries = self.read()
        if self.strict and entries and all(entry["digest"] != self.digest for entry in entries):
            names = ", ".join(sorted({entry["model"] for entry in entries}))
            raise ConfigError(
                f"layer sets {self.path} are those of another model ({names}), not of {self.model}: name another file"
            )

    def read(self) -> list[dict[str, Any]]:
        """The entries of the file: `KEY`, `model` and `search`; none if there is no file or it cannot be used."""
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(saved, dict) or saved.get("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT!r}")
            for entry in saved["sets"]:
                if not all(isinstance(entry[name], str) for name in (*KEY, "model")) or entry["search"]["steps"] < 0:
                    raise ValueError("an entry lacks its model, task or ratio")
            return saved["sets"]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._refuse(f"layer sets {self.path} cannot be read: {error}", error)
            return []

    def load(self, task: str, search: LayerSearch) -> None:
        """Let a search go on from what is stored for a task and its ratio."""
        for entry in self.read():
            if [entry[name] for name in KEY] == self._key(task, search) and (error := _load(search, entry)):
                self._refuse(f"layer sets {self.path}, task {task!r}: {error!r}", error)

    def save(self, task: str, search: LayerSearch, *, replace: bool = False) -> None:
        """Store a search, unless a usable one that took more steps is there already and is not to be replaced.

        A file that cannot be written is a warning. Of several processes that write at once the last one's entry stays.
        """
        if not search.steps and not search.decoded_s:
            return
        try:
            key, found, entries = self._key(task, search), search.save(), self.read()
            known = [entry for entry in entries if [entry[name] for name in KEY] == key]
            if known and known[0]["search"]["steps"] > search.steps and not replace:
                if _load(LayerSearch(search.num_layers, search.settings), known[0]) is None:
                    return
            others = [entry for entry in entries if entry not in known]
            entry = dict(zip(KEY, key, strict=True)) | {"model": self.model, "search": found}
            self.path.resolve().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self.path, json.dumps({"format": FORMAT, "sets": [*others, entry]}))
        except (OSError, ConfigError) as error:
            logging.getLogger(__name__).warning("layer sets %s cannot be written: %s", self.path, error)

    def _key(self, task: str, search: LayerSearch) -> list[str]:
        return [self.digest, task, f"{search.settings.ratio:g}"]

    def _refuse(self, problem: str, error: Exception) -> None:
        if self.strict:
            raise ConfigError(problem) from error
        warn_once(f"{problem}; what was found before is not used")


def _load(search: LayerSearch, entry: dict[str, Any]) -> Exception | None:
    """Let a search go on from an entry; returns what is wrong with it."""
    try:
        search.load(entry["search"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return error
