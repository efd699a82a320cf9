"""What users give an `LLM`: prompts, conversations and sampling parameters, told apart and checked."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from jaxspec.config import SamplingParams, check_length
from jaxspec.errors import ConfigError, shown

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


def is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether a prompt is token ids; ConfigError: it has too many."""
    if not _is_list(prompt):
        return False
    check_length("the prompt", prompt)
    return all(isinstance(t, numbers.Integral) and not isinstance(t, bool) for t in prompt)


def is_batch(prompt: object) -> TypeGuard[Sequence[Prompt]]:
    """Whether these are several prompts, or none."""
    return _is_list(prompt) and (not len(prompt) or not is_ids(prompt))


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether these are messages."""
    return _is_list(prompt) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def _is_list(prompt: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)


def one_each(sampling: object, count: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt, from one for all or a list of as many."""
    if not _is_list(sampling):
        return [check_sampling(sampling)] * count
    if len(sampling) != count:
        raise ConfigError(
            f"sampling_params holds {len(sampling)} for {count} prompts: give one SamplingParams, or one for each"
        )
    return [check_sampling(one) for one in sampling]


def check_sampling(sampling: object) -> SamplingParams:
    """The parameters, or the defaults for None; ConfigError for anything else."""
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"sampling_params must be SamplingParams, got {shown(sampling)}")
    return sampling
