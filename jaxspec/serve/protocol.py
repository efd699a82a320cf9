"""Requests of clients: JSON bodies in OpenAI's form, checked field by field; others are refused by name."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config import MAX_LOGPROBS, MOST_TOKENS, SamplingParams
from jaxspec.errors import ConfigError, one_line, suggest

COMPLETION_TOKENS = 16  # of /v1/completions where `max_tokens` is absent, as in OpenAI's interface
UNLIMITED = -1  # as `max_tokens`, in llama.cpp's interface: as much as the context holds
MAX_STOPS = 16

# Fields that change no token here: taken and left aside.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "cache_prompt", "priority", "request_id", "cache_salt", "id_slot", "n_keep", "return_progress",
    "timings_per_token", "spaces_between_special_tokens", "add_special_tokens", "min_keep",
    # Details of samplers that are off unless another field, which is refused, switches them on.
    "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "xtc_threshold", "dynatemp_exponent", "smoothing_curve", "guided_decoding_backend",
})  # fmt: skip
# Fields of `SamplingParams` that have the same name and meaning; the last five are vLLM's additions.
SAMPLING = (
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens",
)  # fmt: skip
# Fields that give an answer a shape, with what they are in `StructuredOutputs`: llama.cpp's, vLLM's older and newer
# ones, and OpenAI's.
SHAPES = {
    "json_schema": "json", "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "structured_outputs": None, "response_format": None,
}  # fmt: skip
COMMON = {
    *SAMPLING, *SHAPES, "model", "stream", "stream_options", "stop", "max_tokens", "n_predict", "logit_bias",
    "logprobs", "n",
}  # fmt: skip
CHAT_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")  # of `LLM.chat`
PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "repeat_penalty": 1}  # for none
CHAT_FIELDS = COMMON | {*CHAT_OPTIONS, "messages", "max_completion_tokens", "top_logprobs", "reasoning_effort"}
COMPLETION_FIELDS = COMMON | {"prompt", "echo"}
MOST_CHOICES = 64  # of a request
# Values of unsupported fields that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"), "skip_special_tokens": (True,), "include_reasoning": (True,),
    "modalities": (["text"],), "audio": (), "prediction": (),
    "web_search_options": (), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "best_of": (1,), "suffix": ("",), "prompt_logprobs": (), "use_beam_search": (False,),
    # Of other servers: vLLM, then llama.cpp and text-generation-webui.
    "truncate_prompt_tokens": (), "allowed_token_ids": (), "bad_words": ([],), "detokenize": (True,),
    "logits_processors": ([],), "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},), "chat_template": (), "documents": ([],), "mm_processor_kwargs": ({},), "echo": (False,),
    "guided_whitespace_pattern": (), "kv_transfer_params": (),
    "typical_p": (1,), "typical": (1,), "tfs_z": (1,), "top_a": (0,), "top_n_sigma": (-1, 0), "mirostat": (0,),
    "mirostat_mode": (0,), "dry_multiplier": (0,), "xtc_probability": (0,), "dynatemp_range": (0,),
    "smoothing_factor": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "repeat_penalty": (1,), "repeat_last_n": (-1,),
    "penalize_nl": (False,), "n_probs": (0,), "n_indent": (0,), "grammar": ("",), "samplers": ([], ""), "lora": ([],),
    "image_data": ([],), "return_tokens": (False,), "post_sampling_probs": (False,), "response_fields": ([],),
    "t_max_predict_ms": (0, -1), "t_max_prompt_ms": (0, -1),
}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = {"role", "content", "name"}  # the last, of one of several users, is left aside
# Fields of assistants' and tools' messages, which the chat template gets.
ANSWER_FIELDS = ("tool_calls", "tool_call_id", "reasoning_content", "reasoning")


class ApiError(Exception):
    """A request that is answered with an OpenAI error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        kind: str = "invalid_request_error", retry_after: int | None = None,
    ):  # fmt: skip
        """`kind` is the object's "type"; `retry_after`, in seconds, becomes the header of that name."""
        super().__init__(one_line(message))  # it may quote what a client sent, which UTF-8 need not have
        self.param = None if param is None else one_line(param)
        self.status, self.code, self.kind, self.retry_after = status, code, kind, retry_after

    def to_dict(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class ApiRequest:
    """A checked request.

    Attributes:
      prompts: texts, token ids, or the one conversation of a chat.
      options: arguments of `LLM.chat`.
      sampling: arguments of `SamplingParams`, but for `max_tokens`.
      n: choices for each prompt.
      echo: whether a choice begins with its prompt.
      shape_field: the field that gives answers a shape.
    """

    chat: bool
    prompts: list[Any]
    options: dict[str, Any]
    sampling: dict[str, Any]
    n: int
    echo: bool
    shape_field: str | None
    max_tokens: int | None
    stream: bool
    include_usage: bool

    @property
    def where(self) -> str:
        """The field of its prompts."""
        return "messages" if self.chat else "prompt"

    def params(self, room: int) -> SamplingParams:
        """Sampling parameters where the context has room for `room` tokens after the prompt."""
        wanted = self.max_tokens
        if wanted == UNLIMITED or (wanted is None and self.chat):
            wanted = room
        elif wanted is None:
            wanted = min(COMPLETION_TOKENS, room)
        try:
            return SamplingParams(**self.sampling, n=self.n, max_tokens=wanted)
        except (ConfigError, TypeError) as error:
            raise ApiError(400, str(error), param=self.named_field(str(error))) from error

    def named_field(self, message: str) -> str | None:
        """The field that an error message begins with."""
        found = re.match(r"\w*", message)
        name = found[0] if found else ""
        if name == "structured_outputs":
            return self.shape_field
        return name if name in {*self.sampling, *CHAT_OPTIONS, "max_tokens", "n"} else None


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; ApiError 400 for anything else."""
    try:
        parsed = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(parsed).__name__}")
    return parsed


def parse_request(body: Mapping[str, Any], *, chat: bool) -> ApiRequest:
    """Check the body of /v1/chat/completions (`chat`) or /v1/completions; null means absent.

    ApiError 400, with `param`, names the first field that is malformed, unknown or not supported.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in HARMLESS}
    known = CHAT_FIELDS if chat else COMPLETION_FIELDS
    _refuse_unsupported(given, known)
    sampling = {name: given[name] for name in SAMPLING if name in given}
    stop = given.get("stop", ())
    if isinstance(stop, Sequence) and not isinstance(stop, str) and len(stop) > MAX_STOPS:
        raise ApiError(400, f"stop holds {len(stop)} strings, at most {MAX_STOPS} are supported", param="stop")
    sampling["stop"] = stop
    if "logit_bias" in given:
        sampling["logit_bias"] = _bias(given["logit_bias"])
    logprobs = _chat_logprobs(given) if chat else _completion_logprobs(given)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    shape_field, shape = _shape(given)
    if shape is not None:
        sampling["structured_outputs"] = shape
    stream, streaming = _bool(given, "stream"), given.get("stream_options", {})
    if "stream_options" in given and not stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if not isinstance(streaming, Mapping) or streaming.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, "stream_options supports include_usage alone", param="stream_options")
    max_tokens = _int(given, "max_tokens", _int(given, "n_predict", None))
    max_tokens = _int(given, "max_completion_tokens", max_tokens)
    prompts = [_messages(given.get("messages"))] if chat else _prompts(given.get("prompt"))
    n, echo = _int(given, "n", 1), _bool(given, "echo")
    if not 1 <= n * len(prompts) <= MOST_CHOICES:
        raise ApiError(400, f"n is {n} and there are {len(prompts)} prompts: 1 to {MOST_CHOICES} choices", param="n")
    if echo and logprobs is not None:
        raise ApiError(400, "echo does not go with logprobs: those of a prompt are not computed", param="echo")
    options = {name: given[name] for name in CHAT_OPTIONS if name in given}
    if "reasoning_effort" in given:
        kwargs = options.get("chat_template_kwargs", {})
        if not isinstance(kwargs, Mapping):
            raise ApiError(400, "chat_template_kwargs must be an object", param="chat_template_kwargs")
        options["chat_template_kwargs"] = {"reasoning_effort": given["reasoning_effort"], **kwargs}
    request = ApiRequest(
        chat=chat,
        prompts=prompts,
        options=options,
        sampling=sampling,
        n=n,
        echo=echo,
        shape_field=shape_field,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=_bool(streaming, "include_usage"),
    )
    request.params(MOST_TOKENS)  # for its errors
    return request


