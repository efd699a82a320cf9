"""The HTTP side: routes, limits, and from a body to an answer."""

import asyncio
import contextlib
import dataclasses
import hmac
import importlib.resources
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec import __version__
from jaxspec.async_llm import Answer
from jaxspec.config import SamplingParams
from jaxspec.engine import derive_seed, fresh_seed
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM, internals
from jaxspec.results import DecodeStats, StreamEvent
from jaxspec.scheduler import Job, QueueError, Scheduler
from jaxspec.serve.answers import EventStream, stream_chunks, whole
from jaxspec.serve.live import RoundWatcher
from jaxspec.serve.metrics import Metrics
from jaxspec.serve.protocol import CHAT_OPTIONS, ApiError, ApiRequest, parse_json, parse_request, take_flag
from jaxspec.serve.replies import Choice, Reply, event_line
from jaxspec.text.turn import Turn, open_turn

TOKENIZED = ("prompt", "messages", *CHAT_OPTIONS)  # fields of /tokenize that decide its tokens

LOG = logging.getLogger(__name__)

BODY_SECONDS = 30.0  # for a client to send its body
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HOST_HEADER = re.compile(r"(?:\[([\da-fA-F:.]+)\]|([^\s:@/\[\]]+))(?::\d*)?")  # an IPv6 address, or a name


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
      active: answers that are decoded at the same time, in turn.
      waiting: requests in the queue.
      body_bytes: size of a request's body.
      seconds: from a request's arrival to the end of its answer.
    """

    active: int = 4
    waiting: int = 64
    body_bytes: int = 2**20
    seconds: float = 600.0


class ApiServer:
    """One model served through OpenAI's interface; `app` is the ASGI application."""

    def __init__(
        self, llm: LLM, name: str, limits: Limits, api_key: str | None = None, hosts: tuple[str, ...] = LOOPBACK,
        origins: Sequence[str] = (), tool_parser: str | None = None,
    ):  # fmt: skip
        """Serve `llm` under a name. `hosts` are the hosts whose requests are answered, "*" for any.

        `origins` are web sites whose pages may ask, "*" for any. `tool_parser` is that of `ChatOptions`.
        """
        self.llm, self.name, self.limits = llm, name, limits
        self._engine = internals(llm).engine
        self.metrics = Metrics(name)
        self.scheduler = Scheduler(self.metrics, limits.active, limits.waiting)
        self._key, self._tool_parser = api_key, tool_parser
        self._plain: LLM | None = None  # plain decoding on the same weights
        self._created = int(time.time())
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/version", self._version),
            Route("/tokenize", self._answering(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._answering(self._detokenize), methods=["POST"]),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", self._answering(partial(self._answer, chat=True)), methods=["POST"]),
            Route("/v1/completions", self._answering(partial(self._answer, chat=False)), methods=["POST"]),
            Route("/v1/live", self._answering(self._live), methods=["POST"]),
        ]
        guards = [Middleware(_KnownHosts, hosts=hosts, refuse=self._error)]
        if origins:  # the outer one: a page sees errors too
            guards.insert(
                0, Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            )
        handlers: Any = {
            ApiError: self._error,
            QueueError: self._described,
            HTTPException: self._http_error,
            Exception: self._described,
        }
        self.app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers)

    def _answering(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            self._check_key(request)
            return await answer(request)

        return handle

    async def _page(self, request: Request) -> Response:
        text = importlib.resources.files("jaxspec.serve").joinpath("page.html").read_text(encoding="utf-8")
        if self._key is None:
            text = text.replace("<label>API key", "<label hidden>API key")
        return HTMLResponse(text, headers={"Content-Security-Policy": PAGE_POLICY})

    async def _health(self, request: Request) -> Response:
        self.scheduler.check_alive()
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _tokenize(self, http: Request) -> Response:
        """Token ids of a prompt, or of messages through the chat template, as vLLM has them."""
        body = await self._read_json(http)
        self._check_model(body.get("model"))
        request = parse_request({name: body[name] for name in body if name in TOKENIZED}, chat="messages" in body)
        turns = await asyncio.to_thread(self._read_prompts, request)
        if len(turns) > 1:
            raise ApiError(400, "prompt holds several prompts, and one is tokenized", param="prompt")
        ids = turns[0].ids
        return JSONResponse({"count": len(ids), "max_model_len": self._engine.max_context, "tokens": ids})

    async def _detokenize(self, http: Request) -> Response:
        body = await self._read_json(http)
        self._check_model(body.get("model"))
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
            raise ApiError(400, "tokens must be a list of token ids", param="tokens")
        return JSONResponse({"prompt": await asyncio.to_thread(self.llm.tokenizer.decode, ids, False)})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_key(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxspec",
            "max_model_len": self._engine.max_context,
        }

    async def _answer(self, http: Request, *, chat: bool) -> Response:
        body = await self._read_json(http)
        self._check_model(body.get("model"))
        request = parse_request(body, chat=chat)
        reply = Reply(request, self.name, self.llm.tokenizer)
        turns = await asyncio.to_thread(self._read_prompts, request)
        answers = await self._submit(request, turns)
        choices = [Choice(reply, index, turns[index // request.n]) for index in range(len(answers))]
        headers = {"x-request-id": reply.id}
        if request.stream:
            return EventStream(answers, stream_chunks(answers, reply, choices), headers)
        return JSONResponse(reply.whole(choices, await whole(answers, http)), headers=headers)

    async def _live(self, http: Request) -> Response:
        """An answer with everything that the page shows: what was drafted, and the tree of every round.

        With `baseline` in the body, plain decoding answers afterwards, to compare the speed and the tokens.
        """
        body = await self._read_json(http)
        self._check_model(body.get("model"))
        baseline = take_flag(body, "baseline")
        request = parse_request(body, chat="messages" in body)
        seed = request.sampling.get("seed")
        request = dataclasses.replace(
            request, n=1, sampling=request.sampling | {"seed": fresh_seed() if seed is None else seed}
        )
        watcher = RoundWatcher(self.llm.tokenizer, self._engine.models)
        turns = await asyncio.to_thread(self._read_prompts, request)
        answers = await self._submit(request, turns[:1], watcher)
        again = partial(self._submit, request, turns[:1], plain=True) if baseline else None
        return EventStream(answers, self._stream_rounds(answers, watcher, again))

    async def _stream_rounds(
        self, answers: list[Answer], watcher: RoundWatcher, again: Callable[[], Any] | None
    ) -> AsyncIterator[bytes]:
        draft = self.llm.draft_path and self.llm.draft_path.name
        yield event_line({"method": self._engine.method.name, "draft": draft})
        tokens: tuple[int, ...] = ()
        async for event in answers[0].events():
            for happened in watcher.take():
                yield event_line(happened)
            if event.completion is not None:
                tokens, stats = event.completion.token_ids, _plain_json(event.completion.stats)
                yield event_line({"done": stats | {"finish_reason": event.completion.finish_reason}})
        if again is None:
            return
        answers[:] = await again()  # what is cancelled where the client leaves
        async for event in answers[0].events():
            if event.completion is not None:
                speed, equal = event.completion.stats.tokens_per_s, event.completion.token_ids == tokens
                yield event_line({"baseline": {"tokens_per_s": speed, "equal": equal}})

    async def _submit(
        self, request: ApiRequest, turns: Sequence[Turn], watcher: RoundWatcher | None = None, *, plain: bool = False
    ) -> list[Answer]:
        """Check a request against the model and queue its choices; `plain` decodes them without drafts."""
        self.scheduler.check_room()
        arrived, stream = time.monotonic(), self._open_plain if plain else self.llm.stream
        answers = []
        try:
            for turn in turns:
                for events in await asyncio.to_thread(self._open, request, turn, stream):
                    answer = Answer(asyncio.get_running_loop(), describe_error)
                    answer.job = Job(events, answer.emit, arrived + self.limits.seconds, watcher, arrived=arrived)
                    self.scheduler.submit(answer.job)
                    answers.append(answer)
        except Exception:
            for answer in answers:
                answer.job.cancel()
            raise
        return answers

    def _open_plain(self, turn: Turn, sampling: SamplingParams) -> Generator[StreamEvent, bool | None, None]:
        """Events of plain decoding, whose programs are compiled when it is first asked for."""
        if self._plain is None:
            self._plain = self.llm if self._engine.method.name == "ar" else self.llm.with_method("ar")
        yield from self._plain.stream(turn, sampling)

    def _read_prompts(self, request: ApiRequest) -> list[Turn]:
        """Encode the prompts of a request, which takes a while where they are long; ApiError for what is wrong."""
        self.scheduler.check_room()
        with _naming_fields(request):
            if not request.chat:
                return [Turn(self.llm.encode(prompt)) for prompt in request.prompts]
            options: Any = {"tool_parser": self._tool_parser, **request.options}
            return [open_turn(self.llm.tokenizer, messages, **options) for messages in request.prompts]

    def _open(self, request: ApiRequest, turn: Turn, stream: Callable[[Turn, SamplingParams], Any]) -> list[Any]:
        """Events of each choice of a prompt."""
        context = self._engine.max_context
        room, wanted = context - len(turn.ids), request.max_tokens or 1
        if room < max(wanted, 1):
            asked = "" if wanted < 1 or request.max_tokens is None else f", and max_tokens {wanted} more"
            raise ApiError(
                400, f"the prompt has {len(turn.ids)} tokens{asked}: the model's context holds {context}",
                param=request.where if room < 1 else "max_tokens", code="context_length_exceeded",
            )  # fmt: skip
        with _naming_fields(request):
            sampling = request.params(room)
            if request.n == 1:
                return [stream(turn, sampling)]
            seed = fresh_seed() if sampling.seed is None else sampling.seed
            each = [dataclasses.replace(sampling, n=1, seed=derive_seed(seed, index)) for index in range(request.n)]
            return [stream(turn, one) for one in each]

    async def _read_json(self, request: Request) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the content type must be application/json, got {kind or 'none'!r}")
        most, body = self.limits.body_bytes, bytearray()
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from error
        except ClientDisconnect as error:
            raise ApiError(400, "the client left before its body was complete") from error
        return parse_json(bytes(body))

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key.encode()):
            raise ApiError(
                401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                kind="authentication_error", code="invalid_api_key",
            )  # fmt: skip

    def _check_model(self, name: Any) -> None:
        if name is not None and name != self.name:
            raise ApiError(
                404, f"the model {name!r:.100} does not exist here; {self.name!r} does", param="model",
                code="model_not_found", kind="not_found_error",
            )  # fmt: skip

    async def _error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.metrics.fail(error.status)
        headers = {"x-request-id": uuid.uuid4().hex}
        if error.retry_after is not None:
            headers["Retry-After"] = str(error.retry_after)
        if error.status == 504:  # the next try would take as long
            headers["x-should-retry"] = "false"
        return JSONResponse(error.to_dict(), error.status, headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        named = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        response = await self._error(request, named)
        response.headers.update(error.headers or {})  # which methods a path takes
        return response

    async def _described(self, request: Request, error: Exception) -> Response:
        return await self._error(request, describe_error(error))


class _KnownHosts:
    """Refuses requests for other hosts: a page of another site whose name was pointed here, to read what is here."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], refuse: Callable[[Request, Exception], Any]):
        self._app, self._hosts, self._refuse = app, hosts, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and "*" not in self._hosts:
            request = Request(scope)
            given = request.headers.get("host", "")
            found = HOST_HEADER.fullmatch(given)
            if found is None or (found[1] or found[2]).lower() not in self._hosts:
                app = await self._refuse(request, ApiError(400, f"the Host header {given!r:.99} is not of this server"))
        await app(scope, receive, send)


PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


@contextlib.contextmanager
def _naming_fields(request: ApiRequest) -> Iterator[None]:
    """Let errors within be `ApiError`s that name the field of the request."""
    try:
        yield
    except (ApiError, QueueError):
        raise
    except Exception as error:
        described = describe_error(error)
        if described.status == 400:
            described.param = request.named_field(str(error)) or request.where
        raise described from error


def describe_error(error: BaseException) -> ApiError:
    """The error message for a client; an exception that is not its fault is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueError):
        return QUEUE_ERRORS[error.reason](str(error))
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    LOG.error("a request failed", exc_info=error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return ApiError(503, "the server is out of memory", kind="server_error", code="out_of_memory")
    return ApiError(500, "the request failed inside the server; its log says why", kind="server_error")


QUEUE_ERRORS: dict[str, Callable[[str], ApiError]] = {
    "full": partial(ApiError, 429, kind="rate_limit_error", code="queue_full", retry_after=1),
    "timeout": partial(ApiError, 504, kind="server_error", code="timeout"),
    "closed": partial(ApiError, 503, kind="server_error", code="shutting_down"),
    "dead": partial(ApiError, 503, kind="server_error"),
}


def _plain_json(stats: DecodeStats) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(stats), default=str))
