"""Which devices target and draft get."""

from typing import NamedTuple

import jax
import pytest

from jaxspec.errors import ConfigError
from jaxspec.runtime.mesh import MeshPlan, plan_mesh, plan_pair
from pallas_kernels.registry import Kernels


def ids(plans):
    return tuple([device.id for device in plan.devices] for plan in plans)


def pair(target, draft=None, **options):
    return plan_pair(target, draft, **{"method": "swiftspec", "own_devices": True, **options})


@pytest.mark.parametrize("split", [(1, 1), (3, 1), (4, 4), (1, 7)])
def test_the_draft_comes_behind_the_target(split):
    target, draft = split
    assert ids(pair(*split)) == (list(range(target)), list(range(target, target + draft)))


def test_one_device_is_left_for_the_draft_or_all_are_shared():
    for target in (1, 7):
        assert ids(pair(target)) == (list(range(target)), [target])
    assert ids(pair(8)) == (list(range(8)),) * 2
    plans = pair(8, method="chain", own_devices=False)
    assert plans[0] == plans[1] == plan_mesh(8)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"draft": 1}, "draft_devices is for swiftspec"), ({"draft_platform": "cpu"}, "draft_platform is for swiftspec")],
)
def test_methods_that_share_devices_refuse_others(options, word):
    with pytest.raises(ConfigError, match=f"method 'specexec' runs the draft on the target's devices: {word}"):
        pair(1, **{"method": "specexec", "own_devices": False, **options})


@pytest.mark.parametrize(
    ("split", "options", "word"),
    [
        ((8, 1), {}, "1 devices asked for after the first 8, but only 8 exist"),
        ((5, 4), {}, "4 devices asked for after the first 5, but only 8 exist"),
        ((9,), {}, "9 devices asked for, but only 8 exist"),
        ((1, 0), {}, "at least one device, got 0"),
        ((1, 1), {"draft_platform": "abacus"}, "no devices of platform 'abacus'"),
    ],
)
def test_what_cannot_be(split, options, word):
    with pytest.raises(ConfigError, match=word):
        pair(*split, **options)
    with pytest.raises(ConfigError, match="at least one device, got none"):
        MeshPlan((), Kernels("xla", "cpu"))
    with pytest.raises(ConfigError, match="appears twice"):
        MeshPlan((jax.devices()[0],) * 2, Kernels("xla", "cpu"))


def test_the_targets_own_platform_by_name():
    """Is no other platform: the draft's devices still come behind the target's."""
    assert ids(pair(2, 3, draft_platform="cpu")) == ids(pair(2, 3))
    assert ids(pair(2, draft_platform="cpu")) == ids(pair(2))


class Accelerator(NamedTuple):
    """A device that this machine does not have."""

    id: int
    platform: str = "gpu"
    device_kind: str = "invented"


@pytest.fixture
def accelerators(monkeypatch):
    """Four of them, which go by their vendor's name as well, as GPUs do."""
    found = jax.devices

    def devices(platform=None):
        return [Accelerator(i) for i in range(4)] if platform in (None, "gpu", "cuda") else found(platform)

    monkeypatch.setattr(jax, "devices", devices)


def test_another_platform(accelerators):
    """Its first devices are the draft's, however many the target has; one if nothing is said."""
    assert ids(pair(4, draft_platform="cpu")) == ([0, 1, 2, 3], [0])
    target, draft = pair(3, 2, draft_platform="cpu")
    assert ids((target, draft)) == ([0, 1, 2], [0, 1])
    assert {device.platform for device in target.devices} == {"gpu"} and target.kernels.name == "xla"
    assert {device.platform for device in draft.devices} == {"cpu"}
    # The whole CPU is the draft's.
    assert draft.kernels == plan_mesh(2, platform="cpu").kernels


def test_devices_of_one_cpu_share_its_cores():
    """Fewer threads a device where more devices compute at the same time."""
    alone, beside = plan_mesh(1), pair(1, 7)[0]
    assert beside.kernels == plan_mesh(1, beside=7).kernels
    assert plan_mesh(8).kernels == beside.kernels
    assert alone.devices == beside.devices
