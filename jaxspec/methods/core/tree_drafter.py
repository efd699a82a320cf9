"""The drafter of `auto`, `chain`, `lookup` and `specexec`: one tree in each round, from every source that it is given.

A draft model proposes nodes best-first; copies of earlier text join them. A fixed drafter grows until the best tokens
of its budget are certain (SpecExec, section 4). A weighing one stops where a further pass or row would bring
fewer tokens per second than it costs. All of it is data inside compiled programs: no choice costs a host read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.methods.core.block import block_round
from jaxspec.methods.core.copies import EARLIER_TOKENS, Text, Watch
from jaxspec.methods.core.cost_model import CostModel, init_acceptance
from jaxspec.methods.core.draft_passes import DraftModel, Propose, Unfed, feed
from jaxspec.methods.core.drafter import Drafter, Pending
from jaxspec.methods.core.round import ModelParams
from jaxspec.methods.core.sequence import ABSENT, ModelSequence, PromptStates, SequenceState
from jaxspec.methods.core.tree_round import (
    FIRST_PATIENCE,
    NEVER,
    TreeSettings,
    TreeState,
    blank_nodes,
    draft_round,
    leave,
    take_in,
)
from jaxspec.methods.core.verify import Draft, draft_shapes
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program
from jaxspec.runtime.transfer import place, read_scalar, zeros_of
from jaxspec.sampling.accept import Verified
from jaxspec.sampling.processors import history_shapes
from jaxspec.sampling.request import Request, request_shapes
from jaxspec.tree.tree import init_tree

# Tokens for which a weighed draft need not take hidden states, and rounds (of P tokens) that are added to them.
UNFED_TOKENS, UNFED_ROUNDS = 64, 4


class TreeDrafter(Drafter):
    """Grows a fresh tree in every round; deterministic, so that `match` keeps the output equal to plain decoding."""

    def __init__(
        self, placement: Placement, slots: int, settings: TreeSettings, verified: Verified, *,
        propose: Propose | None = None, costs: CostModel | None = None,
    ):  # fmt: skip
        """Declare the programs.

        Args:
          placement: of the draft model; of the target where there is none, which is known by `propose`.
          slots: capacity of the draft's cache, and of the text; at least M and `SYNC_ROWS` more than the longest text.
          verified: shapes.
          propose: turns logits into children of a node; None for no draft model.
          costs: what drafts are weighed with; needed where `settings` weigh.
        """
        has_model, copies = propose is not None, settings.copies is not None
        self.idles = self._copies = copies
        # Only programs for CPUs decode several tokens in a round.
        watches = copies and placement.plan.kernels.takes_cpu_forms
        self.shapes = draft_shapes(placement, settings.num_rows)
        capacity = slots + verified.tokens.shape[0] + (EARLIER_TOKENS if settings.copies else 0)
        self._home, self._is_fed, self._never = placement, False, None
        self._costs: Any = ()
        self.programs, sequence, tree = (), None, None
        if has_model:
            self.placement, self.slots, self.defers = placement, slots, True
            self._is_fed = placement.cfg.features is not None
            self._sequence = ModelSequence(placement, slots, "draft", keeps_text=False)
            self.programs = tuple(self._sequence.programs)
            sequence = self._sequence.state
        self.skips = self.drops = settings.weighs or not has_model
        path, unfed = verified.tokens.shape[0], None
        if self._is_fed and settings.weighs and not settings.places:
            assert verified.states is not None
            self.unfed_rows = path * (UNFED_ROUNDS + -(-UNFED_TOKENS // path))
            states = placement.array((self.unfed_rows, verified.states.shape[1]), jnp.float32)
            unfed = Unfed(states, placement.array((), jnp.int32))
        if has_model and not settings.places and unfed is None:
            tree = placement.replicated(jax.eval_shape(lambda: init_tree(settings.tree_rows, settings.branch)))
        # An assistant takes a prompt by copying its keys.
        features = placement.cfg.features if has_model else None
        self.rests = has_model and settings.weighs and not settings.places
        self.rests &= features is None or features.kind != "assistant"

        def blank():
            return blank_nodes(settings) if copies else None

        def create(stats=None):
            text = Text(jnp.zeros(capacity, jnp.int32), jnp.int32(0), jnp.int32(0))
            empty = None if tree is None else init_tree(settings.tree_rows, settings.branch)
            first = jnp.int32(FIRST_PATIENCE)
            nothing = None if unfed is None else Unfed(jnp.zeros(unfed.states.shape), jnp.int32(0))
            stats = stats or (init_acceptance() if copies else None)
            return TreeState(text, None, empty, stats, blank(), idle=first, patience=first, unfed=nothing)

        def restart(state, text, verified):
            begun = create(state.stats and state.stats.next_text())
            left = None if state.unfed is None else dataclasses.replace(state.unfed, count=jnp.int32(0))
            begun = dataclasses.replace(begun, text=text, idle=state.idle, patience=state.patience, unfed=left)
            return leave(take_in((), None, begun, verified)[0], verified, blank())

        def draft(params, state, verified, history, request, costs=None):
            if state.stats is not None:
                law = jnp.int32(request.processors.temperature > 0)
                state = dataclasses.replace(state, stats=dataclasses.replace(state.stats, law=law))
            if propose is None or state.sequence is None:
                state, batch = draft_round(None, settings, state, verified, history, costs)
            else:
                one_round = block_round if settings.places else draft_round
                model = DraftModel(params, placement, propose, request)
                state, batch = one_round(model, settings, state, verified, history, costs)
            return state, batch if watches else dataclasses.replace(batch, watch=None)

        def skip(params, state, verified, flush):
            state, _, _ = take_in(params, placement, state, verified)
            if state.unfed is not None and state.sequence is not None:
                sequence, left, _, _ = feed(
                    params, placement.cfg, state.text, state.sequence, state.unfed, verified, flush
                )
                state = dataclasses.replace(state, sequence=sequence, unfed=left)
            return leave(state, verified, blank())

        plan, scalar = placement.plan, placement.array((), jnp.int32)
        stats = nodes = None
        if copies:
            stats = placement.replicated(jax.eval_shape(init_acceptance))
            nodes = placement.replicated(jax.eval_shape(blank))
        text = Text(placement.array((capacity,), jnp.int32), scalar, scalar)
        if settings.copies is not None and watches:
            self.shapes = dataclasses.replace(self.shapes, watch=Watch(text, scalar, settings.copies.ngram))
        self.state = state = TreeState(text, sequence, tree, stats, nodes, scalar, scalar, unfed)
        # A cache has many arrays: programs that run no model do without it, since a call takes longer with each.
        apart = dataclasses.replace(state, sequence=None)
        self._create = Program("draft begin", create, plan, [], apart)
        kept = [dataclasses.replace(apart, text=ABSENT, tree=None, nodes=None), text, verified]
        self._restart = Program("draft begin again", restart, plan, kept, apart, donate=[0])
        self._nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), verified)
        params = placement.params() if has_model else ()
        shapes = [] if costs is None else [costs.shapes(placement)]
        history = history_shapes(placement) if has_model else ()
        args = [params, state, verified, history, request_shapes(placement), *shapes]
        self._draft = Program("draft", draft, plan, args, (state, self.shapes), donate=[1])
        args = [(), apart, verified, (), *args[4:]]
        self._rest = Program("draft rest", draft, plan, args, (apart, self.shapes), donate=[1]) if self.rests else None
        self.draft_programs = (self._draft, self._rest) if self._rest is not None else (self._draft,)
        args = [params, state] if self._is_fed else [(), apart]
        args += [verified, placement.array((), jnp.bool_)]
        self._skip = Program("draft skip", skip, plan, args, args[1], donate=[1])
        self.propose = draft if costs is not None else lambda *arguments: draft(*arguments[:-1])
        self.programs = (*self.programs, *self.draft_programs, self._create, self._restart, self._skip)
        if costs is not None:
            self.use_costs(costs)

    def use_costs(self, costs: CostModel) -> None:
        """Weigh drafts with these figures from now on."""
        self.operands = self._costs = costs.place(self._home)
        if self._never is None:
            self._never = place(np.float32(NEVER), self._costs.draft.sharding)

    def rest(self, resting: bool) -> None:
        if self.rests:
            self.operands = dataclasses.replace(self._costs, draft=self._never) if resting else self._costs

    def start(self, root: int, state: TreeState | None) -> TreeState:
        """See `Drafter.start`; what was learned of drafts counts in the next text, too, with less weight."""
        sequence = None
        if self.placement is not None:
            sequence = self._sequence.start(root, None if state is None else state.sequence)
        return self._begin(sequence, state, self._text_of(np.zeros(0, np.int32)), None)

    def resume(
        self, params: ModelParams, state: TreeState, tokens: np.ndarray, common: int,
        states: PromptStates | None = None, same_text: bool = False, taken: Verified | None = None,
    ) -> tuple[TreeState, int]:  # fmt: skip
        sequence, kept = state.sequence, 0
        if sequence is not None:
            sequence, kept = self._sequence.rewind_to(sequence, tokens, common)
        text = self._text_of(tokens[:-1])
        if not same_text:
            return self._begin(sequence, state, text, taken), kept
        begun = dataclasses.replace(state, sequence=sequence, text=text)
        return begun if taken is None else self.skip(params, begun, taken), kept

    def fill(self, params: ModelParams, state: TreeState, pending: Pending) -> TreeState:
        if state.sequence is None:
            return state
        assert params.draft is not None
        known = pending.known
        sequence, _ = self._sequence.prefill(
            params.draft, state.sequence, pending.tokens[known:], known, pending.states
        )  # fmt: skip
        return dataclasses.replace(state, sequence=sequence)

    def num_rows_kept(self, state: TreeState) -> int:
        return 0 if state.sequence is None else read_scalar(state.sequence.cache.length)

    def num_unfed(self, state: TreeState) -> int:
        return 0 if state.unfed is None else read_scalar(state.unfed.count)

    def num_missing(self, state: TreeState) -> int:
        if state.unfed is None or state.sequence is None:
            return 0
        text = read_scalar(state.text.length) - read_scalar(state.text.start)
        return text - read_scalar(state.sequence.seen) - read_scalar(state.unfed.count)

    def draft(
        self, params: ModelParams, target: SequenceState, state: TreeState, verified: Verified, request: Request
    ) -> tuple[SequenceState, TreeState, Draft]:
        costs = () if self.operands == () else (self.operands,)
        if self._rest is not None and self.operands is not self._costs:
            left, batch = self._rest((), dataclasses.replace(state, sequence=None), verified, (), request, *costs)
            return target, dataclasses.replace(left, sequence=state.sequence), batch
        model, history = ((), ()) if self.placement is None else (params.draft, target.history)
        return target, *self._draft(model, state, verified, history, request, *costs)

    def skip(self, params: ModelParams, state: TreeState, verified: Verified, flush: bool = False) -> TreeState:
        if self._is_fed:
            return self._skip(params.draft, state, verified, np.bool_(flush))
        left = self._skip((), dataclasses.replace(state, sequence=None), verified, np.bool_(flush))
        return dataclasses.replace(left, sequence=state.sequence)

    def drop(self, state: TreeState) -> TreeState:
        if state.stats is None or state.nodes is None:
            return state
        stats = dataclasses.replace(state.stats, latest=zeros_of(state.stats.latest))
        return dataclasses.replace(state, nodes=zeros_of(state.nodes), stats=stats)

    def _begin(
        self, sequence: SequenceState | None, state: TreeState | None, text: Text, taken: Verified | None
    ) -> TreeState:
        if state is None:
            begun: TreeState = self._create()
            if self.learned is not None and begun.stats is not None:
                kept = {f"usual_{name}": counts for name, counts in self.learned.items()}
                begun = dataclasses.replace(begun, stats=dataclasses.replace(begun.stats, **kept))
        else:
            begun = state
        # The rest depends on the capacity, or is new.
        begun = dataclasses.replace(begun, sequence=None, text=ABSENT, tree=None, nodes=None)
        begun = self._restart(begun, text, self._nothing if taken is None else taken)
        return dataclasses.replace(begun, sequence=sequence)

    def _text_of(self, tokens: np.ndarray) -> Text:
        """The buffer with int32 `tokens` `[n]`, on the host: the first program of a text takes it."""
        token, start = np.zeros(self.state.text.token.shape, np.int32), 0
        if self._copies:
            start = len(self.earlier)
            token[:start] = self.earlier
        token[start : start + len(tokens)] = tokens
        length = np.int32(start + len(tokens))
        return Text(token, length, np.int32(start))  # pyright: ignore[reportArgumentType]
