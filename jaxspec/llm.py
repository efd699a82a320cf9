"""Text in, text out: `generate` and `LLM`."""

import collections
import copy
import dataclasses
import logging
import numbers
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from jaxspec.checkpoint.layer_subset import PREFIX, open_layer_subset, place_layer_subset, take_layers
from jaxspec.checkpoint.load import Weights, open_weights
from jaxspec.checkpoint.shared_embedding import share_embedding
from jaxspec.checkpoint.shipped import find_shipped_draft, warn_of_damage
from jaxspec.checkpoint.vocabulary import check_vocabulary, count_named, count_shared_tokens, vocabulary_digest
from jaxspec.config import DType, EngineConfig, SamplingParams
from jaxspec.engine import Engine, derive_seed, fresh_seed
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.methods.base import Method, Store
from jaxspec.methods.core.round import ModelParams, Models, StepOutput
from jaxspec.methods.registry import check_draft_given, resolve_method
from jaxspec.metrics import count_speculation
from jaxspec.models.params import Params
from jaxspec.results import Completion, DecodeStats, StreamEvent, TopTokens
from jaxspec.runtime.compile_cache import enable_compile_cache
from jaxspec.runtime.mesh import MeshPlan, plan_pair
from jaxspec.runtime.placement import Placement, SharedEmbedding, resolve_dtype
from jaxspec.text.stream import StreamPiece, TextStream
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels.registry import Kernels

Message = Mapping[str, str]

# Instead of a draft's checkpoint: no draft model, not even the shipped one.
NO_DRAFT = "none"
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
      draft_devices: devices of their own for the draft, behind the target's, for method "swiftspec"; None is one if
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
        weights = _open_weights("model", model)
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
        draft_weights = _choose_draft(draft, resolved, weights, self.tokenizer)
        self._cache_folder = enable_compile_cache(config.compile_cache)
        self.eos_ids = tuple(sorted({*weights.eos_ids, *self.tokenizer.eos_ids}))
        try:
            self._assemble(weights, draft_weights, resolved, plan, draft_plan, config, draft is None)
            return
        except _DamagedDraftError as error:
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
        models = _place_models(weights, draft_weights, self.tokenizer, plan, draft_plan, config.dtype)
        self.engine = Engine(models, method, config.max_context, store)
        # Weights load while XLA compiles: both leave the interpreter lock for most of their time.
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(_load_params, weights, draft_weights, models)
            self._unreported_compile_s = self.engine.prepare()
            self.model_params = loading.result()

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
        """Another decoding method on the same weights, with compiled functions and buffers of its own.

        No further weights are loaded: a model that was loaded for a method without a draft model, such as "ar", has
        none here either. "auto" then copies or decodes plainly (`stats.choice` shows the draft None), and methods that
        need one are refused; load with method "auto" to have the shipped draft.

        Args:
          method: a name or a method object. One that uses no draft model leaves this one's aside.

        Raises:
          ConfigError: an unknown method, or one that does not fit the models.
        """
        other, engine = copy.copy(self), self.engine
        other.engine = Engine(engine.models, resolve_method(method), engine.given_context, engine.store)
        other._unreported_compile_s = other.engine.prepare()
        return other

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
        """Answer a conversation, rendered with the model's own chat template.

        Args:
          messages: dicts with "role" and "content", oldest first.
          sampling_params: see `generate`.
        """
        sampling = _check_sampling(sampling_params)
        if not _is_conversation(messages):
            raise ConfigError(f"chat takes messages, dicts with 'role' and 'content', got {messages!r:.80}")
        ids = self.encode(messages)
        return self._complete(ids, self._check(ids, sampling))

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[StreamEvent, bool | None, None]:
        """Yield text as it is decoded, in whole characters; the last event carries the `Completion`.

        `send(True)` instead of `next` ends the text where it is: it gives the last event, whose `finish_reason` is
        "abort".

        Args:
          prompt: a string, token ids, or a conversation (dicts with "role" and "content").
          sampling_params: see `generate`; `n` must be 1.
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
        """Decode a checked request."""
        max_tokens = self.engine.token_limit(ids, sampling)
        compile_s = self._unreported_compile_s + self.engine.prepare(len(ids) + max_tokens)
        self._unreported_compile_s = 0.0
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        text = TextStream(self.tokenizer, sampling.stop or (), sampling.stop_token_ids or (), max_tokens)
        clock = _Clock()
        events = _EventMaker(text, sampling)
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
      prompt: see `LLM.generate`.
      sampling_params: see `LLM.generate`.
      model: see `LLM`.
      **options: further keyword arguments of `LLM`.
    """
    key = (None if model is None else str(model), tuple(sorted(options.items())))
    if key not in _loaded:
        # Two models may not fit into memory: the old one goes before the new one comes.
        _loaded.clear()
        _loaded[key] = LLM(model, **options)
    return _loaded[key].generate(prompt, sampling_params)


