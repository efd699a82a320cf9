"""Make the pictures of the README from real runs of the default model.

    python tools/make_pictures.py [--folder docs/pictures]

`tokens.svg` shows an answer: which tokens the draft proposed and the target accepted, which of them the target
corrected, and which it added. `round.svg` shows rounds of SwiftSpec as a timeline, draft and target on a CPU device
each. The second picture holds times: run it on an idle machine.
"""

import argparse
import collections
import dataclasses
import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.llm import internals
from jaxspec.runtime.mesh import MeshPlan
from jaxspec.runtime.trace import Launch, Read, recording
from jaxspec.trace.events import DRAFT, HOST, TARGET, TRANSFERS, Event
from jaxspec.trace.timeline import Timeline

QUESTION = "How do I reverse a string in Python?"
MAX_TOKENS = 72
DRAFT_TOKENS = 5  # of the chain in the first picture
ROUNDS = 3  # in the second picture
DEPTH = 6  # of SwiftSpec's growth there

# Every picture has a panel of its own, so that it can be read on light and dark pages.
FONT = "'DejaVu Sans Mono', ui-monospace, Menlo, Consolas, monospace"
SIZE = 14.0
ADVANCE = 0.602 * SIZE  # of a character; `textLength` holds every font to it
LINE = 27.0
MARGIN = 18.0
COLUMNS = 96
ARROW = "\u21b5"  # shows an end of line
STYLE = f"""
.panel {{ fill: #ffffff; stroke: #d0d7de }}
text {{ font-family: {FONT}; font-size: {SIZE:g}px; fill: #1f2328; white-space: pre }}
.small {{ font-size: 12px; fill: #59636e }}
.accepted {{ fill: #c5ecd0 }}
.added {{ fill: #cfe3fb }}
.corrected {{ fill: #ffdcae }}
.dropped {{ fill: #b3261e }}
.strike {{ stroke: #b3261e; stroke-width: 1.4 }}
.pass {{ stroke: #8c959f; stroke-width: 1 }}
.verify {{ fill: #a9cdf7 }}
.expand {{ fill: #b4e3c2 }}
.advance {{ fill: #f7b955 }}
.host {{ fill: #c6ccd3 }}
.lane {{ fill: #f3f5f7 }}
.message {{ stroke: #8250df; stroke-width: 1.6; fill: none; marker-end: url(#tip) }}
.tip {{ fill: #8250df }}
.grid {{ stroke: #d0d7de; stroke-width: 1; stroke-dasharray: 3 3 }}
"""


# The first picture.


@dataclasses.dataclass(frozen=True)
class Piece:
    """A token of the answer, or a proposal that the target did not confirm.

    Attributes:
      text: what it adds to the text.
      kind: "accepted", "corrected", "added" or "dropped".
      ends: whether a target pass ends with it.
    """

    text: str
    kind: str
    ends: bool = False


