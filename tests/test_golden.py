"""The default model's greedy output is Hugging Face's, token for token (tools/make_golden.py made the file)."""

import json
from pathlib import Path

import pytest
from marks import quick_part

from jaxspec import SamplingParams

pytestmark = pytest.mark.real_model

GOLDEN = json.loads((Path(__file__).parent / "golden/smollm2_greedy.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}


@pytest.mark.parametrize("name", quick_part(CASES, lambda name: name in ("one_token", "long", "turns")))
def test_greedy_output_equals_hugging_face(llm, name):
    case = CASES[name]
    sampling = SamplingParams(max_tokens=GOLDEN["num_tokens"], ignore_eos=True)
    output = list(llm.generate(case["prompt_ids"], sampling).token_ids)
    assert len(case["output_ids"]) == GOLDEN["num_tokens"]
    for index, (got, expected) in enumerate(zip(output, case["output_ids"], strict=True)):
        assert got == expected, f"token {index} differs; Hugging Face's margin there is {case['margins'][index]}"


@pytest.mark.parametrize("name", CASES)
def test_prompt_ids(llm, name):
    case = CASES[name]
    assert llm.encode(case["text"] if "text" in case else case["messages"]) == case["prompt_ids"]


def test_prompts_cover_the_prefill_paths():
    lengths = sorted(len(case["prompt_ids"]) for case in CASES.values())
    assert lengths[0] == 1  # nothing to prefill
    assert lengths[-1] > 512 + 1  # more than the largest chunk
