"""The best pieces for each [MASK] of a text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.loading import Loaded
from bert_jax.model import BertForPreTraining
from transformer_jax.config import UserError

LENGTH_STEP = 32
"""Rows are padded to a multiple of this, so that texts of similar length share one compiled program."""


class Fill(NamedTuple):
    """One piece offered for a [MASK]."""

    token: str
    id: int
    probability: float


def fill_mask(loaded: Loaded, texts: Sequence[str], top_k: int = 5) -> list[list[list[Fill]]]:
    """The `top_k` likeliest pieces for each [MASK], likeliest first.

    Each text is one row of its own, [CLS] text [SEP], so the answer does not depend on the other texts.

    Args:
      texts: at least one [MASK] in each; control tokens in them are read as such.

    Returns:
      For each text, for each of its masks from left to right, the pieces with their probabilities over the vocabulary.

    Raises:
      UserError: a text without [MASK] or longer than the model's positions (with its index), an impossible `top_k`, or
        a model without a trained masked-LM head. Found before anything is compiled.
    """
    tokenizer, limit = loaded.tokenizer, loaded.config.max_position_embeddings
    entries = min(tokenizer.vocab_size, loaded.config.vocab_size)
    if isinstance(texts, str):
        raise UserError("fill_mask takes a list of texts; put the one text into a list")
    if not 1 <= top_k <= entries:
        raise UserError(f"top_k is {top_k}; it must be between 1 and the size of the vocabulary, {entries}")
    if "mlm" in loaded.drawn:
        raise UserError("this model came without a masked-LM head, so what it offered would be random")
    objective = loaded.meta.get("config", {}).get("examples", {}).get("objective", "masked")
    if objective != "masked":
        raise UserError(f"this model was trained to predict the {objective} piece, and has never seen a [MASK]")
    rows = []
    for index, text in enumerate(texts):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"text {index} is not Unicode: it holds half of a surrogate pair: {text[:80]!r}")
        ids = [tokenizer.cls_id, *tokenizer.encode_query(text)[0], tokenizer.sep_id]
        if len(ids) > limit:
            raise UserError(
                f"text {index} is {len(ids)} pieces long with [CLS] and [SEP]; the model has {limit} positions: "
                f"shorten {text[:40]!r}"
            )
        if tokenizer.mask_id not in ids:
            raise UserError(f"text {index} has no [MASK]: {text[:80]!r}; write [MASK] where a piece is wanted")
        rows.append(ids)
    params = jax.device_put(loaded.params)
    return [_fill(loaded, params, ids, top_k, entries) for ids in rows]


def _fill(loaded: Loaded, params: Any, ids: list[int], top_k: int, entries: int) -> list[list[Fill]]:
    batch, masks = _row(ids, loaded.tokenizer.mask_id, loaded.config.max_position_embeddings)
    logits_PV = np.asarray(_mlm_logits(loaded.model, params, batch))[0, :masks, :entries].astype(np.float64)
    if not np.isfinite(logits_PV).all():
        raise UserError("what the model gives is not finite: its training has diverged; take an earlier step, RUN@STEP")
    shifted_PV = logits_PV - logits_PV.max(axis=-1, keepdims=True)
    probabilities_PV = np.exp(shifted_PV) / np.exp(shifted_PV).sum(axis=-1, keepdims=True)
    # Stable, so that equal probabilities come in the order of the vocabulary.
    best_PK = np.argsort(-probabilities_PV, axis=-1, kind="stable")[:, :top_k]
    return [
        [Fill(loaded.tokenizer.vocab[i], int(i), float(probabilities_V[i])) for i in best_K]
        for best_K, probabilities_V in zip(best_PK, probabilities_PV, strict=True)
    ]


def _row(ids: list[int], mask_id: int, limit: int) -> tuple[dict[str, np.ndarray], int]:
    """One padded row [1, L] and the number of its masks; their count is padded to a power of two."""
    length = min(-(-len(ids) // LENGTH_STEP) * LENGTH_STEP, limit)
    positions = [i for i, token in enumerate(ids) if token == mask_id]
    batch = {
        "input_ids": np.zeros((1, length), np.int32),
        "token_type_ids": np.zeros((1, length), np.int32),
        "position_ids": np.arange(length, dtype=np.int32)[None],
        "sequence_ids": np.zeros((1, length), np.int32),
        "masked_lm_positions": np.zeros((1, 1 << (len(positions) - 1).bit_length()), np.int32),
        "cls_positions": np.zeros((1, 1), np.int32),
    }
    batch["input_ids"][0, : len(ids)] = ids
    batch["sequence_ids"][0, : len(ids)] = 1
    batch["masked_lm_positions"][0, : len(positions)] = positions
    return batch, len(positions)


@functools.partial(jax.jit, static_argnums=0)
def _mlm_logits(model: BertForPreTraining, params: Any, batch: dict[str, Any]) -> jax.Array:
    out: Any = model.apply({"params": params}, **batch)
    return out["mlm_logits_BPV"]
