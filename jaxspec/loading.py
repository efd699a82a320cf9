"""Find, open, check, place and load a target and its draft, whether the target's weights stay or are streamed.

`open_models` reads headers and vocabularies only; what does not fit is refused before any weight is read.

The file exceeds 400 lines because opening is one module: resident and streamed weights are checked by the same steps.
"""

import dataclasses
import logging
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxspec.checkpoint import shared_weights
from jaxspec.checkpoint.hub import fetch, parse_name
from jaxspec.checkpoint.load import MTP_NAME, Weights, open_weights, pack_trees
from jaxspec.checkpoint.shipped import find_shipped_draft
from jaxspec.config import (
    ActivationsSetting,
    DType,
    EngineConfig,
    EngineSettings,
    KVDType,
    Offload,
    check_path,
    read_settings,
)
from jaxspec.engine import FIRST_CAPACITY
from jaxspec.errors import CheckpointError, ConfigError, shown
from jaxspec.files import vocabulary_digest
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.base import NO_STORE, Method, Store
from jaxspec.methods.core.cost_model import USUAL_RATES
from jaxspec.methods.core.round import ModelParams, Models
from jaxspec.methods.registry import check_draft_given, resolve_method
from jaxspec.models.config import ModelConfig
from jaxspec.models.features import NORMED, keys_state
from jaxspec.models.params import Params, declare_params
from jaxspec.models.quantization import KEPT_ON_CPU, Storage, keep_blocks, number_tables
from jaxspec.offload.plan import OffloadPlan, plan_for_method
from jaxspec.offload.reader import DirectReader
from jaxspec.offload.stream import open_stream
from jaxspec.runtime import hosts
from jaxspec.runtime.distributed import settings as process_settings
from jaxspec.runtime.mesh import MeshPlan, plan_hosts, plan_pair
from jaxspec.runtime.placement import (
    Activations,
    Placement,
    SharedEmbedding,
    formats_of,
    resolve_dtype,
    resolve_numbers,
)
from jaxspec.runtime.program import release_free_memory
from jaxspec.runtime.sharding import place_tree
from jaxspec.runtime.store.ready_weights import ReadyWeights
from jaxspec.text.tokenizer import load_tokenizer
from pallas_kernels import selection
from pallas_kernels.linear.blocks import FORMATS
from pallas_kernels.linear.columns import columns_name

# Activations of a target for "auto": int8 changes the most probable token too often (docs/results/integer-cpu.md).
AUTO_ACTIVATIONS: Activations = "int16"
# Instead of a draft's checkpoint: no draft model, not even the shipped one.
NO_DRAFT = "none"


class DamagedDraftError(CheckpointError):
    """The draft's weights cannot be read; the target's can."""


