"""Tiny pairs of target and draft for every method, compiled once per process, and ways to run and judge them.

Drafts of different quality share a geometry, and so an engine: parameters are arguments of the compiled programs.
"""

import bisect
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from tiny_models import ALL_FAMILIES, FOR_TWO_DEVICES, RandomSource

from jaxspec.checkpoint.keymaps import EMBED, HEAD
from jaxspec.checkpoint.load import load_foreign
from jaxspec.checkpoint.shared_weights import share_embedding
from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.round import STEPS_PER_DISPATCH, ModelParams, Models, read_rounds
from jaxspec.methods.core.runner import HostState
from jaxspec.methods.core.sequence import CHUNKS
from jaxspec.methods.core.timing import RoundTimer
from jaxspec.methods.core.tree_round import SYNC_ROWS, tree_rows
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.sampled_tree import SampledShape
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.models.features import NORMED, FeatureConfig, keys_state
from jaxspec.models.quantization import Storage
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement, SharedEmbedding
from jaxspec.runtime.sharding import round_up

FAMILIES = ALL_FAMILIES | FOR_TWO_DEVICES
VOCAB = 101
# What a draft with the target's embedding proposes: a number of tokens that four devices do not divide.
HEAD_IDS = tuple(token for token in range(VOCAB) if token % 3)
SMALL, LARGE = 60, 128  # vocabularies of drafts that have fewer tokens than the target, or more rows
FLOAT32 = np.dtype("float32")

_rng = np.random.default_rng(5)
# Id 0 is frequent, so that a pad taken for a token shows. The second one takes two chunks of prefill.
PROMPT = [0, 0, *np.where(_rng.random(30) < 0.4, 0, _rng.integers(0, VOCAB, 30)).tolist(), 0]
LONG_PROMPT = [*_rng.integers(0, 4, 70).tolist(), 0, 3]

# Logits have a standard deviation of about 3, rounding is below 1e-5: a near-tie between two orders of summation is
# not to be expected in any of the few thousand tokens compared.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0},
    "cuts": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "logprobs": True},
    "penalties": {
        "temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3,
        "logit_bias": {0: 6.0, 5: -np.inf, 7: -np.inf, 11: 3.0},
    },
    "greedy penalties": {
        "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.2, "logprobs": True,
        "logit_bias": {0: 5.0, 17: 2.0, 3: -np.inf},
    },
}  # fmt: skip
GREEDY = [name for name, sampling in SAMPLINGS.items() if not sampling.get("temperature")]

# The target itself, its first layer, another random model, the least likely token first, all tokens alike, and a model
# whose embedding of the frequent token 0 (and of 3) is NaN.
DRAFTS = ("copy", "first layer", "random", "adversarial", "constant", "broken")


class Case(NamedTuple):
    """A compiled engine: target family, tensor-parallel degree, draft geometry (see `draft_config`), method."""

    family: str
    degree: int
    geometry: str
    method: Any


