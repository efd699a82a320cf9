"""The strict reader of the values that describe a model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxspec.errors import CheckpointError, ConfigError


def all_but_every(n: int, count: int) -> tuple[bool, ...]:
    """A flag for each of `count` layers: false for every nth."""
    return tuple((index + 1) % n != 0 for index in range(count))


class ConfigValues:
    """Named values of a `config.json` or of GGUF metadata. Errors name the file, the key and the value.

    The object remembers which keys were read: a key that is left over may change the model and is refused.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = ""):
        """Take the keys that begin with `prefix`, which is cut off. `path` is for errors."""
        self.path, self.prefix = path, prefix
        self._values = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, with null too."""
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type; the default where the key is absent or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer from `minimum` to 2^31 - 1; without a default the key is required."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**31:
            self.refuse(key, f"an integer of at least {minimum} is needed", CheckpointError)
        return value

    def optional_integer(self, key: str, default: int) -> int | None:
        """A positive integer; the default where the key is absent, None where it is null."""
        return None if key in self and self.get(key) is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; without a default the key is required."""
        value = self._require(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**62:
            self.refuse(key, "a finite number is needed", CheckpointError)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; the default where the key is absent or null."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false is needed", CheckpointError)
        return value

    def layer_flags(self, key: str, count: int) -> tuple[bool, ...] | None:
        """A flag for each of `count` layers: a list of them, or n, which means all but every nth; None where absent."""
        self._read.add(key)
        value = self._values.get(key)
        if type(value) is int and value > 0:
            return all_but_every(value, count)
        if value is None or (isinstance(value, list) and len(value) == count and {*map(type, value)} <= {bool}):
            return None if value is None else tuple(value)
        self.refuse(key, f"a positive number or {count} times true or false is needed", CheckpointError)

    def listed(self, key: str, count: int) -> list[Any]:
        """The values of `count` layers: a list of so many, or one of all."""
        self._read.add(key)
        value = self._values.get(key)
        if isinstance(value, list) and len(value) != count:
            self.refuse(key, f"a value for each of {count} layers is needed", CheckpointError)
        return value if isinstance(value, list) else [value] * count

    def by_layer(self, key: str, count: int) -> list[int]:
        """Positive integers, one for each of `count` layers; a single one is that of all."""
        self._read.add(key)
        value = self._values.get(key)
        listed = [value] * count if type(value) is int else value
        if not isinstance(listed, list) or len(listed) != count or not all(type(n) is int and n > 0 for n in listed):
            self.refuse(key, f"a positive number, or {count} of them, is needed", CheckpointError)
        return listed

    def refuse(self, key: str, why: str, error: type[ValueError] = ConfigError) -> NoReturn:
        """Raise an error that names the key and its value."""
        text = repr(self._values.get(key))
        raise error(f"{self.path}: {self.prefix}{key} is {text if len(text) <= 60 else text[:60] + '...'}; {why}")

    def refuse_unread(self, is_harmless: Callable[[str, Any], bool]) -> None:
        """Refuse the first key that was not read, unless `is_harmless(key, value)` says that it changes no logit."""
        for key, value in self._values.items():
            if key not in self._read and not is_harmless(key, value):
                self.refuse(key, "this setting is not known to jaxspec and may change the model")

    def _require(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: lacks {self.prefix}{key}")
        return value
