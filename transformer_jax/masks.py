"""Which positions may attend to which, from the number of the sequence that each position belongs to.

A row holds one sequence and padding, or several packed sequences. `sequence_ids_BL` says which: 0 is padding, 1, 2, ...
count the sequences of the row. Masks never come from token ids, since a vocabulary may put its padding piece anywhere.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

FORBIDDEN = -1e9
"""Score of a pair that may not attend. Finite, so that a position with nothing to attend to gives no NaN."""


def from_lengths(lengths_B: jax.Array, length: int) -> jax.Array:
    """Sequence ids int32 [B, length] of padded rows: 1 in the first `lengths_B[b]` positions of row b, 0 after."""
    positions_BL = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (lengths_B.shape[0], length))
    return (positions_BL < lengths_B[:, None].astype(jnp.int32)).astype(jnp.int32)


def same_sequence(query_ids_BL: jax.Array, key_ids_BM: jax.Array) -> jax.Array:
    """bool [B, L, M]: query and key lie in the same sequence, and neither is padding.

    For rows of one sequence this is the padding mask; for packed rows it is block-diagonal (Krell et al. 2021,
    arXiv 2107.02027, section 3.2).
    """
    query_BL1, key_B1M = query_ids_BL[:, :, None], key_ids_BM[:, None, :]
    return (query_BL1 == key_B1M) & (key_B1M != 0)


def one_way(context: Literal["left", "right"], queries: int, keys: int) -> jax.Array:
    """bool [queries, keys]: a query may attend to keys at or before its own place (left), or at or after it (right).

    Places are counted within the row. With `same_sequence`, `left` is causal attention within each sequence, since a
    sequence lies in one piece.
    """
    shape = (queries, keys)
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return query >= key if context == "left" else query <= key
