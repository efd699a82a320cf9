"""The forward pass of a feature draft (EAGLE, MTP layers and our own): rows join a token to the hidden state before it.

Row t of the draft stands for token t + 1 of a text and takes the state of token t: true states of the target where the
text is verified (`fuse`), the parent's own state inside a draft tree. Its rotary position is t, as in the published
code, so its cache holds one row less than the text has tokens. Written for one shard, as `transformer`.

Sources: EAGLE-3 (arXiv 2503.01840), EAGLE (arXiv 2401.15077), and the configurations of published checkpoints.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.kv_cache import KVCache
from jaxspec.models.params import Params
from jaxspec.models.transformer import Window, chunk_rows, look_up, run_layers, store_keys
from jaxspec.models.vocab import VocabShard
from pallas_kernels.linear import as_matrix, linear
from pallas_kernels.rms_norm import rms_norm


def fuse(params: Params, cfg: ModelConfig, states: jax.Array, active_rows: jax.Array | None = None) -> jax.Array:
    """The target's hidden states beside each other, float32 [T, n * D_target], as states of the draft, [T, D].

    For `active_rows` see `transformer.forward`.
    """
    features = cfg.features
    assert features is not None
    if features.joins_tokens:
        return states
    with jax.named_scope("fuse"):
        if features.fc_norm == "whole":
            states = rms_norm(states, params["fc_norm"], cfg.norm_eps)
        elif features.fc_norm == "each":
            parts = states.reshape(-1, features.num_states, features.target_dim)
            normed = rms_norm(parts, jnp.ones(features.target_dim), cfg.norm_eps) * params["fc_norm"]
            states = normed.reshape(states.shape)
        fused = _project(params, states, active_rows)
        return rms_norm(fused, params["hidden_norm"], cfg.norm_eps) if features.kind == "block" else fused


def forward_draft(
    params: Params,
    cfg: ModelConfig,
    token: jax.Array,  # int32 [T]
    state: jax.Array,  # float32 [T, D]
    position: jax.Array,  # int32 [T]
    cache: KVCache,
    window_mask: jax.Array,  # bool [T, W]
    window_position: jax.Array | None = None,  # int32 [W]
    offset: jax.Array | None = None,  # int32 []
    active_rows: jax.Array | None = None,  # int32 []
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Run T rows; `state` is that of each row's token before, the other arguments are those of `transformer.forward`.

    Returns:
      What the head sees, float32 [T, D]; the rows' own states, float32 [T, own_dim], which their children take; and the
      cache with the rows written.
    """
    features = cfg.features
    assert features is not None
    if features.kind == "assistant":
        # Rows see no drafted token. Without any key a row sees itself, which is zeros.
        position, window_position, offset = jnp.broadcast_to(cache.length, position.shape), None, None
        window_mask = jnp.eye(position.shape[0], dtype=bool) & (cache.length == 0)
    window = Window(window_mask, position if window_position is None else window_position, offset, active_rows)
    x, cache, _ = run_layers(params, cfg, token, position, cache, window, None, enter=_enter(params, cfg, state))
    hidden = x if features.kind == "eagle1" else rms_norm(x, params["final_norm"], cfg.norm_eps)
    if "fc_own" in params:
        own = as_matrix(params["fc_own"], features.own_dim(cfg.embed_dim))
        return hidden, linear(hidden, own, active_rows), cache
    return hidden, hidden if features.norm_output else x, cache


def prefill_draft(
    params: Params, cfg: ModelConfig, token: jax.Array, state: jax.Array, count: jax.Array, cache: KVCache
) -> KVCache:
    """Commit the first `count` (int32 []) of T consecutive rows; `token` and `state` are those of `forward_draft`.

    Row t of a block draft is the state of token t: keys and values of every layer are made of it, and nothing else. An
    assistant's are among the target's states.
    """
    features = cfg.features
    assert features is not None
    if features.kind == "assistant":
        cache = store_keys(cfg, state[:, features.target_dim :], cache)
        return dataclasses.replace(cache, length=cache.length + count)
    position = cache.length + jnp.arange(token.shape[0], dtype=jnp.int32)
    _, written, _ = run_layers(
        params, cfg, token, position, cache, None, None, enter=_enter(params, cfg, state),
        active_rows=chunk_rows(count), keys_only=features.kind == "block",
    )  # fmt: skip
    return dataclasses.replace(written, length=cache.length + count)


