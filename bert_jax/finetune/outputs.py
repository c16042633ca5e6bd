"""From the scores of rows to one prediction for each example, and to the lines that say it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.finetune import sequence, span, tagging
from bert_jax.finetune.encoded import Features
from bert_jax.finetune.records import Example
from bert_jax.finetune.task_file import TaskConfig
from bert_jax.heads import HeadConfig


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model says of some examples, in their order; of the fields those of the kind are there."""

    examples: tuple[Example, ...]
    probabilities: np.ndarray | None = None
    """float64 [E, C]: of the classes or choices, which sum to 1; of multi_label each by itself."""
    numbers: np.ndarray | None = None
    """float64 [E], of a regression."""
    tags: tuple[tuple[str, ...], ...] = ()
    answers: tuple[span.Prediction, ...] = ()

    def classes(self) -> np.ndarray:
        """The most likely class or choice of each example: int64 [E]."""
        assert self.probabilities is not None
        return self.probabilities.argmax(-1)

    def chosen(self) -> np.ndarray:
        """Whether each label is more likely than not: bool [E, C]."""
        assert self.probabilities is not None
        return self.probabilities > 0.5


def predictions(
    task: TaskConfig, head: HeadConfig, examples: Sequence[Example], features: Features, logits: np.ndarray
) -> Predictions:
    """What the scores of the rows say of the examples; the windows of one example are put together.

    Args:
      logits: float32 [n, ...] of the rows of `features`.
    """
    kept = tuple(examples)
    if head.kind == "tagging":
        return Predictions(kept, tags=tuple(tagging.decode(logits, features, kept, head.labels)))
    if head.kind == "span":
        return Predictions(kept, answers=tuple(span.decode(logits, features, kept, task.span)))
    pooled = sequence.pool(logits, features.example_index_N, features.examples, task.inputs.pooling).astype(np.float64)
    if head.kind == "regression":
        return Predictions(kept, numbers=pooled[:, 0])
    if head.kind == "multi_label":
        return Predictions(kept, probabilities=1 / (1 + np.exp(-np.clip(pooled, -500, 500))))
    exponentials = np.exp(pooled - pooled.max(-1, keepdims=True))
    return Predictions(kept, probabilities=exponentials / exponentials.sum(-1, keepdims=True))


def header(task: TaskConfig, head: HeadConfig, with_labels: bool = False) -> str | None:
    """The first line of a predictions file; None for tags, whose lines have no columns."""
    if head.kind == "tagging":
        return None
    names = ["id", *(["label"] if with_labels else []), "prediction"]
    if head.kind in ("classification", "multi_label"):
        names += head.labels
    if head.kind == "choice":
        names += [name or f"choice {i}" for i, name in enumerate(task.data.columns.choices)]
    return "\t".join(map(_cell, names))


def lines(
    task: TaskConfig, head: HeadConfig, found: Predictions, with_labels: bool = False, threshold: float | None = None
) -> Iterator[str]:
    """A line for each example, without its line end.

    Args:
      with_labels: put the true label of each beside it.
      threshold: of the null score, see `span.Prediction.text`.
    """
    for n, example in enumerate(found.examples):
        if head.kind == "tagging":
            yield " ".join(found.tags[n])
            continue
        start = [example.id, *([_label(example)] if with_labels else [])]
        if found.numbers is not None:
            cells = [f"{found.numbers[n]:.6g}"]
        elif head.kind == "span":
            cells = [found.answers[n].text(threshold)]
        else:
            assert found.probabilities is not None
            cells = [_said(task, head, found, n), *(f"{p:.6f}" for p in found.probabilities[n])]
        yield "\t".join(map(_cell, [*start, *cells]))


def records(
    task: TaskConfig, head: HeadConfig, found: Predictions, threshold: float | None = None
) -> Iterator[dict[str, Any]]:
    """The same as objects: id, prediction, and the probabilities by name."""
    names = head.labels
    if head.kind == "choice" and found.probabilities is not None:
        names = tuple(str(i) for i in range(found.probabilities.shape[1]))
    for n, example in enumerate(found.examples):
        out: dict[str, Any] = {"id": example.id}
        if head.kind == "tagging":
            out["prediction"] = list(found.tags[n])
        elif head.kind == "span":
            answer = found.answers[n]
            out |= {"prediction": answer.text(threshold), "null_score": answer.null_score}
            out["n_best"] = answer.n_best_json()
        elif found.numbers is not None:
            out["prediction"] = float(found.numbers[n])
        else:
            assert found.probabilities is not None
            chosen = np.flatnonzero(found.chosen()[n])
            said = [names[i] for i in chosen] if head.kind == "multi_label" else _said(task, head, found, n)
            probabilities = dict(zip(names, map(float, found.probabilities[n]), strict=True))
            out |= {"prediction": said, "probabilities": probabilities}
        yield out


def write_spans(path: Path, found: Predictions, threshold: float | None) -> list[Path]:
    """Answers as the official SQuAD scripts read them, and beside them n-best answers and null scores; the files."""
    parts: dict[Path, dict[str, Any]] = {
        path: {p.id: p.text(threshold) for p in found.answers},
        path.with_suffix(".nbest.json"): {p.id: p.n_best_json() for p in found.answers},
        path.with_suffix(".null_odds.json"): {p.id: p.null_score for p in found.answers},
    }
    for file, content in parts.items():
        file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return list(parts)


def _said(task: TaskConfig, head: HeadConfig, found: Predictions, n: int) -> str:
    if head.kind == "multi_label":
        return task.data.label_separator.join(head.labels[i] for i in np.flatnonzero(found.chosen()[n]))
    best = int(found.classes()[n])
    return head.labels[best] if head.kind == "classification" else str(best)


def _label(example: Example) -> str:
    if example.answers:
        return example.answers[0][0]
    if isinstance(example.label, tuple):
        return ",".join(example.label)
    return "" if example.label is None else str(example.label)


def _cell(text: str) -> str:
    """The text without what would end a column or a line."""
    return " ".join(text.split("\t")).replace("\n", " ").replace("\r", " ")
