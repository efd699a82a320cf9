"""Choose which layers stay on the device and which are streamed, before loading."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.load import Weights
from jaxspec.config import EngineConfig, Offload
from jaxspec.errors import ConfigError
from jaxspec.methods.base import Method, Store
from jaxspec.methods.core.round import Models, steps_per_dispatch
from jaxspec.methods.core.runner import Runner
from jaxspec.models.experts import distinct_experts
from jaxspec.offload.executor import stream_layers
from jaxspec.offload.layout import LayerLayout, TreeLayout, layer_layouts, slot_layouts
from jaxspec.offload.memory import Needs, answer_needs, bytes_by_device
from jaxspec.offload.reader import PIECE, DirectReader
from jaxspec.offload.stores import can_pin, measure_link
from jaxspec.offload.stream import NUM_BUFFERS, NUM_FILLERS, NUM_PINNED_BUFFERS
from jaxspec.runtime import hosts
from jaxspec.runtime.placement import Placement

# Of the checkpoint's files, how much is read to learn what the disk gives.
_PROBE_BYTES, _PROBE_SECONDS = 256 << 20, 0.5
# Numbers of rows whose expected bytes a plan of a mixture shows.
SHOWN_ROWS = (1, 8, 64)


@dataclasses.dataclass(frozen=True)
class OffloadPlan:
    """Memory and traffic of a streamed target, in bytes on each device unless said otherwise.

    Attributes:
      target: its placement, which says how many layers stay.
      offload: "host" or "disk".
      beside: the target's weights apart from the layers: embedding, norms, head.
      resident: its layers that stay.
      buffers: the ring through which the others pass.
      experts: arrays of experts that are read one by one: all of a layer, and those that layers keep.
      held: caches, trees and texts of one answer, target and draft.
      work: what programs take while they run, an estimate from above.
      kept: caches that finished conversations may keep.
      draft: the draft's own weights, where it shares the target's devices.
      apart: what a draft on devices of its own takes on each of them, in all; `draft_devices` says how many there are.
      staging: host memory for what is read and not yet packed (all devices).
      host: host memory for the layers that pass by (all devices); 0 where they are read from disk.
      pass_bytes: bytes read from files, or copied from host memory, for a pass; with all experts.
      expert_bytes: those of them that are of experts which are read only if rows are sent to them.
      process: memory that this process takes already, without any weights; 0 where that is not known.
      bytes_per_s: what the disk or the memory gives, where it was measured.
      memory_bytes_per_s: what copies in memory reach, measured at the same time.
    """

    target: Placement
    offload: Offload
    beside: int
    resident: int
    buffers: int
    experts: int
    held: int
    work: int
    kept: int
    draft: int
    apart: int
    draft_devices: int
    staging: int
    host: int
    pass_bytes: int
    expert_bytes: int = 0
    process: int = 0
    bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes that the memory of each of the target's devices has to hold."""
        weights = self.beside + self.resident + self.buffers + self.experts + self.draft
        return weights + self.held + self.kept + self.work

    def bytes_of_rows(self, rows: int) -> float:
        """Bytes of a pass of so many rows, if each one's experts are drawn at random and none of them is kept."""
        experts = self.target.cfg.experts
        part = 1.0 if experts is None else distinct_experts(experts, rows) / experts.count
        return self.pass_bytes - (1 - part) * self.expert_bytes

    def seconds_of_rows(self, rows: int) -> float | None:
        """Seconds that such a pass takes at least, as it waits for all that is streamed."""
        return self.bytes_of_rows(rows) / self.bytes_per_s if self.bytes_per_s else None

    @property
    def expert_share(self) -> float:
        """Share of a one-row pass's bytes that belongs to experts read only when rows choose them."""
        experts, one = self.target.cfg.experts, self.bytes_of_rows(1)
        return 0.0 if experts is None or not one else self.expert_bytes * experts.per_token / experts.count / one

    @property
    def stream_ratio(self) -> float:
        """The least time of a pass over what one row takes to compute, which reads all weights from memory; or 0."""
        pass_s = self.seconds_of_rows(1)
        if pass_s is None or self.memory_bytes_per_s is None:
            return 0.0
        layers, unread = sum(layout.weights.nbytes for layout in layer_layouts(self.target)), 0.0
        if (experts := self.target.cfg.experts) is not None:
            split = (layout.experts for layout in layer_layouts(self.target))
            every = sum(one.layout.nbytes * one.count for one in split if one is not None)
            unread = every * (1 - experts.per_token / experts.count)
        return pass_s * self.memory_bytes_per_s / (self.beside + layers - unread)

    def lines(self, rates: Mapping[int, float] | None = None) -> list[str]:
        """The plan in words; `rates` are tokens per pass of SpecExec by draft tokens, 0 is plain decoding."""
        layers, streamed = self.target.cfg.num_layers, len(self.target.streamed)
        rows = [
            ("embedding, norms, head", self.beside), (f"{layers - streamed} resident layers", self.resident),
            (f"buffers for {streamed} streamed layers", self.buffers),
            (f"experts, {self.target.kept_experts} of a layer stay", self.experts), ("draft", self.draft),
            ("caches, trees and texts", self.held), ("earlier conversations, at most", self.kept),
            ("programs while they run, at most", self.work),
        ]  # fmt: skip
        where = "host memory" if self.offload == "host" else "disk"
        made = [f"{streamed} of {layers} layers are streamed from {where}; on each device:"]
        made += [f"  {name:<34}{format_bytes(size):>12}" for name, size in rows if size]
        made.append(f"  {'together':<34}{format_bytes(self.device_bytes):>12}")
        if self.apart:
            made.append(f"{'on each device of the draft':<36}{format_bytes(self.apart):>12}")
        beside = [
            ("layers in host memory", self.host), ("host memory for reading", self.staging),
            ("the process itself", self.process),
        ]  # fmt: skip
        made += [f"{name:<36}{format_bytes(size):>12}" for name, size in beside if size]
        devices = self.target.plan.devices
        if devices[0].platform == "cpu" and self.process:
            most = self.device_bytes * len(devices) + self.apart * self.draft_devices
            most += sum(size for _, size in beside)
            made.append(f"{'memory of the process, in all':<36}{format_bytes(most):>12}")
        made += self._pass_lines()
        pass_s = self.seconds_of_rows(1)
        if pass_s is not None and self.bytes_per_s is not None:
            made.append(f"{'measured bandwidth':<36}{format_bytes(self.bytes_per_s):>12}/s")
            made.append(f"{'seconds of a pass, at least':<36}{pass_s:>12.3f}")
            if rates:
                made.append("tokens/s at most, where drafting takes no time:")
                for tokens, rate in rates.items():
                    name = f"specexec, {tokens} draft tokens" if tokens else "plain decoding"
                    made.append(f"  {name:<34}{rate / (self.seconds_of_rows(tokens + 1) or pass_s):>12.2f}")
        return made

    def _pass_lines(self) -> list[str]:
        """Lines that say what a pass reads."""
        experts = self.target.cfg.experts
        if not self.expert_bytes or experts is None:
            return [f"{'bytes of a pass':<36}{format_bytes(self.pass_bytes):>12}"]
        made = [f"bytes of a pass, each of whose rows has {experts.per_token} of {experts.count} experts at random:"]
        for rows in SHOWN_ROWS:
            name = "1 row" if rows == 1 else f"{rows} rows, expected"
            made.append(f"  {name:<34}{format_bytes(self.bytes_of_rows(rows)):>12}")
        made.append(f"  {'all experts, at most':<34}{format_bytes(self.pass_bytes):>12}")
        return [*made, "experts are read once the router has chosen them: each layer waits for them"]