_loaded: dict[tuple[Any, ...], LLM] = {}


class _DamagedDraftError(CheckpointError):
    """The draft's weights cannot be read; the target's can."""


class _Clock:
    """Times of the first and the latest round, in seconds from construction."""

    def __init__(self):
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._first_tokens = 0

    def tick(self, tokens: int) -> None:
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
            self._first_tokens = tokens

    def stats(self, prompt_tokens: int, tokens: int, compile_s: float, seed: int | None) -> DecodeStats:
        assert self._first is not None
        decode_s = self._last - self._first
        behind_first = max(0, tokens - self._first_tokens)  # what a stop cut off was not received
        return DecodeStats(
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            ttft_s=self._first - self._start,
            decode_s=decode_s,
            tokens_per_s=behind_first / decode_s if behind_first else None,
            compile_s=compile_s,
            seed=seed,
        )


class _EventMaker:
    """Turns rounds into events; tokens wait here until the text is certain to keep them."""

    def __init__(self, text: TextStream, sampling: SamplingParams):
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopTokens] = []
        self._text = text
        self._num_logprobs = sampling.num_logprobs if sampling.wants_logprobs else None
        self._waiting: collections.deque[tuple[int, bool, float, TopTokens]] = collections.deque()

    def push(self, output: StepOutput) -> StreamEvent:
        """Feed a round's tokens to the text until it ends; tokens after the end are dropped."""
        spans, kept = [], []
        top = output.top or ((),) * len(output.tokens)
        for index, (token, logprob, ranked) in enumerate(zip(output.tokens, output.logprobs, top, strict=True)):
            self._waiting.append((token, index < output.accepted, logprob, ranked))
            piece = self._text.push(token)
            self._take(piece, spans, kept)
            if piece.finish_reason is not None:
                break
        return self._make(spans, kept)

    def abort(self) -> StreamEvent:
        """End the text with all tokens that it was fed."""
        spans, kept = [], []
        self._take(self._text.abort(), spans, kept)
        return self._make(spans, kept)

    def _take(self, piece: StreamPiece, spans: list[tuple[str, bool]], kept: list[tuple[Any, ...]]) -> None:
        shown = [self._waiting.popleft() for _ in range(piece.num_tokens)]
        kept.extend(shown)
        if piece.text:
            spans.append((piece.text, bool(shown) and all(drafted for _, drafted, *_ in shown)))

    def _make(self, spans: list[tuple[str, bool]], kept: list[tuple[Any, ...]]) -> StreamEvent:
        tokens, from_draft, logprobs, top = zip(*kept, strict=True) if kept else ((), (), (), ())
        top = tuple(ranked[: self._num_logprobs] for ranked in top)
        self.logprobs.extend(logprobs)
        self.top_logprobs.extend(top)
        return StreamEvent(
            text="".join(text for text, _ in spans),
            token_ids=tokens,
            from_draft=from_draft,
            logprobs=None if self._num_logprobs is None else logprobs,
            finish_reason=self._text.finish_reason,
            spans=tuple(spans),
            top_logprobs=top if self._num_logprobs else None,
        )


def _open_weights(role: str, path: object) -> Weights:
    if not isinstance(path, str | PathLike | None) or path == "":
        raise ConfigError(f"{role} must be the path of a checkpoint, got {path!r}")
    return open_weights(None if path is None else Path(path).expanduser())


def has_draft(model: str | PathLike[str] | None, draft: str | PathLike[str] | None) -> bool:
    """Whether a method that uses a draft model would get one from these arguments of `LLM`."""
    if draft is not None:
        return draft != NO_DRAFT
    weights = _open_weights("model", model)
    tokens = load_tokenizer(weights.path).token_strings()
    return find_shipped_draft(weights.config, vocabulary_digest(tokens)) is not None


