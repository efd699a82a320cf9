"""Order-1 Markov models as draft and target: whole generations by the rules of acceptance, and their exact law.

A generation is several rounds: the draft proposes a tree below the root, the walk decides, its last token is the next
root. Only the forward passes are replaced, by rows of logit tables. Seeds are vmapped; one compiled function serves
all tables, processors and sizes of the tree.

The law is enumerated with the reference processor in float64, which shares no code with what it judges.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sampling_reference import process_reference
from scipy.special import gammaincc

from jaxspec.config import SamplingParams
from jaxspec.methods.core.draft_passes import PathHistory, most_probable, same_draw
from jaxspec.methods.sampled_tree import SampledShape
from jaxspec.models.vocab import VocabShard
from jaxspec.sampling.accept import Decide, RowLogits, draw_children, match_rule, rejection_rule, walk
from jaxspec.sampling.choose import choose
from jaxspec.sampling.processors import History, from_sampling, init_history, process, update_history
from jaxspec.sampling.request import Request
from jaxspec.tree.tree import Batch

V = 8
WHOLE = VocabShard(V, V)
PROMPT = (3, 6, 3, 1)  # the last token is the first root
ROUNDS = 3  # so as many tokens at least
DRAWS = 20_000
TABLES = 64  # that one call can hold; the i-th seed decodes with table i % TABLES
UNUSED = -1  # token of batch rows that are not in use: no token at all

FALSE_ALARM = 1e-3  # of each test of a law
DETECTED = 1e-6  # planted faults are found with at least this certainty

# Each knob alone, and together.
SAMPLINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "min-p": SamplingParams(temperature=1.5, min_p=0.15),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=2.5),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=1.5),
    "presence": SamplingParams(temperature=1.0, presence_penalty=2.0),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: -np.inf, 2: 1.5, 5: -np.inf, 6: -2.0}),
    "all": SamplingParams(
        temperature=1.4, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.6,
        presence_penalty=-0.8, logit_bias={7: -np.inf, 1: 0.7},
    ),
}  # fmt: skip


def _tables() -> tuple[np.ndarray, np.ndarray]:
    target, noise = np.random.default_rng(20).normal(size=(2, V, V)) * 1.5
    return target.astype(np.float32), (0.5 * target + 0.6 * noise).astype(np.float32)


# The draft agrees with the target often, and errs often enough that every branch of every rule is taken.
TARGET, DRAFT = _tables()


class Setting(NamedTuple):
    """The constants of a whole generation; `fault` is a planted mistake, for modes that know some."""

    mode: "Mode"
    vocab: VocabShard
    request: Request
    fault: jax.Array


class Grown(NamedTuple):
    """The message of a draft: a batch, log q of its inner rows if it drew them, and the text's history."""

    batch: Batch
    draft_logprob: jax.Array
    history: History


