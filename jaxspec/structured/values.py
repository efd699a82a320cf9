"""Arguments of calls in forms that are not JSON: Qwen3-Coder's parameters and FunctionGemma's objects, as Lark."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from jaxspec.errors import ConfigError
from jaxspec.structured.grammar import write_json
from jaxspec.text.families import is_text

NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength"}
OF_LISTS = {"type", "items", "minItems", "maxItems"}
KEY = re.compile(r"[\w.-]+")


class Writer(Protocol):
    """A grammar under construction."""

    rules: dict[str, str]

    def text(self, text: str) -> str:
        """Lark for a text; its markers are the special tokens that they are."""
        ...

    def until(self, marker: str, name: str, text: str, without: tuple[str, ...]) -> str:
        """Lark for text of a regular expression without some texts, up to a marker."""
        ...


def write_arguments(writer: Writer, rule: str, schema: Mapping[str, Any], form: Literal["gemma", "xml"]) -> None:
    """Add the rule of a call's arguments; what stands around them all is the call's.

    ConfigError: the form cannot be held to the schema.
    """
    _Arguments(writer, rule, schema, form).write()


class _Arguments:
    def __init__(self, writer: Writer, rule: str, schema: Mapping[str, Any], form: Literal["gemma", "xml"]):
        self._writer, self._rule, self._root, self._form = writer, rule, schema, form
        self._named: dict[str, str] = {}  # rules of references

    def write(self) -> None:
        """The rule, and those that it needs."""
        self._check(self._root, OF_OBJECTS)
        if self._form == "gemma":
            self._writer.rules[self._rule] = self._members(self._root, self._rule)
            return
        members = self._list_members(self._root, self._rule, self._parameter)
        self._writer.rules[self._rule] = " ".join(text if needed else f"({text})?" for text, needed in members) or '""'

    def _list_members(
        self, schema: Mapping[str, Any], rule: str, write: Callable[[str, Any, str], str]
    ) -> list[tuple[str, bool]]:
        """Each property's rule, and whether it has to be there, in the schema's order."""
        needed = schema.get("required", ())
        properties = dict.fromkeys(needed, {}) | schema.get("properties", {})
        properties = {key: properties[key] for key in [*schema.get("properties", {}), *needed]}
        for key in properties:
            if KEY.fullmatch(key) is None:
                raise ConfigError(f"a tool's parameter {key!r} must be letters, digits, '_', '-' or '.'")
        return [
            (write(key, value, f"{rule}_{index}"), key in needed)
            for index, (key, value) in enumerate(properties.items())
        ]

    def _parameter(self, key: str, schema: Any, rule: str) -> str:
        """Qwen3-Coder's, a line of its own: texts as they are, everything else as JSON."""
        opening, closing = f"<parameter={key}>\n", "\n</parameter>\n"
        if is_text(schema):
            self._writer.rules[rule] = self._text(schema, rule, opening, closing)
        else:
            defined = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
            json_ = write_json({**defined, **schema} if isinstance(schema, Mapping) else {})
            self._writer.rules[rule] = f"{self._writer.text(opening)} {json_} {self._writer.text(closing)}"
        return rule

    def _text(self, schema: Mapping[str, Any], rule: str, opening: str, closing: str) -> str:
        """A text between two markers, which the parser finds first: it holds none of them."""
        self._check(schema, OF_TEXTS)
        write, options = self._writer.text, schema.get("enum", [schema["const"]] if "const" in schema else None)
        if options is not None:
            return " | ".join(write(f"{opening}{one}{closing}") for one in options if isinstance(one, str))
        length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        without = ("</parameter>", "</function>", "</tool_call>") if self._form == "xml" else ("<end_function_call>",)
        return f"{write(opening)} {self._writer.until(closing, f'{rule}_text', f'(.|{chr(92)}n){length}', without)}"

    def _members(self, schema: Mapping[str, Any], rule: str) -> str:
        """An object's members with commas between those that are there."""
        members, rules = self._list_members(schema, rule, self._member), self._writer.rules
        rules[f"{rule}_first_{len(members)}"] = rules[f"{rule}_rest_{len(members)}"] = '""'
        for index, (text, needed) in enumerate(members):
            rest = f"{rule}_rest_{index + 1}"
            rules[f"{rule}_rest_{index}"] = f'"," {text} {rest}' if needed else f'("," {text})? {rest}'
            skipped = "" if needed else f" | {rule}_first_{index + 1}"
            rules[f"{rule}_first_{index}"] = f"{text} {rest}{skipped}"
        return f"{rule}_first_0"

    def _member(self, key: str, schema: Any, rule: str) -> str:
        self._writer.rules[rule] = f"{json.dumps(f'{key}:')} {self._value(schema, f'{rule}_value')}"
        return rule

    def _value(self, schema: Any, rule: str) -> str:
        """FunctionGemma's value, a rule of its own."""
        schema = schema if isinstance(schema, Mapping) else {}
        rules = self._writer.rules
        if (reference := schema.get("$ref")) is not None:
            if reference not in self._named:
                self._named[reference] = rule
                target: Any = self._root
                for name in str(reference).removeprefix("#/").split("/"):
                    target = target.get(name) if isinstance(target, Mapping) else None
                if target is None:
                    raise ConfigError(f"a tool's parameters hold no {reference!r}")
                self._value(target, rule)
            return self._named[reference]
        kind = schema.get("type")
        if isinstance(kind, list):  # each type has the keywords that say something of it
            options = [{**schema, "type": one} for one in kind]
            options = [{k: v for k, v in one.items() if _belongs(k, one["type"])} for one in options]
        else:
            options = schema.get("anyOf")
            self._check(schema, {"anyOf"} if options else schema.keys())
        if options:
            rules[rule] = " | ".join(self._value(one, f"{rule}_{index}") for index, one in enumerate(options))
        elif kind == "object":
            self._check(schema, OF_OBJECTS)
            rules[rule] = f'"{{" {self._members(schema, rule)} "}}"'
        elif kind == "array":
            self._check(schema, OF_LISTS)
            least, most, item = (
                schema.get("minItems", 0),
                schema.get("maxItems"),
                self._value(schema.get("items"), f"{rule}_item"),
            )
            more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
            some = f"{item} {more}" if most != 0 else '""'
            rules[rule] = f'"[" {some} "]"' if least else f'"[" ({some})? "]"'
        elif kind in ("number", "integer", "boolean", "null"):
            rules[rule] = write_json(schema)
        else:
            rules[rule] = self._text({**schema, "type": "string"}, rule, "<escape>", "<escape>")
        return rule

    def _check(self, schema: Mapping[str, Any], known: set[str]) -> None:
        if unknown := schema.keys() - known - NOTES:
            raise ConfigError(
                f"calls of this family of models cannot be held to {min(unknown)!r} in a tool's parameters"
            )


def _belongs(name: str, kind: str) -> bool:
    """Whether a keyword says something of values of a type."""
    of = {"object": OF_OBJECTS, "array": OF_LISTS, "string": OF_TEXTS}
    return name == "type" or (name in of[kind] if kind in of else not any(name in names for names in of.values()))