LLAMA_SPECEXEC = Case("llama", 1, "same", SpecExec(16))
LLAMA_CHAIN = Case("llama", 1, "same", Chain(4))
LARGE_REJECTION = Case("llama-tied", 1, "large", Chain(3, "rejection"))
LLAMA_SPECINFER = Case("llama", 1, "same", SpecInfer((2, 2, 1, 1)))
LLAMA_LOOKUP = Case("llama", 1, "none", PromptLookup())
# The draft costs nothing: it is asked whenever the text does not repeat itself.
LLAMA_AUTO = Case("llama", 1, "shared", Auto(draft_cost=1e-3))
# A draft as large as the target, at a tenth of its price: random ones do not pay, good ones do. Room for long texts.
LLAMA_AUTO_LONG = Case("llama", 1, "same", Auto(draft_cost=0.1, pass_cost=tuple(1 + more / 10 for more in range(16))))
# One of each kind of runner.
BASIC = [LLAMA_SPECEXEC, LLAMA_CHAIN, LARGE_REJECTION, LLAMA_SPECINFER, LLAMA_LOOKUP, LLAMA_AUTO]
# SpecExec with ever larger budgets. Passes suffice for the search to end by its exact test.
LADDER = [
    Case("llama", 1, "same", SpecExec(1)),  # bs 2, depth 1, branch 1
    Case("llama", 1, "same", SpecExec(4, width=16)),  # wider than there are leaves
    LLAMA_SPECEXEC,
    Case("llama", 1, "same", SpecExec(128, width=32, depth=16)),
    Case("llama", 1, "same", SpecExec(1024, width=128, depth=16)),
]
CHAIN_TP4 = Case("qwen2", 4, "same", Chain(5))
SMALL_TP4 = Case("llama-tied", 4, "small", SpecExec(63, width=3, branch=1, depth=7))  # its batch is never full
SPECINFER_TP4 = Case("qwen3", 4, "same", SpecInfer((3, 1, 2), replacement=False))
SHORT_REJECTION = Case("mistral", 1, "same", Chain(5, "rejection", min_probability=0.2))
SHORT_CHAIN = Case("mistral", 1, "layer", Chain(6, min_probability=0.2))
LARGE_SPECEXEC = Case("llama", 4, "large", SpecExec(8))
SMALL_SPECEXEC = Case("qwen2", 1, "small", SpecExec(7, depth=1))
CASES = [
    *BASIC,
    *(case for case in LADDER if case is not LLAMA_SPECEXEC),
    CHAIN_TP4,
    SMALL_TP4,
    SPECINFER_TP4,
    SHORT_REJECTION,
    SHORT_CHAIN,
    LARGE_SPECEXEC,
    SMALL_SPECEXEC,
    Case("qwen3", 1, "foreign", SpecExec(1023, width=128, depth=9, ranking="sampling", decay=0.95)),
    Case("mistral", 4, "none", PromptLookup(num_draft_tokens=63, length=40, ngram=2, candidates=3)),
    Case("qwen2", 1, "none", PromptLookup(num_draft_tokens=1, adaptive=False)),
    Case("mistral", 4, "shared", Auto(num_draft_tokens=4, length=2, ngram=2)),
    Case("qwen3", 1, "none", Auto(num_draft_tokens=7, length=3)),
    Case("llama-tied", 4, "shared", SpecExec(12, width=2)),
    Case("qwen2", 1, "shared", SpecInfer((2, 2))),
    Case("llama", 4, "shared", Chain(3, "rejection")),
    Case("llama", 1, "same", SpecExec(15, ranking="probability")),
    # Experts beside an MLP.
    *(Case("gemma4-large", 1, *how) for how in (("same", Chain(4)), ("shared", LLAMA_AUTO.method))),
    *(Case("gemma4-large-two", 2, *how) for how in (("same", Chain(4)), ("shared", LLAMA_AUTO.method))),
]

# Tokens that an engine has room for; 150 in the others.
CONTEXTS = {LLAMA_AUTO_LONG: 400}
# Rows of the window in the draft's cache, for engines in which that cache ends with the last slot that it can need;
# in the others the target's does.
_SHAPE = SampledShape(LLAMA_SPECINFER.method.expansion)
DRAFT_TIGHT = {
    LLAMA_CHAIN: 2 * LLAMA_CHAIN.method.num_rows,
    LLAMA_SPECINFER: _SHAPE.inner_rows + _SHAPE.width + LLAMA_SPECINFER.method.max_path,
    CHAIN_TP4: 2 * CHAIN_TP4.method.num_rows,
    LADDER[1]: tree_rows(16, 4) + LADDER[1].method.max_path,
}


def case_id(case):
    """The name of the test case."""
    method = case.method
    shape = {k: v for k, v in dataclasses.asdict(method).items() if getattr(type(method), k, None) != v}
    return f"{case.family}-tp{case.degree}-{case.geometry}-{method.name}({','.join(map(str, shape.values()))})"


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


