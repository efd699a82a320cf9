"""The plan of a streamed target: what it says of memory is what a request takes."""

import gc

import jax
import pytest
from marks import fast_part
from offload_cases import CONTEXT, PROMPT, TOKENS, checkpoint, decode, make_pair

from jaxspec.checkpoint.load import open_weights
from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.loading import OpenModels
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.base import Store
from jaxspec.methods.core.cost_model import stream_growth
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.swift.settings import Swift
from jaxspec.methods.swiftspec.settings import SwiftSpec
from jaxspec.offload.executor import stream_layers
from jaxspec.offload.plan import check_room
from jaxspec.runtime.mesh import plan_pair

METHODS = {
    "ar": Autoregressive(),
    "lookup": PromptLookup(),
    "specexec 4": SpecExec(4),
    "specexec 64": SpecExec(64, width=8),
    "specexec 256": SpecExec(256),
    "swiftspec": SwiftSpec(7, depth=3, refill=0),
    "auto": Auto(draft_cost=0.01),
}
FAST = ("ar", "specexec 64", "swiftspec")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


def opened(folder, method, kind="q4_0"):
    """Open models, their placements and the method."""
    weights = open_weights(checkpoint(folder, kind))
    draft = open_weights(checkpoint(folder, "draft")) if method.drafts else None
    plans = plan_pair(
        1, 1 if method.own_devices else None, draft_platform=None, kernels="auto", method=method.name,
        own_devices=method.own_devices,
    )  # fmt: skip
    opened = OpenModels(weights, draft, TOKENS, TOKENS)
    return opened, opened.place(*plans, "auto"), method


def planned(folder, method, kind="q4_0", **settings):
    config = EngineConfig(**{"offload": "host", "max_context": CONTEXT, "session_memory": 0, **settings})
    models, placed, _ = opened(folder, method, kind)
    return models.plan_offload(placed, method, config)


def places(device):
    """Arrays on a device: where each lies, and its bytes."""
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == device and shard.data.nbytes:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", fast_part(METHODS, lambda name: name in FAST))
def test_planned_bytes_are_those_of_live_arrays(folder, name):
    """Counted after each layer of each pass of a request, that of the prompt included, on the target's device."""
    method = METHODS[name]
    plan, _ = planned(folder, method, resident_layers=2)
    gc.collect()
    device = plan.target.plan.devices[0]
    before = places(device)
    draft = checkpoint(folder, "draft") if method.drafts else None
    pair = make_pair(checkpoint(folder, "q4_0"), method, draft=draft, offload="host", resident=2)
    counted = []

    def count(*_):
        now = places(device)
        counted.append(sum(nbytes for place, nbytes in now.items() if place not in before))

    pair.params.target["layers"].progress = count
    decode(pair, prompt=PROMPT * 3, count=12)
    assert len(counted) >= 10
    certain = plan.device_bytes - plan.work
    # A buffer's last array does not fill its page; small arrays that pass between programs are not planned one by one.
    assert 0.97 * certain <= max(counted) <= plan.device_bytes
    own = [program for program in pair.engine.runner.programs if device in program.plan.devices]
    temporary = [c.memory_analysis().temp_size_in_bytes for program in own for c in program._compiled.values()]
    assert max(temporary) <= plan.work, "programs take more than is planned"


def test_a_draft_that_does_not_fit_its_own_devices_is_refused(folder):
    """A chain's target needs less than a wide tree's draft."""
    method = SwiftSpec(1, 64, branch=1, depth=8, refill=0)
    plan, _ = planned(folder, method)
    assert plan.apart > plan.device_bytes
    with pytest.raises(ConfigError, match="the draft takes on each of its own devices"):
        planned(folder, method, device_memory=plan.apart - 1)
    assert planned(folder, method, device_memory=plan.apart)[0].target.resident_layers > 0


def test_the_draft_tokens_that_auto_chooses_are_planned(folder):
    """A long pass makes `auto` SpecExec: its tree takes memory, and less is left for layers."""
    method = Auto()
    models, placed, _ = opened(folder, method)
    config = EngineConfig(offload="host", max_context=CONTEXT, session_memory=0)
    plain, store = models.plan_offload(placed, method, config)
    slow, known = models.plan_offload(placed, method, config, Store(stream_ratio=500.0))
    chosen = method.configure(placed, known)
    assert method.configure(placed, store).name == "auto" and chosen.name == "specexec"
    assert slow.held > plain.held
    explicit, _ = models.plan_offload(placed, chosen, config)
    assert (slow.held, slow.work) == (explicit.held, explicit.work)


