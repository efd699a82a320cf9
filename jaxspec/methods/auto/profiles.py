"""Measurements of a machine, kept in files beside the compiled programs: times of rounds, and speeds of placements.

A file is JSON. Its name is a digest of all that the figures depend on. A damaged file counts as none.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxspec.config import MOST_TOKENS
from jaxspec.errors import CheckpointError
from jaxspec.files import digest_text, read_json, write_whole
from jaxspec.methods.base import DeviceChoice, Measured
from jaxspec.methods.core.cost_model import COPIES, KINDS, LAWS, CostModel, fill_rows
from jaxspec.methods.core.round import Models
from jaxspec.runtime import hosts
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.store import limit, program_files
from jaxspec.runtime.store.fingerprint import UnknownError, surroundings

LOG = logging.getLogger(__name__)

COSTS, LEARNED, DEVICES = "jaxspec cost profile 3", "jaxspec learned rates 3", "jaxspec device profile 1"
# Verified rows that are timed, as far as a batch has so many.
ROWS = (1, 2, 4, 8, 16, 32, 64)
# What figures of rounds lie between, in seconds and rows: others are damage, and would not be finite in 32 bits.
SHORTEST_S, LONGEST_S, LARGEST_BATCH = 1e-9, 1e6, 1024
# Settings of several devices have to gain so much over those of fewer: less is noise.
LEAST_GAIN = 1.02

T = TypeVar("T")


def measured_rows(num_rows: int) -> list[int]:
    """Verified rows that are timed for batches of `num_rows` rows."""
    return sorted({rows for rows in ROWS if rows < num_rows} | {min(num_rows, ROWS[-1])})


@dataclasses.dataclass(frozen=True)
class RoundTimes:
    """Seconds of the parts of rounds, as rounds showed them."""

    plain_s: float  # of a token of plain decoding, several per dispatch
    verify_s: Mapping[int, float]  # of a pass of the target, by rows
    round_s: float  # of a round apart from its passes
    draft_s: float  # of a draft pass of one row; 0 without a draft
    draft_overhead_s: float = 0.0  # of a draft apart from its passes

    @classmethod
    def of(cls, costs: CostModel, plain_s: float) -> "RoundTimes":
        """The times by costs in plain tokens, which take `plain_s` seconds each."""
        verify_s = {rows: plain_s * float(costs.passes[rows - 1]) for rows in measured_rows(costs.passes.size)}
        parts = (plain_s * cost for cost in (costs.round, costs.draft, costs.draft_overhead))
        return cls(plain_s, verify_s, *parts)

    def figures(self) -> dict[str, Any]:
        """The settings of `Auto` that say the same, in tokens of plain decoding."""
        one_row = self.verify_s[1]
        passes = {rows: max(1.0, 1 + (seconds - one_row) / self.plain_s) for rows, seconds in self.verify_s.items()}
        found = {"pass_cost": fill_rows(passes), "round_cost": round(self.round_s / self.plain_s, 4)}
        drafts = {"draft_cost": self.draft_s, "draft_overhead": self.draft_overhead_s}
        return found | {name: round(seconds / self.plain_s, 4) for name, seconds in drafts.items() if seconds}


def find_costs(cache: Path | None, models: Models, num_rows: int) -> Path | None:
    """The file of a pair's times for batches of `num_rows` rows; None where nothing is measured.

    That is without a cache folder, on other devices than one CPU, and where the target's layers are streamed.
    """
    placements = [placement for placement in models if placement is not None]
    fits = all(_is_simple(placement) for placement in placements)
    if cache is None or not program_files.is_used() or hosts.several() or not fits:
        return None
    try:
        words = [surroundings(), COSTS, num_rows, *map(_describe, placements)]
    except UnknownError as error:
        LOG.info("costs are not measured: %s", error)
        return None
    return cache / limit.PROFILES / f"costs-{digest_text(repr(words))[:32]}.json"


def load_costs(path: Path) -> RoundTimes | None:
    """The measured times; None where there are none, or the file is of no use."""
    return _load(path, COSTS, _read_times, LOG.info, "the cost profile %s is measured again: %s")


def save_costs(path: Path, times: RoundTimes) -> None:
    """Write the file over one that may be there; a folder that takes nothing keeps nothing."""
    _try_to_save(path, COSTS, dataclasses.asdict(times))


def load_learned(profile: Path) -> dict[str, np.ndarray] | None:
    """`AcceptanceStats.all` of an earlier process, kept beside these costs; None where it is missing or of no use."""
    return _load(_beside(profile), LEARNED, _read_learned, LOG.info, "the learned rates %s are not used: %s")


def save_learned(profile: Path, learned: Mapping[str, np.ndarray]) -> None:
    """Write `AcceptanceStats.all` over what may be there."""
    _try_to_save(_beside(profile), LEARNED, {name: counts.tolist() for name, counts in learned.items()})


def profile_path(
    folder: Path, model: Path, draft: Path, *, dtype: str, kernels: str, activations: str, kv_dtype: str,
    numerics: str = "fast",
) -> Path:  # fmt: skip
    """The file of a pair's profile on this machine's devices, with what changes the speed of a pass; it may be new."""
    devices = [f"{device.platform} {device.device_kind}" for device in jax.devices()]
    settings = [dtype, kernels, activations, kv_dtype, *[numerics] * (numerics != "fast")]
    key = json.dumps([str(model.resolve()), str(draft.resolve()), *settings, devices])
    return folder / limit.PROFILES / f"{digest_text(key)[:32]}.json"


def save_profile(path: Path, rows: Sequence[Measured], command: str) -> None:
    """Write the speeds of placements over a file that may be there."""
    _save(path, DEVICES, {"command": command, "rows": [dataclasses.asdict(row) for row in rows]})


def load_profile(path: Path) -> list[Measured]:
    """The speeds of placements; none if there is no file, or one that cannot be used (a warning says so)."""
    return _load(path, DEVICES, _read_rows, LOG.warning, "the device profile %s is not used: %s") or []


def weigh_devices(path: Path | None, devices: int) -> DeviceChoice:
    """The fastest measured placement on `devices` devices, and what it was compared with."""
    rows = [] if path is None else load_profile(path)
    rows = [row for row in rows if row.target_devices + (row.draft_devices or 0) <= devices]
    if not rows:
        why = f"no profile of this pair on these {devices} devices: jaxspec-tune --method swiftspec measures one"
        return DeviceChoice(None, why)
    beside = max((r for r in rows if r.draft_devices is not None), key=_speed, default=None)
    together = max((r for r in rows if r.draft_devices is None), key=_speed, default=None)
    best = max(filter(None, (beside, together)), key=_speed)
    if together is not None and best is beside and best.tokens_per_s < LEAST_GAIN * together.tokens_per_s:
        best = together
    other = together if best is beside else beside
    return DeviceChoice(best, f"measured: {best}", None if other is None else str(other))


def _speed(row: Measured) -> float:
    return row.tokens_per_s


def _save(path: Path, form: str, saved: Mapping[str, Any]) -> None:
    """Write a file; an interrupted write leaves the one that may be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": form, **saved}, default=str) + "\n")


