"""Values, texts and bytes that programs seldom expect."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = (
    "", " ", "a", "ab", "$A", "$B", "x:9", "<s>", "\0", "\n", "a\nb", "\x1b[31m", "\ud800", "é漢😀", "\u2028", "../x",
    "%s%n", "{{", "a" * 40, "a" * 5000, "▁", "None", "nan", "1e309", "9" * 5000, "self:attention=1", "/dev/null",
)  # fmt: skip
INTEGERS = (
    0, 1, 2, 3, 5, 7, 64, -1, -2, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64,
    -(2**31), -(2**63), 10**400,
)  # fmt: skip
FLOATS = (
    0.0, 0.1, 0.5, 0.9, 1.0, 1.5, -0.1, -0.0, 2.0, 1e-9, 1e-46, 1e-300, 1e38, 3.5e38, 1e300, 1e308, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip


class Odd:
    """Its `repr` fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def wild_json(rng: random.Random, depth: int = 2) -> Any:
    """A random JSON value."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 4:
        return rng.choice(INTEGERS)
    if kind == 4:
        return rng.choice(FLOATS)
    if kind == 5:
        return rng.choice((None, True, False))
    if kind < 8:
        return [wild_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): wild_json(rng, depth - 1) for _ in range(rng.randrange(4))}


def wild_value(rng: random.Random) -> Any:
    """A random Python value, JSON's among them."""
    others = (
        Odd(), object(), b"x", (1, 2), {1: 1.0}, {1: 10**400}, {10**5000: 1}, {0: -1e308}, [1] * 5000, np.int64(3),
        np.float32(0.5), np.float64("nan"), np.array([1, 2]), np.array([[1.5]]), np.bool_(True), range(3), range(10**9),
        10**5000, Path("x"), Path("a\0b"), "a\0b", int, print, {"x"}, 1j, np.array(["a"], object), float("-inf"),
        "\udcff",
    )  # fmt: skip
    return rng.choice(others) if rng.random() < 0.4 else wild_json(rng)


def mutate_json(rng: random.Random, value: Any, times: int = 1) -> Any:
    """A copy in which parts were replaced, removed, repeated or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(times):
        places = list(_places(value))
        if not places:
            return wild_json(rng)
        holder, key = rng.choice(places)
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1:
                other, place = rng.choice(places)
                holder[key] = copy.deepcopy(other[place]) if place in _keys(other) else wild_json(rng)
            case _:
                holder[key] = wild_json(rng)
    return value


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(_keys(value)):
            yield value, key
            yield from _places(value[key])


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Bytes that were flipped, cut, repeated or inserted."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + rng.choice((1, 4, 8, 100))]
            case 2:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 100)))
            case 3:
                size = rng.choice((1, 2, 4, 8))
                data[at : at + size] = rng.choice((b"\xff", b"\x00", b"\x7f")) * size
            case _ if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
    return bytes(data)
