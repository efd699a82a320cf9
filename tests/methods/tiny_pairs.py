"""Tiny pairs of target and draft: their geometries, and random parameters of drafts of different quality."""

import dataclasses
import functools

import numpy as np
from tiny_models import ALL_FAMILIES, FOR_TWO_DEVICES, RandomSource

from jaxspec.checkpoint.keymaps import EMBED, HEAD
from jaxspec.checkpoint.load import load_foreign
from jaxspec.checkpoint.shared_weights import share_embedding
from jaxspec.models.features import NORMED, FeatureConfig, keys_state
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement, SharedEmbedding

FAMILIES = ALL_FAMILIES | FOR_TWO_DEVICES
VOCAB = 101
# What a draft with the target's embedding proposes: a number of tokens that four devices do not divide.
HEAD_IDS = tuple(token for token in range(VOCAB) if token % 3)
SMALL, LARGE = 60, 128  # vocabularies of drafts that have fewer tokens than the target, or more rows
FLOAT32 = np.dtype("float32")
# The target itself, its first layer, another random model, the least likely token first, all tokens alike, and a model
# whose embedding of the frequent token 0 (and of 3) is NaN.
DRAFTS = ("copy", "first layer", "random", "adversarial", "constant", "broken")
FED = dataclasses.replace(FAMILIES["llama"], num_layers=1, mlp_dim=20, num_heads=4, num_kv_heads=2, head_dim=16)


