"""One batch of inputs on which a written model is compared with ours, and what it takes for both to be the same."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs of a model that is written as a program, each [batch, length], or [batch, choices, length] for choice."""
POOLED = ("pooler_output", "seq_relationship_logits")
"""Outputs with one vector a row."""


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


def outputs_of(head: HeadConfig | None) -> tuple[str, ...]:
    """Names of the outputs; those of Hugging Face's classes."""
    if head is None:
        return "last_hidden_state", "pooler_output", "prediction_logits", "seq_relationship_logits"
    return ("start_logits", "end_logits") if head.kind == "span" else ("logits",)


def probe_rows(config: BertConfig) -> dict[str, np.ndarray]:
    """int64 [4, L] each: a full row, two shorter ones, and one of padding alone; two segments; ids of all kinds."""
    length = min(24, config.max_position_embeddings)
    lengths_4 = np.array([length, max(1, length * 17 // 24), max(1, length * 5 // 24), 0])
    rng = np.random.default_rng(0)
    real = np.arange(length)[None] < lengths_4[:, None]
    second = np.arange(length)[None] >= lengths_4[:, None] // 2
    return {
        "input_ids": np.where(real, rng.integers(0, config.vocab_size, real.shape), 0),
        "attention_mask": real.astype(np.int64),
        "token_type_ids": np.where(real & second, min(1, config.type_vocab_size - 1), 0),
    }


def reference(
    params: Mapping[str, Any], config: BertConfig, batch: Mapping[str, np.ndarray], head: HeadConfig | None = None
) -> dict[str, np.ndarray]:
    """What our own model gives on a batch of `INPUTS`, under the names of `outputs_of`."""
    config = dataclasses.replace(config, dtype="float32", remat="none")
    ids = batch["input_ids"]
    if head is not None and head.kind == "choice" and ids.ndim == 2:
        return reference(params, config, as_choices(batch), head)
    return {name: np.asarray(x) for name, x in _named(config, head, dict(params), *(batch[n] for n in INPUTS)).items()}


def as_choices(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of a batch as choices, two for each example."""
    return {name: x.reshape(-1, 2, x.shape[-1]) for name, x in batch.items()}


def named_outputs(
    config: BertConfig, head: HeadConfig | None, params: Mapping[str, Any], ids: Any, mask: Any, types: Any
) -> dict[str, jax.Array]:
    """The outputs of `outputs_of` from the inputs of `INPUTS`; positions count from 0, a mask of 0 is padding."""
    places = jnp.broadcast_to(
        jnp.arange(ids.shape[-1], dtype=jnp.int32).reshape((1,) * (ids.ndim - 1) + (-1,)), ids.shape
    )
    arrays = (jnp.asarray(ids, jnp.int32), jnp.asarray(types, jnp.int32), places, (mask != 0).astype(jnp.int32))
    found: Any
    if head is None:
        found = BertForPreTraining(config).apply({"params": params}, *arrays)
        return {
            "last_hidden_state": found["sequence_output_BLH"],
            "pooler_output": found["pooled_output_BSH"][:, 0],
            "prediction_logits": found["mlm_logits_BPV"][..., : config.vocab_size],
            "seq_relationship_logits": found["nsp_logits_BS2"][:, 0],
        }
    found = BertWithHead(config, head).apply({"params": params}, *arrays)
    if head.kind == "span":
        return {"start_logits": found[..., 0], "end_logits": found[..., 1]}
    return {"logits": found}


_named = jax.jit(named_outputs, static_argnums=(0, 1))


def compare_parts(
    run: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]],
    batch: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
) -> float:
    """The largest difference of a written program: on a whole batch, and on parts of it cut to their own length.

    Raises:
      UserError: as `compare`.
    """
    gap = compare(run(dict(batch)), expected)
    if expected.get("logits", np.zeros(0)).shape[:1] == (len(batch["input_ids"]) // 2,):  # of choices
        return gap
    lengths = batch["attention_mask"].sum(1)
    for rows in (slice(1, 3), slice(2, 3)):
        length = int(lengths[rows].max())
        found = run({name: x[rows, :length] for name, x in batch.items()})
        real = batch["attention_mask"][rows, :length] > 0
        for name, value in found.items():
            wanted = expected[name][rows]
            per_token = wanted.ndim > 1 and wanted.shape[1] == batch["input_ids"].shape[1] and name not in POOLED
            pair = (value[real], wanted[:, :length][real]) if per_token else (value, wanted)
            gap = max(gap, compare({name: pair[0]}, {name: pair[1]}))
    return gap
