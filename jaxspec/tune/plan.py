"""Each device's part of both models on every split of the devices, from the headers of checkpoints alone."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.config import ActivationsSetting, DType, KVDType
from jaxspec.errors import ConfigError
from jaxspec.loading import open_models
from jaxspec.methods.core.round import Models
from jaxspec.methods.registry import resolve_method
from jaxspec.runtime.mesh import plan_pair
from jaxspec.runtime.placement import Placement
from pallas_kernels.linear.blocks import Blocks, find_format

# Slots that a cache is planned with.
CONTEXT = 2048
# Share of a device's memory that weights and caches may take: programs need room of their own.
USABLE = 0.9
# No device has less memory: a smaller number is one of gibibytes, without its unit.
LEAST_DEVICE = 1 << 20


@dataclasses.dataclass(frozen=True)
class DeviceShare:
    """One device's part of a model.

    Attributes:
      devices: that share the model.
      weight_bytes: of the parameters, padding included.
      cache_bytes: of a cache of `CONTEXT` slots.
      query_heads: padding included.
      kv_heads: copies and padding included.
      row_flops: floating-point operations of one row of a pass after `CONTEXT` tokens.
    """

    devices: int
    weight_bytes: int
    cache_bytes: int
    query_heads: int
    kv_heads: int
    row_flops: int

    @property
    def total_bytes(self) -> int:
        """Bytes of weights and cache."""
        return self.weight_bytes + self.cache_bytes


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """Target and draft on some devices; `shared` where both are on the same."""

    target: DeviceShare
    draft: DeviceShare | None
    shared: bool

    @property
    def most_bytes(self) -> int:
        """Bytes of weights and caches on the fullest device."""
        draft = 0 if self.draft is None else self.draft.total_bytes
        return self.target.total_bytes + draft if self.shared else max(self.target.total_bytes, draft)

    def fits(self, limit: int | None) -> bool:
        """Whether it leaves room on devices of `limit` bytes; None knows no limit."""
        return limit is None or self.most_bytes <= USABLE * limit


class PairFiles:
    """Open checkpoints of a target and its draft: places them on any split without loading a weight."""

    def __init__(
        self, model: Any, draft: Any, dtype: DType, kernels: str, activations: ActivationsSetting = "auto",
        kv_dtype: KVDType = "auto",
    ):  # fmt: skip
        """Read the headers; `draft` None is the shipped one, if one fits. The rest is as `LLM` takes it."""
        self._opened = open_models(model, draft, resolve_method("auto"))
        self._numerics = dtype, activations, kv_dtype
        self._kernels = kernels

    @property
    def paths(self) -> tuple[Path, Path | None]:
        """Checkpoints of target and draft."""
        draft = self._opened.draft
        return self._opened.target.path, None if draft is None else draft.path

    def place(self, target: int, draft: int | None) -> Models:
        """Both models; `draft` None has the target's devices."""
        plans = plan_pair(target, draft, kernels=self._kernels, method="swiftspec", own_devices=draft is not None)
        return self._opened.place(*plans, *self._numerics)

    def plan(self, target: int, draft: int | None) -> SplitPlan:
        """The parts of both models on the devices of a split."""
        models = self.place(target, draft)
        return SplitPlan(
            share_of(models.target), None if models.draft is None else share_of(models.draft), draft is None
        )


def list_splits(devices: int) -> Iterator[tuple[int, int | None]]:
    """Devices of target and draft: first all of them shared, then every split from the middle outwards."""
    yield devices, None
    for target in sorted(range(1, devices), key=lambda target: abs(2 * target - devices)):
        yield target, devices - target


def memory_limit(given: int | None = None) -> int | None:
    """Bytes of a device: as given, else the smallest that the devices report; None where they report none."""
    if given is not None:
        if given < LEAST_DEVICE:
            raise ConfigError(f"--device-memory {given} is {given} bytes: write {given}GiB for gibibytes")
        return given
    reports = [device.memory_stats() or {} for device in jax.devices()]
    limits = [report["bytes_limit"] for report in reports if "bytes_limit" in report]
    return min(limits, default=None)


def share_of(placement: Placement) -> DeviceShare:
    """One device's part of a placed model."""
    cfg, heads = placement.cfg, placement.heads
    params = placement.params()
    multiplied = {k: v for k, v in params.items() if k != "embed" or "head" not in params}
    values = sum(_values(leaf) for leaf in jax.tree.leaves(multiplied, is_leaf=_is_blocks))
    attention = 2 * heads.queries * cfg.head_dim * CONTEXT * len(cfg.attention_layers)
    cache = [leaf for leaf in jax.tree.leaves(placement.cache(CONTEXT)) if leaf.ndim]
    return DeviceShare(
        placement.plan.tensor, sum(map(local_bytes, jax.tree.leaves(params))), sum(map(local_bytes, cache)),
        heads.queries, sum(heads.slots), 2 * (values + attention),
    )  # fmt: skip


def plan_lines(plans: Sequence[SplitPlan], limit: int | None) -> list[list[str]]:
    """A table, its head first: one row for each split."""
    head = ["target/draft", "model", "weights GiB", f"cache GiB ({CONTEXT} tokens)", "query heads", "KV heads",
            "GFLOP a row", "fullest device", "fits"]  # fmt: skip
    rows = [head]
    for plan in plans:
        name = f"{plan.target.devices} shared" if plan.shared else f"{plan.target.devices}/{_devices(plan.draft)}"
        for role, share in (("target", plan.target), ("draft", plan.draft)):
            if share is None:
                continue
            last = ["", ""]
            if role == "target":
                fits = "unknown" if limit is None else "yes" if plan.fits(limit) else "no"
                last = [f"{plan.most_bytes / 2**30:.2f} GiB", fits]
            rows.append([
                name if role == "target" else "", role, f"{share.weight_bytes / 2**30:.3f}",
                f"{share.cache_bytes / 2**30:.3f}", str(share.query_heads), str(share.kv_heads),
                f"{share.row_flops / 1e9:.3f}", *last,
            ])  # fmt: skip
    return rows


def _devices(share: DeviceShare | None) -> str:
    return "-" if share is None else str(share.devices)


def _is_blocks(leaf: Any) -> bool:
    return isinstance(leaf, Blocks)


def _values(leaf: Any) -> int:
    """Numbers of a device's part of a weight; vectors are no matrices."""
    if isinstance(leaf, Blocks):
        data, found = leaf.data, find_format(leaf.format)
        assert found is not None, leaf.format
        return math.prod(data.sharding.shard_shape(data.shape)) // found.nbytes * found.values
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) if leaf.ndim > 1 else 0


def local_bytes(leaf: Any) -> int:
    """Bytes of one device's part of an array, from its shape and sharding."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