def draft_config(family, geometry):
    """Geometry of a draft: "same" as the target's, "layer" with one layer, "foreign" with other heads and widths,
    "small" and "large" with another vocabulary, "shared" with one layer and the target's embedding, "fed" (and
    more) by the target's hidden states, or "none"."""
    cfg = FAMILIES[family]
    match geometry:
        case "same":
            return cfg
        case "layer":
            experts = cfg.experts and dataclasses.replace(cfg.experts, layers=cfg.experts.layers[:1])
            sliding, nope = cfg.sliding_layers[:1], cfg.nope_layers[:1]
            kinds = cfg.kinds and dataclasses.replace(cfg.kinds, sharing=0, sharing_mlp_dim=0)
            if cfg.recurrent is not None:  # a layer of each kind
                recurrent = dataclasses.replace(cfg.recurrent, layers=(True, False))
                return dataclasses.replace(cfg, num_layers=2, recurrent=recurrent)
            cut = dict(sliding_layers=sliding, nope_layers=nope, experts=experts, kinds=kinds)
            return dataclasses.replace(cfg, num_layers=1, **cut)
        case "shared":
            layer = draft_config(family, "layer")
            return dataclasses.replace(layer, shares_embedding=True, head_ids=HEAD_IDS)
        case "foreign":
            return dataclasses.replace(
                FAMILIES["llama"], num_layers=1, embed_dim=32, mlp_dim=20, num_heads=4, num_kv_heads=2, head_dim=16
            )
        case "small":
            return dataclasses.replace(cfg, vocab_size=SMALL)
        case "large":
            return dataclasses.replace(cfg, vocab_size=LARGE)
        case "fed":  # the target's hidden states, a head of some tokens, the target's embedding
            features = FeatureConfig(cfg.embed_dim, (1, 1, 2))
            return dataclasses.replace(FED, shares_embedding=True, head_ids=HEAD_IDS, features=features)
        case "fed own":  # with everything of its own, another width and two layers
            features = FeatureConfig(
                cfg.embed_dim, (0, 2), norm_output=True, norm_before_residual=True, fc_norm="whole", fc_bias=True
            )
            return dataclasses.replace(FED, num_layers=2, embed_dim=32, features=features)
        case "fed added":  # an ordinary draft of some tokens, with states added to its embeddings
            features = FeatureConfig(cfg.embed_dim, (0, 1, 2), "added", own_head=False, fc_norm="each")
            shared = dict(num_layers=2, shares_embedding=True, head_ids=HEAD_IDS)
            return dataclasses.replace(FED, **shared, features=features)
        case "fed eagle1":
            features = FeatureConfig(cfg.embed_dim, (NORMED,), "eagle1", own_head=False, fc_bias=True)
            return dataclasses.replace(FED, shares_embedding=True, features=features)
        case "fed mtp":  # a layer with attention, as the target has
            features = FeatureConfig(cfg.embed_dim, (NORMED,), "mtp", own_head=False, norm_output=True)
            layer = dict(num_layers=1, recurrent=None, tied=False, shares_embedding=True)
            return dataclasses.replace(cfg, **layer, features=features)
        case "fed assistant":  # keys and values of the target's first two layers, which its others share
            kinds = dataclasses.replace(cfg.kinds, sharing=3, sharing_mlp_dim=30, keys_are_values=False, inputs_dim=0)
            keys = 2 * (cfg.num_kv_heads * cfg.head_dim + kinds.full_kv_heads * kinds.full_head_dim)
            layers = (NORMED, keys_state(0), keys_state(1))
            return dataclasses.replace(
                cfg, num_layers=3, embed_dim=32, mlp_dim=30, sliding_layers=(True, True, False), tied=False,
                shares_embedding=True, logit_softcap=None, kinds=kinds, experts=None,
                features=FeatureConfig(cfg.embed_dim, layers, "assistant", keys_dim=keys),
            )  # fmt: skip
        case "fed block":  # one pass fills a block; two layers with norms of heads
            features = FeatureConfig(cfg.embed_dim, (1, 2), "block", own_head=False, block=5, mask_token=7)
            made = dataclasses.replace(FED, num_layers=2, shares_embedding=True, qk_norm=True, family="qwen3")
            return dataclasses.replace(made, features=features)
        case "fed block own":  # with an embedding and a head of some tokens of its own
            made = draft_config(family, "fed block")
            features = dataclasses.replace(made.features, own_head=True, causal=True)
            return dataclasses.replace(made, shares_embedding=False, head_ids=HEAD_IDS, features=features)
        case "fed dspark":  # the first row proposes, and the token before corrects what a place says
            made = draft_config(family, "fed block own")
            features = dataclasses.replace(made.features, first_row=0, markov_rank=8, markov_gated=True, causal=False)
            return dataclasses.replace(made, features=features)
        case "fed dflash2":  # convolutions, a choice among the likeliest tokens, sliding windows
            made = draft_config(family, "fed block")
            features = dataclasses.replace(
                made.features, conv_taps=2, conv_group=16, selector_rank=8, selector_top=6, sliding_causal=True
            )
            return dataclasses.replace(made, features=features, sliding_window=16, sliding_layers=(True, False))
        case "fed parallel":  # P-EAGLE
            features = FeatureConfig(cfg.embed_dim, (1, 1, 2), block=4, first_row=0, mask_token=7)
            made = dataclasses.replace(FED, num_layers=2, shares_embedding=True, head_ids=HEAD_IDS)
            return dataclasses.replace(made, features=features)
    raise ValueError(geometry)


class EditedSource(RandomSource):
    """A random checkpoint whose tensors, by name, were edited."""

    def __init__(self, config, seed, edit):
        super().__init__(config, seed)
        edit(self._tensors)


def sharpen(tensors):
    """Logits of standard deviation 3 instead of 1: some tokens are probable, most are not."""
    for name in ("model.norm.weight", "model.embedding_norm.weight"):  # EAGLE-1 has none
        if name in tensors:
            tensors[name] *= 3


def drop_layers(tensors, first):
    """Make layers from `first` on add nothing."""
    for name in tensors:
        # Norms of results, too: a result of zeros stays one.
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")) and int(name.split(".")[2]) >= first:
            tensors[name] = np.zeros_like(tensors[name])


def resize_vocab(tensors, rows):
    """Cut the vocabulary, or add tokens that would always win if they were not masked."""
    for name in (EMBED, HEAD):
        if name in tensors:
            own = tensors[name]
            more = np.random.default_rng(9).normal(size=(max(0, rows - len(own)), own.shape[1])) * 100
            tensors[name] = np.concatenate([own[:rows], more.astype(np.float32)])


