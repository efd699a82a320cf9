"""Text in, text out: `LLM`.

The file exceeds 400 lines because one class holds what users call, and most of it is what its docstrings promise.
"""

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from os import PathLike
from typing import Any, NamedTuple, Unpack, overload

import jax
import numpy as np

from jaxspec.checkpoint.shipped import warn_of_damage
from jaxspec.config import EngineConfig, EngineSettings, SamplingParams, read_settings
from jaxspec.engine import FIRST_CAPACITY, Engine, derive_seed, fresh_seed
from jaxspec.errors import ConfigError, JaxspecError, shown
from jaxspec.files import checkpoint_digest, digest_text, vocabulary_digest
from jaxspec.foreign import check_keywords
from jaxspec.loading import DamagedDraftError, OpenModels, open_models, plan_meshes
from jaxspec.methods.auto.profiles import profile_path
from jaxspec.methods.base import DeviceChoice, Method, Store
from jaxspec.methods.core.round import ModelParams, Models, StepOutput
from jaxspec.methods.registry import make_method, resolve_method
from jaxspec.offload.plan import OffloadPlan, check_room
from jaxspec.offload.room import check_devices, fits_devices, memory_limits
from jaxspec.offload.stream import LayerStream
from jaxspec.prompts import Message, Prompt, check_sampling, is_batch, is_conversation, is_ids, one_each
from jaxspec.results import READING, Completion, Stream, StreamEvent
from jaxspec.runtime import hosts
from jaxspec.runtime.distributed import Distributed
from jaxspec.runtime.distributed import initialize as join_processes
from jaxspec.runtime.distributed import resolve as resolve_processes
from jaxspec.runtime.mesh import describe_hosts
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import expect_program, remember_program
from jaxspec.runtime.store.folder import enable_compile_cache
from jaxspec.scheduler import OrderedLock
from jaxspec.stream_events import EventMaker, RoundClock, count_speculation
from jaxspec.structured.grammar import Grammars
from jaxspec.text.stream import TextStream
from jaxspec.text.turn import ChatOptions, Turn, open_turn
from jaxspec.worker import describe_programs, run_worker
from pallas_kernels.registry import Kernels


class Internals(NamedTuple):
    """The parts of an `LLM`, for commands, tools and tests; not for users: they may change from release to release."""

    engine: Engine
    params: ModelParams
    offload_plan: OffloadPlan | None = None  # of streamed weights
    device_plan: str | None = None  # of several processes: which devices target and draft have

    @property
    def models(self) -> Models:
        """Placements of target and draft."""
        return self.engine.models

    @property
    def target(self) -> Placement:
        """Placement of the target."""
        return self.engine.target

    @property
    def kernels(self) -> Kernels:
        """The kernels that the target's programs multiply and attend with."""
        return self.engine.target.plan.kernels

    @property
    def layer_stream(self) -> LayerStream | None:
        """The stream of the target's layers; None where they stay on the devices."""
        layers = self.params.target["layers"]
        return layers if isinstance(layers, LayerStream) else None


def internals(llm: "LLM") -> Internals:
    """The parts of a loaded model."""
    return llm._internals