def plan_offload(
    weights: Weights, target: Placement, draft: Placement | None, config: EngineConfig, held: Mapping[Any, int],
    work: Mapping[Any, int],
) -> OffloadPlan:  # fmt: skip
    """Decide how many layers stay; `held` and `work` are bytes of an answer by device, see `OffloadPlan`.

    Raises:
      ConfigError: more layers are to stay than there are, or the memory does not suffice for what has to stay, or for
        a draft on its own devices of the same kind.
    """
    layers, cfg, device = layer_layouts(target), target.cfg, target.plan.devices[0]
    beside = sum(layout.small.nbytes for layout in layers)
    beside += _device_bytes({name: leaf for name, leaf in target.params().items() if name != "layers"})
    kept = int(config.session_memory or 0)
    own = apart = draft_devices = 0
    if draft is not None:
        own = _device_bytes(draft.params())
        if (beyond := draft.plan.devices[0]) not in target.plan.devices:
            apart, own = own + held.get(beyond, 0) + work.get(beyond, 0), 0
            draft_devices = len(draft.plan.devices)
        else:
            # The target's own arrays; a head of some of its rows is a copy.
            lent = draft.params()
            own -= _device_bytes(
                {name: lent[name] for name in draft.shared_params() if not (name == "head" and draft.cfg.head_ids)}
            )

    def plan(resident_layers: int, kept_experts: int = 0) -> OffloadPlan:
        placed = stream_layers(target, resident_layers, kept_experts)
        streamed = [layers[i] for i in placed.streamed]
        resident = sum(layout.weights.nbytes for i, layout in enumerate(layers) if i not in placed.streamed)
        largest = max((layout.passing.nbytes for layout in streamed), default=0)
        devices = len({device for layout in streamed for leaf in layout.weights.leaves for device, _ in leaf.shards})
        pinned = config.offload == "host" and bool(streamed) and can_pin(streamed[0].weights.leaves[0].shards)
        buffers = min(NUM_PINNED_BUFFERS if pinned else NUM_BUFFERS, len(streamed)) * largest
        experts = sum(layout.nbytes for layout in {one.kind: one for one in slot_layouts(placed).values()}.values())
        # Where devices have memory of their own, what is not copied from pinned memory lies in the host's, too.
        host = 0 if device.platform == "cpu" or pinned else (buffers + experts) * devices
        if config.offload == "host":
            host += sum(layout.weights.nbytes for layout in streamed) * devices
        pass_bytes, expert_bytes = _pass_bytes(weights, streamed, config.offload)
        return OffloadPlan(
            placed, config.offload, beside, resident, buffers, experts, held.get(device, 0), work.get(device, 0), kept,
            own, apart, draft_devices, _staging(weights, streamed) if config.offload == "disk" else 0, host, pass_bytes,
            expert_bytes, _process_bytes(),
        )  # fmt: skip

    if config.resident_layers is not None and config.resident_layers > cfg.num_layers:
        raise ConfigError(f"resident_layers is {config.resident_layers}, the model has {cfg.num_layers} layers")
    if config.device_memory is None:
        return plan(config.resident_layers or 0)
    limit = int(config.device_memory)
    least = plan(0)
    if draft is not None and draft.plan.devices[0].platform == device.platform and least.apart > limit:
        raise ConfigError(
            f"device_memory {format_bytes(limit)} is less than what the draft takes on each of its own devices: "
            f"{format_bytes(least.apart)} (max_context and fewer draft tokens make it smaller)"
        )
    if least.device_bytes > limit:
        answer = least.held + least.work
        raise ConfigError(
            f"device_memory {format_bytes(limit)} is less than what has to stay on a device: "
            f"{format_bytes(least.device_bytes)}, of which an answer takes {format_bytes(answer)} (max_context and "
            "fewer draft tokens make it smaller)" + (f", earlier conversations {format_bytes(kept)}" if kept else "")
        )
    if (whole := plan(cfg.num_layers)).device_bytes <= limit:
        return whole
    # Experts that many rows are sent to are worth more than whole layers, and so have memory first.
    most = cfg.experts.count if least.experts and cfg.experts is not None else 1
    stay = max(count for count in range(most) if plan(0, count).device_bytes <= limit)
    return plan(max(n for n in range(cfg.num_layers + 1) if plan(n, stay).device_bytes <= limit), stay)