def take_flag(body: dict[str, Any], name: str) -> bool:
    """Take a field of jaxspec's own out of a body; absent is false."""
    flag = _bool(body, name)
    body.pop(name, None)
    return flag


def _refuse_unsupported(given: Mapping[str, Any], known: set[str]) -> None:
    for name, value in given.items():
        if name in known:
            continue
        if name in NEUTRAL:
            unused = name == "repeat_last_n" and all(given.get(p, none) == none for p, none in PENALTIES.items())
            if value in NEUTRAL[name] or unused:
                continue
            raise ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
        raise ApiError(400, f"unknown field {name!r}; {suggest(name, sorted(known))}", param=name)


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    plain = []
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"{param} must be an object with role and content", param=param)
        role = message["role"]
        if role == "function" or message.get("function_call"):
            raise ApiError(400, f"{param}: calls of functions are not supported, those of tools are", param=param)
        if role not in ROLES:
            raise ApiError(400, f"{param}: the role is {role!r:.40}; {suggest(role, ROLES)}", param=param)
        for name, value in message.items():
            if name not in MESSAGE_FIELDS and name not in ANSWER_FIELDS and value not in (None, [], ""):
                raise ApiError(400, f"{param}: the field {name!r:.40} is not supported by this server", param=param)
        role = "system" if role == "developer" else role
        more = {name: message[name] for name in ANSWER_FIELDS if message.get(name)}
        content = message.get("content")
        if role == "assistant" and content is None and more:
            content = ""
        plain.append({"role": role, "content": _content(content, param), **more})
    return plain


