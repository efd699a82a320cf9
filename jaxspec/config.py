"""What a caller may ask for: sampling parameters and engine settings, validated before any compute."""

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.errors import ConfigError, shown
from pallas_kernels import KERNEL_NAMES

LARGEST_INT = 2**31 - 1  # what a setting may be; programs count in 32 bits
LARGEST_SEED = 2**63 - 1
MOST_TOKENS = 2**30  # of a request: more than any context holds, and sums of two fit into 32 bits
DEFAULT_MAX_TOKENS = 256  # where nothing was asked for
LARGEST_FLOAT = float(np.finfo(np.float32).max)
MOST_IDS = 2**24  # in one list
MAX_LOGPROBS = 20  # most tokens at each place whose log-probabilities can be asked for, as in vLLM


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop; the names are vLLM's.

    Attributes:
      max_tokens: most tokens to generate; None is 256, or what the context has room for if that is less.
      temperature: 0 is greedy; ties go to the lowest token id.
      top_k: keep the k most probable tokens (ties at the threshold kept); 0 or -1 keeps all.
      top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
      min_p: keep tokens at least min_p times as probable as the most probable one; 0 keeps all.
      repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
      frequency_penalty: subtracted once per occurrence in the output.
      presence_penalty: subtracted once if the token occurs in the output.
      logit_bias: added to logits, by token id; -inf bans a token.
      stop: text that ends generation, cut from the output together with what follows.
      stop_token_ids: tokens that end generation, as end-of-sequence tokens do; they end `token_ids` and are no text.
      min_tokens: before so many tokens, end-of-sequence tokens and `stop_token_ids` are impossible. A stop string ends
        the text at any length.
      n: number of completions of each prompt, which differ in their seeds; several need a temperature above 0.
      seed: names the random stream. Equal seeds give equal text; None takes a fresh seed, reported in the stats.
      ignore_eos: generate past end-of-sequence tokens.
      logprobs: report log-probabilities under the processed distribution: of each chosen token (True, or 0), and with
        an integer k also those of the k most probable tokens at each place.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: bool | int | None = False
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    n: int = 1

    def __post_init__(self):
        """Check types and ranges; numpy numbers become Python's, `stop` a tuple, `logit_bias` a dict, and so on."""

        def assign(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, low, high in (
            ("max_tokens", 1, MOST_TOKENS), ("top_k", -1, LARGEST_INT), ("min_tokens", 0, MOST_TOKENS),
            ("n", 1, LARGEST_INT),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None or name != "max_tokens":
                assign(name, check_int(name, value, low, high))
        if self.seed is not None:
            if isinstance(self.seed, numbers.Integral) and self.seed > LARGEST_SEED:
                raise ConfigError(f"seed must be below 2**63, got {shown(self.seed)}")
            assign("seed", check_int("seed", self.seed, 0, LARGEST_SEED))
        for name, low, high in (
            ("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, math.inf), ("frequency_penalty", -2.0, 2.0), ("presence_penalty", -2.0, 2.0),
        ):  # fmt: skip
            assign(name, _check_float(name, getattr(self, name), low, high))
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0; top_k=1 keeps only the most probable token")
        if self.repetition_penalty == 0:
            raise ConfigError("repetition_penalty must be above 0; 1 switches it off")
        assign("stop", _check_stop(self.stop))
        assign("logit_bias", _check_bias(self.logit_bias))
        assign("stop_token_ids", _check_token_ids(self.stop_token_ids))
        if self.logprobs is None:
            assign("logprobs", False)
        elif not isinstance(self.logprobs, bool):
            assign("logprobs", check_int("logprobs", self.logprobs, 0))
            if self.logprobs > MAX_LOGPROBS:
                raise ConfigError(f"logprobs must be at most {MAX_LOGPROBS}, got {self.logprobs}")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False, got {shown(self.ignore_eos)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n is {self.n} and temperature 0: all completions would be equal; raise the temperature")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the chosen tokens are reported."""
        return self.logprobs is not False

    @property
    def num_logprobs(self) -> int:
        """How many of the most probable tokens are reported at each place."""
        return 0 if isinstance(self.logprobs, bool) or self.logprobs is None else self.logprobs


DType = Literal["auto", "float32", "bfloat16"]
ActivationsSetting = Literal["auto", "float32", "int16", "int8"]
Offload = Literal["none", "host", "disk"]
KVDType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How a model is placed and run.

    Attributes:
      dtype: of weights and activations; "auto" is bfloat16 on accelerators, on CPU float32 activations and, with native
        kernels, weights as the checkpoint holds them.
      target_devices: tensor-parallel degree of the target.
      draft_devices: tensor-parallel degree of a draft on devices of its own; None is one such device if there is one,
        for methods that can use it.
      draft_platform: of these devices, where it is not the target's: "cpu" beside an accelerator.
      max_context: most tokens of prompt plus output; None takes the model's own context length.
      compile_cache: folder of compiled programs; None is the user's cache folder, "" switches the cache off.
      kernels: one of `KERNEL_NAMES`; see `pallas_kernels.selection.choose`.
      activations: what rows of the target are rounded to before they are multiplied by weights in blocks: "int8" or
        "int16" (32 inputs share a scale), "float32" (not at all), or "auto": int16 where native CPU kernels run.
      kv_dtype: of cached keys and values, those of a draft too; "auto" is float16 beside integer activations, else as
        `dtype`.
      session_memory: bytes of caches that finished conversations may keep, so that a prompt that goes on from one of
        them is computed from there; the latest one is kept whatever it takes. None keeps only that; 0 keeps none.
      expert_parallel: whether a mixture's experts lie whole on the devices; else each device has a part of every one.
      offload: where the target's layers are kept: on the devices ("none"), in host memory or on disk.
      device_memory: bytes that may be taken on each device where layers are streamed; a text such as "6GiB" becomes
        bytes.
      resident_layers: layers that stay on the devices, in place of `device_memory`.
    """

    dtype: DType = "auto"
    target_devices: int = 1
    draft_devices: int | None = None
    draft_platform: str | None = None
    max_context: int | None = None
    compile_cache: str | None = None
    kernels: str = "auto"
    activations: ActivationsSetting = "auto"
    kv_dtype: KVDType = "auto"
    session_memory: int | None = None
    expert_parallel: bool = False
    offload: Offload = "none"
    device_memory: int | str | None = None
    resident_layers: int | None = None

    def __post_init__(self):
        self._check_offload()
        for name, value, known in (
            ("dtype", self.dtype, ("auto", "float32", "bfloat16")),
            ("activations", self.activations, ("auto", "float32", "int16", "int8")),
            ("kv_dtype", self.kv_dtype, ("auto", "float32", "bfloat16", "float16")),
        ):
            if not isinstance(value, str) or value not in known:
                *others, last = known
                raise ConfigError(f"{name} {shown(value)} is not supported; use {', '.join(others)} or {last}")
        check_int("target_devices", self.target_devices, 1)
        if not isinstance(self.expert_parallel, bool):
            raise ConfigError(f"expert_parallel must be true or false, got {shown(self.expert_parallel)}")
        if self.draft_devices is not None:
            check_int("draft_devices", self.draft_devices, 1)
        if self.draft_platform is not None and (not isinstance(self.draft_platform, str) or not self.draft_platform):
            raise ConfigError(f"draft_platform must be a name such as 'cpu', got {shown(self.draft_platform)}")
        if self.max_context is not None:
            check_int("max_context", self.max_context, 2)
        if self.session_memory is not None:
            check_int("session_memory", self.session_memory, 0, 2**63 - 1)
        if not isinstance(self.kernels, str) or self.kernels not in KERNEL_NAMES:
            raise ConfigError(f"kernels {shown(self.kernels)} are not known; use {', '.join(KERNEL_NAMES)}")
        if self.compile_cache is not None and not isinstance(self.compile_cache, str):
            raise ConfigError(f"compile_cache must be a folder's name, got {shown(self.compile_cache)}")
        check_path("compile_cache", self.compile_cache or "none")

    def _check_offload(self) -> None:
        if not isinstance(self.offload, str) or self.offload not in ("none", "host", "disk"):
            raise ConfigError(f"offload {shown(self.offload)} is not supported; use none, host or disk")
        if self.device_memory is not None:
            object.__setattr__(self, "device_memory", parse_bytes("device_memory", self.device_memory))
        if self.resident_layers is not None:
            check_int("resident_layers", self.resident_layers, 0)
        given = [name for name in ("device_memory", "resident_layers") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("device_memory and resident_layers both say how many layers stay: give one of them")
        if given and self.offload == "none":
            raise ConfigError(f"{given[0]} is for streamed layers: give offload 'host' or 'disk' with it")


def check_int(name: str, value: object, low: int, high: int = LARGEST_INT) -> int:
    """An integer from `low` to `high`, numpy's become Python's; ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be an integer, got {shown(value)}")
    number = int(value)
    if number < low:
        raise ConfigError(f"{name} must be at least {low}, got {shown(number)}")
    if number > high:
        raise ConfigError(f"{name} must be at most {high}, got {shown(number)}")
    return number


_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def parse_bytes(name: str, value: object, least: int = 1) -> int:
    """A number of bytes: an integer, or a text such as "6GiB", "512M" (1024² each) or "1.5GB"; else ConfigError."""
    if not isinstance(value, str):
        return check_int(name, value, least, 2**63 - 1)
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]{0,3})\s*", value)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"{name} must be a number of bytes such as 6GiB, 512M or 1.5GB, got {shown(value)}")
    return check_int(name, int(float(found[1]) * unit), least, 2**63 - 1)


def check_length(name: str, values: Any) -> None:
    """Refuse a list that takes a minute to read, such as `range(10**9)`; ConfigError."""
    if len(values) > MOST_IDS:
        raise ConfigError(f"{name} holds {len(values)} values, more than any vocabulary or context: at most {MOST_IDS}")


def check_path(name: str, value: object) -> Path:
    """A path as a caller gives it, `~` expanded; ConfigError where it is none that a system could have."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise ConfigError(f"{name} must be a path, got {shown(value)}")
    try:
        path = Path(value)
        if "\0" in str(path):
            raise ConfigError(f"{name} must be a path, and {shown(value)} holds a NUL character")
        os.fsencode(path)
        return path.expanduser()
    except (TypeError, UnicodeEncodeError, RuntimeError) as error:  # bytes, lone surrogates, an unknown user's home
        raise ConfigError(f"{name} must be a path, got {shown(value)}: {error}") from error


def _check_float(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number, got {shown(value)}")
    number = _as_float(value)
    if not low <= number <= high:
        bounds = f"be at least {low:g}" if high == math.inf else f"lie between {low:g} and {high:g}"
        raise ConfigError(f"{name} must {bounds}, got {_plain(value)}")
    if number > LARGEST_FLOAT:
        raise ConfigError(f"{name} must be at most {LARGEST_FLOAT:.4g}, the largest float32, got {_plain(value)}")
    return number


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _plain(value: object) -> str:
    """A number as it prints, not as numpy writes its own."""
    return shown(value.item() if isinstance(value, np.generic) else value)


def _check_stop(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(f"stop must be one or several non-empty strings, got {shown(stop)}")
    return tuple(strings)


def _check_token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence | np.ndarray):
        raise ConfigError(f"stop_token_ids must be a list of token ids, got {shown(ids)}")
    check_length("stop_token_ids", ids)
    return tuple(check_int("stop_token_ids", token, 0) for token in ids)


def _check_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, got {shown(bias)}")
    checked = {}
    for token, value in bias.items():
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else _as_float(value)
        if math.isnan(number) or number == math.inf:
            raise ConfigError(f"logit_bias of token {shown(token)} must be a number below +inf, got {shown(value)}")
        if isinstance(value, numbers.Integral) and math.isinf(number) or -math.inf < number < -LARGEST_FLOAT:
            raise ConfigError(f"logit_bias of token {shown(token)} is {shown(value)}; -inf bans a token")
        checked[check_int("logit_bias token id", token, 0)] = min(number, LARGEST_FLOAT)
    return checked
