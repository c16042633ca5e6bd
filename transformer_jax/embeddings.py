"""What stands at the foot of a stack: BERT's embeddings, and the sinusoids of the Transformer."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.config import EncoderConfig
from transformer_jax.dropout import Randomness, dropout
from transformer_jax.layers import Embedding, LayerNorm


class BertEmbeddings(nn.Module):
    """Sum of word, position and token-type embeddings, then norm and dropout (Devlin et al. 2019, section 3).

    Args:
      vocab_size: entries of the vocabulary; rows from there to `padded_vocab_size` are padding.
      positions, types: rows of the other two tables.
    """

    config: EncoderConfig
    vocab_size: int
    padded_vocab_size: int
    positions: int
    types: int

    def setup(self) -> None:
        c = self.config
        self.word = Embedding(self.padded_vocab_size, "vocab", c, used=self.vocab_size)
        self.position = Embedding(self.positions, "position", c)
        self.token_type = Embedding(self.types, "type", c)
        self.norm = LayerNorm(c)

    def __call__(
        self,
        input_ids_BL: jax.Array,
        token_type_ids_BL: jax.Array,
        position_ids_BL: jax.Array,
        randomness: Randomness | None,
        site: int,
    ) -> jax.Array:
        """The embedded tokens [B, L, H], with dropout at `site`."""
        x_BLH = self.word(input_ids_BL) + self.position(position_ids_BL) + self.token_type(token_type_ids_BL)
        return dropout(self.norm(x_BLH), self.config.hidden_dropout_prob, randomness, site)

    def scores(self, x_BPH: jax.Array) -> jax.Array:
        """Scores of x against each word embedding, float32 [B, P, Vpadded]."""
        return self.word.attend(x_BPH)


@functools.cache
def sinusoids(length: int, size: int) -> np.ndarray:
    """float32 [length, size]: for each position p, sin(p / 10000^(2i / size)) for all i, then all the cosines.

    The paper (section 3.5) leaves sine and cosine in turns; a permutation of the same numbers. The halves, and this
    divisor, are those of Marian and of Hugging Face's model of it. Computed in float64 and rounded once.
    """
    angles = np.arange(length)[:, None] / np.power(10000.0, 2 * np.arange(size // 2)[None, :] / size)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    table.setflags(write=False)
    return table
