"""Resident and streamed engines of tiny checkpoints, and how their outputs are compared."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from gguf import GGMLQuantizationType as Kind
from make import random_tensors, tiny_config, write_gguf, write_hf
from train.export import save_draft

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.eagle import write_eagle3
from jaxspec.checkpoint.load import open_weights
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.files import vocabulary_digest
from jaxspec.loading import OpenModels
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.core.round import ModelParams
from jaxspec.models.features import NORMED, FeatureConfig
from jaxspec.models.params import declare_leaves, declare_params, is_info
from jaxspec.offload.executor import stream_layers
from jaxspec.runtime.mesh import plan_pair

LAYERS = 5
TOKENS = [f"t{i}" for i in range(72)]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
CONTEXT = 100


def medium(name):
    """A file like Q4_K_M: layers that differ in their types."""
    if "layers.1" in name and name.endswith(("v_proj.weight", "down_proj.weight")) or "embed" in name:
        return Kind.Q6_K
    return Kind.Q4_K


def uneven(name):
    """Layers whose experts differ in their types."""
    return Kind.Q8_0 if "layers.1" in name or "layers.3" in name and "down_proj" in name else Kind.Q4_0


CONFIG = tiny_config(num_layers=LAYERS)
WIDE = tiny_config(num_layers=LAYERS, embed_dim=256, mlp_dim=512, head_dim=64)
SLIDING = tiny_config("qwen2", num_layers=LAYERS, sliding_window=8, sliding_layers=(False, False, False, True, True))
MIXTRAL = tiny_config("mixtral", num_layers=LAYERS)
QWEN3_MOE = tiny_config("qwen3_moe", num_layers=LAYERS)
GPT_OSS = tiny_config("gpt_oss", num_layers=LAYERS, sliding_layers=(True, False, True, False, True))
SHARED_EXPERT = tiny_config("qwen2_moe", num_layers=LAYERS)
# Of each kind of checkpoint, how it is written.
CHECKPOINTS = {
    "float32": lambda folder: write_hf(folder / "hf", CONFIG, sharp(CONFIG)),
    "bfloat16": lambda folder: write_hf(folder / "hf", SLIDING, sharp(SLIDING), shards=3, dtype="bfloat16"),
    "q4_0": lambda folder: write_gguf(folder / "q4_0.gguf", CONFIG, sharp(CONFIG), qtype=Kind.Q4_0),
    "medium": lambda folder: write_gguf(folder / "medium.gguf", WIDE, sharp(WIDE), qtype=medium),
    "native": lambda folder: convert(write_hf(folder / "hf", CONFIG, sharp(CONFIG)), folder / "native"),
    "native q8_0": lambda folder: convert(
        write_gguf(folder / "q8_0.gguf", CONFIG, sharp(CONFIG), qtype=Kind.Q8_0), folder / "native"
    ),
    "mixtral": lambda folder: write_gguf(folder / "mixtral.gguf", MIXTRAL, sharp(MIXTRAL), qtype=Kind.Q8_0),
    "shared expert": lambda folder: write_hf(folder / "hf", SHARED_EXPERT, sharp(SHARED_EXPERT)),
    "qwen3 moe": lambda folder: write_gguf(folder / "qwen3.gguf", QWEN3_MOE, sharp(QWEN3_MOE), qtype=Kind.Q4_0),
    "mixed moe": lambda folder: write_gguf(folder / "mixed.gguf", MIXTRAL, sharp(MIXTRAL), qtype=uneven),
    "gpt oss": lambda folder: write_gguf(folder / "oss.gguf", GPT_OSS, sharp(GPT_OSS), qtype=Kind.Q8_0),
    "native moe": lambda folder: convert(
        write_gguf(folder / "moe.gguf", QWEN3_MOE, sharp(QWEN3_MOE), qtype=Kind.Q8_0), folder / "native"
    ),
    "fed": lambda folder: write_fed(folder / "fed"),
    "added": lambda folder: write_added(folder / "added"),
    "block": lambda folder: write_added(folder / "block", BLOCK),
    "draft": lambda folder: write_hf(folder / "draft", tiny_config(num_layers=1), sharp(CONFIG, layers=1)),
}  # fmt: skip


def write_fed(path):
    """An EAGLE-3 draft that is fed the first, a middle and the last state, the one after all layers."""
    features = FeatureConfig(CONFIG.embed_dim, (0, 2, LAYERS))
    cfg = dataclasses.replace(tiny_config(num_layers=1), tied=False, shares_embedding=True, features=features)
    rng, leaves = np.random.default_rng(3), {}
    for name, info in declare_leaves(cfg, "float32").items():
        noise = rng.normal(size=info.shape).astype(np.float32)
        leaves[name] = 1 + noise / 4 if name.endswith("norm") else noise / info.shape[-1] ** 0.5
    leaves["final_norm"] *= 30
    write_eagle3(path, cfg, leaves)
    return path


ADDED = FeatureConfig(CONFIG.embed_dim, (1, NORMED), "added", own_head=False, fc_norm="each")
BLOCK = FeatureConfig(
    CONFIG.embed_dim, (0, LAYERS), "block", own_head=False, block=4, mask_token=5, first_row=0, markov_rank=32
)  # fmt: skip


def write_added(path, features=ADDED):
    """A draft with states added to its embeddings, which also takes the one after the final norm; Q8_0.

    With other `features`, such as those of a DSpark head, another one.
    """
    cfg = dataclasses.replace(tiny_config(num_layers=1), tied=False, shares_embedding=True, features=features)
    rng = np.random.default_rng(4)

    def make(info):
        noise = rng.normal(size=info.shape).astype(np.float32)
        return 1 + noise / 4 if len(info.shape) < 2 else noise / info.shape[-1] ** 0.5

    params = jax.tree.map(make, declare_params(cfg, "float32"), is_leaf=is_info)
    save_draft(
        path, params | {"final_norm": 30 * params["final_norm"]}, cfg, vocabulary_digest(TOKENS), quantize="q8_0"
    )
    return path


def sharp(cfg, layers=None):
    """Tensors of which some tokens are probable, most are not; `layers` leaves the later ones out."""
    tensors = random_tensors(cfg)
    tensors["model.norm.weight"] *= 30
    kept = cfg.num_layers if layers is None else layers
    return {name: t for name, t in tensors.items() if ".layers." not in name or int(name.split(".")[2]) < kept}


WRITTEN = {}  # no cache of `functools`: those are cleared when a process has many programs


def checkpoint(folder, kind):
    """Path of a checkpoint of `CHECKPOINTS`, written once."""
    import ml_dtypes  # noqa: F401  # its dtypes by name

    path = folder / kind.replace(" ", "-")
    if path not in WRITTEN:
        path.mkdir()
        written = CHECKPOINTS[kind](path)
        WRITTEN[path] = path / "native" if kind.startswith("native") else written
    return WRITTEN[path]


class Pair(NamedTuple):
    """An engine with its parameters."""

    engine: Engine
    params: ModelParams


def make_pair(
    path, method, *, draft=None, degree=1, offload="none", resident=0, dtype="auto", kernels="auto", context=CONTEXT,
    shared=False, kept=0,
):  # fmt: skip
    """A compiled engine of a checkpoint, streamed where `offload` says so; `shared` devices are those of the target.

    Of each streamed mixture `kept` experts stay.
    """
    apart = method.own_devices and draft is not None and not shared
    plans = plan_pair(
        degree, 1 if apart else None, draft_platform=None, kernels=kernels, method=method.name, own_devices=apart
    )
    opened = OpenModels(open_weights(path), None if draft is None else open_weights(draft), TOKENS, TOKENS)
    models = opened.place(*plans, dtype)
    if offload != "none":
        models = models._replace(target=stream_layers(models.target, resident, kept))
    params = opened.load(models, offload)
    engine = Engine(models, method, context)
    engine.prepare()
    engine.calibrate(params)
    if isinstance(method, Auto):
        engine.runner.timer = None  # rounds that follow a clock are not the same twice
    return Pair(engine, params)


def decode(pair, prompt=PROMPT, count=24, seed=1, **sampling):
    """The output of an engine: tokens, their log-probabilities, the most probable tokens at each place."""
    options = SamplingParams(max_tokens=count, logprobs=5, **sampling)
    rounds = []
    with pair.engine.open(pair.params, prompt, options, seed) as session:
        while not session.done:
            rounds.append(session.step())
    tokens = [token for one in rounds for token in one.tokens]
    logprobs = [p for one in rounds for p in one.logprobs]
    return tokens, logprobs, [top for one in rounds for top in one.top]


def stream_of(pair) -> Any:
    return pair.params.target["layers"]


def caches(pair):
    """Keys and values of the session that ended last."""
    state = pair.engine._idle[-1].state
    cache = getattr(state, "target", state).cache
    length = int(cache.length)
    return [np.asarray(layer)[:, :length] for layer in (*cache.key, *cache.value)]
