"""Replies to clients: OpenAI's JSON objects of completions, and of their parts as they are streamed."""

import codecs
import json
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxspec.results import Completion, StreamEvent, TopTokens
from jaxspec.serve.protocol import ApiRequest
from jaxspec.text.answer_parser import Part
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.turn import Turn

UNLIKELY = -9999.0  # what JSON has in place of a logarithm of zero, as in OpenAI's interface


def event_line(data: Any) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def usage_of(completions: Sequence[Completion], n: int) -> dict[str, Any]:
    """Counts of tokens, an end-of-sequence token included; `n` choices of a prompt count it once."""
    prompt = sum(completion.stats.prompt_tokens for completion in completions[::n])
    answers = sum(completion.stats.completion_tokens for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": sum(c.stats.cached_prompt_tokens for c in completions[::n])},
    }


class Reply:
    """Makes the objects of one request; each choice of it has a `Choice`."""

    def __init__(self, request: ApiRequest, model: str, tokenizer: Tokenizer):
        """`model` is the name that the server shows."""
        self.request, self.tokenizer = request, tokenizer
        self.id = ("chatcmpl-" if request.chat else "cmpl-") + uuid.uuid4().hex
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._usage: dict[str, None] = {"usage": None} if request.include_usage else {}

    def whole(self, choices: Sequence["Choice"], completions: Sequence[Completion]) -> dict[str, Any]:
        """The object of finished completions."""
        made = [choice.whole(completion) for choice, completion in zip(choices, completions, strict=True)]
        usage = usage_of(completions, self.request.n)
        return self._object(made) | {"usage": usage, "timings": timings_of(completions[0])}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The chunk of `stream_options.include_usage`."""
        return self._object([], streamed=True) | {"usage": usage_of(completions, self.request.n)}

    def chunk(self, index: int, piece: Any, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        """The chunk of a choice."""
        choice = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        choice["delta" if self.request.chat else "text"] = piece
        return self._object([choice], streamed=True) | self._usage

    def _object(self, choices: list[dict[str, Any]], streamed: bool = False) -> dict[str, Any]:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return self._head | {"object": kind if self.request.chat else "text_completion", "choices": choices}


class Choice:
    """One choice of a reply."""

    def __init__(self, reply: Reply, index: int, turn: Turn):
        """`turn` is its prompt, and how its answer is read."""
        self._reply, self._index = reply, index
        self._chat, self._tokenizer = reply.request.chat, reply.tokenizer
        self._wants_logprobs = "logprobs" in reply.request.sampling
        self._parser = turn.make_parser()
        self._prompt = self._tokenizer.decode(turn.ids) if reply.request.echo else ""
        self._offset = 0  # characters of the tokens before
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The choice of a finished completion."""
        logprobs = self._logprobs(completion.token_ids, completion.logprobs, completion.top_logprobs)
        choice: dict[str, Any] = {"index": self._index, "logprobs": logprobs, "finish_reason": _reason(completion)}
        if self._chat:
            assert completion.message is not None
            message = {**completion.message, "refusal": None}
            if "reasoning_content" in message:
                message["reasoning"] = message["reasoning_content"]
            choice["message"] = message
        else:
            choice["text"] = self._prompt + completion.text
        return choice

    def first(self) -> dict[str, Any] | None:
        """The chunk that opens a chat's stream; None for a text's, unless it begins with its prompt."""
        if not self._chat:
            return self._reply.chunk(self._index, self._prompt, None, None) if self._prompt else None
        return self._reply.chunk(self._index, {"role": "assistant", "content": ""}, None, None)

    def part(self, event: StreamEvent) -> dict[str, Any] | None:
        """The chunk of an event; None where there is nothing to show yet."""
        logprobs = self._logprobs(event.token_ids, event.logprobs, event.top_logprobs)
        if not self._chat:
            if not event.text and not (logprobs and event.token_ids) and event.finish_reason is None:
                return None
            return self._reply.chunk(self._index, event.text, logprobs, event.finish_reason)
        parts = self._parser.push(event.text)
        if event.finish_reason is not None:
            parts += self._parser.finish()
        delta = _delta(parts)
        if not delta and not (logprobs and event.token_ids):
            return None
        return self._reply.chunk(self._index, delta or {"content": ""}, logprobs, None)

    def last(self, completion: Completion) -> dict[str, Any] | None:
        """The chunk that ends a chat's stream; a text's last part did that."""
        return self._reply.chunk(self._index, {}, None, _reason(completion)) if self._chat else None

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None, top: Sequence[TopTokens] | None
    ) -> dict[str, Any] | None:
        if not self._wants_logprobs or logprobs is None:
            return None
        top = top or ((),) * len(tokens)
        if self._chat:
            rows = zip(tokens, logprobs, top, strict=True)
            return {"content": [self._token(t, p) | {"top_logprobs": [self._token(*k) for k in r]} for t, p, r in rows]}
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [_finite(p) for p in logprobs],
            "top_logprobs": [{self._text(t): _finite(p) for t, p in ranked} for ranked in top],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _text(self, token: int) -> str:
        """A token alone; a piece of a character as OpenAI writes it, so that two of them stay two."""
        content = self._tokenizer.token_bytes(token)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _delta(parts: Sequence[Part]) -> dict[str, Any]:
    """What parts of an answer add to a message, as OpenAI's client adds it up."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.id, "type": "function", "function": function}
        elif part.kind == "arguments":
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
        else:
            for name in ("content",) if part.kind == "content" else ("reasoning_content", "reasoning"):
                delta[name] = delta.get(name, "") + part.text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})


def _reason(completion: Completion) -> str:
    """What ended an answer; a call is a reason of its own."""
    called = completion.tool_calls and completion.finish_reason == "stop"
    return "tool_calls" if called else completion.finish_reason


def timings_of(completion: Completion) -> dict[str, Any]:
    """Times of a completion under llama.cpp's names, in milliseconds."""
    stats = completion.stats
    computed = stats.prompt_tokens - stats.cached_prompt_tokens
    timings: dict[str, Any] = {
        "cache_n": stats.cached_prompt_tokens,
        "prompt_n": computed,
        "prompt_ms": round(stats.ttft_s * 1e3, 3),
        "predicted_n": stats.completion_tokens,
        "predicted_ms": round(stats.decode_s * 1e3, 3),
        "predicted_per_second": stats.tokens_per_s,
    }
    if stats.speculative_decoding is not None:
        counters = stats.speculative_decoding
        timings |= {"draft_n": counters.num_draft_tokens, "draft_n_accepted": counters.num_accepted_draft_tokens}
    return timings


def _finite(number: float) -> float:
    return number if math.isfinite(number) else UNLIKELY