class DraftLog:
    """A recorder that notes each batch of draft tokens that the target verifies, in order."""

    def __init__(self):
        """Start with nothing."""
        self.batches: list[Any] = []

    def generation(self, state: Any, launch: Launch, read: Read) -> tuple[Launch, Read]:
        """Leave the rounds as they are."""
        return launch, read

    def program(self, name: str, plan: MeshPlan, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Note the batch among the arguments of a verification."""
        batches = [arg.batch for arg in args if hasattr(arg, "batch") and hasattr(arg, "passes")]
        self.batches += [jax.tree.map(np.asarray, batch) for batch in batches]
        return run(*args)

    def transfer(self, move: Callable[[], jax.Array], array: jax.Array, plan: MeshPlan) -> jax.Array:
        """Nothing moves here."""
        return move()

    def wait(self, array: jax.Array) -> None:
        """Wait."""
        array.block_until_ready()


def draft_answer() -> tuple[list[Piece], Any]:
    """Decode an answer with a chain of draft tokens; its pieces, and the completion."""
    method = jaxspec.Chain(num_draft_tokens=DRAFT_TOKENS)
    llm = jaxspec.LLM(method=method)
    log = DraftLog()
    with recording(log):
        out = llm.chat([{"role": "user", "content": QUESTION}], jaxspec.SamplingParams(max_tokens=MAX_TOKENS))
    return list(follow(llm.tokenizer.decode, out.token_ids, log.batches)), out


def follow(decode: Callable[[Sequence[int]], str], answer: Sequence[int], batches: Iterable[Any]) -> Iterator[Piece]:
    """Walk through the batches along the answer, as the target did.

    Args:
      decode: text of tokens.
      answer: tokens that were emitted.
      batches: draft tokens of each target pass.
    """
    at, before = 0, ""

    def text_of(tokens: Sequence[int]) -> str:
        return decode(tokens)[len(before) :]

    for batch in batches:
        row, ends = 0, False
        while not ends and at < len(answer):
            children = [r for r in range(1, int(batch.count)) if int(batch.parent[r]) == row]
            hit = [r for r in children if int(batch.token[r]) == answer[at]]
            if children and not hit:
                wrong = text_of([*answer[:at], int(batch.token[children[0]])])
                yield Piece(wrong, "dropped")
            kind = "accepted" if hit else "corrected" if children else "added"
            text = text_of(answer[: at + 1])
            before, at, ends = before + text, at + 1, not hit
            yield Piece(text, kind, ends)
            row = hit[0] if hit else row


def draw_tokens(pieces: Sequence[Piece], caption: str) -> str:
    """The first picture as SVG."""
    shapes, column, line, end = [], 0, 0, (MARGIN, MARGIN)
    before = 0  # column at which the last line ended
    for piece in pieces:
        parts = [piece.text.replace("\n", ARROW)] if piece.kind == "dropped" else _parts(piece.text)
        for part in parts:
            if part == "\n":
                column, line, before = 0, line + 1, column
                continue
            back = column == 0 and line > 0 and not part.strip(ARROW)
            if back:
                column, line = before, line - 1  # an empty line takes no room
            if column + len(part) > COLUMNS:
                column, line = 0, line + 1
            x, y, width = MARGIN + column * ADVANCE, MARGIN + line * LINE, len(part) * ADVANCE
            if piece.kind != "dropped":
                shapes.append(f'<rect class="{piece.kind}" {_box(x + 0.6, y, width - 1.2, LINE - 6)} rx="3"/>')
            shapes.append(_text(x, y + 15.5, part, css="dropped" if piece.kind == "dropped" else "", fit=width))
            if piece.kind == "dropped":
                indent = (len(part) - len(part.lstrip())) * ADVANCE
                shapes.append(f'<path class="strike" d="M{x + indent:.1f} {y + 11:.1f}h{width - indent:.1f}"/>')
            column += len(part)
            end = x + width + 3, y - 1
            if back and piece.kind == "dropped":
                column, line, before = 0, line + 1, column
        if piece.ends:
            shapes.append(f'<path class="pass" d="M{end[0]:.1f} {end[1]:.1f}v{LINE - 4:.1f}"/>')
            column += 1 if column else 0
    top = MARGIN + (line + 1) * LINE + 8
    legend = [
        ("accepted", "proposed by the draft, accepted"), ("dropped", "proposed, wrong"),
        ("corrected", "the target's correction"), ("added", "added by the target"),
    ]  # fmt: skip
    x = MARGIN
    for kind, label in legend:
        if kind == "dropped":
            shapes.append(_text(x, top + 12, "abc", css="dropped", fit=3 * ADVANCE))
            shapes.append(f'<path class="strike" d="M{x:.1f} {top + 7.5:.1f}h{3 * ADVANCE:.1f}"/>')
        else:
            shapes.append(f'<rect class="{kind}" {_box(x, top, 26, 15)} rx="3"/>')
        shapes.append(_text(x + 32, top + 12, label, css="small", fit=len(label) * 7.2))
        x += 32 + len(label) * 7.2 + 14
    shapes.append(_text(MARGIN, top + 36, caption, css="small", fit=len(caption) * 7.2))
    return _svg(2 * MARGIN + COLUMNS * ADVANCE, top + 36 + MARGIN - 4, shapes)


def _parts(text: str) -> Iterator[str]:
    """A token's text by lines. An end of line shows as an arrow; several in a row break the line once."""
    ends = len(text) - len(text.rstrip("\n"))
    lines = text[: len(text) - ends].split("\n")
    lines[-1] += ARROW * ends
    for index, part in enumerate([*lines, ""] if ends else lines):
        if index:
            yield "\n"
        if part:
            yield part


# The second picture.


def trace_rounds() -> list[Event]:
    """Events of an answer of SwiftSpec, draft and target on a device each."""
    method = jaxspec.SwiftSpec(depth=DEPTH)
    llm = jaxspec.LLM(method=method, draft_devices=1)
    messages = [{"role": "user", "content": QUESTION}]
    llm.chat(messages, jaxspec.SamplingParams(max_tokens=24))
    with Timeline(internals(llm).models) as timeline:
        llm.chat(messages, jaxspec.SamplingParams(max_tokens=96))
    return list(timeline.events)


def choose_rounds(events: Sequence[Event]) -> list[int]:
    """Neighbouring rounds whose verifications take the usual time."""
    length = {event.round: event.length for event in events if event.row == TARGET}
    rounds = sorted(length)[2:-2]
    if len(rounds) < ROUNDS:
        raise SystemExit(f"the answer has {len(length)} rounds, too few for a picture of {ROUNDS}")
    usual = float(np.median(list(length.values())))
    starts = rounds[: len(rounds) - ROUNDS + 1]
    first = min(starts, key=lambda start: sum(abs(length[start + i] - usual) for i in range(ROUNDS)))
    return list(range(first, first + ROUNDS))


def draw_rounds(events: Sequence[Event], rounds: Sequence[int]) -> str:
    """The second picture as SVG."""
    verified = {event.round: event for event in events if event.row == TARGET}
    begin = verified[rounds[0]].start - 0.0012
    end = verified[rounds[-1]].end + 0.0012
    width, left, lanes = 800.0, 92.0, {HOST: 34.0, TARGET: 84.0, DRAFT: 158.0}
    height = 34.0

    def at(seconds: float) -> float:
        return left + (min(max(seconds, begin), end) - begin) / (end - begin) * width

    shapes = []
    for row, y in lanes.items():
        tall = 18.0 if row == HOST else height
        shapes.append(f'<rect class="lane" {_box(left, y, width, tall)} rx="3"/>')
        shapes.append(_text(MARGIN, y + tall / 2 + 5, row, fit=len(row) * ADVANCE))
    for number in rounds:
        x = at(verified[number].start)
        shapes.append(f'<path class="grid" d="M{x:.1f} 26V{lanes[DRAFT] + height + 8:.1f}"/>')
        label = f"round {number + 1}"
        shapes.append(_text(x + 4, 22, label, css="small", fit=len(label) * 7.2))
    for event in events:
        if event.end <= begin or event.start >= end or event.row == TRANSFERS:
            continue
        y, tall = lanes[event.row], 18.0 if event.row == HOST else height
        x, long = at(event.start), max(at(event.end) - at(event.start), 1.4)
        kind = HOST if event.row == HOST else event.name.split()[0]
        if event.row == HOST and event.name == "wait":
            continue
        shapes.append(f'<rect class="{kind}" {_box(x, y, long, tall)} rx="2"/>')
        labels = {"verify": [f"verify batch {event.round + 1}", "verify"]}
        labels["expand"] = [f"grow the tree for batch {event.round + 2}", f"grow for batch {event.round + 2}", "grow"]
        fitting = [text for text in labels.get(event.name, []) if long > len(text) * 7.2 + 8]
        for text in fitting[:1]:
            shapes.append(_text(x + (long - len(text) * 7.2) / 2, y + tall / 2 + 4.5, text, small=True))
    for event in events:
        if event.row != TRANSFERS or not begin < event.end < end:
            continue
        down = event.name.startswith(TARGET)
        x = at(event.end)
        top, bottom = lanes[TARGET] + height, lanes[DRAFT]
        start, stop = (top, bottom - 3) if down else (bottom, top + 3)
        offset = -5.0 if down else 5.0
        shapes.append(f'<path class="message" d="M{x + offset:.1f} {start:.1f}V{stop:.1f}"/>')
    bottom = lanes[DRAFT] + height
    step = _tick(end - begin)
    for tick in range(int((end - begin) / step) + 1):
        x = at(begin + tick * step)
        label = f"{tick * step * 1e3:g} ms"
        shapes.append(f'<path class="pass" d="M{x:.1f} {bottom + 8:.1f}v5"/>')
        shapes.append(_text(x - len(label) * 3.6, bottom + 27, label, css="small", fit=len(label) * 7.2))
    y, x = bottom + 44, MARGIN
    legend = [
        ("verify", "target pass and walk"), ("expand", "the tree grows"),
        ("advance", "move the root, choose the batch"), ("host", "host"), ("message", "token ids"),
    ]  # fmt: skip
    for kind, label in legend:
        if kind == "message":
            shapes.append(f'<path class="message" d="M{x:.1f} {y + 7.5:.1f}h20"/>')
        else:
            shapes.append(f'<rect class="{kind}" {_box(x, y, 26, 15)} rx="3"/>')
        shapes.append(_text(x + 32, y + 12, label, css="small", fit=len(label) * 7.2))
        x += 32 + len(label) * 7.2 + 20
    return _svg(left + width + MARGIN, y + 15 + MARGIN, shapes)


def _tick(span: float) -> float:
    """A round distance of ticks, in seconds."""
    return next(step for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 10.0) if span / step <= 10)


