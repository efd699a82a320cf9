"""Text in, text out: `generate` and `LLM`."""

import copy
import dataclasses
import numbers
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, overload

import numpy as np

from jaxspec.checkpoint.load import Weights
from jaxspec.checkpoint.pair import NO_DRAFT, DamagedDraftError, load_pair, open_draft, open_model, place_pair
from jaxspec.checkpoint.shipped import find_shipped_draft, vocabulary_digest, warn_of_damage
from jaxspec.config import DType, EngineConfig, SamplingParams
from jaxspec.engine import Engine, derive_seed, fresh_seed
from jaxspec.errors import ConfigError
from jaxspec.methods.base import Method, Store
from jaxspec.methods.core.round import ModelParams, Models, StepOutput
from jaxspec.methods.registry import check_draft_given, resolve_method
from jaxspec.metrics import count_speculation
from jaxspec.models.params import Params
from jaxspec.results import Completion, StreamEvent
from jaxspec.runtime.compile_cache import enable_compile_cache
from jaxspec.runtime.mesh import MeshPlan, plan_pair
from jaxspec.stream_events import EventMaker, RoundClock
from jaxspec.text.stream import TextStream
from jaxspec.text.tokenizer import load_tokenizer
from pallas_kernels.registry import Kernels

Message = Mapping[str, str]

Prompt = str | Sequence[int]


