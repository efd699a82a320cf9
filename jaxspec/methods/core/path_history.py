"""Histories of draft rows, so that penalties see each path's own tokens in the draft too."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.sampling.processors import History, Processors, update_history
from jaxspec.sampling.vocab import VocabShard


@struct.dataclass
class PathHistory:
    """Histories of w rows, in the form from which they can be made.

    Attributes:
      text: tokens of the verified text, the root included; over the whole vocabulary.
      token: int32 [M], tokens of the tree.
      on_path: bool [w, M], which of them lie below the root on each row's path, the row included.
    """

    text: History
    token: jax.Array
    on_path: jax.Array

    def build(self, processors: Processors, vocab: VocabShard) -> History:
        """Histories with a leading axis w; over the columns of `vocab`; zeros where no penalty looks."""
        rows = self.on_path.shape[0]

        def every() -> History:
            text = jax.tree.map(vocab.narrow, self.text)
            return jax.vmap(lambda mask: update_history(text, self.token, mask, vocab, generated=True))(self.on_path)

        def nothing() -> History:
            return jax.tree.map(lambda leaf: jnp.zeros((rows, vocab.local_size), leaf.dtype), self.text)

        return lax.cond(processors.penalised, every, nothing)
