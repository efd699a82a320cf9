"""The README's pictures: what they show of a run, from runs made by hand."""

import xml.etree.ElementTree as ET
from types import SimpleNamespace

import make_pictures
import numpy as np
import pytest

from jaxspec.bench.events import Event

WORDS = ["", "The", " sky", " is", " blue", " red", ".\n", " Why", " &"]


def decode(tokens):
    return "".join(WORDS[token] for token in tokens)


def batch(tokens, parents, count=None):
    return SimpleNamespace(token=np.array(tokens), parent=np.array(parents), count=np.int32(count or len(tokens)))


def test_pieces_follow_the_answer():
    # A chain of which the third token is wrong; a tree with two children; a batch whose tokens are unused.
    batches = [
        batch([0, 1, 2, 5], [0, 0, 1, 2]),
        batch([3, 5, 4], [0, 0, 0]),
        batch([6, 1], [0, 0], 1),
        batch([7], [0]),
    ]
    pieces = list(make_pictures.follow(decode, [1, 2, 3, 4, 6, 7], batches))
    assert [(p.text, p.kind, p.ends) for p in pieces] == [
        ("The", "accepted", False),
        (" sky", "accepted", False),
        (" red", "dropped", False),
        (" is", "corrected", True),
        (" blue", "accepted", False),
        (".\n", "added", True),
        (" Why", "added", True),
    ]


@pytest.mark.parametrize("text", ["a", "\n", "\n\n", " & <b>", "a\nb", "x" * 90])
def test_the_picture_of_tokens_is_well_formed(text):
    pieces = [make_pictures.Piece(text, kind, kind != "accepted") for kind in ("accepted", "dropped", "corrected")]
    root = ET.fromstring(make_pictures.draw_tokens(pieces * 3, "a caption"))
    shown = "".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert shown.count(text.replace("\n", make_pictures.ARROW).strip(make_pictures.ARROW)) >= 9 or "\n" in text
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_the_picture_of_rounds_shows_neighbours_of_the_usual_length():
    events = []
    for number in range(12):
        at, slow = 0.02 * number, 0.01 * (number == 4)
        events += [
            Event("draft", "advance", at, at + 0.001, number),
            Event("transfers", "draft->target", at + 0.001, at + 0.002, number),
            Event("target", "verify", at + 0.002, at + 0.019 + slow, number),
            Event("draft", "expand", at + 0.001, at + 0.015, number),
            Event("host", "dispatch", at, at + 0.003, number),
            Event("transfers", "target->draft", at + 0.019, at + 0.02, number),
        ]
    rounds = make_pictures.choose_rounds(events)
    assert rounds == list(range(rounds[0], rounds[0] + make_pictures.ROUNDS)) and 4 not in rounds
    ET.fromstring(make_pictures.draw_rounds(events, rounds))
    with pytest.raises(SystemExit, match="too few"):
        make_pictures.choose_rounds(events[:24])