# Both.


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'


def _text(x: float, y: float, text: str, *, css: str = "", fit: float | None = None, small: bool = False) -> str:
    """A text at its baseline; `fit` is the width that it gets in any font."""
    named = f' class="{css}"' if css else ""
    size = ' style="font-size: 12px"' if small else ""
    width = len(text) * 7.2 if small and fit is None else fit
    length = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"' if width else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{size}{length} xml:space="preserve">{html.escape(text)}</text>'


def _svg(width: float, height: float, shapes: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
    tip = '<marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
    marker = f'<defs>{tip}<path class="tip" d="M0 0L6 3L0 6Z"/></marker></defs>'
    panel = f'<rect class="panel" {_box(0.5, 0.5, width - 1, height - 1)} rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", marker, panel, *shapes, "</svg>"]) + "\n"


def main() -> None:
    """Run both, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    folder = parser.parse_args().folder
    jax.config.update("jax_num_cpu_devices", 2)  # draft and target need a device each
    folder.mkdir(parents=True, exist_ok=True)
    pieces, out = draft_answer()
    counts = collections.Counter(piece.kind for piece in pieces)
    passes = sum(piece.ends for piece in pieces)
    caption = (
        f"{len(out.token_ids)} tokens in {passes} target passes (each ends at a bar): "
        f"{counts['accepted']} accepted, {counts['corrected']} corrected, {counts['added']} added."
    )
    (folder / "tokens.svg").write_text(draw_tokens(pieces, caption), encoding="utf-8")
    events = trace_rounds()
    (folder / "round.svg").write_text(draw_rounds(events, choose_rounds(events)), encoding="utf-8")
    print(f"wrote {folder / 'tokens.svg'} and {folder / 'round.svg'}")


if __name__ == "__main__":
    main()
