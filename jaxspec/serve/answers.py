"""An answer over HTTP: whole or as a stream of events, and its end where the client goes away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxspec.async_llm import Answer
from jaxspec.results import Completion, StreamEvent
from jaxspec.serve.protocol import ApiError
from jaxspec.serve.replies import Choice, Reply, event_line

STALL_SECONDS = 60.0  # that a client may leave a piece of an answer unread
OPENING_SECONDS = 1.0  # after which a stream begins with a comment: proxies close what stays silent


async def whole(answers: Sequence[Answer], http: Request) -> list[Completion]:
    """The whole answers; their jobs are cancelled where the client leaves, with an `ApiError`."""
    watch = asyncio.ensure_future(_until_gone(http.receive))
    collect = asyncio.gather(*(answer.completion() for answer in answers))
    try:
        await asyncio.wait({watch, collect}, return_when=asyncio.FIRST_COMPLETED)
        if not collect.done():
            raise ApiError(499, "the client has left")
        return collect.result()
    finally:
        for answer in answers:
            answer.job.cancel()
        watch.cancel()
        collect.cancel()


async def _merge_events(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """Events of several answers as they come, each with the number of its answer; the first error ends them all."""
    streams = [aiter(answer.events()) for answer in answers]
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, event = waiting.pop(task), task.result()
                if event.completion is None:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, event
    finally:
        for task in waiting:
            task.cancel()


async def stream_chunks(answers: Sequence[Answer], reply: Reply, choices: Sequence[Choice]) -> AsyncIterator[bytes]:
    """Chunks of all choices as they come; those that open a chat come at once."""
    opening = [chunk for choice in choices if (chunk := choice.first()) is not None]
    if opening:
        yield b"".join(map(event_line, opening))
    completions: list[Any] = [None] * len(choices)
    async for index, event in _merge_events(answers):
        choice = choices[index]
        chunks = [choice.part(event)]
        if event.completion is not None:
            completions[index] = event.completion
            chunks.append(choice.last(event.completion))
            if reply.request.include_usage and all(completions):
                chunks.append(reply.usage(completions))
        if lines := b"".join(event_line(chunk) for chunk in chunks if chunk is not None):
            yield lines


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of jobs; they are cancelled where the client leaves, or reads nothing for a while."""

    def __init__(
        self, answers: Sequence[Answer], lines: AsyncIterator[bytes], headers: Mapping[str, str] = MappingProxyType({})
    ):
        """Send `lines` as they come; an `ApiError` after the first becomes an event of its own, before [DONE]."""
        self.status_code, self.background = 200, None
        self._answers, self._lines = answers, lines
        kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self.init_headers({**kind, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # From the beginning: a client that leaves while its request waits must not keep its place.
        watch = asyncio.ensure_future(_until_gone(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait({watch, pump}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for answer in self._answers:
                answer.job.cancel()
            watch.cancel()
            pump.cancel()

    async def _pump(self, send: Send) -> None:
        async def write(message: Message) -> None:
            async with asyncio.timeout(STALL_SECONDS):
                await send(message)

        # An error before the first token has a status of its own, unless that takes long.
        first = asyncio.ensure_future(anext(self._lines))
        done, _ = await asyncio.wait({first}, timeout=OPENING_SECONDS)
        opening = first.result() if done else b": reading the prompt\n\n"
        with contextlib.suppress(TimeoutError, OSError):
            await write({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await write({"type": "http.response.body", "body": opening, "more_body": True})
            try:
                if not done:
                    await write({"type": "http.response.body", "body": await first, "more_body": True})
                async for line in self._lines:
                    await write({"type": "http.response.body", "body": line, "more_body": True})
            except ApiError as error:
                body = event_line(error.to_dict())
                await write({"type": "http.response.body", "body": body, "more_body": True})
            await write({"type": "http.response.body", "body": event_line("[DONE]")})