class LLM:
    """A language model, its tokenizer and a decoding method, compiled and ready.

    Several threads may use it: calls are answered in the order in which they come, and a stream waits for its turn at
    each event. `AsyncLLM` is its form for asyncio. `close`, or the end of a `with` block, frees its memory.

    Args:
      model: a Hugging Face folder, a GGUF file, a native checkpoint, or None for the default model. A name on the
        Hugging Face Hub is fetched into its cache: "org/name", "org/name:Q4_K_M" for one of several GGUF files.
      draft: a draft model's checkpoint, for methods that use one; None takes the model's own draft, or the one that
        ships with jaxspec, if there is one (a damaged one is left out with a warning, unless the method needs one),
        "none" does without. "mtp" is the model's own: its layer for multi-token prediction.
        "self:attention=1,3-5;mlp=2" is the model itself without these blocks.
      method: a name or a method object; "auto" drafts as far as that pays (see `Auto`).
      revision: branch, tag or commit of a name on the hub; None is the main branch.
      distributed: how the processes of a model on several hosts meet: `Distributed`, its settings as a dict, or its
        `coordinator`. None takes the environment, and is one process if that says nothing. Every process makes the
        same calls, or `follow`s process 0. `target_devices` is all devices then (docs/several-hosts.md).
      **settings: the fields of `EngineConfig`, where they are described: dtype, target_devices, draft_devices,
        draft_platform, draft_window, max_context, compile_cache, kernels, numerics, activations, kv_dtype,
        session_memory, expert_parallel, offload, device_memory, resident_layers.

    Raises:
      CheckpointError: the checkpoint is missing, damaged or incomplete.
      ConfigError: a setting, or something the model's configuration asks for, is not supported.
      TypeError: an unknown keyword; the message names the right one, also for those of vLLM and transformers.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        draft: str | PathLike[str] | None = None,
        method: str | Method = "auto",
        revision: str | None = None,
        distributed: Distributed | Mapping[str, Any] | str | None = None,
        **settings: Unpack[EngineSettings],
    ):
        """Load, place and compile; see the class."""
        self._lock = OrderedLock()  # of threads
        self._process, self._parts = os.getpid(), None  # of which process, and `Internals` once it is loaded
        config = read_settings(settings)
        resolved = resolve_method(method)
        # What this process can see alone is refused before it waits for others.
        if resolve_processes(distributed) is not None:
            if config.draft_platform is not None:
                raise ConfigError("draft_platform needs one process: the devices of several are of one platform")
            if config.offload == "disk":
                raise ConfigError("offload 'disk' needs one process, which reads whole arrays; give offload 'host'")
        join_processes(distributed)
        self._cache_folder = enable_compile_cache(config.compile_cache)
        # Loaded beside all that comes next, the program that drafts is there for the first round.
        self._start = digest_text(repr((model, draft, revision, os.getcwd(), resolved, config)))[:32]
        expect_program(self._start)
        opened = open_models(model, draft, resolved, revision)
        plan_meshes(config, resolved, opened)  # devices that are not there are refused before anything else
        self.model_path, self.tokenizer = opened.target.path, opened.tokenizer
        self._device_choice: DeviceChoice | None = None
        chosen, placed = resolved, config
        if (
            config.target_devices is None
            and opened.draft is not None
            and config.offload == "none"  # speeds of resident layers say nothing of streamed ones
            and not hosts.several()
            and (devices := len(jax.devices())) > 1
        ):
            profile = None
            if self._cache_folder is not None:
                profile = profile_path(
                    self._cache_folder, opened.target.path, opened.draft.path, dtype=config.dtype,
                    kernels=config.kernels, activations=config.activations, kv_dtype=config.kv_dtype,
                    numerics=config.numerics,
                )  # fmt: skip
            self._device_choice = choice = resolved.choose_devices(profile, devices)
            if choice is not None and (best := choice.best) is not None:
                own = {"target_devices": best.target_devices, "draft_devices": best.draft_devices}
                placed = dataclasses.replace(config, **own)
                # What drafts on shared devices is weighed round by round.
                if best.method not in ("ar", "chain"):
                    chosen = make_method(best.method, best.settings)
        self.eos_ids = tuple(sorted({*opened.target.eos_ids, *self.tokenizer.eos_ids}))
        try:
            self._assemble(opened, chosen, placed)
            return
        except DamagedDraftError as error:
            if not opened.is_shipped or opened.draft is None or resolved.needs_draft:
                raise
            warn_of_damage(opened.draft.path, str(error))
        # Not while the error is handled: it holds on to what was loaded.
        self._assemble(dataclasses.replace(opened, draft=None), resolved, config)

    @property
    def _internals(self) -> Internals:
        if self._process != os.getpid():
            raise JaxspecError(
                "this LLM was loaded before the process was forked: load it in the child, or start processes with "
                "multiprocessing's 'spawn'"
            )
        if self._parts is None:
            raise ConfigError("this LLM is closed: load another one")
        return self._parts

    def close(self) -> None:
        """Free the memory of weights and caches; nothing can be decoded afterwards.

        Texts under way go on and keep what they need, and so does what `with_method` gave.
        """
        with self._lock:
            self._parts = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._parts is None or self._process != os.getpid():
            return f"<LLM {self.model_path.name!r}, closed>"
        draft = None if self.draft_path is None else self.draft_path.name
        devices = ", ".join(str(device) for device in self._internals.target.plan.devices)
        method = self._internals.engine.method.name
        return f"<LLM {self.model_path.name!r}, method {method!r}, draft {draft!r}, on {devices}>"

    def __copy__(self) -> "LLM":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> Any:
        raise TypeError("an LLM holds memory of devices: load it anew, it is neither pickled nor copied deeply")

    def _assemble(self, opened: OpenModels, method: Method, config: EngineConfig) -> None:
        """Place, compile and load."""
        opened = opened.limit_draft(config.draft_window)
        self.draft_path = None if opened.draft is None else opened.draft.path
        store = Store(opened.target.path, self._cache_folder)
        plans = plan_meshes(config, method, opened)
        models = opened.place(*plans, config.dtype, config.activations, config.kv_dtype)
        room, plan = None, None
        if config.offload != "none":
            plan, store = opened.plan_offload(models, method, config, store)
            models = models._replace(target=plan.target)
            if config.device_memory is not None:
                room = functools.partial(check_room, plan, int(config.device_memory))
        if config.offload == "none" and (limits := memory_limits(models)):
            lends = opened.draft is not None and opened.draft.layers is not None
            tokens = config.max_context or min(FIRST_CAPACITY, models.target.cfg.max_context)
            if config.kernels == "auto" and not fits_devices(limits, lends, method, models, store, tokens):
                # The kernel for TPUs is not measured yet, but writes no scores.
                meshes = plan_meshes(dataclasses.replace(config, kernels="mosaic-tpu"), method, opened)
                other = opened.place(*meshes, config.dtype, config.activations, config.kv_dtype)
                models = other if fits_devices(limits, lends, method, other, store, tokens) else models
            room = functools.partial(check_devices, limits, lends)
        session_memory = None if config.session_memory is None else int(config.session_memory)
        engine = Engine(models, method, config.max_context, store, session_memory, room)
        devices = _check_processes(opened, engine, config)
        self._parts = Internals(engine, ModelParams({}), plan, devices)
        self._before_compiling()
        # Weights load while XLA compiles: both leave the interpreter lock for most of their time.
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(opened.load, models, config.offload, self._cache_folder)
            self._unreported_compile_s = engine.prepare()
            params = loading.result()
        self._unreported_compile_s += engine.calibrate(params)
        self._parts = Internals(engine, params, plan, devices)
        remember_program(self._start, models.target.plan, engine.runner.programs)
        hosts.gather("loaded", True)

    def _before_compiling(self) -> None:
        """The tokenizer and the model's configuration are known; nothing was compiled yet."""
        return None

    def follow(self) -> None:
        """The worker loop of a process other than 0: run the commands of process 0 until it ends."""
        run_worker(self._internals.engine, self._internals.params)

    def with_method(self, method: str | Method) -> "LLM":
        """Another decoding method, a name or an object, on the same weights, with functions and buffers of its own.

        No further weights are loaded: a model that was loaded for a method without a draft model, such as "ar", has
        none here either. "auto" then copies or decodes plainly (`stats.choice` shows the draft None), and methods that
        need one are refused; load with method "auto" to have the shipped draft. A method that uses no draft model
        leaves this one's aside.

        Raises:
          ConfigError: an unknown method, or one that does not fit the models.
        """
        other, inner = copy.copy(self), self._internals
        with self._lock:
            engine = inner.engine.with_method(resolve_method(method))
            other._parts = inner._replace(engine=engine)
            other._unreported_compile_s = engine.prepare() + engine.calibrate(inner.params)
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
        completions = [
            self._complete(Turn(ids), sampling) for ids, sampling in read_requests(self, prompt, sampling_params)
        ]
        return completions if is_batch(prompt) else completions[0]

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """Answer a conversation: dicts with "role" and "content", oldest first, in the model's own chat template.

        `options` are tools and how they may be called (`ChatOptions`). `Completion.message` is the answer in OpenAI's
        form, with its `tool_calls` and `reasoning_content`; it goes back into the conversation as it is. The result of
        a call follows it as {"role": "tool", "tool_call_id": ..., "content": ...} (docs/tools.md).
        """
        sampling = check_sampling(sampling_params)
        if not is_conversation(messages):
            raise ConfigError(f"chat takes messages, dicts with 'role' and 'content', got {shown(messages)}")
        turn = self._read(messages, options)
        return self._complete(turn, self._check(turn.ids, self._shape(turn, sampling)))

    def stream(
        self, prompt: Prompt | Sequence[Message] | Turn, sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:  # fmt: skip
        """Decode a prompt piece by piece: a `Stream` of events in whole characters; the last has the `Completion`.

        The prompt is a string, token ids, or a conversation (dicts with "role" and "content"), which alone takes
        `options` (see `chat`); `n` must be 1. The text of events is the answer as the model writes it.
        """
        sampling = check_sampling(sampling_params)
        if sampling.n > 1:
            raise ConfigError(f"stream gives one completion, and n is {sampling.n}: use generate or chat")
        turn = self._read(prompt, options)
        checked = self._check(turn.ids, self._shape(turn, sampling))
        return Stream(lambda *asked: self._lock.each(self._stream(turn, checked, *asked)))

    def _read(self, prompt: Any, options: ChatOptions) -> Turn:
        """The prompt of a conversation or of a text."""
        if isinstance(prompt, Turn):
            return prompt
        check_keywords("chat", options, list(ChatOptions.__annotations__), [f.name for f in fields(SamplingParams)])
        if is_conversation(prompt):
            return open_turn(self.tokenizer, prompt, **options)
        if options:
            raise ConfigError(f"{', '.join(options)}: for conversations, and the prompt is text or token ids")
        return Turn(self.encode(prompt))

    def _shape(self, turn: Turn, sampling: SamplingParams) -> SamplingParams:
        """Sampling under the shape that a turn asks for: calls of tools, or a shape after reasoning."""
        if not turn.required and not turn.strict and (sampling.structured_outputs is None or not turn.reasons):
            return sampling
        # Imported here: it needs an extra.
        from jaxspec.structured.calls import shape_answer

        return shape_answer(self.tokenizer, turn, sampling)

    def encode(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        """Token ids of a prompt: text as it is, ids unchanged, a conversation through the chat template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if is_conversation(prompt):
            return self.tokenizer.encode_chat(prompt)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if is_ids(prompt):
            return [int(token) for token in prompt]
        raise ConfigError(f"a prompt is a string, token ids, a conversation or a list of prompts, got {shown(prompt)}")

    def _check(self, ids: list[int], sampling: SamplingParams) -> SamplingParams:
        """Refuse what cannot be decoded; all tokens that end a text join `stop_token_ids`."""
        engine = self._internals.engine
        vocab = engine.target.cfg.vocab_size
        ends = {*(sampling.stop_token_ids or ()), *(i for i in self.eos_ids if i < vocab and not sampling.ignore_eos)}
        checked = dataclasses.replace(sampling, stop_token_ids=tuple(sorted(ends)))
        engine.check_request(ids, checked)
        if checked.structured_outputs is not None:
            self._grammars.match(checked.structured_outputs)  # compiled now, and kept
        return checked

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self._internals.target.cfg.vocab_size, self.eos_ids)

    def _complete(self, turn: Turn, sampling: SamplingParams) -> Completion:
        """All completions of a prompt; each names the seed that gives it alone."""
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        completions = []
        with self._lock:
            for index in range(sampling.n):
                own = dataclasses.replace(sampling, seed=derive_seed(seed, index))
                *_, last = self._stream(turn, own, lambda: False)
                completions.append(last.completion)
        return dataclasses.replace(completions[0], alternatives=tuple(completions[1:]))

    def _stream(
        self, turn: Turn, sampling: SamplingParams, aborted: Callable[[], bool],
        in_pieces: Callable[[], bool] = lambda: False,
    ) -> Generator[StreamEvent, None, None]:  # fmt: skip
        """Events of a text; where `aborted` is true after one of them, the next is the last.

        `in_pieces` is asked once, at the beginning; see `Stream.read_in_pieces`.
        """
        engine, params, stream = self._internals.engine, self._internals.params, self._internals.layer_stream
        ids = turn.ids
        max_tokens = engine.token_limit(ids, sampling)
        compile_s = self._unreported_compile_s + engine.prepare(len(ids) + max_tokens, sampling)
        self._unreported_compile_s = 0.0
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        ends = sampling.stop_token_ids or ()
        text = TextStream(self.tokenizer, sampling.stop or (), ends, max_tokens, turn.shown)
        clock = RoundClock()
        events = EventMaker(text, sampling)
        received: list[StepOutput] = []
        counts = None if stream is None else stream.counts
        event: StreamEvent | None = None
        shape = sampling.structured_outputs
        matcher = None if shape is None else self._grammars.match(shape)
        # A caller that stops listening keeps what the method found on the way.
        with engine.open(params, ids, sampling, seed, matcher, in_pieces()) as session:
            while session.reading:
                yield READING
                session.read()
            while event is None or event.finish_reason is None:
                if event is not None:
                    yield event
                    if aborted():
                        event = events.abort()
                        break
                output = session.step()
                clock.tick(len(output.tokens))
                received.extend(output.passes())
                event = events.push(output)
            report, cached = session.report(), session.num_cached
        assert event.finish_reason is not None
        method = engine.method
        num_tokens = len(text.token_ids)
        counters = choice = None
        offload = None if stream is None or counts is None else stream.counts.since(counts)
        if method.num_rows > 1 and num_tokens:
            counters = count_speculation(received, num_tokens, method.num_rows - 1)
            if report is not None:
                name = self.draft_path.name if self.draft_path is not None and method.drafts else None
                known = {"draft": name, "devices": self._device_choice, "rounds": counters.rounds_by_kind}
                choice = dataclasses.replace(report, **known)
        stats = clock.stats(
            len(ids), num_tokens, compile_s=compile_s, seed=session.seed if sampling.temperature > 0 else None,
            speculative_decoding=counters, choice=choice, num_programs=engine.num_programs,
            cached_prompt_tokens=cached, offload=offload,
        )  # fmt: skip
        completion = Completion(
            text=text.text,
            token_ids=text.token_ids,
            finish_reason=event.finish_reason,
            stats=stats,
            method=method.name,
            logprobs=tuple(events.logprobs) if sampling.wants_logprobs else None,
            top_logprobs=tuple(events.top_logprobs) if sampling.num_logprobs else None,
            message=turn.read(text.text),
        )
        yield dataclasses.replace(event, completion=completion)


def read_requests(llm: LLM, prompt: Any, sampling_params: Any = None) -> list[tuple[list[int], SamplingParams]]:
    """The token ids of each prompt, and how it is decoded; refuses what `generate` refuses, and computes nothing."""
    prompts: list[Any] = [*prompt] if is_batch(prompt) else [prompt]
    samplings = one_each(sampling_params, len(prompts))
    if is_conversation(prompts) or any(is_conversation(p) for p in prompts):
        raise ConfigError("generate takes text or token ids; chat answers conversations, and stream takes either")
    encoded = [llm.encode(p) for p in prompts]
    return [(ids, llm._check(ids, sampling)) for ids, sampling in zip(encoded, samplings, strict=True)]


def _check_processes(opened: OpenModels, engine: Engine, config: EngineConfig) -> str | None:
    """Devices of both models in all processes; None in one process.

    DistributedError: other processes have other settings, checkpoints or programs than this one.
    """
    if not hosts.several():
        return None
    models = engine.models
    devices = describe_hosts(models.target.plan, models.draft and models.draft.plan)
    given = dataclasses.asdict(config) | {"method": engine.method, "devices": devices}
    given |= describe_programs(models.target.plan)
    given["the model"] = checkpoint_digest(opened.target.path, opened.target.config)
    if (draft := opened.draft) is not None:  # one made of the target's layers has no file: the settings name it
        given["the draft"] = draft.layers or checkpoint_digest(draft.files or draft.path, draft.config)
    given["the tokenizer"] = vocabulary_digest(opened.tokens)
    del given["compile_cache"]  # a folder of each host
    hosts.check_equal("settings", given)
    return devices