def plan_for_method(
    weights: Weights, models: Models, method: Method, config: EngineConfig, store: Store, tokens: int
) -> tuple[OffloadPlan, Store]:  # fmt: skip
    """Plan for answers of up to `tokens` tokens; also returns `store` with the cost of a pass.

    A method that chooses its draft tokens by the time of a pass takes more memory, and so has fewer layers stay.
    """
    models = models._replace(target=stream_layers(models.target, 0))
    method.check(models)
    speeds: tuple[float | None, float] | None = None
    found: tuple[OffloadPlan, Store] | None = None
    while True:
        chosen = method.configure(models, store)
        chosen.check(models)
        try:
            needs = method_needs(chosen, chosen.bind(models, tokens), models, tokens)
            plan = plan_offload(weights, *models, config, *needs)
        except ConfigError:
            if found is None:
                raise
            return found  # what the time of a pass would make worthwhile does not fit
        speeds = speeds or measure_bandwidth(plan, weights)
        plan = dataclasses.replace(plan, bytes_per_s=speeds[0], memory_bytes_per_s=speeds[1])
        # Of several processes each streams its own part: the slowest decides.
        ratio = max(hosts.gather("stream ratio", plan.stream_ratio))
        measured = dataclasses.replace(store, stream_ratio=ratio, expert_share=plan.expert_share)
        # The time of a pass only grows from turn to turn, and with it the tree.
        if method.configure(models, measured) == chosen or measured.stream_ratio <= store.stream_ratio:
            return plan, store
        found, store = (plan, store), measured


