"""The shape of answers that must call a tool, or whose calls must fit the tool's schema, in the family's own form."""

import dataclasses
import json
import re

from jaxspec.config import SamplingParams, StructuredOutputs
from jaxspec.errors import ConfigError
from jaxspec.structured.grammar import read_schema, write_json
from jaxspec.structured.values import write_arguments
from jaxspec.text.families import END_THINK, FAMILIES
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.text.turn import Turn

ANY = r"(.|\n)*"
NO_BRACE = r"(\s*[^{\s](.|\n)*)?"  # text that is no call of Llama's, which needs no marker


def shape_answer(tokenizer: Tokenizer, turn: Turn, sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters under which an answer has the calls, or the shape, that the turn asks for.

    Reasoning that the prompt opened, and gpt-oss' channel for it, come before the shape.
    ConfigError: the caller asked for another shape too, or the family cannot write a tool's schema.
    """
    shape = sampling.structured_outputs
    if turn.required and shape is not None:
        raise ConfigError("structured_outputs and calls of tools are two shapes of one answer: give one of them")
    writer = _Writer(tokenizer, turn)
    if turn.required:
        return writer.after_reasoning(sampling, writer.calls())
    if shape is None:
        return writer.free(sampling) if turn.strict and turn.tools else sampling
    if not turn.thinks and turn.family != "harmony":
        return sampling
    if shape.json is None and not shape.json_object:
        raise ConfigError("structured_outputs after reasoning are JSON; switch the reasoning off for another shape")
    writer.rules["answer"] = write_json({"type": "object"} if shape.json is None else shape.json)
    opening = [writer.text("<|channel|>final<|message|>")] if turn.family == "harmony" else []
    return writer.after_reasoning(sampling, " ".join([*opening, "answer"]))


class _Writer:
    """A grammar in llguidance's Lark, for the answers of one turn."""

    def __init__(self, tokenizer: Tokenizer, turn: Turn):
        """Write no rules yet."""
        family = FAMILIES[turn.family or "hermes"]
        self.rules: dict[str, str] = {}
        self._turn, self._family = turn, family
        special = {tokenizer.token_bytes(token).decode("utf-8", "replace"): token for token in tokenizer.special_ids}
        self._special = {marker: special[marker] for marker in family.markers if marker in special}
        self._form = next(form for form in family.forms if form.sign in tokenizer.chat_template)

    def text(self, text: str) -> str:
        """A text, with its markers as the special tokens that they are; "" for none."""
        parts = re.split("(" + "|".join(map(re.escape, self._special)) + ")", text) if self._special else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def until(self, marker: str, name: str, text: str = ANY, without: tuple[str, ...] = ()) -> str:
        """Text of a regular expression and then a marker, which the text does not hold, nor those in `without`."""
        end, name = marker.strip(), name.upper()
        held = "|".join(_quote(one) for one in {end, *without} if one)
        if marker in self._special:
            self.rules[name] = f"/{text}/ & ~/{ANY}({held}){ANY}/"
            return f"{name} {self.text(marker)}"
        before, after = marker.split(end)
        more = "|".join(_quote(one) for one in {*without} - {end})
        self.rules[name] = f"/{text}{_quote(before + end)}/ & ~/{ANY}{_quote(end)}(.|\\n)+/" + (
            f" & ~/{ANY}({more}){ANY}/" if more else ""
        )
        return " ".join(filter(None, [name, self.text(after)]))

    def calls(self) -> str:
        """The calls of an answer, one at least."""
        between, call = self._form.between, self._call()
        if self._turn.parallel and between is not None:
            call = f"{call} ({self.text(between)} {call})*"
        return " ".join(filter(None, [self.text(self._form.before), call, self.text(self._form.after)]))

    def _call(self) -> str:
        """The rule of one call."""
        form, calls = self._form, []
        for index, (name, schema) in enumerate(self._turn.tools.items()):
            head, _, tail = form.call.replace("NAME", name).partition("ARGUMENTS")
            rule = f"arguments_{index}"
            if form.arguments == "json":
                self.rules[rule] = write_json(schema)
            else:
                write_arguments(self, rule, read_schema(schema), form.arguments)
            calls.append(" ".join(filter(None, [self.text(head), rule, self.text(tail)])))
        self.rules["call"] = " | ".join(calls)
        return "call"

    def free(self, sampling: SamplingParams) -> SamplingParams:
        """Text in which calls, once they begin, are complete calls of the tools."""
        opening = self._family.opening
        if self._turn.family == "harmony":
            final = self.text("<|channel|>final<|message|>")
            self.rules["FINAL"] = f"/{ANY}/"
            return self.after_reasoning(sampling, f"({self.calls()} | {final} FINAL)")
        text = NO_BRACE if self._family.bare else ANY
        lead = self.until(opening, "lead", text)
        self.rules["TAIL"] = f"/{text}/ & ~/{ANY}{_quote(opening)}{ANY}/"
        if self._family.bare:
            return self._with(sampling, f"{self.calls()} | {lead} {self.calls()} | TAIL")
        # The marker that opens a call is part of the text before it.
        form = dataclasses.replace(self._form, before=self._form.before.removeprefix(opening))
        if not self._form.before:
            form = dataclasses.replace(form, call=form.call.removeprefix(opening), between=None)
        self._form = form
        return self._with(sampling, f"({lead} {self.calls()}){'*' if self._turn.parallel else '?'} TAIL")

    def after_reasoning(self, sampling: SamplingParams, start: str) -> SamplingParams:
        """Sampling under the grammar, after reasoning that the prompt opened, or in gpt-oss' messages."""
        if self._turn.family == "harmony":
            channel, message, next_ = map(self.text, ("<|channel|>", "<|message|>", "<|start|>assistant"))
            self.rules["note"] = (
                f'{channel} ("analysis" | "commentary") {message} {self.until("<|end|>", "note_text")} {next_}'
            )
            start = f"note* {start}"
        elif self._turn.thinks:
            self.rules["thought[lazy]"] = f"/{ANY}{_quote(END_THINK)}/"
            self.rules["gap"] = r"/\n{0,2}/"
            start = f"thought gap ({start})"
        return self._with(sampling, start)

    def _with(self, sampling: SamplingParams, start: str) -> SamplingParams:
        lines = [f"start: {start}", *(f"{name}: {rule}" for name, rule in self.rules.items())]
        return dataclasses.replace(sampling, structured_outputs=StructuredOutputs(grammar="\n".join(lines)))


def _quote(text: str) -> str:
    """A text in a regular expression of a grammar."""
    return re.sub(r"[^\w\s<>=]", lambda found: "\\" + found[0], text).replace("\n", r"\n")
