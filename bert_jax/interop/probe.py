"""One batch of inputs on which a written model is compared with ours, and what it takes for both to be the same."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import BertWithHead, HeadConfig
from bert_jax.model import BertForPreTraining
from transformer_jax.config import UserError

TOLERANCE = 1e-4
"""Most that a logit of the written model may differ from ours, in float32."""
SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Déjà vu, CAFÉ and naïve ÅNGSTRÖM; l'œuvre coûte 1 234,56 €!",
    "深度学习 and 機械学習 mixed with words",
    "unaffable incomprehensibilities " + "a" * 120 + " " + "b" * 250,
    "tabs\tand\u00a0odd\u200b spaces \u2014 \U0001f600",
)
"""Texts whose ids the written tokenizer must give again: case, accents, characters without spaces, long words."""


def failed(what: str) -> UserError:
    """The error of an export that is not what it was made from."""
    return UserError(f"export failed its own check, so nothing was written: {what}")


def probe_batch(config: BertConfig) -> dict[str, np.ndarray]:
    """Four padded pairs: both segments, different lengths, ids over the whole vocabulary; for comparing models."""
    rows, length, picks = 4, min(64, config.max_position_embeddings), 4
    rng = np.random.default_rng(0)
    batch = {
        "input_ids": rng.integers(0, config.vocab_size, (rows, length)),
        "token_type_ids": np.zeros((rows, length)),
        "position_ids": np.tile(np.arange(length), (rows, 1)),
        "sequence_ids": np.zeros((rows, length)),
        "masked_lm_positions": np.zeros((rows, picks)),
        "cls_positions": np.zeros((rows, 1)),
    }
    batch["input_ids"][:, 1] = config.vocab_size - 1
    for row in range(rows):
        real = length - row * length // 6
        first = max(1, (row + 1) * real // 6)
        batch["token_type_ids"][row, first:real] = min(1, config.type_vocab_size - 1)
        batch["sequence_ids"][row, :real] = 1
        for name in ("input_ids", "position_ids"):
            batch[name][row, real:] = 0
        batch["masked_lm_positions"][row] = np.linspace(0, real - 1, picks)
    return {name: value.astype(np.int32) for name, value in batch.items()}


def probe_logits(
    params: Mapping[str, Any], config: BertConfig, head: HeadConfig | None = None
) -> dict[str, np.ndarray]:
    """What the model gives on `probe_batch`, computed in float32 without dropout.

    Returns:
      "MLM" [4, 4, vocab_size] and "NSP" [4, 1, 2], or with a head its logits under the name of its kind.
    """
    config = dataclasses.replace(config, dtype="float32", remat="none")
    batch = probe_batch(config)
    if head is None:
        mlm, nsp = _logits(BertForPreTraining(config), dict(params), batch)
        return {"MLM": np.asarray(mlm)[..., : config.vocab_size], "NSP": np.asarray(nsp)}
    names = ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
    rows = {name: batch[name] for name in names}
    if head.kind == "choice":
        rows = {name: x.reshape(2, 2, -1) for name, x in rows.items()}
    return {head.kind: np.asarray(_head_logits(BertWithHead(config, head), dict(params), rows))}


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: BertForPreTraining, params: dict[str, Any], batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    out: Any = model.apply({"params": params}, **batch)
    return out["mlm_logits_BPV"], out["nsp_logits_BS2"]


@functools.partial(jax.jit, static_argnums=0)
def _head_logits(model: BertWithHead, params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    logits: Any = model.apply({"params": params}, **batch)
    return logits


def compare(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float = TOLERANCE) -> float:
    """The largest difference between the outputs, which must be within `tolerance`.

    Raises:
      UserError: it is more, or ours is not finite.
    """
    largest = 0.0
    for name, value in found.items():
        if not np.isfinite(expected[name]).all():
            raise UserError(f"the model's own {name} logits are not finite, so it is not exported")
        gap = float(np.max(np.abs(value - expected[name]), initial=0.0))
        if not gap <= tolerance:  # NaN too
            raise failed(f"{name} logits of the written folder differ by {gap:.3g}, more than {tolerance:g}")
        largest = max(largest, gap)
    return largest
