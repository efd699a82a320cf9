"""Tables of tuned block sizes in `pallas_kernels/tuned/`: `tools/tune_kernels.py` writes them, configs read them.

A table is `{device kind: {bucket: {size: number}}}`. JAX names the device kind, and the config's `bucket` a call's row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Config = TypeVar("Config")

FOLDER = Path(__file__).parent / "tuned"


def load_table(path: Path, make: Callable[..., Config]) -> dict[str, dict[str, Config]]:
    """Block sizes by device kind and bucket; empty where there is no file.

    Args:
      path: file of the table.
      make: turns a row's sizes, given by keyword, into a config. It raises ValueError or TypeError for wrong ones.

    Raises:
      ValueError: the file is no such table; the message names the file and the row.
    """
    if not path.is_file():
        return {}
    where, table = str(path), {}
    try:
        for kind, rows in json.loads(path.read_text(encoding="utf-8")).items():
            table[kind] = {}
            for bucket, sizes in rows.items():
                where = f"{path}, {kind!r}, {bucket!r}"
                table[kind][bucket] = make(**sizes)
    except (AttributeError, TypeError, ValueError) as error:
        remedy = "write the table anew with tools/tune_kernels.py, or delete it"
        raise ValueError(f"tuned block sizes cannot be read: {where}: {error}; {remedy}") from error
    return table
