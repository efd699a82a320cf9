"""What a caller may ask for: sampling parameters and engine settings, validated before any compute."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxspec.errors import ConfigError
from pallas_kernels import KERNEL_NAMES

DEFAULT_MAX_TOKENS = 256  # where nothing was asked for
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

        for name, low in (("max_tokens", 1), ("top_k", -1), ("seed", 0), ("min_tokens", 0), ("n", 1)):
            value = getattr(self, name)
            if value is not None or name not in ("max_tokens", "seed"):
                assign(name, check_int(name, value, low))
        if self.seed is not None and self.seed >= 2**63:
            raise ConfigError(f"seed must be below 2**63, got {self.seed}")
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
            raise ConfigError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
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
    """

    dtype: DType = "auto"
    target_devices: int = 1
    draft_devices: int | None = None
    draft_platform: str | None = None
    max_context: int | None = None
    compile_cache: str | None = None
    kernels: str = "auto"

    def __post_init__(self):
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype {self.dtype!r} is not supported; use auto, float32 or bfloat16")
        check_int("target_devices", self.target_devices, 1)
        if self.draft_devices is not None:
            check_int("draft_devices", self.draft_devices, 1)
        if self.draft_platform is not None and (not isinstance(self.draft_platform, str) or not self.draft_platform):
            raise ConfigError(f"draft_platform must be a name such as 'cpu', got {self.draft_platform!r}")
        if self.max_context is not None:
            check_int("max_context", self.max_context, 2)
        if self.kernels not in KERNEL_NAMES:
            raise ConfigError(f"kernels {self.kernels!r} are not known; use {', '.join(KERNEL_NAMES)}")
        if self.compile_cache is not None and not isinstance(self.compile_cache, str):
            raise ConfigError(f"compile_cache must be a folder's name, got {self.compile_cache!r}")


def check_int(name: str, value: object, low: int) -> int:
    """An integer of at least `low`, numpy's become Python's; ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")
    return int(value)


def _check_float(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise ConfigError(f"{name} must lie between {low} and {high}, got {value}")
    return number


def _check_stop(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(f"stop must be one or several non-empty strings, got {stop!r}")
    return tuple(strings)


def _check_token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Sequence | np.ndarray):
        raise ConfigError(f"stop_token_ids must be a list of token ids, got {ids!r:.80}")
    return tuple(check_int("stop_token_ids", token, 0) for token in ids)


def _check_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, got {bias!r:.80}")
    checked = {}
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value) or value == math.inf:
            raise ConfigError(f"logit_bias of token {token} must be a number below +inf, got {value!r}")
        checked[check_int("logit_bias token id", token, 0)] = float(value)
    return checked
