"""Tokens that are pieces of a character: in log-probabilities and on the page."""

from types import SimpleNamespace

from jaxspec.methods.core.round import StepOutput
from jaxspec.results import StreamEvent
from jaxspec.serve.live import RoundWatcher
from jaxspec.serve.protocol import parse_request
from jaxspec.serve.replies import Choice, Reply
from jaxspec.text.turn import Turn

FIRST, SECOND = ("é".encode()[at : at + 1] for at in (0, 1))
TOKENIZER = SimpleNamespace(token_bytes=[b"a", FIRST, SECOND, b"b", b"<end>"].__getitem__, special_ids={4})


def test_log_probabilities_name_the_bytes_and_count_characters():
    reply = Choice(Reply(parse_request({"prompt": "a", "logprobs": 2}, chat=False), "m", TOKENIZER), 0, Turn([]))
    top = (((0, -0.1), (1, -2.0)), ((1, -0.5), (2, -0.9)), ((2, -0.1), (1, -3.0)), ((3, 0.0), (0, -9.0)))
    event = StreamEvent("aéb", (0, 1, 2, 3), (False,) * 4, (-0.1, -0.5, -0.1, 0.0), top_logprobs=top)
    logprobs = reply.part(event)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", r"bytes:\xc3", r"bytes:\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert [len(ranked) for ranked in logprobs["top_logprobs"]] == [2, 2, 2, 2]


def test_the_page_gets_whole_characters():
    watcher = RoundWatcher(TOKENIZER, SimpleNamespace(draft=None, target=None))
    rounds = iter([StepOutput((0, 1), (0.0, 0.0)), StepOutput((2, 3, 4), (0.0,) * 3)])
    launch, read = watcher.generation(None, lambda: None, lambda _: [next(rounds)])
    for _ in range(2):
        launch()
        read(None)
    assert [event["round"]["tokens"] for event in watcher.take()] == [["a", ""], ["é", "b", ""]]