@dataclasses.dataclass(frozen=True)
class OpenModels:
    """A target and its draft whose headers are read, and whose weights are still on disk.

    Attributes:
      tokens: the target's vocabulary, by id.
      draft_tokens: that of a draft with a tokenizer of its own.
      is_shipped: whether the draft ships with jaxspec.
      tokenizer: the target's `Tokenizer`; None in tests alone.
    """

    target: Weights
    draft: Weights | None = None
    tokens: Sequence[str] = ()
    draft_tokens: Sequence[str] = ()
    is_shipped: bool = False
    tokenizer: Any = None

    def limit_draft(self, window: int | None) -> "OpenModels":
        """The same with a draft whose attention sees at most `window` positions, where it is not None.

        Raises:
          ConfigError: there is no draft, or it consists of the target's layers or fills blocks.
        """
        if window is None:
            return self
        if self.draft is None or self.draft.layers is not None:
            raise ConfigError("draft_window is for a draft model, and here is none of its own")
        cfg = self.draft.config
        if cfg.features is not None and cfg.features.block:
            raise ConfigError("draft_window is not for drafts that fill blocks: their checkpoints say what they see")
        if cfg.recurrent is not None or cfg.kinds is not None or cfg.local_rope is not None or cfg.sliding_layers:
            raise ConfigError("draft_window is for drafts whose layers are alike")
        cfg = dataclasses.replace(cfg, sliding_window=min(window, cfg.sliding_window or window))
        return dataclasses.replace(self, draft=dataclasses.replace(self.draft, config=cfg))

    def place(
        self, plan: MeshPlan, draft_plan: MeshPlan, dtype: DType, activations: ActivationsSetting = "auto",
        kv_dtype: KVDType = "auto",
    ) -> Models:  # fmt: skip
        """Placements of both models on their meshes.

        Args:
          plan: the target's mesh; `draft_plan` is the draft's.
          dtype: of both, as `LLM` takes it.
          activations: of the target, as `LLM` takes it. A draft decides the speed alone and has int8 wherever it can,
            except where its arrays are the target's.
          kv_dtype: of the caches of both, as `LLM` takes it.

        Raises:
          ConfigError: the two do not fit together, or the weights cannot be multiplied by integers.
        """
        weights, draft_weights = self.target, self.draft
        storage = _choose_storage(weights, plan, dtype) if dtype == "auto" else None
        target = Placement(weights.config, plan, resolve_dtype(dtype, plan), storage=storage)
        target = resolve_numbers(target, activations, kv_dtype, AUTO_ACTIVATIONS)
        if draft_weights is None:
            return Models(target)
        draft_dtype = resolve_dtype(dtype, draft_plan)
        if draft_weights.layers is not None:
            subset = shared_weights.place_layer_subset(target, draft_weights.layers, draft_plan, draft_dtype)
            return Models(target, resolve_numbers(subset, "auto", kv_dtype, target.activations))
        if draft_weights.config.features is not None:
            draft_weights = _fit_features(weights, draft_weights)
        limit, rows = self._match_vocabularies()
        if draft_weights.config.max_context < weights.config.max_context:
            logging.getLogger(__name__).warning(
                "the draft was made for %d tokens of context, the target for %d: drafts beyond that may be poor",
                draft_weights.config.max_context, weights.config.max_context,
            )  # fmt: skip
        target = dataclasses.replace(target, vocab_rows=rows)
        # A draft decides the speed alone, so it need not follow the target to float32.
        keeps = dtype == "auto" or (dtype == "float32" and draft_plan.kernels.native)
        storage = _choose_storage(draft_weights, draft_plan, dtype) if keeps else None
        lender = SharedEmbedding(weights.config, target.weights, target.activations)
        draft = Placement(
            draft_weights.config, draft_plan, draft_dtype, vocab_rows=rows, vocab_limit=limit, storage=storage,
            shared_embedding=lender if draft_weights.config.borrows else None,
        )  # fmt: skip
        return Models(target, resolve_numbers(draft, "auto", kv_dtype, "int8"))

    def plan_offload(
        self, models: Models, method: Method, config: EngineConfig, store: Store = NO_STORE
    ) -> tuple[OffloadPlan, Store]:
        """Plan which layers stay on the devices; also returns `store` with the cost of a pass, for `Method.configure`.

        The bandwidth of the disk, or of host memory, is measured for about half a second.

        Raises:
          ConfigError: the target cannot be streamed for this draft or this method, or the memory does not suffice.
        """
        if self.draft is not None and self.draft.layers is not None:
            raise ConfigError(f"draft {self.draft.path} consists of the target's own layers, which offload streams")
        tokens = config.max_context or min(FIRST_CAPACITY, models.target.cfg.max_context)
        return plan_for_method(self.target, models, method, config, store, tokens)

    def load(self, models: Models, offload: Offload = "none", cache: Path | None = None) -> ModelParams:
        """Read both models onto their devices and pack them as their programs take them.

        Args:
          models: their placements; with `offload`, that of a streamed target.
          offload: where the target's layers are kept. Unless "none", `params.target["layers"]` is a `LayerStream`.
          cache: folder in which packed weights are kept for the next start; None keeps none.

        Raises:
          DamagedDraftError: the draft cannot be read.
          CheckpointError: the target cannot be read, or its format cannot be streamed.
        """
        if offload != "none":
            return self._load_streamed(models, offload)
        opened = [self.target] if self.draft is None else [self.target, self.draft]
        paths = [weights.files or weights.path for weights in opened]
        ready = ReadyWeights.find(cache, paths, *models)
        params = None if ready is None else ready.load()
        if params is not None:
            return ModelParams(*params)
        params = self._add_draft(models, self.target.load(models.target))
        release_free_memory()
        if ready is not None:
            ready.save(*params)
        return params

    def _load_streamed(self, models: Models, offload: Offload) -> ModelParams:
        weights, target = self.target, models.target
        if weights.direct is None:
            raise CheckpointError(f"{weights.path}: cannot be read piece by piece, which offload {offload!r} needs")
        reader = DirectReader()
        try:
            # One of several processes needs a part of each array, which lies in many pieces of a file.
            read = weights.direct(reader) if jax.process_count() == 1 else weights.read
            declared, shapes = declare_params(target.cfg, target.weights), target.own_params()
            del declared["layers"], shapes["layers"]
            params = self._add_draft(models, place_tree(read, declared, shapes, threads=1))
            stream = open_stream(read, reader, target, offload, weights.path)
        except BaseException:
            reader.close()
            raise
        return ModelParams(params.target | {"layers": stream}, params.draft)

    def _add_draft(self, models: Models, params: Params) -> ModelParams:
        """Load the draft beside the target's loaded parameters, and pack both."""
        target, draft = models
        shapes = target.params()
        trees, wanted = [params], [{name: shapes[name] for name in params}]
        if self.draft is not None and draft is not None:
            read = shared_weights.target_reader(self.target, target, draft)
            if self.draft.layers is not None:
                own = shared_weights.take_layers(target, draft, self.draft.layers, params, read)
            else:
                try:
                    own = self.draft.load(draft)
                except CheckpointError as error:
                    raise DamagedDraftError(str(error)) from error
            trees.append(own | shared_weights.share_embedding(draft, params, read))
            wanted.append(draft.params())
            del own
        return ModelParams(*pack_trees(trees, wanted))

    def _match_vocabularies(self) -> tuple[int, int]:
        """Ids that the draft may propose, from 0 up to a limit, and the vocabulary rows that both models need."""
        draft, size = self.draft, self.target.config.vocab_size
        assert draft is not None
        if draft.vocabulary is not None:
            check_vocabulary(self.tokens, draft.vocabulary, (self.target.config.embed_dim, draft.config.embed_dim))
        if not _has_tokenizer(draft):
            return size, size
        shared = count_shared_tokens(self.tokens, self.draft_tokens)
        later = zip(self.tokens[shared:], self.draft_tokens[shared:], strict=False)
        if unused := sum(bool(ours and theirs) for ours, theirs in later):
            logging.getLogger(__name__).warning(
                "the draft proposes tokens 0 to %d only: its vocabulary and the target's differ from there on, and %d "
                "later tokens that both have are left to the target", shared - 1, unused,
            )  # fmt: skip
        return min(shared, size, draft.config.vocab_size), max(size, draft.config.vocab_size)


