"""Device meshes: which devices a model runs on, and the split between target and draft, in one process or several."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxspec.errors import ConfigError
from jaxspec.models.config import TENSOR_AXIS
from pallas_kernels import selection
from pallas_kernels.registry import Kernels


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """Tensor parallelism over `devices`, in order; one device means no parallelism.

    Hashable and comparable by device, so that it can key compiled functions.
    """

    devices: tuple[Any, ...]  # of one platform
    kernels: Kernels  # implementations that programs on them are traced with
    # Whether a mixture's experts lie whole on the devices; else each device has a part of every expert.
    expert_parallel: bool = False

    def __post_init__(self):
        """Refuse empty or repeated device lists."""
        if not self.devices:
            raise ConfigError("a mesh needs at least one device, got none")
        if len(set(self.devices)) != len(self.devices):
            raise ConfigError(f"a device appears twice in the mesh: {[d.id for d in self.devices]}")

    @property
    def tensor(self) -> int:
        """Tensor-parallel degree."""
        return len(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The one-axis device mesh.

        Its axis is Auto: every computation of jaxspec runs inside `jax.shard_map`, which states its own collectives,
        and outside of it a caller may use the parameters like any other arrays.
        """
        return Mesh(np.array(self.devices), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def plan_mesh(
    count: int = 1, offset: int = 0, kernels: str = "auto", platform: str | None = None, beside: int = 0
) -> MeshPlan:
    """Take `count` devices after the first `offset`, so that two models can have disjoint ones.

    `platform` is "cpu" for instance, None the default one. `kernels` is one of `KERNEL_NAMES` (see
    `pallas_kernels.selection.choose`). `beside` counts devices of another mesh that compute at the same time and share
    a CPU's cores. Raises `ConfigError` where fewer devices exist than asked for, or the kernels cannot run on them.
    """
    if count < 1:
        raise ConfigError(f"a mesh needs at least one device, got {count}")
    try:
        available = jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(f"there are no devices of platform {platform!r} here: {error}") from error
    if offset + count > len(available):
        after = f" after the first {offset}" if offset else ""
        raise ConfigError(
            f"{count} devices asked for{after}, but only {len(available)} exist; "
            "on CPU, JAX_NUM_CPU_DEVICES=N makes N of them"
        )
    devices = tuple(available[offset : offset + count])
    try:
        chosen = selection.choose(kernels, devices[0].platform, count + beside, devices[0])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return MeshPlan(devices, chosen)


def plan_pair(
    target_devices: int, draft_devices: int | None, *, draft_platform: str | None = None, kernels: str = "auto",
    method: str, own_devices: bool,
) -> tuple[MeshPlan, MeshPlan]:  # fmt: skip
    """Meshes of target and draft: the draft's devices come after the target's, or both have the same.

    `target_devices` and `draft_devices` are tensor-parallel degrees. Without the latter the draft has one device of its
    own if the method can use it (`own_devices`) and one is left, else the target's. `draft_platform` is None for that
    of the target; `method` is a name for messages. Raises `ConfigError` where the devices do not exist, or the method
    cannot use them.
    """
    if not own_devices:
        for name, value in (("draft_devices", draft_devices), ("draft_platform", draft_platform)):
            if value is not None:
                raise ConfigError(f"method {method!r} runs the draft on the target's devices: {name} is for swiftspec")
        plan = plan_mesh(target_devices, kernels=kernels)
        return plan, plan
    # Compared as devices: a platform may go by several names, "cuda" and "gpu".
    other = draft_platform is not None and plan_mesh(platform=draft_platform).devices[0] != jax.devices()[0]
    if draft_devices is None:
        left = 1 if other else len(jax.devices()) - target_devices
        if left < 1:
            plan = plan_mesh(target_devices, kernels=kernels)
            return plan, plan
        draft_devices = 1
    # A CPU's cores are shared by all its devices; an accelerator's are its own.
    beside = (0, 0) if other else (draft_devices, target_devices)
    target = plan_mesh(target_devices, kernels=kernels, beside=beside[0])
    offset = 0 if other else target_devices
    kernels, platform = ("auto", draft_platform) if other else (kernels, None)
    return target, plan_mesh(draft_devices, offset, kernels, platform, beside=beside[1])


def plan_hosts(
    target_devices: int | None, draft_devices: int | None, *, draft_process: int | None, kernels: str, method: str,
    own_devices: bool,
) -> tuple[MeshPlan, MeshPlan]:  # fmt: skip
    """Meshes of target and draft over all processes; both are the same where the draft has no devices of its own.

    Tensor parallelism communicates in every layer, draft and target only between rounds. So the target takes whole
    processes first, one after another, and the draft the devices of one process. They share a process only where the
    target needs more devices than the others have.

    Without `target_devices` the target has all devices of all processes, or, beside a draft with devices of its own,
    all of the processes other than the draft's. `draft_devices` is 1 then. `draft_process` is the last one where it is
    None. ConfigError: there are not as many devices, or a process would have no part of the models.
    """
    if not own_devices:
        if draft_devices is not None:
            raise ConfigError(
                f"method {method!r} runs the draft on the target's devices: draft_devices is for swiftspec, "
                "as in --method swiftspec"
            )
        if draft_process is not None:
            raise ConfigError(f"draft_process is for swiftspec: method {method!r} has no devices for the draft alone")
    target, draft = split_devices(jax.devices(), target_devices, draft_devices, draft_process, own_devices)
    try:
        plans = [MeshPlan(own, _choose_kernels(kernels, own, target + draft)) for own in (target, draft) if own]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return plans[0], plans[-1]


def split_devices(
    devices: Sequence[Any], target_devices: int | None, draft_devices: int | None, draft_process: int | None,
    own_devices: bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Devices of the target and of a draft of its own, which has none where `own_devices` is False."""
    by_process: dict[int, list[Any]] = collections.defaultdict(list)
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        by_process[device.process_index].append(device)
    last = max(by_process) if draft_process is None else draft_process
    if last not in by_process:
        raise ConfigError(f"draft_process {last} does not exist: there are {len(by_process)} processes")
    order = sorted(by_process, key=lambda process: (own_devices and process == last, process))
    ordered = [device for process in order for device in by_process[process]]
    count = (draft_devices or 1) if own_devices else 0
    if target_devices is None:
        target_devices = len(ordered) - (max(count, len(by_process[last])) if own_devices else 0)
    if target_devices < 1 or target_devices + count > len(ordered):
        raise ConfigError(
            f"{target_devices} devices for the target and {count} for the draft are asked for, and {len(by_process)} "
            f"processes have {len(ordered)}"
        )
    target, draft = tuple(ordered[:target_devices]), tuple(ordered[len(ordered) - count :])
    used = {device.process_index for device in (*target, *draft)}
    if idle := sorted(set(by_process) - used):
        raise ConfigError(
            f"process {idle[0]} would have no part of the models: {target_devices} target devices and {count} of the "
            f"draft lie in other processes; start {len(used)} processes, or ask for more devices"
        )
    return target, draft


def describe_hosts(target: MeshPlan, draft: MeshPlan | None) -> str:
    """One line: which process has how many devices of which model."""
    parts = [f"target on {_count(target)}"]
    if draft is not None:
        same = draft.devices == target.devices
        parts.append("draft on the same devices" if same else f"draft on {_count(draft)}")
    return f"{jax.process_count()} processes: {'; '.join(parts)}"


def _count(plan: MeshPlan) -> str:
    held = collections.Counter(device.process_index for device in plan.devices)
    where = ", ".join(f"{count} of process {process}" for process, count in sorted(held.items()))
    return f"{len(plan.devices)} {'device' if len(plan.devices) == 1 else 'devices'} ({where})"


def _choose_kernels(name: str, devices: Sequence[Any], used: Sequence[Any]) -> Any:
    """Kernels for a mesh, tried on a device of this process; a CPU's cores are shared by the devices of a process."""
    here = jax.local_devices()
    sharing = max(collections.Counter(device.process_index for device in used).values())
    return selection.choose(name, devices[0].platform, sharing, here[0])
