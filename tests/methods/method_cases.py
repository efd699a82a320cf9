"""Cases of every method on tiny pairs, compiled once per process, and ways to run and judge them.

Drafts of different quality share a geometry, and so an engine: parameters are arguments of the compiled programs.
"""

import bisect
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from tiny_pairs import FAMILIES, FLOAT32, VOCAB, draft_params, draft_placement, target_params, vocab_rows_of

from jaxspec.config import SamplingParams
from jaxspec.engine import Engine
from jaxspec.methods.auto.settings import Auto
from jaxspec.methods.autoregressive import Autoregressive
from jaxspec.methods.chain import Chain
from jaxspec.methods.core.round import STEPS_OF_SMALL, ModelParams, Models, read_rounds
from jaxspec.methods.core.runner import HostState
from jaxspec.methods.core.sequence import CHUNKS
from jaxspec.methods.core.timing import RoundTimer, Worth
from jaxspec.methods.core.tree_round import SYNC_ROWS, tree_rows
from jaxspec.methods.lookup import PromptLookup
from jaxspec.methods.sampled_tree import SampledShape
from jaxspec.methods.specexec import SpecExec
from jaxspec.methods.specinfer import SpecInfer
from jaxspec.runtime.mesh import plan_mesh
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.sharding import round_up

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
    *(CHAIN_TP4, SMALL_TP4, SPECINFER_TP4, SHORT_REJECTION, SHORT_CHAIN, LARGE_SPECEXEC, SMALL_SPECEXEC),
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


def forget_drafts(case):
    """Begin the next text with nothing learned of a draft: other tests share the engine, with other drafts."""
    engine_of(case)._idle.clear()
    if isinstance(case.method, Auto):
        runner = engine_of(case).runner
        runner.worths = Worth(), Worth()
        runner._use(runner.costs)


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
            assert 1 <= len(emitted.tokens) <= STEPS_OF_SMALL
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
        state = self.runner.resume(self.params, self.runner.start(0, None), np.array(text, np.int32), 0)
        pending = getattr(state, "host", None) and state.host.pending
        if pending is None:
            return state
        # The draft takes the prompt after the first round; here at once.
        draft = state.draft if state.host.begin is None else state.host.begin(state.draft, None)
        return dataclasses.replace(state, draft=self.runner.drafter.fill(self.params, draft, pending), host=HostState())

    def step(self, room=1):
        """Run a round, or the rounds of a dispatch with more `room`; returns their tokens."""
        self.state, rounds, _ = self.runner.round(self.params, self.state, self.request, room)
        outputs = read_rounds(rounds)
        self.runner.observe(self.state, outputs)
        self.output = outputs[-1]
        tokens = [token for output in outputs for token in output.tokens]
        self.text += tokens
        return tokens

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
