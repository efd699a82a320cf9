"""Requests of a caller: sampling parameters and engine settings, validated before any compute.

This file exceeds 400 lines because each setting has its description, its option and its check here.
"""

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from jaxspec.errors import ConfigError, shown
from jaxspec.foreign import check_keywords, refuse_names, refuse_unknown
from pallas_kernels import KERNEL_NAMES

LARGEST_INT = 2**31 - 1  # what a setting may be; programs count in 32 bits
LARGEST_SEED = 2**63 - 1
MOST_TOKENS = 2**30  # of a request: more than any context holds, and sums of two fit into 32 bits
DEFAULT_MAX_TOKENS = 256  # where nothing was asked for
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of float32
MOST_IDS = 2**24  # in one list
MAX_LOGPROBS = 20  # most tokens at each place whose log-probabilities can be asked for, as in vLLM


def setting(default: Any, text: str | None = None, *flags: str) -> Any:
    """A field that the command line takes, with its help `text`; without one it has no option there.

    `flags` are further names of the option; those of a list of ids, which is repeated, replace the field's own name.
    """
    return dataclasses.field(default=default, metadata={} if text is None else {"help": text, "flags": flags})


@dataclasses.dataclass(frozen=True)
class StructuredOutputs:
    """The shape that an answer must have: exactly one of these; the names are vLLM's.

    Attributes:
      json: a JSON schema, as a dict or as text.
      json_object: True for any JSON object.
      regex: a regular expression that the whole answer matches, in the syntax of Rust's regex crate.
      choice: texts, one of which is the answer.
      grammar: a context-free grammar in llguidance's Lark syntax, which has `%json` and lazy lexemes.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self):
        given = [name for name in _SHAPES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs takes exactly one of {', '.join(_SHAPES)}; got {' and '.join(given) or 'none'}"
            )
        for name, kind in (("json", str | Mapping), ("regex", str), ("grammar", str), ("json_object", bool)):
            if not isinstance(getattr(self, name), kind | None):
                raise ConfigError(f"structured_outputs.{name} is of the wrong type: {shown(getattr(self, name))}")
        if self.choice is not None:
            texts = not isinstance(self.choice, str) and all(isinstance(one, str) and one for one in self.choice)
            if not texts or not self.choice:
                raise ConfigError(f"structured_outputs.choice must be a list of texts, got {shown(self.choice)}")
            object.__setattr__(self, "choice", tuple(self.choice))


_SHAPES = ("json", "regex", "choice", "grammar", "json_object")


@refuse_unknown(lambda: (*LLM_ARGUMENTS, *(field.name for field in dataclasses.fields(EngineConfig))))
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
      structured_outputs: the shape of the answer, a `StructuredOutputs` or a dict of its fields. It decides where the
        answer ends, so neither `ignore_eos` nor `min_tokens` goes with it.
    """

    max_tokens: int | None = setting(None, "Most tokens to generate [256].", "-n")
    temperature: float = setting(0.0, "0 is greedy [0].", "--temp")
    top_k: int = setting(0, "Keep the k most probable tokens; 0 keeps all.")
    top_p: float = setting(1.0, "Keep the most probable tokens of this mass.")
    min_p: float = setting(0.0, "Keep tokens this times as probable as the first.")
    repetition_penalty: float = setting(1.0, "Against tokens of prompt and output.")
    frequency_penalty: float = setting(0.0, "Against repetition, per occurrence.")
    presence_penalty: float = setting(0.0, "Against tokens of the output.")
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = setting(None, "Text that ends generation; repeatable.")
    seed: int | None = setting(None, "Random stream at temperature > 0: equal seeds, equal text.")
    ignore_eos: bool = setting(False, "Go on past end-of-sequence tokens.")
    logprobs: bool | int | None = setting(False, "With --json, add log-probabilities.")
    stop_token_ids: Sequence[int] | None = setting(None, "Token that ends generation; repeatable.", "--stop-token-id")
    min_tokens: int = setting(0, "No end-of-sequence or stop token before so many.")
    n: int = 1
    structured_outputs: StructuredOutputs | None = None

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
        if isinstance(self.structured_outputs, Mapping):
            refuse_names("structured_outputs", self.structured_outputs, _SHAPES)
            assign("structured_outputs", StructuredOutputs(**self.structured_outputs))
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                raise ConfigError(f"structured_outputs must be StructuredOutputs, got {shown(self.structured_outputs)}")
            if self.ignore_eos or self.min_tokens:
                name = "ignore_eos" if self.ignore_eos else "min_tokens"
                raise ConfigError(f"{name} does not go with structured_outputs, which decide where the answer ends")

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
Numerics = Literal["fast", "exact"]
KVDType = Literal["auto", "float32", "bfloat16", "float16"]