def _try_to_save(path: Path, form: str, saved: Mapping[str, Any]) -> None:
    try:
        _save(path, form, saved)
    except OSError as error:
        LOG.info("%s is not kept: %s", path.name, error)


def _beside(profile: Path) -> Path:
    return profile.with_name(profile.name.replace("costs-", "rates-"))


def _load(path: Path, form: str, parse: Callable[[Any], T], complain: Callable[..., object], message: str) -> T | None:
    """A file of a format as `parse` reads it; None where there is no file, or one that is damaged."""
    if not path.is_file():
        return None
    try:
        saved = read_json(path)
        if saved.get("format") != form:
            raise ValueError(f"it is not of format {form!r}")
        with contextlib.suppress(OSError):
            os.utime(path)  # it was used
        return parse(saved)
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        complain(message, path, error)
        return None


def _read_times(saved: Any) -> RoundTimes:
    verify_s = {int(rows): float(seconds) for rows, seconds in saved["verify_s"].items()}
    plain_s, *parts = (float(saved[name]) for name in ("plain_s", "round_s", "draft_s", "draft_overhead_s"))
    rows = list(verify_s)
    if not rows or rows[0] != 1 or rows != sorted(rows) or rows[-1] > LARGEST_BATCH:
        raise ValueError("its numbers of rows are not those of rounds")
    if not all(SHORTEST_S <= seconds <= LONGEST_S for seconds in (plain_s, *verify_s.values())):
        raise ValueError("a round has no time")
    if not all(0 <= part <= LONGEST_S for part in parts):
        raise ValueError("a part of a round has no time")
    return RoundTimes(plain_s, verify_s, *parts)


def _read_learned(saved: Any) -> dict[str, np.ndarray]:
    learned = {name: np.array(saved[name], np.float64) for name in ("tried", "accepted", "asked")}
    tried, accepted, asked = learned.values()
    if not tried.shape == accepted.shape == (LAWS, KINDS) or asked.shape != (LAWS, 4):
        raise ValueError("its kinds of tokens are others")
    if not all(((each >= 0) & (each <= MOST_TOKENS)).all() for each in learned.values()):
        raise ValueError("a count is none")
    if (accepted > tried)[:, :COPIES].any() or asked[asked[:, 0] == 0].any():
        raise ValueError("more was accepted than tried")
    return {name: counts.astype(np.float32) for name, counts in learned.items()}


def _read_rows(saved: Any) -> list[Measured]:
    rows = [Measured(**row) for row in saved["rows"]]
    if not all(0 < row.tokens_per_s < math.inf and row.target_devices >= 1 for row in rows):
        raise ValueError("a row has no speed")
    return rows


def _is_simple(placement: Placement) -> bool:
    devices = placement.plan.devices
    return len(devices) == 1 and devices[0].platform == "cpu" and placement.resident_layers is None


def _describe(placement: Placement) -> str:
    shapes, tree = jax.tree.flatten(placement.params())
    leaves = [(leaf.shape, str(leaf.dtype)) for leaf in shapes]
    cache = str(placement.kv_dtype)
    return repr((placement.plan.kernels, placement.cfg, placement.activations, cache, leaves, str(tree)))
