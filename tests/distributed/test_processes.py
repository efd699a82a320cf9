"""Every method in several processes: the tokens of one process, and the same programs in the same order in each."""

import json

import pytest
from distributed_pair import write_pair
from harness import on_request, results, run_processes
from make import tiny_config, write_hf
from native_models import write_tokenizer

import jaxspec

PROMPT = [3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8, 3, 4, 5]
SAMPLINGS = [
    {"max_tokens": 20, "ignore_eos": True}, {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 5},
]  # fmt: skip
# One round of each kind is enough: a method that dispatches by a clock of its own would differ at once.
METHODS = [
    ["ar", {}],
    ["chain", {}],
    ["lookup", {}],
    ["specexec", {"num_draft_tokens": 16}],
    ["auto", {}],
    ["swift", {}],
]
SWIFTSPEC = ["swiftspec", {"depth": 3, "refill": 1}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return [str(path) for path in write_pair(tmp_path_factory.mktemp("pair"))]


@pytest.fixture(scope="module")
def alone(pair):
    """The tokens of plain decoding in one process."""
    llm = jaxspec.LLM(pair[0], method="ar")
    return [list(llm.generate(PROMPT, jaxspec.SamplingParams(**sampling)).token_ids) for sampling in SAMPLINGS]


def check(pair, alone, processes, devices, loads):
    target, draft = pair
    loads = [{"model": target, "draft": draft, **load} for load in loads]
    spec = {"devices": devices, "prompt": PROMPT, "samplings": SAMPLINGS, "loads": loads}
    ended = run_processes([spec] * processes)
    assert [process.status for process in ended] == [0] * processes, "\n".join(p.err[-2000:] for p in ended)
    found = results(ended[0])
    assert [name for name, _ in found] == [name for load in loads for name, _ in load["methods"]]
    for name, tokens in found:
        assert tokens == alone, name
    return ended


def check_shares(ended):
    """Each process has read its share of the weights, within a tenth."""
    lines = [line for line in ended[0].err.splitlines() if line.startswith("read over share: ")]
    assert lines
    for line in lines:
        assert all(0.9 < share < 1.1 for share in json.loads(line.partition(": ")[2])), line


@on_request
@pytest.mark.slow
def test_every_method_with_the_target_over_two_processes(pair, alone):
    ended = check(pair, alone, 2, 1, [{"method": METHODS[1], "methods": METHODS}])
    assert "target on 2 devices (1 of process 0, 1 of process 1)" in ended[0].err
    check_shares(ended)


def test_swiftspec_with_draft_and_target_in_different_processes(pair, alone):
    ended = check(pair, alone, 2, 1, [{"method": SWIFTSPEC, "draft_process": 0, "methods": [SWIFTSPEC]}])
    assert "target on 1 device (1 of process 1); draft on 1 device (1 of process 0)" in ended[0].err
    check_shares(ended)


@on_request
@pytest.mark.slow
def test_swiftspec_that_grows_until_the_target_is_ready(pair, alone):
    methods = [SWIFTSPEC, ["swiftspec", {"adaptive": True}]]
    loads = [{"method": SWIFTSPEC, "draft_process": process, "methods": methods} for process in (1, 0)]
    check_shares(check(pair, alone, 2, 1, loads))


@on_request
@pytest.mark.slow
def test_splits_of_swiftspec_over_processes_with_two_devices(pair, alone):
    splits = [(2, 1), (3, 1), (2, 2)]
    check(pair, alone, 2, 2, [
        {"method": SWIFTSPEC, "target_devices": target, "draft_devices": draft, "draft_process": process,
         "methods": [SWIFTSPEC]}
        for process in (1, 0) for target, draft in splits
    ])  # fmt: skip


@on_request
@pytest.mark.slow
def test_four_processes(pair, alone):
    three = {"target_devices": 3, "draft_devices": 1, "methods": [SWIFTSPEC], "method": SWIFTSPEC}
    check(pair, alone, 4, 1, [{"method": METHODS[1], "methods": METHODS[:2]}, three])


@on_request
@pytest.mark.slow
def test_a_mixture_of_experts(tmp_path):
    """With a part of every expert on each device, and with whole experts."""
    path = write_hf(tmp_path / "mixture", tiny_config("mixtral"))
    write_tokenizer(path, 72)
    llm = jaxspec.LLM(path, method="ar")
    alone = [list(llm.generate(PROMPT, jaxspec.SamplingParams(**sampling)).token_ids) for sampling in SAMPLINGS]
    methods = [METHODS[0], METHODS[2]]
    loads = [{"method": METHODS[0], "methods": methods, "expert_parallel": whole} for whole in (False, True)]
    check_shares(check((str(path), None), alone, 2, 1, loads))
