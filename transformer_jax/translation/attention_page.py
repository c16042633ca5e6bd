"""How the decoder attends to the source: one self-contained page for a sentence, every layer and head."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.page import STYLE
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.model import Transformer

CELL, SMALL = 16, 5
LEAST = 0.005
"""Smaller weights are not drawn."""
LABEL = 110
"""Room for pieces beside a map."""
COLOUR = "#1f4e99"


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
    """The page: the mean of each layer's heads with its pieces, and each head beside it.

    Args:
      weights_LNTS: from `cross_attention`.
      source, target: the pieces of both sides.
    """
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        "<p>Rows are pieces of the translation as they were predicted, columns pieces of the source; the darker, the "
        "larger the weight. A row sums to 1. Layers are counted from the source up; weights below "
        f"{LEAST:g} are left white.</p>",
    ]
    for layer, weights_NTS in enumerate(weights_LNTS):
        parts.append(f"<h2>Layer {layer + 1}</h2><div class=charts>")
        parts.append(_figure(f"mean of {len(weights_NTS)} heads", weights_NTS.mean(0), CELL, source, target))
        parts += [_figure(f"head {n + 1}", weights_TS, SMALL) for n, weights_TS in enumerate(weights_NTS)]
        parts.append("</div>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


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
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def _figure(
    caption: str, weights_TS: np.ndarray, cell: int, source: Sequence[str] = (), target: Sequence[str] = ()
) -> str:
    left, top = (LABEL, LABEL) if source else (0, 0)
    rows, columns = weights_TS.shape
    body = []
    for t, s in zip(*np.nonzero(weights_TS >= LEAST), strict=True):
        weight = float(weights_TS[t, s])
        shown = f"<title>{html.escape(f'{target[t]} ← {source[s]}: {weight:.3f}')}</title>" if source else ""
        body.append(
            f'<rect x="{left + s * cell}" y="{top + t * cell}" width="{cell}" height="{cell}" '
            f'fill-opacity="{min(weight, 1.0):.3f}">{shown}</rect>'
        )
    for s, piece in enumerate(source):
        x = left + (s + 0.7) * cell
        body.append(f'<text transform="translate({x:.1f},{top - 4}) rotate(-60)">{html.escape(piece)}</text>')
    for t, piece in enumerate(target):
        y = top + (t + 0.75) * cell
        body.append(f'<text x="{left - 4}" y="{y:.1f}" text-anchor="end">{html.escape(piece)}</text>')
    width, height = left + columns * cell + (LABEL // 2 if source else 0), top + rows * cell
    return (
        f"<figure><figcaption>{html.escape(caption)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" fill="{COLOUR}" '
        f'font-size="11" aria-label="{html.escape(caption)}">{"".join(body)}</svg></figure>'
    )
