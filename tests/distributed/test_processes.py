"""Every method in several processes: the tokens of one process, and the same programs in the same order in each."""

import functools
import json

import block_folders
import pytest
from eagle_folders import random_tensors, write_folder
from make import tiny_config, write_hf
from native_models import write_tokenizer
from process_harness import results, run_processes

import jaxspec
from jaxspec.methods.registry import make_method

PROMPT = [3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8, 3, 4, 5]
SAMPLINGS = [
    {"max_tokens": 20, "ignore_eos": True}, {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 5},
]  # fmt: skip
AR, CHAIN, LOOKUP, AUTO, SWIFT = (["ar", {}], ["chain", {}], ["lookup", {}], ["auto", {}], ["swift", {}])
SPECINFER = ["specinfer", {"expansion": [2, 1]}]
SPECEXEC = ["specexec", {"num_draft_tokens": 16}]
SWIFTSPEC = ["swiftspec", {"depth": 3, "refill": 1}]
ADAPTIVE = ["swiftspec", {"adaptive": True}]


@functools.cache
def alone(model, draft=None, method="ar", **settings):
    """The tokens that one process decodes; most methods give the tokens of plain decoding."""
    llm = jaxspec.LLM(model, draft=draft, method=make_method(method, settings))
    return [list(llm.generate(PROMPT, jaxspec.SamplingParams(**sampling)).token_ids) for sampling in SAMPLINGS]


def check(pair, processes, devices, *loads):
    """Decode in several processes with every method of every load, and compare the tokens; returns their ends."""
    model, draft = pair
    firsts = [load["methods"][0] for load in loads]
    loads = [
        {"model": model, "draft": draft if make_method(*first).drafts else None, "method": first, **load}
        for first, load in zip(firsts, loads, strict=True)
    ]
    spec = {"devices": devices, "prompt": PROMPT, "samplings": SAMPLINGS, "loads": loads}
    ended = run_processes([spec] * processes, limit_s=240 * len(loads))
    assert [process.status for process in ended] == [0] * processes, "\n".join(p.err[-2000:] for p in ended)
    found = results(ended[0])
    assert [name for name, _ in found] == [name for load in loads for name, _ in load["methods"]]
    for name, tokens in found:
        expected = alone(model, draft, "specinfer", expansion=(2, 1)) if name == "specinfer" else alone(model)
        assert tokens == expected, name
    return ended


def reported(ended, what):
    """Values of all processes that process 0 printed, for each load."""
    lines = [line for line in ended[0].err.splitlines() if line.startswith(f"{what}: ")]
    assert lines
    return [json.loads(line.partition(": ")[2]) for line in lines]


def check_shares(ended):
    """Each process has read its share of the weights, within a tenth."""
    for shares in reported(ended, "read over share"):
        assert all(0.9 < share < 1.1 for share in shares), shares


@pytest.mark.thorough
def test_methods_with_the_target_over_two_processes(pair):
    ended = check(pair, 2, 1, {"methods": [CHAIN, AR]})
    assert "target on 2 devices (1 of process 0, 1 of process 1)" in ended[0].err
    check_shares(ended)


@pytest.mark.slow
def test_other_methods_with_the_target_over_two_processes(pair):
    check_shares(check(pair, 2, 1, {"methods": [SPECINFER, SPECEXEC, AUTO]}, {"methods": [SWIFT]}))


@pytest.mark.thorough
def test_swiftspec_with_draft_and_target_in_different_processes(pair):
    ended = check(pair, 2, 1, {"draft_process": 0, "methods": [SWIFTSPEC]})
    assert "target on 1 device (1 of process 1); draft on 1 device (1 of process 0)" in ended[0].err
    check_shares(ended)


@pytest.mark.slow
def test_swiftspec_that_grows_until_the_target_is_ready(pair):
    check_shares(check(pair, 2, 1, {"draft_process": 1, "methods": [SWIFTSPEC, ADAPTIVE]}))


