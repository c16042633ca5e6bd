"""Scores of predictions: classes, class sets and numbers here; entities and answers in modules of their own.

Everything is numpy and counts every example once. All scores are between 0 and 1 (correlations from -1), not percent.

Edge inputs are defined, never NaN:
- no example at all is a UserError: a score of nothing is no score;
- precision, recall or F1 of 0/0 is 0 (as scikit-learn and seqeval have it);
- Matthews' correlation is 0 when either side has one class only;
- Pearson's and Spearman's are 0 when either side is constant or has one example (scipy gives NaN there);
- a prediction that is not finite is a UserError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from bert_jax.finetune.answers import exact_match, normalized, squad_scores, token_f1
from bert_jax.finetune.entities import entities, entity_scores, mark_entities
from transformer_jax.config import UserError

__all__ = [
    "accuracy",
    "classification_scores",
    "confusion",
    "entities",
    "entity_scores",
    "exact_match",
    "f1",
    "matthews",
    "multi_label_scores",
    "normalized",
    "pearson",
    "regression_scores",
    "spearman",
    "squad_scores",
    "tagging_scores",
    "token_f1",
]

# --- classes


def confusion(true_N: np.ndarray, predicted_N: np.ndarray, classes: int) -> np.ndarray:
    """How often each class was taken for each.

    Args:
      true_N, predicted_N: class ids, int [N].
      classes: their number, C.

    Returns:
      int64 [C, C]: rows are true classes, columns predicted ones.

    Raises:
      UserError: N is 0.
    """
    true_N, predicted_N = _ids(true_N, classes), _ids(predicted_N, classes)
    _some(true_N, predicted_N)
    return np.bincount(true_N * classes + predicted_N, minlength=classes * classes).reshape(classes, classes)


def accuracy(true_N: np.ndarray, predicted_N: np.ndarray) -> float:
    """Share of examples whose class is right."""
    true_N, predicted_N = np.asarray(true_N), np.asarray(predicted_N)
    _some(true_N, predicted_N)
    return float(np.mean(true_N == predicted_N))


def f1(
    true_N: np.ndarray,
    predicted_N: np.ndarray,
    classes: int,
    average: Literal["binary", "macro", "micro"] = "macro",
    positive: int = 1,
) -> float:
    """F1 of class ids.

    Args:
      average: binary is the F1 of the class `positive` alone; macro the mean over the classes that are in the data or
        among the predictions (a class in neither says nothing); micro is the accuracy, as each example has one class.
    """
    matrix_CC = confusion(true_N, predicted_N, classes)
    hits_C, true_C, predicted_C = np.diag(matrix_CC), matrix_CC.sum(1), matrix_CC.sum(0)
    if average == "micro":
        return float(hits_C.sum() / matrix_CC.sum())
    each_C = _f1(hits_C, true_C, predicted_C)
    if average == "binary":
        return float(each_C[positive])
    return float(each_C[true_C + predicted_C > 0].mean())


def matthews(true_N: np.ndarray, predicted_N: np.ndarray, classes: int) -> float:
    """Matthews' correlation for any number of classes (Gorodkin 2004, R_K); 0 if either side has one class only."""
    matrix_CC = confusion(true_N, predicted_N, classes).astype(np.float64)
    true_C, predicted_C, n = matrix_CC.sum(1), matrix_CC.sum(0), matrix_CC.sum()
    # With one class only the variance is exactly 0: these are whole numbers.
    variances = (n * n - true_C @ true_C) * (n * n - predicted_C @ predicted_C)
    if variances == 0:
        return 0.0
    return float((np.trace(matrix_CC) * n - true_C @ predicted_C) / np.sqrt(variances))


def classification_scores(
    true_N: np.ndarray, predicted_N: np.ndarray, classes: int, positive: int = 1
) -> dict[str, float]:
    """accuracy, f1 (of the class `positive`), macro_f1, micro_f1 and matthews (Matthews' correlation)."""
    return {
        "accuracy": accuracy(true_N, predicted_N),
        "f1": f1(true_N, predicted_N, classes, "binary", positive),
        "macro_f1": f1(true_N, predicted_N, classes, "macro"),
        "micro_f1": f1(true_N, predicted_N, classes, "micro"),
        "matthews": matthews(true_N, predicted_N, classes),
    }


# --- sets of classes


