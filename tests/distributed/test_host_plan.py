"""Device plans over processes, their settings, and the part of a weight that a process reads."""

import types
from typing import Any

import numpy as np
import pytest
from tiny_models import FAMILIES, RandomSource

from jaxspec.checkpoint.keymaps import recipes
from jaxspec.errors import ConfigError
from jaxspec.runtime.distributed import Distributed, resolve
from jaxspec.runtime.mesh import split_devices
from jaxspec.runtime.sharding import Part


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
        ((2, 2), (3, 1, None, True), [[0, 1, 100], [101]]),
        ((2, 2), (2, 2, 0, True), [[100, 101], [0, 1]]),
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


class PartSource(RandomSource):
    def read(self, name, part=None):
        tensor = self._tensors[name]
        if part is None:
            return tensor
        dimension, start, stop = part
        return tensor[start:stop] if dimension == 0 else tensor[:, start:stop]


def test_parts_of_leaves_are_slices_of_the_whole():
    source: Any = PartSource(FAMILIES["qwen2"])
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