def params_of(case, draft="copy"):
    """Parameters of both models; a method without a draft ignores the second."""
    target = target_params(case.family, case.degree, vocab_rows_of(case.geometry))
    if case.geometry == "none":
        return ModelParams(target)
    return ModelParams(target, draft_params(case.family, case.degree, case.geometry, draft))


def models_of(case):
    """Placements of both models."""
    plan, rows = plan_mesh(case.degree), vocab_rows_of(case.geometry)
    target = Placement(FAMILIES[case.family], plan, FLOAT32, rows)
    if case.geometry == "none":
        return Models(target)
    return Models(target, draft_placement(case.family, case.degree, case.geometry))


def draft_placement(family, degree, geometry):
    """Placement of a draft."""
    config, rows = draft_config(family, geometry), vocab_rows_of(geometry)
    limit = min(VOCAB, config.vocab_size) if rows else None
    shared = SharedEmbedding(FAMILIES[family], Storage("float32")) if config.borrows else None
    return Placement(config, plan_mesh(degree), FLOAT32, rows, limit, shared_embedding=shared)


class Untimed(RoundTimer):
    """Every round may draft: rounds that follow a clock are not the same twice. It stays where the caches grow."""

    def may_draft(self):
        return True


@functools.cache
def engine_of(case):
    """A compiled engine of 150 tokens or a few more: as many as one cache, of the target or of the draft, holds."""
    models, least = models_of(case), CONTEXTS.get(case, 150)
    slots = case.method.bind(models, least).slots
    contexts = range(least, least + CHUNKS[0])
    context = contexts[bisect.bisect_right(contexts, slots, key=lambda c: case.method.bind(models, c).slots) - 1]
    if case in DRAFT_TIGHT:
        window = 2 * DRAFT_TIGHT[case]
        context = round_up(least + window, CHUNKS[0]) - window
    engine = Engine(models, case.method, context)
    engine.prepare()
    if isinstance(case.method, Auto):
        engine.runner.timer = Untimed()
    return engine


@functools.cache
def plain_engine(family):
    """The baseline, on one device."""
    engine = Engine(Models(Placement(FAMILIES[family], plan_mesh(1), FLOAT32)), Autoregressive(), 446)
    engine.prepare()
    return engine


def run(engine, params, prompt, count, seed=0, **sampling):
    """Rounds of a generation."""
    options = SamplingParams(max_tokens=count, **sampling)
    engine.check_request(prompt, options)
    with engine.open(params, prompt, options, seed) as session:
        return list(rounds_of(session))


def passes_of(rounds):
    """A round for each target pass: tokens without a draft took one each."""
    return [one for emitted in rounds for one in emitted.passes()]


def rounds_of(session):
    """Rounds of a session, one after the other, to its end."""
    while not session.done:
        yield session.step()


def decode(case, prompt, count, draft="copy", seed=0, **sampling):
    """Rounds of a generation of a case."""
    return run(engine_of(case), params_of(case, draft), prompt, count, seed, **sampling)


def plain(family, prompt, count, seed=0, params=None, **sampling):
    """Rounds of plain decoding."""
    return run(plain_engine(family), ModelParams(params or target_params(family)), prompt, count, seed, **sampling)


def tokens_of(rounds):
    """Tokens of all rounds."""
    return [token for emitted in rounds for token in emitted.tokens]


def logprobs_of(rounds):
    """Their log-probabilities."""
    return [logprob for emitted in rounds for logprob in emitted.logprobs]


