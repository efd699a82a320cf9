"""The live view: its page needs nothing from elsewhere, and its events describe every round."""

import json
import re

import httpx
import pytest
from marks import quick_part
from serving import Running

import jaxspec
from jaxspec.config import SamplingParams
from jaxspec.llm import internals


def test_the_page_is_whole(server):
    answer = httpx.get(server.url)
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href)=(?!"data:)|@import|url\(""", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


LIVE = quick_part(["specexec", "swiftspec", "streamed", "auto"], lambda name: name in ("swiftspec", "streamed"))


@pytest.fixture(scope="module", params=LIVE)
def drafting(request, served_model):
    methods = {
        "swiftspec": jaxspec.SwiftSpec(7, 4, depth=2),
        "auto": jaxspec.Auto(pass_cost=[1.0, 1.01], draft_cost=0.01),
    }
    method = methods.get(request.param, jaxspec.SpecExec(8))
    offload = "host" if request.param == "streamed" else "none"
    return jaxspec.LLM(served_model, draft=served_model, method=method, offload=offload)


@pytest.mark.thorough
def test_every_round_is_described(drafting):
    with Running(drafting) as server:
        sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3}
        lines = server.post("/v1/live", prompt="w1 w2", baseline=True, **sampling).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[0]["method"] == internals(drafting).engine.method.name and events[0]["draft"] == "tiny"
    rounds = [event["round"] for event in events if "round" in event]
    wanted = drafting.generate("w1 w2", SamplingParams(**sampling))
    # The last round may go on beyond the end.
    assert "".join(token for round_ in rounds for token in round_["tokens"]).startswith(wanted.text)
    assert any(round_["drafted"] for round_ in rounds)
    for round_ in rounds:
        if "tree" not in round_:  # of plain decoding, which `auto` mixes in
            assert internals(drafting).engine.method.name == "auto" and not round_["drafted"]
            continue
        tree = round_["tree"]
        assert len(tree["rows"]) == round_["drafted"] + 1
        path = [tree["text"][tree["rows"].index(row)] for row in tree["accepted"]]
        assert path[1:] == round_["tokens"][: round_["accepted"]] and len(path) == round_["accepted"] + 1
    assert any(round_["accepted"] for round_ in rounds)
    timelines = [event["timeline"] for event in events if "timeline" in event]
    apart = set(internals(drafting).models.draft.plan.devices) != set(internals(drafting).models.target.plan.devices)
    assert bool(timelines) == apart
    if apart:
        rows = {row for row, *_ in timelines[-1]}
        assert {"target", "draft"} <= rows and {round_ for *_, round_ in timelines[-1]} >= {len(rounds) - 1}
        assert all(0 <= start <= end for _, _, start, end, _ in timelines[-1])
        assert any(name == "verify" for row, name, *_ in timelines[-1] if row == "target")
    assert events[-2]["done"]["completion_tokens"] == 40
    assert events[-1]["baseline"]["equal"] is True and events[-1]["baseline"]["tokens_per_s"] > 0
