"""Open what the arguments of `LLM` name, choose meshes, and plan streaming; reads headers and vocabularies only."""

import dataclasses
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Unpack

from jaxspec.checkpoint.load import Weights
from jaxspec.checkpoint.pair import NO_DRAFT, open_draft, open_model, place_pair
from jaxspec.checkpoint.shipped import find_shipped_draft
from jaxspec.config import EngineConfig, EngineSettings, check_path, read_settings
from jaxspec.engine import FIRST_CAPACITY
from jaxspec.errors import ConfigError
from jaxspec.files import vocabulary_digest
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.cost_model import USUAL_RATES
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, Models
from jaxspec.methods.core.runner import Runner
from jaxspec.methods.registry import check_draft_given, resolve_method
from jaxspec.offload.executor import stream_layers
from jaxspec.offload.memory import Needs, answer_needs
from jaxspec.offload.plan import OffloadPlan, format_bytes, measure_bandwidth, plan_offload
from jaxspec.runtime import hosts
from jaxspec.runtime.distributed import settings as process_settings
from jaxspec.runtime.mesh import MeshPlan, plan_hosts, plan_pair
from jaxspec.text.tokenizer import load_tokenizer


def open_target(
    model: str | PathLike[str] | None, revision: str | None, draft: object, method: Method, config: EngineConfig
) -> Weights:
    """The target's checkpoint; ConfigError where method, draft or settings do not go with it."""
    if draft is not None:
        check_path("draft", draft)  # a layer set, too, is text without a NUL character
        check_draft_given(method, draft != NO_DRAFT)
    weights = open_model("model", model, revision)
    if weights.config.features is not None:
        raise ConfigError(f"{weights.path}: is a draft that is fed a target's hidden states; give it as the draft")
    if weights.config.shares_embedding:
        raise ConfigError(f"{weights.path}: is a draft without an embedding of its own; give it as the draft")
    if config.expert_parallel and weights.config.experts is None:
        raise ConfigError(f"{weights.path}: has no experts; expert_parallel is for mixtures of experts")
    return weights


def plan_meshes(config: EngineConfig, method: Method) -> tuple[MeshPlan, MeshPlan]:
    """Meshes of target and draft."""
    if hosts.several():
        target, draft = plan_hosts(
            config.target_devices, config.draft_devices, draft_process=process_settings().draft_process,
            kernels=config.kernels, method=method.name, own_devices=method.own_devices,
        )  # fmt: skip
    else:
        target, draft = plan_pair(
            config.target_devices or 1, config.draft_devices, draft_platform=config.draft_platform,
            kernels=config.kernels, method=method.name, own_devices=method.own_devices,
        )  # fmt: skip
    if not config.expert_parallel:
        return target, draft
    if target.tensor == 1:
        raise ConfigError("expert_parallel spreads a mixture's experts over devices: give target_devices, 2 or more")
    return dataclasses.replace(target, expert_parallel=True), dataclasses.replace(draft, expert_parallel=True)


def plan_target_offload(
    weights: Weights, draft_weights: Weights | None, models: Models, method: Method, config: EngineConfig,
    store: Store = NO_STORE,
) -> tuple[OffloadPlan, Store]:  # fmt: skip
    """Plan which layers stay on the devices; also returns `store` with the cost of a pass, for `Method.configure`.

    The bandwidth of the disk, or of host memory, is measured for about half a second.

    Raises:
      ConfigError: the target cannot be streamed for this draft or this method, or the memory does not suffice.
    """
    if draft_weights is not None and draft_weights.layers is not None:
        raise ConfigError(f"draft {draft_weights.path} consists of the target's own layers, which offload streams")
    tokens = config.max_context or min(FIRST_CAPACITY, models.target.cfg.max_context)
    models = models._replace(target=stream_layers(models.target, 0))
    method.check(models)
    speeds: tuple[float | None, float] | None = None
    found: tuple[OffloadPlan, Store] | None = None
    # A method that chooses its draft tokens by the time of a pass takes more memory, and so has fewer layers stay.
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


def method_needs(method: Method, runner: Runner, models: Models, tokens: int) -> Needs:
    """Bytes that answers of up to `tokens` tokens take on each device with a method that is bound to its models."""
    path = max(method.max_path, STEPS_PER_DISPATCH)
    return answer_needs(runner, models, tokens, rows=method.num_rows, path=path, draft_rows=method.draft_rows)


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


def explain_offload(
    model: str | PathLike[str] | None = None,
    *,
    draft: str | PathLike[str] | None = None,
    method: str | Method = "auto",
    revision: str | None = None,
    **settings: Unpack[EngineSettings],
) -> list[str]:
    """Describe what `LLM` would keep on the devices and what it would stream, in lines; loads nothing.

    The bandwidth of the disk, or of host memory, is measured for about half a second.

    Raises:
      ConfigError: as `LLM`, or there is nothing to stream.
    """
    config = read_settings(settings)
    if config.offload == "none":
        raise ConfigError("--plan tells what offload streams: give offload 'host' or 'disk'")
    resolved = resolve_method(method)
    weights = open_target(model, revision, draft, resolved, config)
    tokens = load_tokenizer(weights.path).token_strings()
    draft_weights = open_draft(draft, weights, tokens, find_shipped=resolved.drafts)
    check_draft_given(resolved, draft_weights is not None)
    kinds = config.dtype, config.activations, config.kv_dtype
    plans = plan_meshes(config, resolved)
    models = Models(*place_pair(weights, draft_weights, tokens, token_strings, *plans, *kinds))
    plan, _ = plan_target_offload(weights, draft_weights, models, resolved, config, Store(weights.path))
    rates = USUAL_RATES if draft_weights is not None and draft is None else {}  # those of the shipped draft
    return plan.lines({0: 1.0, **rates})


def token_strings(path: Path) -> Sequence[str]:
    """Every token of a checkpoint's tokenizer as its vocabulary writes it, by id."""
    return load_tokenizer(path).token_strings()


def has_draft(
    model: str | PathLike[str] | None, draft: str | PathLike[str] | None, revision: str | None = None
) -> bool:
    """Whether a method that uses a draft model would get one from these arguments of `LLM`."""
    if draft is not None:
        return draft != NO_DRAFT
    weights = open_model("model", model, revision)
    return find_shipped_draft(weights.config, vocabulary_digest(token_strings(weights.path))) is not None