def _content(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{param}.content must be a string or a list of text parts", param=f"{param}.content")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ApiError(400, f"{param}.content: parts of type {kind!r:.40} are not supported, text is", param=param)
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"{param}.content: the text of a part must be a string", param=param)
    return "".join(part["text"] for part in content)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """A string or token ids, or a list of either."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    for one in (prompts := prompt if several else [prompt]):
        ids = isinstance(one, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in one)
        if not one or not (isinstance(one, str) or ids):
            raise ApiError(400, "prompt must be a text or a list of token ids, and not empty", param="prompt")
    return prompts


def _chat_logprobs(given: Mapping[str, Any]) -> bool | int | None:
    top = _int(given, "top_logprobs", 0)
    if not _bool(given, "logprobs"):
        if top:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return _ranked(top, "top_logprobs")


def _completion_logprobs(given: Mapping[str, Any]) -> bool | int | None:
    count = _int(given, "logprobs", None)
    return None if count is None else _ranked(count, "logprobs")


def _ranked(count: int | None, name: str) -> bool | int:
    if count is None or not 0 <= count <= MAX_LOGPROBS:
        raise ApiError(400, f"{name} must lie between 0 and {MAX_LOGPROBS}, got {count}", param=name)
    return count or True


def _bias(bias: Any) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except (AttributeError, ValueError) as error:
        raise ApiError(400, "logit_bias must map token ids to numbers", param="logit_bias") from error


def _int(given: Mapping[str, Any], name: str, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, f"{name} must be an integer, got {value!r:.40}", param=name)
    return value


def _bool(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false, got {value!r:.40}", param=name)
    return bool(value)


def _shape(given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """The field that gives the answer a shape, and the arguments of `StructuredOutputs`; None without one."""
    found = [name for name in SHAPES if name in given and given[name] != {"type": "text"}]
    if not found:
        return None, None
    name, *others = found
    if others:
        raise ApiError(400, f"{name} and {others[0]} both give the answer a shape: one may", param=others[0])
    value = given[name]
    if SHAPES[name] is not None:
        return name, {SHAPES[name]: value}
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be an object, got {value!r:.40}", param=name)
    if name == "structured_outputs":
        return name, {key: one for key, one in value.items() if one is not None}
    match value:
        case {"type": "json_object"}:
            return name, {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return name, {"json": schema}
    raise ApiError(
        400, 'response_format must be {"type": "text"}, {"type": "json_object"}, or of type json_schema with a schema '
        'in json_schema.schema', param=name,
    )  # fmt: skip


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
