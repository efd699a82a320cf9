"""Plans over processes, settings, faults that are judged, and the part of a weight that a process reads."""

import json
import types
from typing import Any

import numpy as np
import pytest
from tiny_models import FAMILIES, RandomSource

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.checkpoint.shards import Part
from jaxspec.errors import ConfigError
from jaxspec.runtime import watch
from jaxspec.runtime.distributed import Distributed, resolve
from jaxspec.runtime.host_plan import split_devices


def devices(*counts):
    return [
        types.SimpleNamespace(process_index=process, id=process * 100 + number)
        for process, count in enumerate(counts)
        for number in range(count)
    ]


def ids(found):
    return [[device.id for device in own] for own in found]


@pytest.mark.parametrize(
    ("counts", "asked", "expected"),
    [
        ((2, 2), (None, None, None, False), [[0, 1, 100, 101], []]),
        ((1, 1), (None, None, None, True), [[0], [100]]),
        ((1, 1), (None, None, 0, True), [[100], [0]]),
        ((2, 2), (None, None, None, True), [[0, 1], [101]]),
        ((2, 2), (3, 1, None, True), [[0, 1, 100], [101]]),
        ((2, 2), (2, 2, 0, True), [[100, 101], [0, 1]]),
        ((1, 1, 1, 1), (3, 1, None, True), [[0, 100, 200], [300]]),
        ((4, 4), (4, 1, None, True), [[0, 1, 2, 3], [103]]),
    ],
)
def test_targets_take_whole_processes_and_drafts_those_of_one(counts, asked, expected):
    assert ids(split_devices(devices(*counts), *asked)) == expected


@pytest.mark.parametrize(
    ("counts", "asked", "message"),
    [
        ((2, 2), (2, None, None, False), "process 1 would have no part of the models"),
        ((1, 1), (2, 1, None, True), "2 devices for the target and 1 for the draft"),
        ((1, 1), (1, 1, 2, True), "draft_process 2 does not exist"),
    ],
)
def test_plans_that_cannot_be(counts, asked, message):
    with pytest.raises(ConfigError, match=message):
        split_devices(devices(*counts), *asked)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"process_id": 1}, "process_id 1 needs a coordinator"),
        ({"coordinator": "host"}, "is not HOST:PORT"),
        ({"coordinator": "host:1"}, "num_processes is missing"),
        ({"coordinator": "host:1", "num_processes": 2, "process_id": 2}, "must be below num_processes 2"),
        ({"coordinators": "host:1"}, "no setting 'coordinators'"),
        (7, "distributed must be settings"),
    ],
)
def test_settings_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        resolve(given)


def test_settings_come_from_the_environment(monkeypatch):
    assert resolve(None) is None
    for name, value in (("COORDINATOR", "a:5"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "1")):
        monkeypatch.setenv(f"JAXSPEC_{name}", value)
    assert resolve(None) == Distributed("a:5", 2, 1)
    assert resolve({"process_id": 0}) == Distributed("a:5", 2, 0)


def judge(now, *processes):
    """What a watch says at `now`, of processes that wrote the same since time 0: (beat, where, step)."""
    made = watch._Watch(None, 0, len(processes), 10.0, 300.0)
    entries = [(f"{watch.ALIVE}/{i}", json.dumps([*process, f"host{i}"])) for i, process in enumerate(processes)]
    made.judge(entries, 0.0)
    beating = [(key, json.dumps([9, *json.loads(text)[1:]])) for key, text in entries]
    return made.judge([entry if processes[i][0] < 0 else beating[i] for i, entry in enumerate(entries)], now)


def test_faults_are_named():
    waiting, idle = (1, watch.WAITING, 5), (1, watch.IDLE, 5)
    assert judge(20.0, waiting, waiting) is None
    assert judge(200.0, idle, idle) is None
    assert judge(20.0, waiting, (-3, watch.WAITING, 5)) == "process 1 (host1) is gone: it has not answered for 10 s"
    assert "process 1 (host1) hangs" in (judge(20.0, waiting, (1, watch.STEPPING, 5)) or "")
    assert "process 1 (host1) does not follow" in (judge(20.0, waiting, (1, watch.IDLE, 4)) or "")
    assert "has ended while others still wait" in (judge(20.0, waiting, (1, watch.ENDED, 4)) or "")
    assert "not loaded its models" in (judge(400.0, idle, (1, watch.PREPARING, 1)) or "")
    assert "the devices have not answered" in (judge(500.0, waiting, waiting) or "")


class PartSource(RandomSource):
    def read(self, name, part=None):
        tensor = self._tensors[name]
        if part is None:
            return tensor
        dimension, start, stop = part
        return tensor[start:stop] if dimension == 0 else tensor[:, start:stop]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_parts_of_leaves_are_slices_of_the_whole(family):
    source: Any = PartSource(FAMILIES[family])
    axes = {"embed": 0, "head": 0, "qkv": 0, "qkv_bias": 0, "out": 1, "gate_up": 1, "down": 1}
    for name, recipe in recipes(source.config).items():
        axis = axes.get(name.rpartition(".")[2])
        if axis is None:
            continue
        size = recipe.info.shape[axis]
        part = Part(axis, size // 3, size - 1)
        whole = recipe.read(source)
        np.testing.assert_array_equal(
            recipe.read(source, name, part), np.take(whole, np.arange(part.start, part.stop), axis), err_msg=name
        )
