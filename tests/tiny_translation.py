"""Translation models and batches small enough to be made anew in each test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.translation.config import TransformerConfig

VOCAB = 101
PAD = VOCAB - 1
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for programs that run once."""

CONFIG = TransformerConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_decoder_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    source_vocab_size=VOCAB,
    target_vocab_size=VOCAB,
    max_position_embeddings=32,
)

Pair = tuple[np.ndarray, np.ndarray]


def pairs(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[Pair]:
    """Source and target pieces of these lengths; each source ends with `</s>`, which is 0."""
    rng = np.random.default_rng(seed)
    out = []
    for source, target in lengths:
        out.append((rng.integers(2, PAD, source), rng.integers(2, PAD, target)))
        out[-1][0][-1] = 0
    return out


def rows(groups: Sequence[Sequence[Pair]], source_length: int, target_length: int) -> dict[str, np.ndarray]:
    """A batch whose row i holds the pairs of group i one after another, then padding."""
    count = len(groups)
    batch: dict[str, Any] = {
        name: np.full((count, length), fill, np.int32)
        for prefix, length in (("", source_length), ("decoder_", target_length))
        for name, fill in ((f"{prefix}input_ids", PAD), (f"{prefix}position_ids", 0), (f"{prefix}sequence_ids", 0))
    }
    batch["labels"] = np.zeros((count, target_length), np.int32)
    batch["label_weights"] = np.zeros((count, target_length), np.float32)
    batch["row_ids"] = np.arange(count, dtype=np.int32)
    for row, group in enumerate(groups):
        s = t = 0
        for number, (source, target) in enumerate(group, 1):
            here, n = slice(s, s + len(source)), len(source)
            batch["input_ids"][row, here] = source
            batch["position_ids"][row, here] = np.arange(n)
            batch["sequence_ids"][row, here] = number
            there, m = slice(t, t + len(target) + 1), len(target) + 1
            batch["decoder_input_ids"][row, there] = [PAD, *target]
            batch["decoder_position_ids"][row, there] = np.arange(m)
            batch["decoder_sequence_ids"][row, there] = number
            batch["labels"][row, there] = [*target, 0]
            batch["label_weights"][row, there] = 1
            s, t = s + n, t + m
    return batch


def padded(lengths: Sequence[tuple[int, int]], seed: int = 0, source: int = 0, target: int = 0) -> dict[str, Any]:
    """A batch of one pair a row, as long as the longest or as asked."""
    source = source or max(n for n, _ in lengths)
    target = target or max(m for _, m in lengths) + 1
    return rows([[pair] for pair in pairs(lengths, seed)], source, target)
