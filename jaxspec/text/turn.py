"""The assistant's turn in a conversation: its prompt, with the tools that it may call, and how its answer is read."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxspec.errors import ConfigError, shown, suggest
from jaxspec.text.answer_parser import AnswerParser, HarmonyParser
from jaxspec.text.families import FAMILIES, THINK, find_family
from jaxspec.text.tokenizer import Tokenizer

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
CHOICES = ("auto", "none", "required")

# For models whose template knows no tools: what Hermes and Qwen are trained on.
TOOL_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatOptions(TypedDict, total=False):
    """Keywords of `LLM.chat` and `LLM.stream` for conversations.

    Attributes:
      tools: functions that the answer may call, as OpenAI has them: {"type": "function", "function": {"name",
        "description", "parameters"}}, the last one a JSON schema.
      tool_choice: "auto" (the model decides), "none", "required" (at least one call), or the name of a tool.
      parallel_tool_calls: whether an answer may hold more than one call.
      chat_template_kwargs: variables of the model's template, such as {"enable_thinking": False}.
      tool_parser: name of the model's family, where its template does not tell: hermes, llama3, mistral, harmony,
        gemma or qwen3_coder.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any] | None
    tool_parser: str | None


@dataclasses.dataclass(frozen=True)
class Turn:
    """A checked conversation, or a prompt of text, which has token ids alone.

    Attributes:
      ids: token ids of the prompt.
      family: how the model marks its calls; None for a text.
      tools: the tools that may be called, by name, with the schemas of their arguments.
      required: whether a call has to come; `parallel`, whether several may.
      strict: whether calls have to fit their tools' schemas.
      reasons: whether answers may begin with reasoning; `thinks`: whether the prompt opened it.
      shown: special tokens that are markers of the answer's text.
    """

    ids: list[int]
    family: str | None = None
    tools: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    required: bool = False
    strict: bool = False
    parallel: bool = True
    reasons: bool = False
    thinks: bool = False
    shown: frozenset[int] = frozenset()

    def make_parser(self) -> AnswerParser:
        """What reads the answer."""
        kind = HarmonyParser if self.family == "harmony" else AnswerParser
        most = None if self.parallel else 1
        return kind(self.family or "hermes", self.tools, reasons=self.reasons, thinks=self.thinks, most_calls=most)

    def read(self, text: str) -> dict[str, Any] | None:
        """The whole answer as a message; None where the prompt was a text."""
        if self.family is None:
            return None
        parser = self.make_parser()
        parser.push(text)
        parser.finish()
        return parser.message


def open_turn(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto", parallel_tool_calls: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None, tool_parser: str | None = None,
) -> Turn:  # fmt: skip
    """Check and encode a conversation; see `ChatOptions`.

    ConfigError names the tool, message or option that is malformed, before any compute.
    """
    # Imported here: Jinja takes tens of milliseconds.
    from jaxspec.text.chat_template import check_messages

    template = tokenizer.chat_template
    if tool_parser is not None and tool_parser not in FAMILIES:
        raise ConfigError(f"tool_parser is {shown(tool_parser)}; {suggest(tool_parser, FAMILIES)}")
    if not isinstance(parallel_tool_calls, bool):
        raise ConfigError(f"parallel_tool_calls must be true or false, got {shown(parallel_tool_calls)}")
    if not isinstance(given := chat_template_kwargs or {}, Mapping):
        raise ConfigError(f"chat_template_kwargs must be an object, got {shown(chat_template_kwargs)}")
    schemas = check_tools(tools)
    chosen = _check_choice(tool_choice, schemas)
    if chosen == "none":
        tools, schemas = None, {}
    elif chosen not in CHOICES:
        schemas = {chosen: schemas[chosen]}
    family = tool_parser or find_family(template)
    plain = check_messages(messages)
    for message in plain:
        if reasoning := message.pop("reasoning", None):
            message.setdefault("reasoning_content", reasoning)
        if message.get("reasoning_content"):
            message["thinking"] = message["reasoning_content"]  # gpt-oss' name
    if "tool_calls" not in template:
        plain = _write_calls(plain)
    text = tokenizer.apply_chat_template(plain, tools=list(tools) if tools else None, arguments=given)
    if tools and text == tokenizer.apply_chat_template(plain, arguments=given):  # a template that shows no tools
        family = tool_parser or "hermes"
        prompt = TOOL_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        system = plain.pop(0)["content"] + "\n\n" if plain[0]["role"] == "system" else ""
        plain.insert(0, {"role": "system", "content": system + prompt})
        text = tokenizer.apply_chat_template(plain, arguments=given)
    reasons = THINK in template or family == "harmony"
    special = tokenizer.special_ids if schemas or family == "harmony" else ()
    return Turn(
        ids=tokenizer.encode(text, add_special_tokens=False),
        family=family,
        tools=schemas,
        required=bool(schemas) and chosen != "auto",
        strict=any(tool["function"].get("strict") for tool in tools or ()),
        parallel=parallel_tool_calls and chosen in CHOICES,
        reasons=reasons,
        thinks=reasons and text.rstrip().endswith(THINK),
        shown=frozenset(
            i for i in special if tokenizer.token_bytes(i).decode("utf-8", "replace") in FAMILIES[family].markers
        ),
    )


def check_tools(tools: object) -> dict[str, Mapping[str, Any]]:
    """The schemas of tools' arguments by name; ConfigError for a tool that is malformed or named twice."""
    if tools is None:
        return {}
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools must be a list of objects, got {shown(tools)}")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
            raise ConfigError(f"tools[{index}] must be an object of type 'function', got {shown(tool)}")
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
            raise ConfigError(f"tools[{index}] must have a function with a name, got {shown(tool)}")
        if NAME.fullmatch(name) is None:
            raise ConfigError(
                f"tools[{index}]: the name {shown(name)} must be 1 to 64 letters, digits, '_', '-' or '.'"
            )
        if name in schemas:
            raise ConfigError(f"tools[{index}]: the name {name!r} is there twice")
        schema = function.get("parameters")
        schema = {"type": "object", "properties": {}} if schema is None else schema
        if not isinstance(schema, Mapping):
            raise ConfigError(f"tools[{index}]: parameters must be a JSON schema, got {shown(schema)}")
        schemas[name] = schema
    return schemas


def _check_choice(choice: object, schemas: Mapping[str, Any]) -> str:
    """One of `CHOICES`, or the name of a tool."""
    name = choice
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(f"tool_choice must be {', '.join(CHOICES)} or name a function, got {shown(choice)}")
    if name in schemas or (name in ("auto", "none") and not isinstance(choice, Mapping)):
        return name
    if name == "required" and not isinstance(choice, Mapping):
        if not schemas:
            raise ConfigError("tool_choice is 'required', and no tools are given")
        return name
    raise ConfigError(f"tool_choice names {shown(name)}, which is no tool; {suggest(name, [*CHOICES, *schemas])}")


def _write_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with calls and results as text, for templates that know neither."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            objects = [{"name": c["function"]["name"], "arguments": c["function"]["arguments"]} for c in calls]
            texts = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in objects]
            message = {"role": "assistant", "content": "\n".join(filter(None, [message["content"], *texts]))}
        elif message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1].get("results"):
                written[-1]["content"] += f"\n{text}"
                continue
            message = {"role": "user", "content": text, "results": True}
        written.append(message)
    return written
