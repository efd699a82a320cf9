"""`AsyncLLM`: a model for asyncio, with many answers at a time."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from os import PathLike
from typing import Any

from jaxspec.config import SamplingParams
from jaxspec.engine import derive_seed, fresh_seed
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM
from jaxspec.prompts import Message, Prompt
from jaxspec.results import Completion, StreamEvent
from jaxspec.scheduler import Job, Observer, Outcome, Scheduler


class Answer:
    """The outcomes of a job, on the side of the event loop."""

    job: Job

    def __init__(self, loop: asyncio.AbstractEventLoop, translate: Callable[[Exception], Exception] = lambda e: e):
        """Outcomes arrive in `loop`; `translate` makes of an error what `events` raises, in the decoding thread."""
        self._loop, self._translate = loop, translate
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()

    def emit(self, outcome: Outcome) -> None:
        """Called in the decoding thread."""
        if isinstance(outcome, Exception):
            outcome = self._translate(outcome)
        # The loop is closed once its owner has left without waiting any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outcomes.put_nowait, outcome)

    async def events(self) -> AsyncGenerator[StreamEvent]:
        """Every event, the last one included; raises the error that ended the answer."""
        while True:
            outcome = await self._outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            if outcome.completion is not None:
                return

    async def completion(self) -> Completion:
        """The whole answer."""
        async for event in self.events():
            if event.completion is not None:
                return event.completion
        raise AssertionError("the last event carries the completion")


class AsyncLLM:
    """An `LLM` for asyncio: answers are decoded in a thread of its own, up to `max_active` of them in turn.

    Requests wait in the order of their arrival. Closing a stream, leaving its loop, or cancelling the task that waits
    ends the request within one round, and its buffers are free again.

    Args:
      model: an `LLM` that is loaded, or what `LLM` takes. Loading blocks the event loop: do it first, or with
        `asyncio.to_thread`.
      max_active: answers that are decoded in turn, a round each.
      **options: the keywords of `LLM`, where `model` is none.
    """

    def __init__(self, model: LLM | str | PathLike[str] | None = None, *, max_active: int = 4, **options: Any):
        """Load a model, or take a loaded one; see the class."""
        if isinstance(model, LLM) and options:
            raise ConfigError(f"{', '.join(options)}: a loaded LLM has its settings; give them to LLM")
        if isinstance(max_active, bool) or not isinstance(max_active, int) or max_active < 1:
            raise ConfigError(f"max_active must be an integer of at least 1, got {max_active!r:.40}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._scheduler = Scheduler(Observer(), max_active, 2**31)
        self._scheduler.start()

    async def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **chat: Any
    ) -> AsyncGenerator[StreamEvent]:
        """Events of one answer, as `LLM.stream` gives them, with its arguments."""
        # A long text takes a while to encode.
        events = await asyncio.to_thread(self.llm.stream, prompt, sampling_params, **chat)
        answer = Answer(asyncio.get_running_loop())
        answer.job = Job(events, answer.emit)
        self._scheduler.submit(answer.job)
        try:
            async for event in answer.events():
                yield event
        finally:
            answer.job.cancel()

    async def generate(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **chat: Any
    ) -> Completion:
        """The answer to one prompt or conversation; with `n` above 1, `Completion.outputs` has them all.

        The arguments are those of `stream`. For several prompts use `asyncio.gather`.
        """
        sampling = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams) or sampling.n == 1:
            return await self._complete(prompt, sampling, chat)
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        each = [dataclasses.replace(sampling, n=1, seed=derive_seed(seed, index)) for index in range(sampling.n)]
        async with asyncio.TaskGroup() as group:  # an error of one ends the others
            tasks = [group.create_task(self._complete(prompt, one, chat)) for one in each]
        first, *others = [task.result() for task in tasks]
        return dataclasses.replace(first, alternatives=tuple(others))

    chat = generate

    async def _complete(self, prompt: Any, sampling: SamplingParams, chat: dict[str, Any]) -> Completion:
        async with contextlib.aclosing(self.stream(prompt, sampling, **chat)) as events:
            async for event in events:
                if event.completion is not None:
                    return event.completion
        raise AssertionError("the last event carries the completion")

    async def close(self) -> None:
        """End what is under way with a `QueueError`, and take no more."""
        self._scheduler.close(0)
        await asyncio.to_thread(self._scheduler.join)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
