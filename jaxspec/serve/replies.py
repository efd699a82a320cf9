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
from jaxspec.text.tokenizer import Tokenizer

UNLIKELY = -9999.0  # what JSON has in place of a logarithm of zero, as in OpenAI's interface


def event_line(data: Any) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def usage_of(completion: Completion) -> dict[str, Any]:
    """Counts of tokens; an end-of-sequence token is one of them."""
    stats = completion.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_prompt_tokens},
    }


class Reply:
    """Makes the objects of one request."""

    def __init__(self, request: ApiRequest, model: str, tokenizer: Tokenizer):
        """`model` is the name that the server shows."""
        self._chat, self._tokenizer = request.chat, tokenizer
        self._wants_logprobs = "logprobs" in request.sampling
        self.id = ("chatcmpl-" if request.chat else "cmpl-") + uuid.uuid4().hex
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._offset = 0  # characters of the tokens before
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._usage: dict[str, None] = {"usage": None} if request.include_usage else {}

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The object of a finished completion."""
        logprobs = self._logprobs(completion.token_ids, completion.logprobs, completion.top_logprobs)
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": completion.finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        else:
            choice["text"] = completion.text
        return self._object([choice]) | {"usage": usage_of(completion), "timings": timings_of(completion)}

    def first(self) -> dict[str, Any] | None:
        """The chunk that opens a chat's stream; None for a text's."""
        if not self._chat:
            return None
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def part(self, event: StreamEvent) -> dict[str, Any] | None:
        """The chunk of an event; None where there is nothing to show yet."""
        logprobs = self._logprobs(event.token_ids, event.logprobs, event.top_logprobs)
        if not event.text and not (logprobs and event.token_ids) and (self._chat or event.finish_reason is None):
            return None
        if self._chat:
            return self._chunk({"content": event.text}, logprobs, None)
        return self._chunk(event.text, logprobs, event.finish_reason)

    def last(self, completion: Completion) -> dict[str, Any] | None:
        """The chunk that ends a chat's stream; a text's last part did that."""
        return self._chunk({}, None, completion.finish_reason) if self._chat else None

    def usage(self, completion: Completion) -> dict[str, Any]:
        """The chunk of `stream_options.include_usage`."""
        return self._object([], streamed=True) | {"usage": usage_of(completion)}

    def _chunk(self, piece: Any, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        choice["delta" if self._chat else "text"] = piece
        return self._object([choice], streamed=True) | self._usage

    def _object(self, choices: list[dict[str, Any]], streamed: bool = False) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self._chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

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
