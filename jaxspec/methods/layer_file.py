"""Layer sets that were found, kept in a small JSON file per model: by task, with what they reached."""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.methods.swift_search import LayerSearch
from jaxspec.models.config import ModelConfig

FORMAT = "jaxspec layer sets 1"
# What of a checkpoint's files tells it from another: of the largest ones the size and so many bytes of the end, where
# weights are.
SAMPLED_FILES, SAMPLED_BYTES = 4, 1 << 16


@dataclasses.dataclass
class LayerFile:
    """The sets of one model.

    Attributes:
      path: the file; it need not exist.
      digest: the model's; what the file holds for others is kept.
      strict: a file that cannot be read or written is an error, as where somebody named it; else a warning.
    """

    path: Path
    digest: str
    strict: bool = False

    def check(self) -> None:
        """Refuse at once what could not be written at the end.

        Raises:
          ConfigError: there is no such folder, or the file is none of ours.
        """
        if self.strict and (self.path.is_dir() or not self.path.absolute().parent.is_dir()):
            raise ConfigError(f"layer sets {self.path} cannot be written: it must be a file in a folder that exists")
        self.read()

    def read(self) -> dict[str, Any]:
        """What it holds, by model and task; nothing where there is no file.

        Raises:
          ConfigError: it cannot be read or is none of ours.
        """
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(saved, dict) or saved.get("format") != FORMAT or not isinstance(saved["models"], dict):
                raise ValueError(f"it is not of format {FORMAT!r}")
            if not all(isinstance(tasks, dict) for tasks in saved["models"].values()):
                raise ValueError("a model has no table of tasks")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError) as error:
            return self._refuse(f"layer sets {self.path} cannot be read: {error}", error)
        return saved["models"]

    def load(self, task: str, search: LayerSearch) -> None:
        """Let a search go on from what was kept for a task."""
        saved = self.read().get(self.digest, {}).get(task)
        if saved is None:
            return
        try:
            search.load(saved)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._refuse(f"layer sets {self.path}, task {task!r}: {error}", error)

    def save(self, task: str, search: LayerSearch) -> None:
        """Keep what a search found, unless more is known already."""
        if not search.steps:
            return
        models = self.read()
        tasks = models.setdefault(self.digest, {})
        known = tasks.get(task)
        found = search.save()
        if known is not None and known.get("settings") == found["settings"] and known["steps"] >= search.steps:
            return
        tasks[task] = found
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Whole or not at all: another process may read it now.
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "models": models}, file)
            os.replace(name, self.path)
        except OSError as error:
            self._refuse(f"layer sets {self.path} cannot be written: {error.strerror}", error)

    def _refuse(self, problem: str, error: Exception) -> dict[str, Any]:
        if self.strict:
            raise ConfigError(problem) from error
        logging.getLogger(__name__).warning("%s; what was found before is not used", problem)
        return {}


def model_digest(path: Path, cfg: ModelConfig) -> str:
    """A name for a checkpoint's content, wherever it lies: from its geometry and a sample of its files."""
    digest = hashlib.sha256(repr(cfg).encode())
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    sized = sorted(((file.stat().st_size, file) for file in files), key=lambda entry: -entry[0])
    samples = []
    for size, file in sized[:SAMPLED_FILES]:
        with file.open("rb") as content:
            content.seek(max(0, size - SAMPLED_BYTES))
            samples.append(size.to_bytes(8) + content.read())
    for sample in sorted(samples):
        digest.update(sample)
    return digest.hexdigest()[:32]