def open_models(
    model: str | PathLike[str] | None, draft: object, method: Method, revision: str | None = None
) -> OpenModels:
    """Open target and draft as `LLM` takes them; None is the default model, and its own draft or the shipped one.

    Raises:
      CheckpointError: a checkpoint is missing, damaged or incomplete.
      ConfigError: a name or path that is none, a draft in place of the target, or a method that does not go with them.
    """
    if draft is not None:
        check_path("draft", draft)  # a layer set, too, is text without a NUL character
        check_draft_given(method, draft != NO_DRAFT)
    weights = open_model("model", model, revision)
    if weights.config.features is not None:
        raise ConfigError(f"{weights.path}: is a draft that is fed a target's hidden states; give it as the draft")
    if weights.config.shares_embedding:
        raise ConfigError(f"{weights.path}: is a draft without an embedding of its own; give it as the draft")
    tokenizer = load_tokenizer(weights.path)
    tokens, shipped, opened = tokenizer.token_strings(), None, None
    if isinstance(draft, str) and draft.startswith(shared_weights.PREFIX):
        opened = shared_weights.open_layer_subset(draft, weights, vocabulary_digest(tokens))
    elif draft == MTP_NAME:
        if weights.mtp is None:
            raise ConfigError(f"{weights.path}: has no layer for multi-token prediction, which draft {draft!r} is")
        opened = weights.mtp()
    elif draft is not None:
        opened = None if draft == NO_DRAFT else open_model("draft", draft)
    elif method.drafts and (opened := _open_own(weights)) is None:
        shipped = find_shipped_draft(weights.config, vocabulary_digest(tokens))
        opened = shipped and open_model("draft", shipped)
    if draft is None:
        check_draft_given(method, opened is not None)
    own = load_tokenizer(opened.path).token_strings() if opened is not None and _has_tokenizer(opened) else ()
    return OpenModels(weights, opened, tokens, own, shipped is not None, tokenizer)


