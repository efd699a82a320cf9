"""One process's devices, split between target and draft (SwiftSpec 3.5: GPU split)."""

import jax

from jaxspec.errors import ConfigError
from jaxspec.runtime.mesh import MeshPlan, plan_mesh


def plan_pair(
    target_devices: int,
    draft_devices: int | None,
    *,
    draft_platform: str | None = None,
    kernels: str = "auto",
    method: str,
    own_devices: bool,
) -> tuple[MeshPlan, MeshPlan]:
    """Meshes of target and draft: the draft's devices come behind the target's, or both have the same.

    Args:
      target_devices: tensor-parallel degree of the target.
      draft_devices: of the draft; None is 1 if the method can use it and a device is left, else the target's devices.
      draft_platform: of the draft's devices; None is the target's.
      kernels: see `plan_mesh`.
      method: its name, for messages.
      own_devices: whether its draft may have its own.

    Raises:
      ConfigError: devices that do not exist, or are not for this method.
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
    draft = plan_mesh(
        draft_devices, offset, "auto" if other else kernels, draft_platform if other else None, beside=beside[1]
    )
    return target, draft