@pytest.mark.slow
def test_splits_of_swiftspec_over_processes_with_two_devices(pair):
    splits = [(2, 1, 0), (3, 1, 1), (2, 2, 0)]
    loads = [
        {"target_devices": t, "draft_devices": d, "draft_process": p, "methods": [SWIFTSPEC]} for t, d, p in splits
    ]
    check(pair, 2, 2, *loads)


@pytest.mark.slow
def test_swiftspec_over_three_processes(pair):
    """Some messages pass by a process."""
    load = {"target_devices": 2, "draft_devices": 1, "draft_process": 0, "methods": [SWIFTSPEC]}
    check_shares(check(pair, 3, 1, load))


@pytest.mark.slow
def test_devices_that_share_heads(pair):
    check(pair, 4, 2, {"methods": [AR]})


@pytest.mark.slow
def test_a_mixture_of_experts(tmp_path):
    """With a part of every expert on each device, and with whole experts."""
    path = write_hf(tmp_path / "mixture", tiny_config("mixtral"))
    write_tokenizer(path, 72)
    loads = [{"methods": [method], "expert_parallel": whole} for method, whole in ((LOOKUP, False), (AR, True))]
    check_shares(check((str(path), None), 2, 1, *loads))


@pytest.mark.slow
def test_a_target_streamed_from_the_memory_of_each_process(pair):
    """With none of three layers on the devices, and with one; each process streams its half of the others."""
    loads = {"methods": [CHAIN, AR], "resident_layers": 0}, {"methods": [AR], "resident_layers": 1}
    ended = check(pair, 2, 1, *({**load, "offload": "host"} for load in loads))
    check_shares(ended)
    for first, second in reported(ended, "streamed"):
        assert first[:2] == second[:2]
        for nbytes, passes, streamed in (first, second):
            assert passes * nbytes <= streamed <= (passes + 1) * nbytes


@pytest.mark.slow
def test_a_draft_in_one_process_and_a_streamed_target_in_the_other(pair):
    ended = check(pair, 2, 1, {"draft_process": 0, "methods": [SWIFTSPEC, ADAPTIVE], "offload": "host"})
    check_shares(ended)
    (each,) = reported(ended, "streamed")
    assert each[0][0] == each[0][2] == 0 < each[1][2]


def test_disk_offload_is_refused(pair):
    with pytest.raises(jaxspec.ConfigError, match="offload 'disk' needs one process"):
        jaxspec.LLM(pair[0], offload="disk", distributed={"coordinator": "h:1", "num_processes": 2, "process_id": 0})


@pytest.fixture(scope="module")
def fed_pair(tmp_path_factory):
    """A target and an EAGLE-3 head that shares its embedding."""
    folder = tmp_path_factory.mktemp("fed")
    target = tiny_config(num_layers=3, vocab_size=101, embed_dim=48, num_heads=8, num_kv_heads=4)
    path = write_hf(folder / "target", target)
    write_tokenizer(path, 101)
    return str(path), str(write_folder(folder / "draft", random_tensors()))


@pytest.mark.slow
def test_a_draft_that_is_fed_hidden_states(fed_pair):
    """Also across to another process."""
    check(fed_pair, 2, 1, {"methods": [CHAIN, SPECINFER]})
    check(fed_pair, 2, 1, {"draft_process": 0, "methods": [SWIFTSPEC]})


@pytest.mark.slow
def test_a_draft_that_fills_a_block(fed_pair, tmp_path):
    ids = {"target_layer_ids": [-1, 1], "num_target_layers": 3}
    head = block_folders.write_deepspec(tmp_path / "dspark", block_folders.markov_tensors(), **ids)
    check((fed_pair[0], str(head)), 2, 1, {"methods": [CHAIN, SPECEXEC, AUTO]})


@pytest.mark.slow
def test_a_draft_of_the_targets_layers_in_another_process(pair):
    check((pair[0], "self:attention=1;mlp=1"), 2, 1, {"draft_process": 0, "methods": [SWIFTSPEC]})
