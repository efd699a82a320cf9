"""Whether resident models fit TPUs, before anything is compiled: the compiler finds that out after minutes."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxspec.errors import ConfigError
from jaxspec.methods.base import Method, Store
from jaxspec.methods.core.round import Models
from jaxspec.methods.core.runner import Runner
from jaxspec.offload.memory import bytes_by_device
from jaxspec.offload.plan import format_bytes, method_needs


def memory_limits(models: Models) -> dict[Any, int]:
    """Bytes of each TPU of this process that the models lie on, as it reports them."""
    devices = {device for model in models if model is not None for device in model.plan.devices}
    own = [each for each in devices if each.platform == "tpu" and each.process_index == jax.process_index()]
    reported = {device: (device.memory_stats() or {}).get("bytes_limit") for device in own}
    return {device: limit for device, limit in reported.items() if limit}


def check_devices(
    limits: Mapping[Any, int], lends: bool, method: Method, runner: Runner, models: Models, tokens: int
) -> None:
    """ConfigError where weights, answers and programs take more than a device's bytes, of those in `limits`.

    `lends` says that the draft consists of the target's own arrays.
    """
    needs, (target, draft) = method_needs(method, runner, models, tokens), models
    trees = [target.params()]
    if draft is not None and not lends:
        # The target's own arrays; a head of some of its rows is a copy.
        lent = {*draft.shared_params()} - ({"head"} if draft.cfg.head_ids else set())
        trees.append({name: leaf for name, leaf in draft.params().items() if name not in lent})
    weights = bytes_by_device(trees)
    for device, limit in limits.items():
        parts = (weights.get(device, 0), needs.held.get(device, 0), needs.work.get(device, 0))
        if sum(parts) > limit:
            named = zip(("weights", "caches, trees and texts", "programs while they run"), parts, strict=True)
            told = ", ".join(f"{name} {format_bytes(size)}" for name, size in named)
            raise ConfigError(
                f"method {method.name} and texts of {tokens} tokens take {format_bytes(sum(parts))} of {device}, which "
                f"has {format_bytes(limit)} ({told}): give a smaller max_context, fewer draft tokens or more "
                "target_devices"
            )


def fits_devices(
    limits: Mapping[Any, int], lends: bool, method: Method, models: Models, store: Store, tokens: int
) -> bool:
    """Whether `check_devices` has no objection to a method that is neither configured nor bound yet."""
    method = method.configure(models, store)
    try:
        check_devices(limits, lends, method, method.bind(models, tokens), models, tokens)
    except ConfigError:
        return False
    return True
