"""`generate`: text in, text out in one call, with a model that is kept for the next one."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Unpack, overload

from jaxspec.config import EngineSettings, SamplingParams, check_path
from jaxspec.errors import ConfigError, shown
from jaxspec.llm import LLM, read_requests
from jaxspec.methods.base import Method
from jaxspec.prompts import Prompt
from jaxspec.results import Completion
from jaxspec.runtime import hosts


class LLMForRequest(LLM):
    """An `LLM` whose first request is refused before anything is compiled, if it cannot answer it."""

    def __init__(self, request: Callable[[LLM], tuple[Any, Any] | None], **options: Any):
        """Load, place and compile; `options` are those of `LLM`.

        `request` is called once the tokenizer is there: prompt and sampling parameters, or None if there are none yet.
        """
        self._request = request
        super().__init__(**options)

    def _before_compiling(self) -> None:
        # Of several processes the others would wait for this one.
        if not hosts.several() and (request := self._request(self)) is not None:
            read_requests(self, *request)


class ModelOptions(EngineSettings, total=False):
    """The keywords of `generate`: those of `LLM` in one process."""

    model: str | PathLike[str] | None
    draft: str | PathLike[str] | None
    method: str | Method
    revision: str | None


@overload
def generate(
    prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[ModelOptions]
) -> Completion: ...


@overload
def generate(
    prompt: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    **options: Unpack[ModelOptions],
) -> list[Completion]: ...  # fmt: skip


def generate(prompt: Any, sampling_params: Any = None, **options: Unpack[ModelOptions]) -> Any:
    """Complete a prompt with the default model, or `model`; a second call with the same options reuses that model.

    Args:
      prompt, sampling_params: see `LLM.generate`: one prompt gives a `Completion`, a list of prompts a list of them.
      **options: the keywords of `LLM`: model, draft, method, revision, and the fields of `EngineConfig`.
    """
    given: dict[str, Any] = {"model": None, "draft": None, "method": "auto", "revision": None, **options}
    if given["model"] is not None:
        given["model"] = check_path("model", given["model"])
    try:
        hash(key := tuple(sorted(given.items())))
    except TypeError as error:
        raise ConfigError(f"an option of generate has a value that no option takes: {shown(options)}") from error
    if key not in _loaded:
        _loaded.clear()  # before the new one comes: two models may not fit into memory
        _loaded[key] = LLMForRequest(lambda _: (prompt, sampling_params), **given)
    return _loaded[key].generate(prompt, sampling_params)


_loaded: dict[tuple[Any, ...], LLM] = {}