# (logits of a row, what was drafted, position of the root, setting) -> decide
Rule = Callable[[RowLogits, Grown, jax.Array, Setting], Decide]
# (draft logits [w, V_local], paths, positions [w], setting) -> tokens and validity [w, k], log q [w, V_local] or None
Propose = Callable[[jax.Array, PathHistory, jax.Array, Setting], tuple[jax.Array, jax.Array, jax.Array | None]]


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a tree comes about and what decides about it; a compile key.

    Attributes:
      rule: which tokens are accepted.
      propose: children of a row.
      expansion: most children of a row, by level.
    """

    rule: Rule
    propose: Propose
    expansion: tuple[int, ...]

    @property
    def shape(self) -> SampledShape:
        return SampledShape(self.expansion)

    @property
    def steps(self) -> int:
        return len(self.expansion) + 1


class Generated(NamedTuple):
    """The outcomes of the seeds.

    Attributes:
      tokens: int32 [N, ROUNDS], the first ones of each.
      counts: int32 [N, ROUNDS], new tokens of each round, of which all but the last were drafted.
    """

    tokens: np.ndarray
    counts: np.ndarray


# How children come about.
def sampled(logits, paths, position, setting, *, replacement=True):
    _, vocab, request, _ = setting
    q = process(logits, request.processors, paths.over(vocab), vocab)
    draws = setting.mode.shape.draws
    return *draw_children(q, request.key, position, draws, replacement, request.processors, vocab), q


distinct = functools.partial(sampled, replacement=False)


def likely(logits, paths, position, setting):
    propose = most_probable(setting.vocab, setting.mode.shape.draws)
    token, score = propose(logits, paths, setting.request, position)
    return token, score > -jnp.inf, None


def simulated(logits, paths, position, setting):
    token, _ = same_draw(setting.vocab, scored=False)(logits, paths, setting.request, position)
    return token, jnp.ones(token.shape, bool), None


# What decides.
def match(logits, grown, position, setting):
    return match_rule(logits, grown.batch, setting.request, position, setting.vocab)


def reject(logits, grown, position, setting, *, replacement=True):
    mode, vocab, request, _ = setting
    return rejection_rule(
        logits, grown.batch, grown.draft_logprob, request, position, vocab,
        draws=mode.shape.draws, replacement=replacement,
    )  # fmt: skip


MODES = {
    "chain": Mode(reject, sampled, (1, 1, 1)),  # R2
    "multi": Mode(reject, sampled, (3, 2)),  # R3
    "distinct": Mode(functools.partial(reject, replacement=False), distinct, (3, 2)),  # R3'
    "tree": Mode(match, likely, (3, 2)),  # R4
    "simulated": Mode(match, simulated, (1, 1, 1)),  # R4 with a draft that has the target's noise
}


def grow(draft, root, history: History, position, fans, setting: Setting) -> Grown:
    """A tree in which rows of level l have at most `fans[l]` children.

    Every inner row proposes children from what its path holds; after l passes, l levels are what they will be.
    """
    shape, vocab = setting.mode.shape, setting.vocab
    inner, depth = slice(0, shape.inner_rows), jnp.array(shape.depths())
    on_path = jnp.array(shape.ancestors()[inner]).at[:, 0].set(False)
    place, child = np.zeros(shape.rows, np.int32), np.full((shape.inner_rows, shape.draws), shape.rows)
    for row in range(1, shape.rows):
        parent = shape.parents()[row]
        place[row] = (child[parent] < shape.rows).sum()
        child[parent, place[row]] = row
    wanted = (jnp.arange(shape.rows) > 0) & (place < fans[depth - 1])

    def propose(_, state):
        token, valid, _ = state
        paths, at = PathHistory(history, token, on_path), position + depth[inner] + 1
        proposed, real, q = setting.mode.propose(draft[token[inner]], paths, at, setting)
        real = real & valid[inner, None]
        valid = jnp.zeros(shape.rows, bool).at[child].set(real, mode="drop") & wanted
        token = jnp.where(valid, token.at[child].set(proposed, mode="drop"), UNUSED)
        return token.at[0].set(root), valid.at[0].set(True), blank if q is None else q

    blank = jnp.zeros((shape.inner_rows, vocab.local_size))
    token = jnp.full(shape.rows, UNUSED, jnp.int32).at[0].set(root)
    start = token, jnp.arange(shape.rows) == 0, blank
    token, valid, draft_logprob = jax.lax.fori_loop(0, len(shape.expansion), propose, start)
    parent = jnp.where(valid, jnp.array(shape.parents()), jnp.arange(shape.rows))
    return Grown(Batch(token, parent, depth, valid.sum()), draft_logprob, history)


def prompt_history(vocab: VocabShard) -> History:
    prompt = jnp.array(PROMPT, jnp.int32)
    return update_history(init_history(vocab), prompt, jnp.ones(len(PROMPT), bool), vocab, generated=False)


def decode(vocab: VocabShard, mode: Mode, target, draft, processors, fans, fault, key, table):
    """`Generated` of one seed, for one shard of the vocabulary."""
    setting = Setting(mode, vocab, Request(processors, key), fault)

    def go(index, state):
        tokens, counts, total, root, history = state
        position = len(PROMPT) - 1 + total
        grown = grow(draft[table], root, history, position, fans, setting)

        def logits(row):
            return target[table, grown.batch.token[row]][None]

        verified, history = walk(mode.rule(logits, grown, position, setting), history, mode.steps, vocab)
        tokens = jax.lax.dynamic_update_slice(tokens, verified.tokens, (total,))
        count = verified.count
        return tokens, counts.at[index].set(count), total + count, verified.tokens[count - 1], history

    tokens = jnp.zeros(ROUNDS * mode.steps, jnp.int32)
    start = tokens, jnp.zeros(ROUNDS, jnp.int32), jnp.int32(0), jnp.int32(PROMPT[-1]), prompt_history(vocab)
    tokens, counts, *_ = jax.lax.fori_loop(0, ROUNDS, go, start)
    return tokens[:ROUNDS], counts


def decode_plainly(length: int, target, processors, key) -> tuple[jax.Array, jax.Array]:
    """Tokens of plain decoding and their log-probabilities, [length] each."""

    def step(state, index):
        root, history = state
        position = (len(PROMPT) + index)[None]
        row = target[root][None]
        token, logprob = choose(row, processors, history.row, key, position, WHOLE)
        history = update_history(history, token, jnp.ones(1, bool), WHOLE, generated=True)
        return (token[0], history), (token[0], logprob[0])

    start = jnp.int32(PROMPT[-1]), prompt_history(WHOLE)
    return jax.lax.scan(step, start, jnp.arange(length, dtype=jnp.int32))[1]


@functools.cache
def _compiled(mode: Mode):
    axes = (None, None, None, None, None, 0, 0)
    return jax.jit(jax.vmap(functools.partial(decode, WHOLE, mode), in_axes=axes))


@functools.cache
def _compiled_plainly(length: int):
    return jax.jit(jax.vmap(functools.partial(decode_plainly, length), in_axes=(None, None, 0)))


def keys(count: int, seed: int = 0) -> np.ndarray:
    """Keys of the seeds `seed`, `seed + 1`, ...: uint32 [count, 2]."""
    return np.stack([np.zeros(count, np.uint32), np.arange(seed, seed + count, dtype=np.uint32)], axis=1)


def arguments(mode: Mode, params: SamplingParams, draft, target, fans, fault, draws, vocab_size=V):
    """Arguments of a vmapped `decode` after the static ones."""
    tables = [np.resize(table, (TABLES, V, V)) for table in (target, draft)]
    fans = mode.expansion if fans is None else (*fans, *[0] * (len(mode.expansion) - len(fans)))
    processors = from_sampling(params, vocab_size, V)
    return (
        *tables, processors, np.array(fans, np.int32), np.int32(fault), keys(draws), np.arange(draws) % TABLES
    )  # fmt: skip


def generate(mode: Mode, params: SamplingParams, *, draft=DRAFT, target=TARGET, fans=None, fault: int = 0) -> Generated:
    """Generations with the seeds 0 to DRAWS - 1.

    Args:
      mode: the rule and its tree.
      params: sampling parameters.
      draft: float32 logits [V, V], or several such tables; their number divides `TABLES`.
      target: the same.
      fans: children by level, at most those of the mode; fewer levels make a flatter tree.
      fault: see `Setting`.
    """
    out = _compiled(mode)(*arguments(mode, params, draft, target, fans, fault, DRAWS))
    return Generated(*map(np.asarray, out))


def generate_plainly(params: SamplingParams, length: int = ROUNDS, target=TARGET, draws: int = DRAWS):
    """Tokens [N, length] and log-probabilities of plain decoding with the same seeds."""
    out = _compiled_plainly(length)(target, from_sampling(params, V, V), keys(draws))
    return tuple(map(np.asarray, out))


def next_law(params: SamplingParams, output=(), target=TARGET) -> np.ndarray:
    """Probabilities of the token after prompt and output, [V]."""
    row = target[[*PROMPT, *output][-1]]
    return np.exp(process_reference(row, params, PROMPT, output, V))


def joint_law(params: SamplingParams, depth: int = ROUNDS, target=TARGET) -> np.ndarray:
    """Probabilities of the first tokens after the prompt, by enumeration: [V] * depth."""
    law = np.ones(())
    for place in range(depth):
        paths = np.ndindex(*[V] * place)
        rows = [next_law(params, path, target) if law[path] else np.zeros(V) for path in paths]
        law = law[..., None] * np.reshape(rows, [V] * (place + 1))
    return law


def count(tokens: np.ndarray) -> np.ndarray:
    """How often each sequence of tokens `[N, depth]` occurs: [V] * depth."""
    assert ((tokens >= 0) & (tokens < V)).all()
    counts = np.zeros([V] * tokens.shape[1], int)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


def chi_square(counts: np.ndarray, law: np.ndarray, smallest: float = 8.0) -> float:
    """p-value of Pearson's test of several multinomials at once; 0 where something impossible was counted.

    Args:
      counts: [C], or [R, C], each row a sample of its own law.
      law: of the same shape; the probabilities of a row that was counted at all add up to 1.
      smallest: the least probable cells of a row are pooled until they expect so many counts together.
    """
    if counts[law == 0].any():
        return 0.0
    statistic, freedom = 0.0, 0
    for observed, probabilities in zip(np.atleast_2d(counts), np.atleast_2d(law), strict=True):
        if not observed.any():
            continue
        np.testing.assert_allclose(probabilities.sum(), 1, atol=1e-9)
        order = np.argsort(probabilities)
        observed, expected = observed[order], probabilities[order] * observed.sum()
        # Cells 0 .. pooled - 1 become one: all that are too small, and as many more as they need together.
        pooled = max((expected < smallest).sum(), np.searchsorted(np.cumsum(expected), smallest) + 1)
        starts = [0, *range(pooled, len(order))]
        observed, expected = np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)
        statistic += ((observed - expected) ** 2 / expected).sum()
        freedom += len(starts) - 1
    return float(gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0


def law_p_value(tokens: np.ndarray, params: SamplingParams, target=TARGET) -> float:
    """p-value of the joint law of all columns of tokens `[N, depth]`."""
    return chi_square(count(tokens).ravel(), joint_law(params, tokens.shape[1], target).ravel())
