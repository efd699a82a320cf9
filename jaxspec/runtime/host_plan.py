"""Which devices of several processes the target has, and which the draft.

Tensor parallelism talks in every layer, draft and target only between rounds. So the target takes whole processes
first, one after another, and the draft the devices of one process, which it shares with the target only where the
target needs more than the others have.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.errors import ConfigError
from jaxspec.runtime.mesh import MeshPlan
from pallas_kernels import selection


def plan_hosts(
    target_devices: int | None, draft_devices: int | None, *, draft_process: int | None, kernels: str, method: str,
    own_devices: bool,
) -> tuple[MeshPlan, MeshPlan]:  # fmt: skip
    """Meshes of target and draft over all processes; both have the same where the draft has no devices of its own.

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