def multi_label_scores(true_NC: np.ndarray, predicted_NC: np.ndarray) -> dict[str, float]:
    """Scores of sets of labels.

    Args:
      true_NC, predicted_NC: 0 or 1 (or bool) [N, C], whether the example has the label.

    Returns:
      micro_f1 over all decisions, macro_f1 (the mean over all C labels), exact (the share of examples whose set is
      right as a whole).
    """
    true_NC, predicted_NC = np.asarray(true_NC) > 0.5, np.asarray(predicted_NC) > 0.5
    _some(true_NC, predicted_NC)
    hits_C, true_C, predicted_C = (true_NC & predicted_NC).sum(0), true_NC.sum(0), predicted_NC.sum(0)
    return {
        "micro_f1": float(_f1(hits_C.sum(), true_C.sum(), predicted_C.sum())),
        "macro_f1": float(_f1(hits_C, true_C, predicted_C).mean()),
        "exact": float((true_NC == predicted_NC).all(1).mean()),
    }


# --- numbers


def pearson(true_N: np.ndarray, predicted_N: np.ndarray) -> float:
    """Pearson's correlation of two float [N]; 0 if either is constant."""
    true_N, predicted_N = _numbers(true_N, predicted_N)
    if np.ptp(true_N) == 0 or np.ptp(predicted_N) == 0:
        return 0.0
    # Scaled before it is squared, so that neither very small nor very large numbers leave the range of float64.
    a_N, b_N = (_unit(x_N - x_N.mean()) for x_N in (true_N, predicted_N))
    return float(np.clip(a_N @ b_N, -1.0, 1.0))


def spearman(true_N: np.ndarray, predicted_N: np.ndarray) -> float:
    """Spearman's rank correlation of two float [N]; equal values share the mean of their ranks."""
    true_N, predicted_N = _numbers(true_N, predicted_N)
    return pearson(_ranks(true_N), _ranks(predicted_N))


def regression_scores(true_N: np.ndarray, predicted_N: np.ndarray) -> dict[str, float]:
    """pearson, spearman, pearson_spearman (the mean of both, which GLUE reports) and mse (mean squared error)."""
    true_N, predicted_N = _numbers(true_N, predicted_N)
    found = {"pearson": pearson(true_N, predicted_N), "spearman": spearman(true_N, predicted_N)}
    return found | {
        "pearson_spearman": (found["pearson"] + found["spearman"]) / 2,
        "mse": float(np.mean((true_N - predicted_N) ** 2)),
    }


# --- tags


def tagging_scores(true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Scores of the tags (IOB2) of sentences.

    Returns:
      accuracy over words, and where the tags mark entities also precision, recall, f1 and macro_f1 of those (seqeval's
      default reading), and strict_f1 (its strict mode; IOBES if there are tags with E- or S-).
    """
    both = [(a, b) for a, b in zip(true, predicted, strict=True)]
    assert all(len(a) == len(b) for a, b in both), "as many tags as words"
    words = [pair for a, b in both for pair in zip(a, b, strict=True)]
    if not words:
        raise UserError("there are 0 words to score; a score needs at least one")
    found = {"accuracy": sum(a == b for a, b in words) / len(words)}
    if mark_entities({tag for pair in words for tag in pair}):
        found |= entity_scores(true, predicted)
        plain = not any(tag[0] in "ES" for pair in words for tag in pair)
        found["strict_f1"] = entity_scores(true, predicted, "iob2" if plain else "iobes")["f1"]
    return found


# --- inside


def _f1(hits: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return 2 * hits / np.maximum(true + predicted, 1)


def _ids(ids_N: np.ndarray, classes: int) -> np.ndarray:
    ids_N = np.asarray(ids_N, np.int64)
    assert ids_N.ndim == 1 and ((ids_N >= 0) & (ids_N < classes)).all(), "class ids are int [N] below `classes`"
    return ids_N


def _numbers(true_N: Any, predicted_N: Any) -> tuple[np.ndarray, np.ndarray]:
    found = np.asarray(true_N, np.float64), np.asarray(predicted_N, np.float64)
    # [N] beside [N, 1] would broadcast to [N, N].
    assert found[0].ndim == found[1].ndim == 1, "numbers are float [N]"
    _some(*found)
    for what, values_N in zip(("label", "prediction"), found, strict=True):
        if not np.isfinite(values_N).all():
            place = int(np.flatnonzero(~np.isfinite(values_N))[0])
            raise UserError(f"the {what} of example {place + 1} is {values_N[place]}; it must be a finite number")
    return found


def _some(true: np.ndarray, predicted: np.ndarray) -> None:
    assert true.shape == predicted.shape, f"{true.shape} true values and {predicted.shape} predicted ones"
    if not len(true):
        raise UserError("there are 0 examples to score; a score needs at least one")


def _unit(x_N: np.ndarray) -> np.ndarray:
    x_N = x_N / np.abs(x_N).max()
    return x_N / np.sqrt(x_N @ x_N)


def _ranks(x_N: np.ndarray | Sequence[float]) -> np.ndarray:
    _, place_N, count_U = np.unique(x_N, return_inverse=True, return_counts=True)
    last_U = np.cumsum(count_U)
    return ((last_U - count_U + 1 + last_U) / 2)[place_N]
