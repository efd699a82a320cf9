"""Compiled layers of a target whose layers pass by, and the pass that calls them one after another."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.methods.core.executor import Meanwhile
from jaxspec.methods.core.sequence import SequenceState
from jaxspec.models.features import NORMED
from jaxspec.models.mixture import Routed
from jaxspec.models.params import EXPERT_WEIGHTS, MLP_PARAMS, Params
from jaxspec.models.transformer import Frame, mix_one_layer, run_one_layer
from jaxspec.offload.layout import slot_layouts
from jaxspec.offload.stream import LayerStream, Pass
from jaxspec.runtime.placement import Placement
from jaxspec.runtime.program import Program

# Of a mixture's parameters, those that are needed before the experts of rows are chosen.
_ROUTER_PARAMS = ("mlp_norm", "router", "router_bias")


class LayerPrograms:
    """Compiled layers of passes of any of some row counts: one for each kind of layer and number of rows.

    A mixture whose experts are read one by one has two: the first ends with the choice of the experts, for which the
    host waits. It has their weights read, and then calls the second.
    """

    def __init__(self, target: Placement, state: SequenceState, fed: Sequence[int] = ()):
        """Nothing is declared yet; `state` holds shapes, `fed` names the layers whose hidden states a pass gives."""
        self._target, self._state, self._fed = target, state, fed
        cfg, layers = target.cfg, target.params()["layers"]
        # Of each layer whose experts are read one by one, the shapes of the arrays that they lie in.
        self._experts = {index: layout.shapes for index, layout in slot_layouts(target).items()}
        self._kinds: list[Any] = []  # of each layer: all that its program depends on
        for index, layer in enumerate(layers):
            leaves, tree = jax.tree.flatten(layer)
            shapes = tuple((leaf.shape, str(leaf.dtype), leaf.sharding) for leaf in leaves)
            settings = cfg.window(index), cfg.layer_units(index), cfg.layer_rope(index), cfg.layer_experts(index)
            self._kinds.append((tree, shapes, settings, index in self._experts))
        self._programs: dict[Any, tuple[Program, ...]] = {}
        places, count = {index: place for place, index in enumerate(cfg.attention_layers)}, len(cfg.attention_layers)
        # Of each layer, its arrays of the cache: one for each kind of KV head.
        self._slices = [
            slice(places[i], None, count) if i in places else slice(0) for i in range(cfg.num_layers)
        ]  # fmt: skip

    def declare(self, rows: int, frame: Frame) -> list[Program]:
        """Programs of passes whose shared arrays have the shapes of `frame`."""
        declared = []
        for index, (kind, layer) in enumerate(zip(self._kinds, self._target.params()["layers"], strict=True)):
            known = _key(kind, rows, frame)
            if known not in self._programs:
                declare = self._declare_mixture if index in self._experts else self._declare_layer
                self._programs[known] = declare(index, layer, rows, frame)
                declared += self._programs[known]
        return declared

    def _declare_layer(self, index: int, layer: Params, rows: int, frame: Frame) -> tuple[Program, ...]:
        target, cfg = self._target, self._target.cfg

        def run(layer, x, frame, key, value):
            x, key, value = run_one_layer(layer, cfg, index, x, frame, key, value)
            return (key, value), x

        key, value = self._cached(index)
        x = target.array((rows, cfg.embed_dim), jnp.float32)
        args, out = [layer, x, frame, key, value], ((key, value), x)
        return (Program(_name(index, rows, frame), run, target.plan, args, out, donate=[3, 4]),)

    def _declare_mixture(self, index: int, layer: Params, rows: int, frame: Frame) -> tuple[Program, ...]:
        target, cfg = self._target, self._target.cfg
        experts = cfg.layer_experts(index)
        assert experts is not None  # see `slot_layouts`

        def route(layer, x, frame, key, value):
            routed, key, value = run_one_layer(layer, cfg, index, x, frame, key, value, route_only=True)
            return (key, value), routed

        def mix(layer, experts, routed, frame, places):
            return mix_one_layer(layer | experts, cfg, index, routed, frame, places)

        key, value = self._cached(index)
        x, choices = target.array((rows, cfg.embed_dim), jnp.float32), (rows, experts.per_token)
        routed = Routed(x, x, target.array(choices, jnp.int32), target.array(choices, jnp.float32))
        before, after = _split(layer)
        name = _name(index, rows, frame)
        args, out = [before, x, frame, key, value], ((key, value), routed)
        router = Program(f"{name}, router", route, target.plan, args, out, donate=[3, 4])
        args = [after, self._experts[index], routed, frame, target.array((experts.count,), jnp.int32)]
        return router, Program(f"{name}, experts", mix, target.plan, args, x)

    def _cached(self, index: int) -> tuple[Any, Any]:
        cache, cut = self._state.cache, self._slices[index]
        return cache.key[cut], cache.value[cut]

    def run(
        self, stream: LayerStream, state: SequenceState, rows: Sequence[tuple[Array, Frame]],
        meanwhile: Meanwhile = None,
    ) -> tuple[list[list[Array]], SequenceState]:  # fmt: skip
        """One pass over the weights; returns rows, and the state with all of them written.

        Of each of `rows` these are the hidden states `[T, D]` that are fed, without the final norm (see
        `forward_with_states`), and those after the last layer at the end.

        `rows` are consecutive chunks of a prompt, or one batch. Each layer serves all of them before the next layer's
        weights come. `meanwhile` is called before each layer's weights are waited for. The caches of `state` are
        donated. Of chunks only what is written counts: their rows do not pass the experts of the last layer, unless
        what leaves it is fed.
        """
        keys, values = list(state.cache.key), list(state.cache.value)
        xs: list[Any] = [x for x, _ in rows]
        frames = [frame for _, frame in rows]
        wants_end = NORMED in self._fed or len(self._kinds) in self._fed
        last = len(self._kinds) - 1 if frames[0].window is None and not wants_end else -1
        states: dict[int, list[Array]] = {}
        with stream.weights() as weights:
            for index, (kind, cut) in enumerate(zip(self._kinds, self._slices, strict=True)):
                if meanwhile is not None:
                    meanwhile()
                if index in self._fed:
                    states[index] = list(xs)
                layer = weights.take(index)
                is_mixture = index in self._experts
                before, after = _split(layer) if is_mixture else (layer, {})
                key, value = tuple(keys[cut]), tuple(values[cut])
                for place, (x, frame) in enumerate(zip(xs, frames, strict=True)):
                    program = self._programs[_key(kind, x.shape[0], frame)][0]
                    name = f"layer {index}" if frame.window is not None else f"prompt layer {index}"
                    (key, value), xs[place] = program.run(name, before, x, frame, key, value)
                keys[cut], values[cut] = key, value
                if is_mixture:
                    xs = [routed.x for routed in xs] if index == last else self._mix(weights, index, after, xs, frames)
                weights.used(index, xs[-1])
        cache = dataclasses.replace(state.cache, key=tuple(keys), value=tuple(values))
        wanted = [*(states.get(layer, xs) for layer in self._fed), xs]
        return [list(of_rows) for of_rows in zip(*wanted, strict=True)], dataclasses.replace(state, cache=cache)

    def _mix(
        self, weights: Pass, index: int, layer: Params, chunks: Sequence[Routed], frames: Sequence[Frame]
    ) -> list[Array]:
        """Rows through the experts that they were sent to."""
        experts, places = weights.experts(index, [np.asarray(routed.choice) for routed in chunks])
        passed = []
        for routed, frame in zip(chunks, frames, strict=True):
            program = self._programs[_key(self._kinds[index], routed.x.shape[0], frame)][1]
            name = f"experts {index}" if frame.window is not None else f"prompt experts {index}"
            passed.append(program.run(name, layer, experts, routed, frame, places))
        return passed


def _key(kind: Any, rows: int, frame: Frame) -> Any:
    return kind, rows, jax.tree.structure(frame)


def _name(index: int, rows: int, frame: Frame) -> str:
    # Layers of a kind share a program; a call of it names the layer.
    return f"target layer {index}" + (f" of {rows} rows" if frame.window is not None else f" of a {rows} chunk")


def _split(layer: Params) -> tuple[Params, Params]:
    """A mixture's parameters up to its router, and the rest without the weights of its experts."""
    later = [name for name in MLP_PARAMS if name not in _ROUTER_PARAMS and name not in EXPERT_WEIGHTS]
    before = {name: leaf for name, leaf in layer.items() if name not in later and name not in EXPERT_WEIGHTS}
    return before, {name: leaf for name, leaf in layer.items() if name in later}
