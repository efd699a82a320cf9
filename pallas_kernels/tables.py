"""Tables of tuned block sizes, in pallas_kernels/tuned/: tools/tune_kernels.py writes them, each kernel's config reads.

`{device kind: {bucket: {size: number}}}`, with the kind as JAX names it and `bucket` from the config's function.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Config = TypeVar("Config")

FOLDER = Path(__file__).parent / "tuned"


def load_table(path: Path, make: Callable[..., Config]) -> dict[str, dict[str, Config]]:
    """Block sizes by device kind and bucket; none where there is no file.

    Args:
      path: of the table.
      make: a row's sizes, by keyword, into a config; raises ValueError or TypeError.

    Raises:
      ValueError: something in it makes no config.
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