class LLM:
    """A language model, its tokenizer and a decoding method, compiled and ready.

    Args:
      model: a Hugging Face folder, a GGUF file, a native checkpoint, or None for the default model.
      draft: a draft model's checkpoint, for methods that use one; None takes the draft that ships with jaxspec if one
        fits the model (a damaged one is left out with a warning, unless the method needs one), "none" does without.
        "self:attention=1,3-5;mlp=2" is the model itself without these blocks.
      method: a name or a method object; "auto" drafts as far as that pays (see `Auto`).
      dtype: "float32", "bfloat16", or "auto": bfloat16 on accelerators; on CPU float32 activations, and weights as the
        checkpoint holds them (GGUF blocks too) where the native kernels run, else float32.
      target_devices: devices that share the model (tensor parallelism).
      draft_devices: devices of their own for the draft, after the target's, for method "swiftspec"; None is one if
        there is one left, else the draft shares the target's.
      draft_platform: platform of the draft's devices, if it is not the target's: "cpu" beside an accelerator.
      max_context: most tokens of prompt plus output; None takes the model's own limit and grows on demand.
      compile_cache: folder of compiled programs; None is the user's cache folder, "" switches it off.
      kernels: "cpu" (native: results do not depend on the number of rows of a pass), "xla", for NVIDIA GPUs
        "pallas-triton", "mosaic" (Hopper) or "jax-triton" (an extra), or "auto": the fastest that run here.

    Raises:
      CheckpointError: the checkpoint is missing, damaged or incomplete.
      ConfigError: a setting, or something the model's configuration asks for, is not supported.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        draft: str | PathLike[str] | None = None,
        method: str | Method = "auto",
        dtype: DType = "auto",
        target_devices: int = 1,
        draft_devices: int | None = None,
        draft_platform: str | None = None,
        max_context: int | None = None,
        compile_cache: str | None = None,
        kernels: str = "auto",
    ):
        """Load, place and compile; see the class."""
        config = EngineConfig(dtype, target_devices, draft_devices, draft_platform, max_context, compile_cache, kernels)
        resolved = resolve_method(method)
        if draft is not None:
            check_draft_given(resolved, draft != NO_DRAFT)
        weights = open_model("model", model)
        if weights.config.shares_embedding:
            raise ConfigError(f"{weights.path}: is a draft without an embedding of its own; give it as the draft")
        plan, draft_plan = plan_pair(
            config.target_devices,
            config.draft_devices,
            draft_platform=config.draft_platform,
            kernels=config.kernels,
            method=resolved.name,
            own_devices=resolved.own_devices,
        )
        self.model_path = weights.path
        self.tokenizer = load_tokenizer(weights.path)
        tokens = self.tokenizer.token_strings()
        draft_weights = open_draft(draft, weights, tokens, find_shipped=resolved.drafts)
        if draft is None:
            check_draft_given(resolved, draft_weights is not None)
        self._cache_folder = enable_compile_cache(config.compile_cache)
        self.eos_ids = tuple(sorted({*weights.eos_ids, *self.tokenizer.eos_ids}))
        try:
            self._assemble(weights, draft_weights, resolved, plan, draft_plan, config, draft is None)
            return
        except DamagedDraftError as error:
            if draft is not None or draft_weights is None or resolved.needs_draft:
                raise
            warn_of_damage(draft_weights.path, str(error))
        # Not while the error is handled: it holds on to what was loaded.
        self._assemble(weights, None, resolved, plan, draft_plan, config, False)

    def _assemble(
        self,
        weights: Weights,
        draft_weights: Weights | None,
        method: Method,
        plan: MeshPlan,
        draft_plan: MeshPlan,
        config: EngineConfig,
        shipped: bool,
    ) -> None:
        """Place, compile and load; `shipped` says where the draft comes from."""
        self.draft_path = None if draft_weights is None else draft_weights.path
        shipped_name = self.draft_path.name if self.draft_path is not None and shipped else None
        store = Store(weights.path, self._cache_folder, shipped_name)
        tokens = self.tokenizer.token_strings()
        models = Models(*place_pair(weights, draft_weights, tokens, token_strings, plan, draft_plan, config.dtype))
        self.engine = Engine(models, method, config.max_context, store)
        # Weights load while XLA compiles: both leave the interpreter lock for most of their time.
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(load_pair, weights, draft_weights, *models)
            self._unreported_compile_s = self.engine.prepare()
            self.model_params = ModelParams(*loading.result())

    @property
    def params(self) -> Params:
        """The target's parameters, placed and padded."""
        return self.model_params.target

    @property
    def draft_params(self) -> Params | None:
        """The draft's parameters, if there is one."""
        return self.model_params.draft

    @property
    def kernels(self) -> Kernels:
        """What the model's programs multiply and attend with."""
        return self.engine.target.plan.kernels

    def with_method(self, method: str | Method) -> "LLM":
        """Another decoding method, a name or an object, on the same weights, with functions and buffers of its own.

        No further weights are loaded: a model that was loaded for a method without a draft model, such as "ar", has
        none here either. "auto" then copies or decodes plainly (`stats.choice` shows the draft None), and methods that
        need one are refused; load with method "auto" to have the shipped draft. A method that uses no draft model
        leaves this one's aside.

        Raises:
          ConfigError: an unknown method, or one that does not fit the models.
        """
        other, engine = copy.copy(self), self.engine
        other.engine = Engine(engine.models, resolve_method(method), engine.given_context, engine.store)
        other._unreported_compile_s = other.engine.prepare()
        return other

    @overload
    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Complete a prompt, or each of a list of prompts in turn.

        Args:
          prompt: a string or token ids, or a list of either. No chat template is applied; see `chat`. An empty list
            gives an empty list.
          sampling_params: one for all prompts, or a list with one for each; greedy decoding of up to 256 tokens by
            default.

        Returns:
          The completion of one prompt, or a list of those of several. Where `SamplingParams.n` asks for several
          completions of a prompt, `Completion.outputs` has them all.

        Raises:
          ConfigError: a prompt is empty or does not fit; nothing was computed then.
        """
        batch = _is_batch(prompt)
        prompts: list[Any] = [*prompt] if batch else [prompt]
        samplings = _one_each(sampling_params, len(prompts))
        if _is_conversation(prompts) or any(_is_conversation(p) for p in prompts):
            raise ConfigError("generate takes text or token ids; chat answers conversations")
        encoded = [self.encode(p) for p in prompts]
        requests = [self._check(ids, sampling) for ids, sampling in zip(encoded, samplings, strict=True)]
        completions = [self._complete(ids, sampling) for ids, sampling in zip(encoded, requests, strict=True)]
        return completions if batch else completions[0]

    def chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Completion:
        """Answer a conversation: dicts with "role" and "content", oldest first, in the model's own chat template."""
        sampling = _check_sampling(sampling_params)
        if not _is_conversation(messages):
            raise ConfigError(f"chat takes messages, dicts with 'role' and 'content', got {messages!r:.80}")
        ids = self.encode(messages)
        return self._complete(ids, self._check(ids, sampling))

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[StreamEvent, bool | None, None]:
        """Yield text as it is decoded, in whole characters; the last event carries the `Completion`.

        The prompt is a string, token ids, or a conversation (dicts with "role" and "content"); `n` must be 1.
        `send(True)` instead of `next` ends the text: it gives the last event, whose `finish_reason` is "abort".
        """
        sampling = _check_sampling(sampling_params)
        if sampling.n > 1:
            raise ConfigError(f"stream gives one completion, and n is {sampling.n}: use generate or chat")
        ids = self.encode(prompt)
        return self._stream(ids, self._check(ids, sampling))

    def encode(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        """Token ids of a prompt: text as it is, ids unchanged, a conversation through the chat template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if _is_conversation(prompt):
            return self.tokenizer.encode_chat(prompt)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if _is_ids(prompt):
            return [int(token) for token in prompt]
        raise ConfigError(f"a prompt is a string, token ids, a conversation or a list of prompts, got {prompt!r:.80}")

    def _check(self, ids: list[int], sampling: SamplingParams) -> SamplingParams:
        """Refuse what cannot be decoded; all tokens that end a text join `stop_token_ids`."""
        vocab = self.engine.target.cfg.vocab_size
        ends = {*(sampling.stop_token_ids or ()), *(i for i in self.eos_ids if i < vocab and not sampling.ignore_eos)}
        checked = dataclasses.replace(sampling, stop_token_ids=tuple(sorted(ends)))
        self.engine.check_request(ids, checked)
        return checked

    def _complete(self, ids: list[int], sampling: SamplingParams) -> Completion:
        """All completions of a prompt; each names the seed that gives it alone."""
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        completions = []
        for index in range(sampling.n):
            *_, last = self._stream(ids, dataclasses.replace(sampling, seed=derive_seed(seed, index)))
            completions.append(last.completion)
        return dataclasses.replace(completions[0], alternatives=tuple(completions[1:]))

    def _stream(self, ids: list[int], sampling: SamplingParams) -> Generator[StreamEvent, bool | None, None]:
        max_tokens = self.engine.token_limit(ids, sampling)
        compile_s = self._unreported_compile_s + self.engine.prepare(len(ids) + max_tokens)
        self._unreported_compile_s = 0.0
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        text = TextStream(self.tokenizer, sampling.stop or (), sampling.stop_token_ids or (), max_tokens)
        clock = RoundClock()
        events = EventMaker(text, sampling)
        received: list[StepOutput] = []
        event: StreamEvent | None = None
        # A caller that stops listening keeps what the method found on the way.
        with self.engine.open(self.model_params, ids, sampling, seed) as session:
            while event is None or event.finish_reason is None:
                if event is not None and (yield event):
                    event = events.abort()
                    break
                output = session.step()
                clock.tick(len(output.tokens))
                received.extend(output.passes())
                event = events.push(output)
            report = session.report()
        assert event.finish_reason is not None
        method = self.engine.method
        num_tokens = len(text.token_ids)
        stats = clock.stats(len(ids), num_tokens, compile_s, seed if sampling.temperature > 0 else None)
        stats = dataclasses.replace(stats, num_programs=self.engine.num_programs)
        if method.num_rows > 1 and num_tokens:
            counters = count_speculation(received, num_tokens, method.num_rows - 1)
            stats = dataclasses.replace(stats, speculative_decoding=counters)
            if report is not None:
                name = None if self.draft_path is None else str(self.draft_path.name)
                draft = {"draft": name} if method.drafts else {}
                stats = dataclasses.replace(stats, choice=draft | report | {"rounds": counters["rounds_by_kind"]})
        completion = Completion(
            text=text.text,
            token_ids=text.token_ids,
            finish_reason=event.finish_reason,
            stats=stats,
            method=method.name,
            logprobs=tuple(events.logprobs) if sampling.wants_logprobs else None,
            top_logprobs=tuple(events.top_logprobs) if sampling.num_logprobs else None,
        )
        yield dataclasses.replace(event, completion=completion)


def generate(
    prompt: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    model: str | PathLike[str] | None = None,
    **options: Any,
) -> Completion | list[Completion]:
    """Complete a prompt with the default model, or `model`; a second call reuses the loaded model.

    Args:
      prompt, sampling_params: see `LLM.generate`.
      model, **options: see `LLM`.
    """
    key = (None if model is None else str(model), tuple(sorted(options.items())))
    if key not in _loaded:
        _loaded.clear()  # before the new one comes: two models may not fit into memory
        _loaded[key] = LLM(model, **options)
    return _loaded[key].generate(prompt, sampling_params)  # pyright: ignore[reportArgumentType, reportCallIssue]


_loaded: dict[tuple[Any, ...], LLM] = {}


def token_strings(path: Path) -> Sequence[str]:
    """Every token of a checkpoint's tokenizer as its vocabulary writes it, by id."""
    return load_tokenizer(path).token_strings()


def has_draft(model: str | PathLike[str] | None, draft: str | PathLike[str] | None) -> bool:
    """Whether a method that uses a draft model would get one from these arguments of `LLM`."""
    if draft is not None:
        return draft != NO_DRAFT
    weights = open_model("model", model)
    return find_shipped_draft(weights.config, vocabulary_digest(token_strings(weights.path))) is not None


def _is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    return _is_list(prompt) and all(isinstance(t, numbers.Integral) and not isinstance(t, bool) for t in prompt)


def _is_batch(prompt: object) -> TypeGuard[Sequence[Prompt]]:
    return _is_list(prompt) and (not len(prompt) or not _is_ids(prompt))


def _is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    return _is_list(prompt) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def _is_list(prompt: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)


def _one_each(sampling: object, count: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt, from one for all or a list of as many."""
    if not _is_list(sampling):
        return [_check_sampling(sampling)] * count
    if len(sampling) != count:
        raise ConfigError(
            f"sampling_params holds {len(sampling)} for {count} prompts: give one SamplingParams, or one for each"
        )
    return [_check_sampling(one) for one in sampling]


def _check_sampling(sampling: object) -> SamplingParams:
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"sampling_params must be SamplingParams, got {sampling!r:.80}")
    return sampling