def forward_block(params: Params, cfg: ModelConfig, root: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """One pass of a block draft: what the head sees of its `places` after `root` (int32 []), float32 [places, D].

    The cache holds the states of every token before the root. Rows of the block stay in its window, to be overwritten.
    """
    features = cfg.features
    assert features is not None
    rows = jnp.arange(features.block, dtype=jnp.int32)
    every = jnp.ones((features.block, features.block), bool)
    mask, sliding_mask = (jnp.tril(every) if causal else every for causal in (features.causal, features.sliding_causal))
    # Windows are cut by these positions, rows are rotated by their own.
    seen_from = jnp.broadcast_to(cache.length, rows.shape) if features.window_from_root else None
    window = Window(mask, cache.length + rows, None, None, sliding_mask, seen_from)
    token = jnp.where(rows == 0, root, features.mask_token)
    x, cache, _ = run_layers(params, cfg, token, window.position, cache, window, None)
    return rms_norm(x[features.first_row :], params["final_norm"], cfg.norm_eps), cache


def logits_after(
    params: Params, cfg: ModelConfig, vocab: VocabShard, logits: jax.Array, hidden: jax.Array, token: jax.Array
) -> jax.Array:
    """Logits of a block's place after each of the tokens, int32 [w], that may stand before it: float32 [w, V_local].

    `hidden`, float32 [1, D], is what the head sees of the place, and `logits`, float32 [1, V_local], what it makes of
    it. DSpark adds a product of the token before; DFlash2 adds one to those of the likeliest tokens, and has no others.
    """
    features = cfg.features
    assert features is not None
    if features.markov_rank:
        before, out = look_up(params["markov_in"], token), params["markov_out"]
        if features.markov_gated:
            joined = jnp.concatenate([jnp.broadcast_to(hidden, (len(token), hidden.shape[1])), before], axis=1)
            before = before * jax.nn.sigmoid(linear(joined, params["markov_gate"]) + params["markov_gate_bias"])
        return logits + linear(before, as_matrix(out, out.shape[0]))
    if features.selector_rank:
        best, likely = vocab.top_k(logits, features.selector_top)
        before, after = look_up(params["selector_in"], token), look_up(params["selector_out"], likely[0])
        product = jnp.sum((before * linear(hidden, params["selector_hidden"]))[:, None] * after[None], axis=-1)
        every = jnp.full((len(token), logits.shape[1]), -jnp.inf)
        return every.at[:, vocab.local(likely[0])].set(best + product, mode="drop")
    return jnp.broadcast_to(logits, (len(token), logits.shape[1]))


def _enter(
    params: Params, cfg: ModelConfig, state: jax.Array
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array | None]]:
    """How rows begin: from embedded tokens [T, D] to the residual stream, and what the first attention projects."""
    features = cfg.features
    assert features is not None

    def enter(embedded: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if features.joins_tokens:
            both = (embedded, "token_norm"), (state, "hidden_norm")  # norms that EAGLE-1 has not
            normed = [rms_norm(x, params[leaf], cfg.norm_eps) if leaf in params else x for x, leaf in both]
            return _project(params, jnp.concatenate(normed, axis=1)), None
        if features.kind == "added":
            return embedded + state, None
        if features.kind == "block":
            return state, state
        first = params["layers"][0]
        normed = rms_norm(state, first["hidden_norm"], cfg.norm_eps)
        joined = jnp.concatenate([rms_norm(embedded, first["attn_norm"], cfg.norm_eps), normed], axis=1)
        return normed if features.norm_before_residual else state, joined

    return enter


def _project(params: Params, x: jax.Array, active_rows: jax.Array | None = None) -> jax.Array:
    fused = linear(x, as_matrix(params["fc"], params["fc"].shape[0]), active_rows)
    return fused + params["fc_bias"] if "fc_bias" in params else fused