# What `LLM` takes beside its settings.
LLM_ARGUMENTS = ("model", "draft", "method", "revision", "distributed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is placed and run: the settings of `LLM` and of every command that loads a model.

    Attributes:
      dtype: "float32", "bfloat16", or "auto": bfloat16 on accelerators; on CPU float32 activations, and weights as the
        checkpoint holds them (GGUF blocks too) where the native kernels run, else float32.
      target_devices: devices that share the model (tensor parallelism); None is 1, and leaves method "auto" free to use
        all devices as `jaxspec-tune --method swiftspec` found best.
      draft_devices: devices of their own for the draft, after the target's, for method "swiftspec"; None is one if
        there is one left, else the draft shares the target's.
      draft_platform: platform of the draft's devices, if it is not the target's: "cpu" beside an accelerator.
      draft_window: most positions that the draft's attention sees; None is what its checkpoint says. Drafts are often
        trained on short texts: with a window of about that length they stay right, and quick, in long ones.
      max_context: most tokens of prompt plus output; None takes the model's own limit and grows on demand.
      compile_cache: folder of compiled programs; None is the user's cache folder, "" switches it off.
      kernels: "cpu" (native: results do not depend on the number of rows of a pass), "xla", for NVIDIA GPUs
        "pallas-triton", "mosaic" (Hopper), "jax-triton" (an extra), for TPUs "mosaic-tpu", or "auto": the fastest here.
      numerics: "exact": a token's numbers do not depend on the other rows of a pass, of up to 64, so that every method
        gives plain decoding's text on accelerators and with "xla", too. Native kernels are exact anyway. "fast" leaves
        the order of sums to XLA: texts may differ where two tokens are equally good but for rounding.
      activations: how rows are multiplied by weights that are kept in blocks (GGUF, on CPU): rounded to "int16" or
        "int8", 32 inputs of a row at a time (llama.cpp rounds to int8), or as "float32"; "auto" is int16 where native
        kernels run. Every method gives the tokens of plain decoding with the same setting.
      kv_dtype: dtype of cached keys and values: "float32", "bfloat16", "float16" (native kernels), or "auto": float16
        beside integer activations, else as `dtype`.
      session_memory: bytes, or a text such as "512M", of caches that finished conversations may keep. A prompt that
        begins as one of them did is computed only from where they part (`stats.cached_prompt_tokens`). None keeps the
        latest conversation, 0 none. Unless it is 0, drafts are also copied from the latest answers.
      expert_parallel: of a mixture of experts on several devices, each device has whole experts; else a part of each.
      offload: where the target's layers are kept: "none" is on the devices; "host" in host memory and "disk" in the
        checkpoint's files, from where each pass reads them layer by layer. Embedding, head, norms, caches and the draft
        stay on the devices. The tokens are those of "none".
      device_memory: bytes, or a text such as "6GiB", that the models, caches and buffers may take on each device with
        `offload`: as many layers stay on the devices as fit. None with no `resident_layers` streams all layers.
      resident_layers: layers that stay on the devices, in place of `device_memory`.
    """

    dtype: DType = setting("auto", "auto, float32 or bfloat16.")
    target_devices: int | None = setting(None, "Devices that share the model [1].")
    draft_devices: int | None = setting(None, "Devices of the draft model alone, for swiftspec [1 if there is one].")
    draft_platform: str | None = setting(None, "Their platform if not the target's: cpu beside an accelerator.")
    draft_window: int | None = setting(None, "Most positions that the draft's attention sees [as its checkpoint says].")
    max_context: int | None = setting(None, "Most tokens of prompt plus output [the model's limit].")
    compile_cache: str | None = setting(None, 'Folder of compiled programs; "" for none.')
    kernels: str = setting("auto", f"Kind of kernels: {', '.join(KERNEL_NAMES[:-1])} or {KERNEL_NAMES[-1]}.")
    numerics: Numerics = setting("fast", "fast, or exact: the same text with every method on accelerators, too.")
    activations: ActivationsSetting = setting(
        "auto", "Rounding of rows before weights in blocks: auto, float32, int16 or int8."
    )
    kv_dtype: KVDType = setting("auto", "Dtype of cached keys and values: auto, float32, bfloat16 or float16.")
    session_memory: int | str | None = setting(
        None, "Caches kept of finished conversations, such as 512M; 0 computes each prompt anew [the latest one's]."
    )
    expert_parallel: bool = setting(False, "Whole experts on each device, for mixtures of experts.")
    offload: Offload = setting("none", "Where the model's layers are kept: none (on the devices), host or disk.")
    device_memory: int | str | None = setting(None, "With --offload, memory to take on each device, such as 6GiB.")
    resident_layers: int | None = setting(None, "With --offload, layers that stay on the devices [what fits, or 0].")

    def __post_init__(self):
        for name, hint in get_type_hints(EngineConfig).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and (not isinstance(value, str) or value not in get_args(hint)):
                *others, last = get_args(hint)
                raise ConfigError(f"{name} {shown(value)} is not supported; use {', '.join(others)} or {last}")
        least = {"target_devices": 1, "draft_devices": 1, "draft_window": 1, "max_context": 2, "resident_layers": 0}
        for name, minimum in least.items():
            if (value := getattr(self, name)) is not None:
                check_int(name, value, minimum)
        for name, minimum in (("session_memory", 0), ("device_memory", 1)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, parse_bytes(name, value, minimum))
        if not isinstance(self.expert_parallel, bool):
            raise ConfigError(f"expert_parallel must be true or false, got {shown(self.expert_parallel)}")
        if self.draft_platform is not None and (not isinstance(self.draft_platform, str) or not self.draft_platform):
            raise ConfigError(f"draft_platform must be a name such as 'cpu', got {shown(self.draft_platform)}")
        if not isinstance(self.kernels, str) or self.kernels not in KERNEL_NAMES:
            raise ConfigError(f"kernels {shown(self.kernels)} are not known; use {', '.join(KERNEL_NAMES)}")
        if self.compile_cache is not None and not isinstance(self.compile_cache, str):
            raise ConfigError(f"compile_cache must be a folder's name, got {shown(self.compile_cache)}")
        check_path("compile_cache", self.compile_cache or "none")
        given = [name for name in ("device_memory", "resident_layers") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError("device_memory and resident_layers both say how many layers stay: give one of them")
        if given and self.offload == "none":
            raise ConfigError(f"{given[0]} is for streamed layers: give offload 'host' or 'disk' with it")


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineConfig` once more, for type checkers and editors: the keywords of `LLM`."""

    dtype: DType
    target_devices: int | None
    draft_devices: int | None
    draft_platform: str | None
    draft_window: int | None
    max_context: int | None
    compile_cache: str | None
    kernels: str
    numerics: Numerics
    activations: ActivationsSetting
    kv_dtype: KVDType
    session_memory: int | str | None
    expert_parallel: bool
    offload: Offload
    device_memory: int | str | None
    resident_layers: int | None


def read_settings(settings: EngineSettings) -> EngineConfig:
    """The settings that keywords of `LLM` give; TypeError for an unknown one, with the right name."""
    known = (*LLM_ARGUMENTS, *(field.name for field in dataclasses.fields(EngineConfig)))
    check_keywords("LLM", settings, known, [field.name for field in dataclasses.fields(SamplingParams)])
    return EngineConfig(**settings)


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


def parse_bytes(name: str, value: object, minimum: int = 1) -> int:
    """A number of bytes: an integer, or a text such as "6GiB", "512M" (1024² each) or "1.5GB"; else ConfigError."""
    if not isinstance(value, str):
        return check_int(name, value, minimum, 2**63 - 1)
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]{0,3})\s*", value)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"{name} must be a number of bytes such as 6GiB, 512M or 1.5GB, got {shown(value)}")
    return check_int(name, int(float(found[1]) * unit), minimum, 2**63 - 1)


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
    item = getattr(value, "item", None)
    return shown(value if item is None else item())


def _check_stop(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(f"stop must be one or several non-empty strings, got {shown(stop)}")
    return tuple(strings)


def _check_token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    is_array = hasattr(ids, "__array__") and getattr(ids, "ndim", 0) == 1
    if isinstance(ids, str | bytes | Mapping) or not (is_array or isinstance(ids, Sequence)):
        raise ConfigError(f"stop_token_ids must be a list of token ids, got {shown(ids)}")
    listed: Any = ids
    check_length("stop_token_ids", listed)
    return tuple(check_int("stop_token_ids", token, 0) for token in listed)


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