def _open_own(weights: Weights) -> Weights | None:
    """The default draft of a checkpoint that has its own; None for others, and with a warning where it cannot run."""
    try:
        return weights.mtp and weights.mtp()
    except (CheckpointError, ConfigError) as error:
        logging.getLogger(__name__).warning("the checkpoint's own draft is left out: %s", error)
        return None


def open_model(role: str, path: object, revision: str | None = None) -> Weights:
    """Open a checkpoint by its path, or by its name on the Hugging Face Hub; None is the default model.

    `role` begins the message of an error. `revision` is a branch, tag or commit of a name, None its main branch.
    ConfigError: a revision of what is no name.
    """
    if not isinstance(path, str | PathLike | None) or path == "":
        raise ConfigError(f"{role} must be the path of a checkpoint or a name on the hub, got {shown(path)}")
    name = parse_name(path, revision) if isinstance(path, str) else None
    if name is not None:
        path = fetch(dataclasses.replace(name, takes_pickle=role == "draft"))
    elif revision is not None:
        raise ConfigError(f"revision {shown(revision)} is for a model on the hub, and {role} {shown(path)} is none")
    return open_weights(None if path is None else check_path(role, path))


def has_draft(model: str | PathLike[str] | None, draft: object, revision: str | None = None) -> bool:
    """Whether a method that uses a draft model would get one from these arguments of `LLM`."""
    return draft != NO_DRAFT if draft is not None else open_models(model, None, Auto(), revision).draft is not None


def plan_meshes(config: EngineConfig, method: Method, opened: OpenModels) -> tuple[MeshPlan, MeshPlan]:
    """Meshes of target and draft."""
    if config.expert_parallel and opened.target.config.experts is None:
        raise ConfigError(f"{opened.target.path}: has no experts; expert_parallel is for mixtures of experts")
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
    if config.numerics == "exact":
        # One mesh of both models stays one.
        shared = target == draft
        target = _make_exact(target)
        draft = target if shared else _make_exact(draft)
    if not config.expert_parallel:
        return target, draft
    if target.tensor == 1:
        raise ConfigError("expert_parallel spreads a mixture's experts over devices: give target_devices, 2 or more")
    return dataclasses.replace(target, expert_parallel=True), dataclasses.replace(draft, expert_parallel=True)


def _make_exact(plan: MeshPlan) -> MeshPlan:
    return dataclasses.replace(plan, kernels=selection.make_exact(plan.kernels, plan.devices[0]))


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
    opened = open_models(model, draft, resolved, revision)
    models = opened.place(*plan_meshes(config, resolved, opened), config.dtype, config.activations, config.kv_dtype)
    plan, _ = opened.plan_offload(models, resolved, config, Store(opened.target.path))
    return plan.lines({0: 1.0, **(USUAL_RATES if opened.is_shipped else {})})


def _has_tokenizer(draft: Weights) -> bool:
    """Whether a draft has a vocabulary of its own; one that shares the target's embedding has the target's."""
    return draft.vocabulary is None and draft.config.features is None