def check_counts(case, rounds):
    """Check the counters of every round; the last one may be cut."""
    method = case.method
    for emitted in rounds:
        assert len(emitted.tokens) == len(emitted.logprobs)
        assert 0 <= emitted.accepted <= emitted.depth <= emitted.drafted <= method.num_rows - 1
        assert emitted.depth < method.max_path
        if emitted.drafted:
            least = emitted.accepted if emitted is rounds[-1] else emitted.accepted + 1
            assert least <= len(emitted.tokens) <= emitted.accepted + 1
        else:
            # Several tokens that one dispatch decoded without a draft.
            assert 1 <= len(emitted.tokens) <= STEPS_PER_DISPATCH
        if not method.drafts:
            assert emitted.draft_passes == 0
        elif isinstance(method, Auto):
            # A draft that rested takes in what it missed, the prompt among it, by so many tokens per pass.
            assert emitted.draft_passes <= method.length - 1 + -(-engine_of(case).max_context // SYNC_ROWS)
        else:
            assert 1 <= emitted.draft_passes < method.max_path


class Steps:
    """A generation of one engine, round by round, with its state in reach."""

    def __init__(self, case, draft, prompt, seed=0, params=None, **sampling):
        self.case, self.params = case, params or params_of(case, draft)
        self.runner = engine_of(case).runner
        self.text = list(prompt)
        self.output = None  # the last round's
        self.request = self.runner.place_request(SamplingParams(**sampling), seed)
        self.state = self.prefilled(prompt)

    def prefilled(self, text):
        """State of a new sequence: all tokens but the last are committed."""
        state = self.runner.start(text[-1], None)
        state = self.runner.prefill(self.params, state, np.array(text[:-1], np.int32))
        pending = getattr(state, "host", None) and state.host.pending
        if pending is None:
            return state
        # The draft takes the prompt after the first round; here at once.
        return dataclasses.replace(
            state, draft=self.runner.drafter.fill(self.params, state.draft, pending), host=HostState()
        )

    def step(self):
        """Run a round; returns its tokens."""
        self.state, round_, _ = self.runner.round(self.params, self.state, self.request, 1)
        (self.output,) = read_rounds(round_)
        self.runner.observe(self.state, [self.output])
        self.text += self.output.tokens
        return list(self.output.tokens)

    def take_states(self):
        """Have the draft take the hidden states that are kept for it, if any are; returns whether that may be."""
        drafter = self.runner.drafter
        if drafter.unfed_rows:
            draft = drafter.skip(self.params, self.state.draft, self.state.verified, flush=True)
            self.state = dataclasses.replace(self.state, draft=draft)
        return bool(drafter.unfed_rows)

    def caches(self):
        """Caches of the target and, if there is one, of the draft."""
        found = {"target": self.state.target.cache}
        if self.case.method.drafts and self.case.geometry != "none":
            found["draft"] = self.state.draft.sequence.cache
        return found


def arrays(cache):
    """Keys and values of all layers, on the host and its own: the buffers are donated."""
    return [np.array(layer) for layer in (*cache.key, *cache.value)]


def check_written_slots(steps, draft_rows):
    """A round writes into the windows after both prefixes only; that of the draft has so many rows.

    Token 0 is frequent, so a pad that is taken for a token, or written for one, shows.
    """
    before = {name: (int(cache.length), arrays(cache)) for name, cache in steps.caches().items()}
    steps.step()
    for name, cache in steps.caches().items():
        start, old = before[name]
        # The draft commits first and then grows its tree; the target commits within what it wrote.
        stop = start + steps.case.method.num_rows if name == "target" else int(cache.length) + draft_rows
        for one, other in zip(old, arrays(cache), strict=True):
            np.testing.assert_array_equal(one[:, :start], other[:, :start])
            np.testing.assert_array_equal(one[:, stop:], other[:, stop:])


def with_garbage(cache):
    """Keys and values after the prefix, as a finished sequence leaves them; NaN keys as a broken model does."""

    def fill(layer, value):
        garbage = np.array(layer)
        garbage[:, int(cache.length) :] = value
        return jax.device_put(garbage, layer.sharding)

    keys, values = (fill(layer, np.nan) for layer in cache.key), (fill(layer, 1e30) for layer in cache.value)
    return dataclasses.replace(cache, key=tuple(keys), value=tuple(values))


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
