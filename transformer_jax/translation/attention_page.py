"""How the decoder attends to the source: one self-contained page for a sentence, every layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import attention_page
from transformer_jax.attention_page import Names, Piece
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.model import Transformer


def cross_attention(
    config: TransformerConfig, params: Any, source_ids: Sequence[int], target_ids: Sequence[int]
) -> np.ndarray:
    """Weights float32 [layers, N, T, S] with which each target piece looked at the source when it was predicted.

    Args:
      source_ids: with their end mark.
      target_ids: T pieces that were predicted, in order; the last may be `</s>`.
    """
    source_BS = jnp.asarray(source_ids, jnp.int32)[None]
    given_BT = jnp.asarray([config.target_vocab_size - 1, *target_ids[:-1]], jnp.int32)[None]

    def places(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None], jnp.ones_like(ids)

    _, sown = Transformer(config).apply(
        {"params": params}, *places(source_BS), *places(given_BT), mutable=["intermediates"]
    )
    layers: Any = sown["intermediates"]["decoder"]
    maps = [layers[f"layer_{i}"]["cross_attention"]["attention_weights"][0] for i in range(config.num_decoder_layers)]
    return np.stack([np.asarray(x[0], np.float32) for x in maps])


def render(weights_LNTS: np.ndarray, source: Sequence[str], target: Sequence[str], title: str) -> str:
    """The page of one sentence.

    Args:
      weights_LNTS: from `cross_attention`.
      source, target: the pieces of both sides.
    """
    about = (
        "Rows are pieces of the translation as they were predicted, columns pieces of the source: what the "
        "decoder took from where. Each row sums to 1. Layers are counted from the embeddings up."
    )
    names = Names("the pieces of the translation", "the pieces of the source")
    rows, columns = [Piece(text) for text in target], [Piece(text) for text in source]
    return attention_page.render(title, about, weights_LNTS, rows, columns, names)


def write_page(
    path: Path | str,
    config: TransformerConfig,
    params: Any,
    source: tuple[Sequence[int], Sequence[str]],
    target: tuple[Sequence[int], Sequence[str]],
    title: str,
) -> None:
    """Write the page of one sentence, atomically.

    Args:
      source, target: ids and pieces of each side, with their end marks.
    """
    page = render(cross_attention(config, params, source[0], target[0]), source[1], target[1], title)
    attention_page.write(path, page)
