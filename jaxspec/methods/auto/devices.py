"""Measured speeds of a pair on every split of a machine's devices: what `jaxspec-tune` saves, and `auto` weighs.

A profile is one JSON file in the folder of compiled programs. It holds for one pair of checkpoints, one choice of
dtypes, activations and kernels, on the devices that were there.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxspec.errors import CheckpointError
from jaxspec.files import digest_text, read_json, write_whole
from jaxspec.methods.base import DeviceChoice, Measured

FORMAT = "jaxspec device profile 1"
# Settings of several devices have to gain so much over those of fewer: less is noise.
LEAST_GAIN = 1.02


def profile_path(
    folder: Path, model: Path, draft: Path, *, dtype: str, kernels: str, activations: str, kv_dtype: str
) -> Path:
    """The file of a pair's profile on this machine's devices, with what changes the speed of a pass; it may be new."""
    devices = [f"{device.platform} {device.device_kind}" for device in jax.devices()]
    settings = [dtype, kernels, activations, kv_dtype]
    key = json.dumps([str(model.resolve()), str(draft.resolve()), *settings, devices])
    return folder / "profiles" / f"{digest_text(key)[:32]}.json"


def save_profile(path: Path, rows: Sequence[Measured], command: str) -> None:
    """Write a profile over the one that may be there; an interrupted write leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"format": FORMAT, "command": command, "rows": [dataclasses.asdict(row) for row in rows]}
    write_whole(path, json.dumps(report, default=str) + "\n")


def load_profile(path: Path) -> list[Measured]:
    """The rows of a profile; none if there is no file, or one that cannot be used (a warning says so)."""
    if not path.is_file():
        return []
    try:
        saved = read_json(path)
        if saved.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT!r}")
        rows = [Measured(**row) for row in saved["rows"]]
        if not all(0 < row.tokens_per_s < math.inf and row.target_devices >= 1 for row in rows):
            raise ValueError("a row has no speed")
        return rows
    except (CheckpointError, ValueError, TypeError, KeyError) as error:
        logging.getLogger(__name__).warning("the device profile %s is not used: %s", path, error)
        return []


def weigh_devices(path: Path | None, devices: int) -> DeviceChoice:
    """The fastest measured placement on `devices` devices, and what it was compared with."""
    rows = [] if path is None else load_profile(path)
    rows = [row for row in rows if row.target_devices + (row.draft_devices or 0) <= devices]
    if not rows:
        why = f"no profile of this pair on these {devices} devices: jaxspec-tune --method swiftspec measures one"
        return DeviceChoice(None, {"why": why})
    beside = max((r for r in rows if r.draft_devices is not None), key=_speed, default=None)
    together = max((r for r in rows if r.draft_devices is None), key=_speed, default=None)
    best = max(filter(None, (beside, together)), key=_speed)
    if together is not None and best is beside and best.tokens_per_s < LEAST_GAIN * together.tokens_per_s:
        best = together
    other = together if best is beside else beside
    return DeviceChoice(best, {"why": f"measured: {best}", "next": None if other is None else str(other)})


def _speed(row: Measured) -> float:
    return row.tokens_per_s
