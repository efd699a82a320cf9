"""Layer sets that were found, kept in a small JSON file: by model, task and skip ratio, with what they reached."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.methods.swift.search import LayerSearch
from jaxspec.models.config import ModelConfig

FORMAT = "jaxspec layer sets 3"
# What of a checkpoint's files tells it from another: of the largest ones the size and so many bytes of the end, where
# weights are.
SAMPLED_FILES, SAMPLED_BYTES = 4, 1 << 16


@dataclasses.dataclass
class LayerStore:
    """The sets of one model.

    Attributes:
      path: the file; it need not exist.
      digest: the model's; what the file holds for others is kept.
      model: its name, for people.
      strict: a file that cannot be used is an error, as where somebody named it; else a warning.
    """

    path: Path
    digest: str
    model: str = ""
    strict: bool = False

    def check(self) -> None:
        """Refuse at once what could not be read now, or neither read nor written; what can only be read may be used.

        Raises:
          ConfigError: `strict`, and there is no such folder, the file is none of ours, or it is of other models only.
        """
        writable = os.access(self.path.absolute().parent, os.W_OK) or self.path.is_file()
        if self.strict and (self.path.is_dir() or not writable):
            raise ConfigError(
                f"layer sets {self.path} cannot be written: it must be a file in a folder that exists and is writable"
            )
        models = self.read()
        if self.strict and models and self.digest not in models:
            names = ", ".join(sorted({str(entry["model"]) for entry in models.values()}))
            raise ConfigError(
                f"layer sets {self.path} are those of another model ({names}), not of {self.model}: name another file"
            )

    def read(self) -> dict[str, Any]:
        """What it holds, by digest: a model's name, and its searches by task and ratio; nothing where there is no file.

        Raises:
          ConfigError: `strict`, and it cannot be read or is none of ours.
        """
        try:
            return _parse(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._refuse(f"layer sets {self.path} cannot be read: {error}", error)
            return {}

    def load(self, task: str, search: LayerSearch) -> None:
        """Let a search go on from what was kept for a task and its ratio.

        Raises:
          ConfigError: `strict`, and what was kept makes no sense for this model.
        """
        found = self.read().get(self.digest, {"tasks": {}})["tasks"].get(task, {}).get(_ratio_key(search))
        if found is None:
            return
        try:
            search.load(found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._refuse(f"layer sets {self.path}, task {task!r}: {error!r}", error)

    def save(self, task: str, search: LayerSearch, *, replace: bool = False) -> None:
        """Keep what a search found, unless more is known already that it is not to `replace`.

        A file that cannot be written is a warning. Of several processes that write at once, the last one's is kept.
        """
        if not search.steps and not search.decoded_s:
            return
        try:
            models = self.read()
            tasks = models.setdefault(self.digest, {"model": self.model, "tasks": {}})["tasks"]
            by_ratio, ratio, found = tasks.setdefault(task, {}), _ratio_key(search), search.save()
            if not replace and ratio in by_ratio and not _is_more(found, by_ratio[ratio]):
                return
            by_ratio[ratio] = found
            _replace(self.path.resolve(), json.dumps({"format": FORMAT, "models": models}))
        except (OSError, ConfigError) as error:
            # The text is there already: nobody is to lose it for this.
            logging.getLogger(__name__).warning("layer sets %s cannot be written: %s", self.path, error)

    def _refuse(self, problem: str, error: Exception) -> None:
        if self.strict:
            raise ConfigError(problem) from error
        logging.getLogger(__name__).warning("%s; what was found before is not used", problem)


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


def _is_more(found: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether one search went further than another; one with other settings began anew, from what the other found."""
    if found["settings"] != known.get("settings"):
        return found["steps"] >= known["steps"]
    return (found["steps"], found["decoded_s"]) > (known["steps"], known.get("decoded_s", 0.0))


def _ratio_key(search: LayerSearch) -> str:
    return f"{search.settings.ratio:g}"


def _parse(text: str) -> dict[str, Any]:
    """The models of a file's text, whose tables are all there; what a search has kept is checked where it is used.

    Raises:
      ValueError: it is none of ours.
    """
    saved = json.loads(text)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT!r}")
    models = saved.get("models")
    entries = list(models.values()) if isinstance(models, dict) else [None]
    if not all(
        isinstance(entry, dict) and isinstance(entry.get("tasks"), dict) and "model" in entry for entry in entries
    ):
        raise ValueError("a model has no name or no table of tasks")
    searches = [by_ratio for entry in entries for by_ratio in entry["tasks"].values()]  # pyright: ignore[reportOptionalSubscript]
    if not all(isinstance(by_ratio, dict) for by_ratio in searches):
        raise ValueError("a task has no table of ratios")
    found = [one for by_ratio in searches for one in by_ratio.values()]
    if not all(isinstance(one, dict) and isinstance(one.get("steps"), int) for one in found):
        raise ValueError("a search does not say how many steps it took")
    return saved["models"]


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: another process may read it now."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
