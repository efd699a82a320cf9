"""Step times of a pair on some hardware, from a TOML file; the files beside this module hold a paper's."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError, suggest

PARTS = ("title", "target", "draft", "overhead", "published")
OVERHEADS = ("message", "walk", "turn", "host")
PUBLISHED = ("split", "batch", "width", "length", "tokens_per_s")


@dataclasses.dataclass(frozen=True)
class Split:
    """Devices of each model; `draft` is None where both share the target's."""

    target: int
    draft: int | None

    def __str__(self) -> str:
        """As it is written: "6/2", or "8" for shared devices."""
        return str(self.target) if self.draft is None else f"{self.target}/{self.draft}"

    @property
    def total(self) -> int:
        """Devices of both."""
        return self.target + (self.draft or 0)


def parse_split(text: str) -> Split:
    """A split from "6/2" or "8".

    Raises:
      ConfigError: it is neither.
    """
    parts = text.strip().split("/")
    if len(parts) > 2 or not all(p.isdecimal() and int(p) for p in parts):
        raise ConfigError(f"split {text!r}: write target/draft devices, as 6/2, or 8 where both share 8")
    return Split(int(parts[0]), int(parts[1]) if len(parts) == 2 else None)


@dataclasses.dataclass(frozen=True)
class Published:
    """A published measurement with these step times; the length may be missing."""

    split: Split
    batch: int
    width: int
    tokens_per_s: float
    length: float | None


@dataclasses.dataclass(frozen=True)
class Times:
    """Times in milliseconds.

    Attributes:
      title: what was measured, where.
      target: {devices: {rows: time of a pass}}.
      draft: likewise.
      message: from one submesh to the other.
      walk: acceptance and commit, after the target's pass.
      turn: re-rooting, compaction and selection, beside the draft's passes.
      published: measured rates to set predictions beside.
      host: dispatch and reading of a round, as far as it delays the devices.
    """

    title: str
    target: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, Mapping[int, float]]
    message: float
    walk: float
    turn: float
    published: tuple[Published, ...]
    host: float = 0.0

    def splits(self) -> list[Split]:
        """Every split whose devices have times, of as many devices in all as the largest; shared ones last."""
        most = max(self.target)
        own = [Split(t, d) for t in sorted(self.target) for d in sorted(self.draft) if t + d == most]
        return own + [Split(most, None)] * (most in self.draft)

    def target_pass(self, split: Split, rows: int) -> float:
        """A target's pass."""
        return _pass("target", self.target, split.target, rows)

    def draft_pass(self, split: Split, rows: int) -> float:
        """A draft's pass."""
        return _pass("draft", self.draft, split.target if split.draft is None else split.draft, rows)


def load_times(path: Path) -> Times:
    """Read a table.

    Raises:
      ConfigError: it cannot be read, or a part is missing, unknown or no time.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    _check_names(path, data, PARTS)
    overhead = data.get("overhead", {})
    _check_names(path, overhead, OVERHEADS)
    for name in ("target", "draft"):
        if not isinstance(data.get(name), dict) or not data[name]:
            raise ConfigError(f"{path}: there are no times of the {name}")
    return Times(
        str(data.get("title", path.stem)),
        _read_passes(path, "target", data["target"]),
        _read_passes(path, "draft", data["draft"]),
        **{name: _read_time(path, name, overhead.get(name, 0.0)) for name in OVERHEADS},
        published=tuple(_read_published(path, row) for row in data.get("published", [])),
    )


def _pass(name: str, table: Mapping[int, Mapping[int, float]], devices: int, rows: int) -> float:
    if devices not in table:
        raise ConfigError(f"there are no times of the {name} on {devices} devices, only on {sorted(table)}")
    times = table[devices]
    known = sorted(times)
    if rows > known[-1]:
        raise ConfigError(f"there is no time of the {name} on {devices} devices for {rows} rows, only for {known}")
    above = next(r for r in known if r >= rows)
    below = max((r for r in known if r <= rows), default=above)
    if above == below:
        return times[above]
    share = (rows - below) / (above - below)
    return times[below] + share * (times[above] - times[below])


def _read_passes(path: Path, name: str, table: Mapping[str, Any]) -> dict[int, dict[int, float]]:
    result = {}
    for devices, times in table.items():
        if not devices.isdecimal() or not isinstance(times, dict) or not times:
            raise ConfigError(f"{path}: [{name}.{devices}] must be a table, by devices, of times by rows")
        if wrong := [rows for rows in times if not rows.isdecimal() or not int(rows)]:
            raise ConfigError(f"{path}: [{name}.{devices}]: {wrong[0]!r} is no number of rows")
        result[int(devices)] = {int(r): _read_time(path, f"{name}.{devices}.{r}", t) for r, t in times.items()}
    return result


def _read_time(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{path}: {name} must be a time in milliseconds, got {value!r}")
    return float(value)


def _read_published(path: Path, row: Mapping[str, Any]) -> Published:
    _check_names(path, row, PUBLISHED)
    if missing := [name for name in PUBLISHED if name not in row and name != "length"]:
        raise ConfigError(f"{path}: a published row has no {missing[0]}")
    split = parse_split(str(row["split"]))
    return Published(split, row["batch"], row["width"], row["tokens_per_s"], row.get("length"))


def _check_names(path: Path, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{path}: unknown name {name!r}; {suggest(name, known)}")
