"""Single texts and pairs: one label, a set of labels or a number for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from bert_jax.finetune.encoded import Cut, Features, Row, lay_out
from bert_jax.finetune.records import Example
from bert_jax.finetune.task_file import InputsConfig
from bert_jax.finetune.windows import fair_lengths, kept
from bert_jax.heads import Kind
from transformer_jax.tokenizer import WordPiece

Ids = Sequence[int]


def encode(
    examples: Sequence[Example],
    tokenizer: WordPiece,
    inputs: InputsConfig,
    kind: Kind = "classification",
    labels: Sequence[str] = (),
    labelled: bool = True,
) -> Features:
    """Rows of texts and pairs. Each window of a long one is a row with the example's label.

    Args:
      labels: names of the classes in the order of their ids; those of the examples are among them.
    """
    firsts = tokenizer.encode_batch([e.text_a for e in examples])
    seconds = iter(tokenizer.encode_batch([e.text_b for e in examples if e.text_b is not None]))
    rows: list[Row] = []
    cut: list[Cut] = []
    for n, (example, a) in enumerate(zip(examples, firsts, strict=True)):
        b = None if example.text_b is None else next(seconds)
        sides, lost = fit(a, b, inputs)
        rows += [Row(n, *side) for side in sides]
        if lost:
            cut.append(Cut(example.line, lost, "pieces of the text"))
    index_N = np.array([row.example for row in rows], np.int32)
    arrays = lay_out(rows, tokenizer, inputs.max_seq_length)
    if labelled:
        arrays["labels"] = targets(examples, kind, labels)[index_N]
    return Features(arrays, index_N, len(examples), tuple(cut))


def fit(a: Ids, b: Ids | None, inputs: InputsConfig) -> tuple[list[tuple[Ids, Ids | None]], int]:
    """The segments of each row that a text or a pair makes, and how many pieces none of them holds.

    Of a pair, the longer side gives way, piece by piece. In windows the longer side moves and the other is in each; the
    other is cut to half of the room if it is longer.
    """
    length = inputs.max_seq_length
    if b is None:
        found = kept(len(a), length - 2, inputs.long_text, inputs.stride)
        lost = len(a) - len(found[0]) if len(found) == 1 else 0
        return [(take(a, which), None) for which in found], lost
    room = length - 3
    if inputs.long_text != "windows" or len(a) + len(b) <= room:
        keep_a, keep_b = fair_lengths(len(a), len(b), room)
        (which_a,) = kept(len(a), keep_a, inputs.long_text, 0)
        (which_b,) = kept(len(b), keep_b, inputs.long_text, 0)
        return [(take(a, which_a), take(b, which_b))], len(a) + len(b) - keep_a - keep_b
    moving, still = (a, b) if len(a) > len(b) else (b, a)
    fixed = still[: room // 2]
    parts = [take(moving, which) for which in kept(len(moving), room - len(fixed), "windows", inputs.stride)]
    pairs: list[tuple[Ids, Ids | None]] = [(p, fixed) if moving is a else (fixed, p) for p in parts]
    return pairs, len(still) - len(fixed)


def take(ids: Ids, which: np.ndarray) -> list[int]:
    """The pieces at these places."""
    return [ids[i] for i in which.tolist()]


def targets(examples: Sequence[Example], kind: Kind, labels: Sequence[str]) -> np.ndarray:
    """Of each example: int32 [E] class ids, float32 [E] numbers, or float32 [E, C] of 0 and 1."""
    place = {name: i for i, name in enumerate(labels)}
    if kind == "regression":
        return np.array([e.label for e in examples], np.float32)
    if kind == "classification":
        return np.array([place[str(e.label)] for e in examples], np.int32)
    found_EC = np.zeros((len(examples), len(labels)), np.float32)
    for n, example in enumerate(examples):
        assert isinstance(example.label, tuple)
        found_EC[n, [place[name] for name in example.label]] = 1.0
    return found_EC


def pool(
    logits_NC: np.ndarray, example_index_N: np.ndarray, examples: int, pooling: Literal["max", "mean"]
) -> np.ndarray:
    """One row of logits for each example: the largest or the mean of each column over the example's windows.

    Args:
      logits_NC: float [n, C].
      example_index_N: int [n], ascending, each example at least once.

    Returns:
      float [examples, C], of the same type.
    """
    starts = np.searchsorted(example_index_N, np.arange(examples))
    if len(logits_NC) == examples:
        return logits_NC
    if pooling == "max":
        return np.maximum.reduceat(logits_NC, starts)
    counts = np.diff(np.append(starts, len(logits_NC)))
    return np.add.reduceat(logits_NC, starts) / counts[:, None].astype(logits_NC.dtype)
