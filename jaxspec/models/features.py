"""Settings of feature drafts (EAGLE): which hidden states of the target they take, and how they join them to tokens.

Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840), and the published checkpoints' configurations.
"""

import dataclasses
from typing import Literal

from jaxspec.errors import ConfigError

# Of `FeatureConfig.layers`: the hidden states after the final norm, which the head sees. Below it are `keys_state`s.
NORMED = -1


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """The hidden states that a draft is fed, and the variants of its first layer.

    A row of the draft joins a token to the state of the token before it: true states of the target for the verified
    text (`fuse` makes them as wide as the draft), and inside a draft tree the parent's own state.

    Attributes:
      target_dim: width of the target.
      layers: hidden states of the target: i is the residual stream that enters layer i, and `NORMED` what leaves the
        final norm. Empty: `default_layers` of the target.
      kind: "eagle3": the first layer attends with norms of token and state beside each other; the state is its
        residual stream. "eagle1": `fc` joins token and state to the residual stream, and a row's own state is what the
        head sees. "added": the state is added to the token's embedding, the layers are those of an ordinary decoder,
        and a row's own state is `fc_own` times what the head sees; a draft that is fed zeros is an ordinary draft.
        "mtp": as "eagle1", but both are normed before `fc`, and the head sees a row, and its children take it, after
        the final norm.
        "assistant": `fc` joins the target's embedding of a token to a state as wide as the target; a row's own state is
        `fc_own` times what the head sees. Layers have queries alone. Keys and values are the target's, of the tokens
        before the root, and all rows stand at the root's position.
        "block": one pass fills the masked places of a block after the root, see `feature_draft.forward_block`.
      own_head: whether the checkpoint has a head; else it is the target's.
      norm_before_residual: the normed state is the residual stream.
      norm_output: a row's own state is taken after the final norm.
      fc_norm: norms of the target's states before `fc`: one over all of them, or one for each.
      fc_bias: whether `fc` has a bias.
      block: B, rows of a pass that proposes for several places, the root's included; 0 for a draft of one place. Of
        kind "eagle3" (P-EAGLE) they follow the verified rows, and take `mask_hidden` as state.
      first_row: row of a block that proposes the token after the root, 0 or 1.
      mask_token: token of the masked places of a block.
      causal: whether a place of a block sees the earlier ones alone, else all; `sliding_causal` says it of layers with
        a sliding window.
      window_from_root: whether sliding windows of a block's rows end where the root's does, else each has its own.
      markov_rank: r, of the correction by the token before (DSpark); 0 for none. `markov_gated`: it has a gate.
      conv_taps: taps of the convolutions over a block's rows (DFlash2), with `conv_group` columns in a group; or 0.
      selector_rank: r, of the choice among the `selector_top` likeliest tokens by the one before (DFlash2); or 0.
      target_layers: layers of the target that the draft was made for; 0 where that is not known.
      keys_dim: numbers of a token's keys and values that an assistant is fed.
    """

    target_dim: int
    layers: tuple[int, ...] = ()
    kind: Literal["eagle3", "eagle1", "added", "block", "mtp", "assistant"] = "eagle3"
    own_head: bool = True
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: Literal["none", "whole", "each"] = "none"
    fc_bias: bool = False
    block: int = 0
    mask_token: int = 0
    causal: bool = False
    target_layers: int = 0
    first_row: int = 1
    sliding_causal: bool = False
    window_from_root: bool = False
    markov_rank: int = 0
    markov_gated: bool = False
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top: int = 0
    keys_dim: int = 0

    def __post_init__(self):
        """Refuse what no draft can be fed."""
        if type(self.target_dim) is not int or self.target_dim < 1:
            raise ConfigError(f"target_dim must be a positive integer, got {self.target_dim!r}")
        for layer in self.layers:
            if type(layer) is not int or (layer < NORMED and self.kind != "assistant"):
                raise ConfigError(f"layers must be numbers of hidden states, got {layer!r}")
        normed = self.kind in ("eagle1", "mtp")
        if normed and (self.layers != (NORMED,) or self.own_head or self.fc_norm != "none"):
            raise ConfigError("drafts of this kind are fed the state after the final norm and have the target's head")
        if self.kind == "mtp" and not self.norm_output:
            raise ConfigError("an MTP draft takes a row's own state after the norm")
        if (self.kind == "assistant") != (self.keys_dim > 0) or (self.keys_dim and not self.own_head):
            raise ConfigError("an assistant, and no other draft, is fed keys; it has a head of its own")
        if self.kind == "added" and (self.own_head or self.norm_before_residual or self.norm_output):
            raise ConfigError("a draft whose states are added to embeddings has its target's head and no such norms")
        if (self.kind == "block" and not self.block) or (self.block and self.kind not in ("block", "eagle3")):
            raise ConfigError(f"a draft of kind {self.kind} has no block of {self.block} rows")
        if self.block and (self.block < 2 or self.mask_token < 0 or self.first_row not in (0, 1)):
            raise ConfigError(
                "a block draft has two rows or more, a mask token, and its first row proposes or the second"
            )
        if self.kind == "block" and not self.layers:
            raise ConfigError("a block draft has named states")
        if self.kind != "block" and (self.markov_rank or self.conv_taps or self.selector_rank):
            raise ConfigError("only a block draft has a correction by the token before, and convolutions")

    @property
    def places(self) -> int:
        """D: tokens of a path that one pass proposes; 0 for a draft that proposes one."""
        return max(self.block - self.first_row, 0)

    @property
    def first_order(self) -> bool:
        """Whether what a block proposes for a place depends on the token before it."""
        return self.markov_rank > 0 or self.selector_rank > 0

    @property
    def num_states(self) -> int:
        """Hidden states of the target that make one feature."""
        return len(self.layers) or 3

    @property
    def states_dim(self) -> int:
        """Width of the target's hidden states beside each other, and of keys and values after them."""
        return self.target_dim + self.keys_dim if self.keys_dim else self.num_states * self.target_dim

    @property
    def joins_tokens(self) -> bool:
        """Whether `fc` joins each token to the state before it; else it makes the states as wide as the draft."""
        return self.kind in ("eagle1", "mtp", "assistant")

    def own_dim(self, embed_dim: int) -> int:
        """Width of a row's own state, for a draft of width `embed_dim`."""
        return self.target_dim if self.kind == "assistant" else embed_dim

    def fusion_inputs(self, embed_dim: int) -> int:
        """Width of what `fc` projects, for a draft of width `embed_dim`."""
        return 2 * self.own_dim(embed_dim) if self.joins_tokens else self.states_dim

    def resolve(self, num_layers: int) -> "FeatureConfig":
        """The same with the layers of a target of `num_layers` layers filled in; `ConfigError` where it lacks one."""
        layers = self.layers or default_layers(num_layers)
        if (most := max(layers)) > num_layers:
            raise ConfigError(
                f"the draft does not fit the target: it is fed the hidden state {most}, the target has {num_layers} "
                "layers"
            )
        if self.target_layers not in (0, num_layers):
            raise ConfigError(
                f"the draft does not fit the target: it was made for {self.target_layers} layers, the target has "
                f"{num_layers}"
            )
        return dataclasses.replace(self, layers=layers)


def keys_state(layer: int) -> int:
    """Among `FeatureConfig.layers`: the keys and values of a layer of the target, as its cache holds them."""
    return NORMED - 1 - layer


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The states that EAGLE-3 heads are trained on where nothing else is said: near the input, the middle, the end."""
    if num_layers < 5:
        # The published rule is for deep models.
        return (min(1, num_layers), num_layers // 2, num_layers)
    return (2, num_layers // 2, num_layers - 3)
