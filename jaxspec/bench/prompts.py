"""Benchmark prompts in Spec-Bench's form, JSON lines `{"question_id": ..., "category": ..., "turns": [...]}`.
Other keys, such as reference answers, are ignored. A small suite ships with jaxspec.
"""

import collections
import dataclasses
import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError, suggest

KEYS = ("question_id", "category", "turns")


@dataclasses.dataclass(frozen=True)
class BenchPrompt:
    """One conversation to measure."""

    question_id: str | int  # unique in its file
    category: str  # kind of task; results are reported per category
    turns: tuple[str, ...]  # the user's messages, in order; the model answers after each


def load_prompts(path: Path | None = None) -> list[BenchPrompt]:
    """Prompts of a JSON lines file (None: the suite that ships), in its order; empty lines are skipped.
    Raises `ConfigError` if the file cannot be read or holds no prompt, or a line (named) is not of the form above.
    """
    source = mini_suite() if path is None else path
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"prompt file {source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt file {source} is not UTF-8 text: {error}") from error
    prompts: list[BenchPrompt] = []
    first_line: dict[str | int, int] = {}
    # Not `splitlines`: it also splits at characters that JSON strings may hold.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        prompt = _parse_prompt(line, where)
        if prompt.question_id in first_line:
            before = first_line[prompt.question_id]
            raise ConfigError(f"{where}: question_id {prompt.question_id!r} is that of line {before} too")
        first_line[prompt.question_id] = number
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"prompt file {source} holds no prompts")
    return prompts


def select_prompts(
    prompts: Sequence[BenchPrompt], categories: Iterable[str] | None = None, max_prompts: int | None = None
) -> list[BenchPrompt]:
    """The prompts of some categories (None: all) in their original order, at most `max_prompts`.
    These are taken from the categories in turn: the first of each, the second of each, and so on. Raises `ConfigError`
    for a category that no prompt has; the nearest name is given.
    """
    known = list_categories(prompts)
    wanted = known if categories is None else list(categories)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"no prompt is of category {name!r}; {suggest(name, known)}")
    kept = [prompt for prompt in prompts if prompt.category in wanted]
    if max_prompts is None or len(kept) <= max_prompts:
        return kept
    rank = collections.Counter()
    order = []
    for index, prompt in enumerate(kept):
        order.append((rank[prompt.category], index))
        rank[prompt.category] += 1
    return [kept[index] for index in sorted(index for _, index in sorted(order)[:max_prompts])]


def list_categories(prompts: Iterable[BenchPrompt]) -> list[str]:
    """The categories of some prompts, in order of appearance."""
    return list(dict.fromkeys(prompt.category for prompt in prompts))


def mini_suite() -> Traversable:
    """The suite that ships with jaxspec: forty short prompts of six kinds, written for this project."""
    return importlib.resources.files("jaxspec_configs").joinpath("prompts", "mini.jsonl")


def _parse_prompt(line: str, where: str) -> BenchPrompt:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must hold a JSON object with {', '.join(KEYS)}, got {line.strip()!r:.60}")
    missing = [key for key in KEYS if key not in data]
    if missing:
        raise ConfigError(f"{where}: {missing[0]!r} is missing; a prompt has {', '.join(KEYS)}")
    question_id, category, turns = (data[key] for key in KEYS)
    if isinstance(question_id, bool) or not isinstance(question_id, str | int):
        raise ConfigError(f"{where}: question_id must be a string or an integer, got {question_id!r:.60}")
    if not isinstance(category, str) or not category.strip():
        raise ConfigError(f"{where}: category must be a name, got {category!r:.60}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"{where}: turns must be one or several non-empty strings, got {turns!r:.60}")
    return BenchPrompt(question_id, category, tuple(turns))