def count_shared_tokens(target: Sequence[str], draft: Sequence[str]) -> int:
    """Number of leading ids that mean the same token in both vocabularies; the draft proposes only these.

    Tokens are compared and not counted: embeddings are padded, and models of one family add tokens at the end. Both
    lists hold every token by id, as the vocabulary writes it; "" is an id without a token.

    Raises:
      ConfigError: an id has different tokens in the two vocabularies, or they share no token.
    """
    pairs = list(zip(target, draft, strict=False))
    for token_id, (ours, theirs) in enumerate(pairs):
        if ours and theirs and ours != theirs:
            raise ConfigError(
                f"the draft does not fit the target: token {token_id} is {ours!r} in the target's vocabulary "
                f"and {theirs!r} in the draft's; both must use the same tokenizer"
            )
    shared = next((token_id for token_id, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    if shared == 0:
        raise ConfigError("the draft does not fit the target: their vocabularies have no token in common")
    return shared


def check_vocabulary(target: Sequence[str], draft_digest: str, widths: tuple[int, int]) -> None:
    """Refuse a draft that shares its target's embedding and was made for another target.

    Args:
      target: every token as the target's vocabulary writes it, by id.
      draft_digest: of the vocabulary that the draft was made for.
      widths: D of target and draft.
    """
    reason = "the draft does not fit the target: it shares"
    if (digest := vocabulary_digest(target)) != draft_digest:
        made_for = f"the target that it was made for, whose vocabulary has the digest {draft_digest:.12}"
        raise ConfigError(f"{reason} the embedding of {made_for}; that of this one is {digest:.12}")
    if widths[0] != widths[1]:
        raise ConfigError(f"{reason} an embedding of width {widths[1]}, the target's has {widths[0]}")


def _fit_features(weights: Weights, draft_weights: Weights) -> Weights:
    """A feature draft with the states that it takes of this target; ConfigError has the two values that disagree."""
    target, draft = weights.config, draft_weights.config
    features = draft.features
    assert features is not None
    for what, ours, theirs in (
        ("hidden states", target.embed_dim, features.target_dim),
        ("a vocabulary", target.vocab_size, draft.vocab_size),
    ):
        if ours != theirs:
            reason = f"the draft {draft_weights.path} does not fit the target"
            raise ConfigError(f"{reason}: it was made for {what} of {theirs}, the target has {ours}")
    try:
        if features.kind == "assistant":
            features = dataclasses.replace(features, layers=_lent_layers(target, draft))
        features = features.resolve(target.num_layers)
    except ConfigError as error:
        raise ConfigError(f"{draft_weights.path}: {error}") from error
    # As its target scales the embedding, so an assistant was trained, and a block draft that does not say otherwise.
    scaled = features.kind == "assistant" or (features.kind == "block" and draft.embed_scale == 1)
    scale = target.embed_scale if scaled else draft.embed_scale
    config = dataclasses.replace(draft, features=features, embed_scale=scale)
    return dataclasses.replace(draft_weights, config=config)


def _lent_layers(target: ModelConfig, draft: ModelConfig) -> tuple[int, ...]:
    """The states that an assistant takes: the last one, and the keys of the last layer of each kind that has its own.

    ConfigError: the target's layers have other heads.
    """
    if target.kinds is None:
        raise ConfigError(
            f"the draft does not fit the target: an assistant needs Gemma 4, the target is {target.family}"
        )
    lent = [NORMED]
    for index in draft.attention_layers:
        alike = [i for i in range(target.num_layers) if (target.window(i) is None) == (draft.window(index) is None)]
        layer = target.keys_of(max(alike))
        (K, H), (own_K, own_H) = target.layer_heads(layer), draft.layer_heads(index)
        if (K, H) != (own_K, own_H):
            made_for = f"it was made for {own_K} KV heads of {own_H}, layer {layer} of the target has {K} of {H}"
            raise ConfigError(f"the draft does not fit the target: {made_for}")
        lent.append(keys_state(layer))
    return tuple(lent)


def _choose_storage(weights: Weights, plan: MeshPlan, dtype: DType) -> Storage | None:
    """How the weights of a checkpoint are kept where nothing else is asked for; None for numbers of one dtype.

    Native kernels read everything as it is. Accelerators keep every block: a few rows take as long as their weights
    are read, and blocks are a quarter of the numbers. XLA on a CPU is slow at GGUF's blocks, so these become numbers
    there; quantised safetensors stay packed, because their models are too large otherwise. On a TPU a kernel multiplies
    by blocks of integers; for others XLA would write the numbers of the whole model in every pass.

    ConfigError: weights in other blocks on a TPU.
    """
    own, kernels = weights.storage(plan), plan.kernels
    if kernels.platform == "tpu":
        own, cfg = number_tables(own, weights.config, jnp.dtype(resolve_dtype(dtype, plan)).name), weights.config
        plain = kernels.reads_planes and cfg.experts is None and cfg.recurrent is None
        if blocks := sorted(name for name in formats_of(own) & {*FORMATS} if not (plain and columns_name(name))):
            raise ConfigError(
                f"{weights.path}: weights in blocks ({', '.join(blocks)}) have no kernels for TPUs: give a model that "
                "jaxspec-convert --quantize q8_0 or q4_0 made, without experts or recurrent layers, or dtype bfloat16, "
                "which takes two bytes for each weight"
            )
    if kernels.native:
        return own
    formats = KEPT_ON_CPU if kernels.platform == "cpu" else FORMATS
    kept = keep_blocks(own, weights.config, jnp.dtype(resolve_dtype(dtype, plan)).name, formats)
    return kept if any(part in formats for part in formats_of(kept)) else None