def test_as_many_layers_stay_as_fit(folder):
    none, _ = planned(folder, METHODS["ar"])
    layers = none.target.cfg.num_layers
    whole, _ = planned(folder, METHODS["ar"], resident_layers=layers)
    seen, step = set(), (whole.device_bytes - none.device_bytes) // 6
    for memory in (*range(none.device_bytes, whole.device_bytes, step), whole.device_bytes):
        plan, _ = planned(folder, METHODS["ar"], device_memory=memory)
        assert plan.device_bytes <= memory
        seen.add(plan.target.resident_layers)
    assert {0, 1, layers} <= seen
    with pytest.raises(ConfigError, match="of which an answer takes"):
        planned(folder, METHODS["ar"], device_memory=none.device_bytes - 1)
    kept, _ = planned(folder, METHODS["ar"], session_memory=1 << 20)
    assert kept.device_bytes == none.device_bytes + (1 << 20)


def test_a_larger_tree_or_text_than_was_planned_is_refused(folder):
    plan, _ = planned(folder, METHODS["ar"])
    _, models, method = opened(folder, METHODS["specexec 256"])
    models = models._replace(target=stream_layers(models.target, 0))
    runner = method.bind(models, CONTEXT)
    with pytest.raises(ConfigError, match="fewer layers stay, or use fewer draft tokens"):
        check_room(plan, plan.device_bytes, method, runner, models, CONTEXT)
    check_room(plan, 1 << 40, method, runner, models, CONTEXT)


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [0, 2])
def test_planned_bytes_of_a_mixture(folder, kept):
    """Room for experts is planned, and what passes read is within what the plan says."""
    method = METHODS["ar"]
    none, _ = planned(folder, method, kind="mixtral", offload="disk", resident_layers=1)
    assert none.experts and none.target.kept_experts == 0
    plan, _ = planned(folder, method, kind="mixtral", offload="disk", device_memory=none.device_bytes * 4)
    assert plan.target.resident_layers == plan.target.cfg.num_layers  # all of them fit
    gc.collect()
    device = none.target.plan.devices[0]
    before = places(device)
    pair = make_pair(checkpoint(folder, "mixtral"), method, offload="disk", resident=1, kept=kept)
    counted, stream = [], pair.params.target["layers"]

    def count(*_):
        now = places(device)
        counted.append(sum(nbytes for place, nbytes in now.items() if place not in before))

    stream.progress = count
    decode(pair, prompt=PROMPT * 3, count=12)
    one = sum(leaf.shard_bytes for leaf in stream.store.experts[max(stream.store.experts)].layout.leaves)
    certain = none.device_bytes - none.work + kept * one * len(stream.store.experts)
    assert 0.97 * certain <= max(counted) <= certain + none.work


def test_experts_that_stay_have_memory_before_whole_layers(folder):
    method, seen = METHODS["ar"], set()
    none, _ = planned(folder, method, kind="mixtral")
    whole, _ = planned(folder, method, kind="mixtral", resident_layers=none.target.cfg.num_layers)
    for memory in range(none.device_bytes, whole.device_bytes, (whole.device_bytes - none.device_bytes) // 8):
        plan, _ = planned(folder, method, kind="mixtral", device_memory=memory)
        assert plan.device_bytes <= memory
        seen.add((plan.target.kept_experts, plan.target.resident_layers))
    assert {stay for stay, _ in seen} >= {0, 1, 2}
    text = "\n".join(none.lines({0: 1.0, 16: 2.0}))
    for part in ("each of whose rows has 2 of 4 experts", "1 row", "64 rows, expected", "all experts, at most"):
        assert part in text
    assert "each layer waits for them" in text and "specexec, 16 draft tokens" in text
    assert none.bytes_of_rows(1) < none.bytes_of_rows(2) < none.bytes_of_rows(64) <= none.pass_bytes
    share = none.expert_share
    assert 0 < share < 1
    growth = stream_growth(none.target, 17, share)
    assert growth == pytest.approx(none.bytes_of_rows(17) / none.bytes_of_rows(1))


def test_drafts_of_the_target_itself_are_refused(folder):
    with pytest.raises(ConfigError, match="swift drafts with the target's own layers"):
        planned(folder, Swift())