def _choose_draft(draft: object, method: Method, weights: Weights, tokenizer: Tokenizer) -> Weights | None:
    """The draft that was asked for, or the shipped one where the method takes one and nothing was said."""
    if isinstance(draft, str) and draft.startswith(PREFIX):
        return open_layer_subset(draft, weights, vocabulary_digest(tokenizer.token_strings()))
    if draft is None and method.drafts:
        draft = find_shipped_draft(weights.config, vocabulary_digest(tokenizer.token_strings()))
        check_draft_given(method, draft is not None)
    return None if draft is None or draft == NO_DRAFT else _open_weights("draft", draft)


def _place_models(
    weights: Weights,
    draft_weights: Weights | None,
    tokenizer: Tokenizer,
    plan: MeshPlan,
    draft_plan: MeshPlan,
    dtype: DType,
) -> Models:
    """Placements of target and draft on their meshes; a pair that does not fit together is refused."""
    # Only the native kernels read blocks and half precision faster than float32.
    keeps = dtype == "auto" and plan.kernels.native
    target = Placement(
        weights.config, plan, resolve_dtype(dtype, plan), storage=weights.storage(plan) if keeps else None
    )
    if draft_weights is None:
        return Models(target)
    if draft_weights.layers is not None:
        own_dtype = resolve_dtype(dtype, draft_plan)
        return Models(target, place_layer_subset(target, draft_weights.layers, draft_plan, own_dtype))
    limit, rows = _match_vocabularies(weights, draft_weights, tokenizer)
    if draft_weights.config.max_context < weights.config.max_context:
        logging.getLogger(__name__).warning(
            "the draft was made for %d tokens of context, the target for %d: drafts behind that may be poor",
            draft_weights.config.max_context, weights.config.max_context,
        )  # fmt: skip
    target = dataclasses.replace(target, vocab_rows=rows)
    # A draft decides the speed alone, so it need not follow the target to float32.
    keeps = dtype in ("auto", "float32") and draft_plan.kernels.native
    draft = Placement(
        draft_weights.config,
        draft_plan,
        resolve_dtype(dtype, draft_plan),
        rows,
        limit,
        draft_weights.storage(draft_plan) if keeps else None,
        SharedEmbedding(weights.config, target.weights) if draft_weights.config.shares_embedding else None,
    )
    return Models(target, draft)


def _match_vocabularies(weights: Weights, draft_weights: Weights, tokenizer: Tokenizer) -> tuple[int, int]:
    """Ids that a draft may propose, from 0 up to a limit, and the vocabulary rows that both models need."""
    tokens = tokenizer.token_strings()
    if draft_weights.vocabulary is not None:
        widths = (weights.config.embed_dim, draft_weights.config.embed_dim)
        check_vocabulary(tokens, draft_weights.vocabulary, widths)
        return weights.config.vocab_size, weights.config.vocab_size
    draft_tokens = load_tokenizer(draft_weights.path).token_strings()
    shared = count_shared_tokens(tokens, draft_tokens)
    if unused := count_named(tokens[shared:], draft_tokens[shared:]):
        logging.getLogger(__name__).warning(
            "the draft proposes tokens 0 to %d only: its vocabulary and the target's part there, and %d tokens behind "
            "that both have are left to the target", shared - 1, unused,
        )  # fmt: skip
    sizes = (weights.config.vocab_size, draft_weights.config.vocab_size)
    return min(shared, *sizes), max(sizes)


def _load_params(weights: Weights, draft_weights: Weights | None, models: Models) -> ModelParams:
    target = weights.load(models.target)
    if draft_weights is None or models.draft is None:
        return ModelParams(target)
    if draft_weights.layers is not None:
        own = take_layers(models.target, models.draft, draft_weights.layers, target)
    else:
        try:
            own = draft_weights.load(models.draft)
        except CheckpointError as error:
            raise _DamagedDraftError(str(error)) from error
    return ModelParams(target, own | share_embedding(models.draft, target))


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
        raise ConfigError(f"sampling_params are {len(sampling)} for {count} prompts: give one, or one for each prompt")
    return [_check_sampling(one) for one in sampling]


def _check_sampling(sampling: object) -> SamplingParams:
    if sampling is None:
        return SamplingParams()
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(f"sampling_params must be SamplingParams, got {sampling!r:.80}")
    return sampling