def check_room(plan: OffloadPlan, limit: int, method: Method, runner: Runner, models: Models, tokens: int) -> None:
    """ConfigError where answers take more than `limit` bytes leave room for, beside the layers that stay."""
    needs, device = method_needs(method, runner, models, tokens), models.target.plan.devices[0]
    wanted = dataclasses.replace(plan, held=needs.held[device], work=needs.work[device])
    if wanted.device_bytes > limit:
        raise ConfigError(
            f"method {method.name} and texts of {tokens} tokens take {format_bytes(wanted.device_bytes)} of a device, "
            f"device_memory is {format_bytes(limit)}: load the model with this method and max_context {tokens}, so "
            "that fewer layers stay, or use fewer draft tokens"
        )


def method_needs(method: Method, runner: Runner, models: Models, tokens: int) -> Needs:
    """Bytes by device that answers of up to `tokens` tokens take with a bound method."""
    path = max(method.max_path, steps_per_dispatch(models.target))
    return answer_needs(runner, models, tokens, rows=method.num_rows, path=path, draft_rows=method.draft_rows)


def measure_bandwidth(plan: OffloadPlan, weights: Weights) -> tuple[float | None, float]:
    """Bytes per second of the checkpoint's files, or of host memory, and of copies in memory; in about half a second.

    The first is None where nothing is streamed.
    """
    layouts = [layout.weights for i, layout in enumerate(layer_layouts(plan.target)) if i in plan.target.streamed]
    memory = _copy_bandwidth()
    if layouts and plan.offload == "host" and can_pin(layouts[0].leaves[0].shards):
        return measure_link([device for device, _ in layouts[0].leaves[0].shards]), memory
    if not layouts or plan.offload == "host":
        return memory if layouts else None, memory
    assert weights.direct is not None
    reader = DirectReader()
    try:
        read = weights.direct(reader)
        start = time.perf_counter()
        for leaf in (leaf for layout in layouts for leaf in layout.leaves):
            with reader.reusing():
                read(leaf.name, leaf.info)
            if reader.bytes_read > _PROBE_BYTES or time.perf_counter() - start > _PROBE_SECONDS:
                break
        return reader.bytes_read / reader.busy_s, memory
    finally:
        reader.close()


def _copy_bandwidth() -> float:
    """Bytes per second of copies in this machine's memory."""
    block = np.ones(32 << 20, np.uint8)
    out = np.zeros_like(block)
    start = time.perf_counter()
    for _ in range(4):
        np.copyto(out, block)
    return 4 * block.nbytes / (time.perf_counter() - start)


def format_bytes(count: float) -> str:
    """A number of bytes for people: "512 B", "1.5 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.{2 if count < 10 else 1}f} {units[power]}"


def _device_bytes(tree: Any) -> int:
    """Bytes of placed shapes on one device, the one with the most of them."""
    return max(bytes_by_device(tree).values(), default=0)


def _process_bytes() -> int:
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


def _pass_bytes(weights: Weights, layouts: Sequence[LayerLayout], offload: Offload) -> tuple[int, int]:
    """Bytes of a pass with all experts, and those of the experts that are read one by one."""
    # Experts of a layer have equal sizes.
    experts = sum(
        one.count * _bytes_read(weights, one.layout, offload, 0)
        for one in (layout.experts for layout in layouts)
        if one
    )
    return experts + sum(_bytes_read(weights, layout.passing, offload) for layout in layouts), experts


def _bytes_read(weights: Weights, layout: TreeLayout, offload: Offload, expert: int | None = None) -> int:
    if offload == "host":
        return layout.all_bytes
    assert weights.file_bytes is not None
    return sum(weights.file_bytes(leaf.name, leaf.info, expert) for leaf in layout.leaves)


def _staging(weights: Weights, layouts: Sequence[LayerLayout]) -> int:
    """Memory of the threads that fill buffers: what they read, and as much while the parts of an array are joined."""
    assert weights.file_bytes is not None
    largest = 0
    for layout in layouts[:1]:
        passing = [(leaf, None) for leaf in layout.passing.leaves]
        single = [(leaf, 0) for leaf in layout.experts.layout.leaves] if layout.experts else []
        largest = max(weights.file_bytes(leaf.name, leaf.info, expert) for leaf, expert in [*passing, *single])
    return NUM_FILLERS * 2 * (largest + PIECE)