def spoil(tensors, kind):
    """Turn the target into a draft of `DRAFTS`; "random" differs by its seed."""
    match kind:
        case "first layer":
            drop_layers(tensors, 1)
        case "adversarial":
            tensors["model.norm.weight"] *= -1
        case "constant":
            tensors["model.norm.weight"] *= 0
        case "broken":
            tensors[EMBED if EMBED in tensors else "fc.weight"][[0, 3]] = np.nan


def place_edited(config, degree, vocab_rows, seed, edit):
    """Parameters of an `EditedSource`; `config` is what the edited tensors look like."""
    source = EditedSource(config, seed, edit)
    return load_foreign(source, plan_mesh(degree), FLOAT32, vocab_rows)


@functools.cache
def target_params(family, degree=1, vocab_rows=0):
    """A sharp random model of a family."""
    return place_edited(FAMILIES[family], degree, vocab_rows, 0, sharpen)


@functools.cache
def flat_params(family, vocab_rows=0):
    """A target that finds all tokens alike."""
    return place_edited(FAMILIES[family], 1, vocab_rows, 0, lambda tensors: spoil(tensors, "constant"))


@functools.cache
def draft_params(family, degree, geometry, kind):
    """A draft of a geometry and a kind of `DRAFTS`."""
    if geometry == "shared":
        layer = draft_params(family, degree, "layer", kind)
        own = {name: layer[name] for name in ("final_norm", "layers")}
        return own | share_embedding(draft_placement(family, degree, geometry), target_params(family, degree))
    config = draft_config(family, geometry)
    if config.features is not None:
        kind = "copy" if config.features.kind == "eagle1" and kind in ("adversarial", "constant") else kind
        source = EditedSource(config, 1 if kind == "random" else 0, lambda t: (sharpen(t), spoil(t, kind)))
        own = load_foreign(source, plan_mesh(degree), FLOAT32)
        return own | share_embedding(draft_placement(family, degree, geometry), target_params(family, degree))
    resized = geometry in ("small", "large")

    def edit(tensors):
        sharpen(tensors)
        spoil(tensors, kind)
        if resized:
            resize_vocab(tensors, config.vocab_size)

    made = FAMILIES[family] if resized else config
    source = EditedSource(made, 1 if kind == "random" else 0, edit)
    source.config = config
    return load_foreign(source, plan_mesh(degree), FLOAT32, vocab_rows_of(geometry))


def vocab_rows_of(geometry):
    """Rows that both models need."""
    return {"small": VOCAB, "large": LARGE}.get(geometry, 0)


def draft_placement(family, degree, geometry):
    """Placement of a draft."""
    config, rows = draft_config(family, geometry), vocab_rows_of(geometry)
    limit = min(VOCAB, config.vocab_size) if rows else None
    shared = SharedEmbedding(FAMILIES[family], Storage("float32")) if config.borrows else None
    return Placement(config, plan_mesh(degree), FLOAT32, rows, limit, shared_embedding=shared)


# A target whose next token is known: token t is followed by t + 1, and no other is nearly as probable.


def follow(tensors, successor):
    """Make a random model predict `successor[t]` after t, whatever came before."""
    drop_layers(tensors, 0)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 5)
    tensors[HEAD] = np.empty_like(tensors[EMBED])
    tensors[HEAD][successor] = tensors[EMBED]


def counting(wrong=()):
    """Parameters of a llama that counts, and goes to t + 50 after the tokens of `wrong`."""
    return _counting(tuple(wrong))


@functools.cache
def _counting(wrong):
    successor = (np.arange(VOCAB) + 1) % VOCAB
    # A permutation still: the wrong ones change places.
    successor[list(wrong)] = successor[[*wrong[1:], *wrong[:1]]]
    return place_edited(FAMILIES["llama"], 1, 0, 0, lambda tensors: follow(tensors, successor))


def count_on(root, count):
    """The tokens that the counting model writes after `root`."""
    return [(root + 1 + i) % VOCAB for i in range(count)]
