"""Linear models on fixed features: logistic regression and ridge regression, over all examples at once.

Nothing is drawn at random, so the same features give the same model. Features are centred and scaled by the training
set's own mean and deviation; the penalty is on what they are multiplied by then, and not on the bias.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

Kind = Literal["classification", "multi_label", "regression"]
WIDE_BYTES = 1 << 30
"""Features are taken in float64 up to this size, and in float32 beyond."""
STEPS, MEMORY = 500, 10
TOLERANCE = 1e-5
"""Of the largest entry of the gradient, against 1."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """(x - mean) / scale @ kernel + bias."""

    mean_F: np.ndarray
    scale_F: np.ndarray
    kernel_FC: np.ndarray
    bias_C: np.ndarray

    def __call__(self, x_NF: np.ndarray) -> np.ndarray:
        """Scores, float64 [N, C]."""
        return ((x_NF - self.mean_F) / self.scale_F) @ self.kernel_FC + self.bias_C


def fit(
    x_NF: np.ndarray,
    targets: np.ndarray,
    kind: Kind,
    classes: int,
    penalties: tuple[float, ...],
    say: Callable[[str], None] = lambda line: None,
) -> list[Linear]:
    """One model for each penalty.

    The loss is the mean over examples of the cross-entropy (of multi_label, of the sum over labels) or of half the
    squared error, plus half the penalty times the sum of the kernel's squares.

    Args:
      x_NF: features.
      targets: int [N] class ids; 0 and 1 [N, C]; float [N].
      penalties: from the largest on, since each fit starts from the one before it.
      say: called with a line for each fit that takes steps.
    """
    wide = np.float64 if x_NF.size * 8 <= WIDE_BYTES else np.float32
    mean_F = x_NF.mean(0, dtype=np.float64)
    scale_F = x_NF.std(0, dtype=np.float64)
    scale_F[scale_F < 1e-9 * np.maximum(1.0, np.abs(mean_F))] = 1.0
    x_NF = ((x_NF - mean_F.astype(wide)) / scale_F.astype(wide)).astype(wide, copy=False)
    if kind == "regression":
        fits = _ridge(x_NF, np.asarray(targets, np.float64), penalties)
    else:
        wanted_NC = np.eye(classes)[targets] if kind == "classification" else np.asarray(targets, np.float64)
        fits = _logistic(x_NF, wanted_NC, kind == "classification", penalties, say)
    return [Linear(mean_F, scale_F, kernel_FC, bias_C) for kernel_FC, bias_C in fits]


def loss(scores_NC: np.ndarray, targets: np.ndarray, kind: Kind) -> float:
    """The mean loss of examples without the penalty, for regression the mean squared error."""
    if kind == "regression":
        return float(np.mean((scores_NC[:, 0] - targets) ** 2))
    if kind == "classification":
        return float(np.mean(_log_sum(scores_NC) - scores_NC[np.arange(len(targets)), targets]))
    return float(np.mean(np.logaddexp(0.0, scores_NC) - scores_NC * targets))


def constant(targets: np.ndarray, kind: Kind, classes: int) -> np.ndarray:
    """The best scores [C] that look at no feature: they say the commonest class, the commoner half, or the mean."""
    if kind == "regression":
        return np.array([np.mean(targets)])
    share_C = (
        np.bincount(targets, minlength=classes) / len(targets) if kind == "classification" else np.mean(targets, 0)
    )
    share_C = np.clip(share_C.astype(np.float64), 1e-9, 1 - 1e-9)
    return np.log(share_C) if kind == "classification" else np.log(share_C / (1 - share_C))


def _ridge(x_NF: np.ndarray, y_N: np.ndarray, penalties: tuple[float, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    n, centre = len(y_N), float(y_N.mean())
    gram_FF = (x_NF.T @ x_NF).astype(np.float64) / n
    right_F = (x_NF.T @ (y_N - centre).astype(x_NF.dtype)).astype(np.float64) / n
    values_F, vectors_FF = np.linalg.eigh(gram_FF)
    turned_F = vectors_FF.T @ right_F
    fits = [vectors_FF @ (turned_F / (np.maximum(values_F, 0) + penalty)) for penalty in penalties]
    return [(kernel_F[:, None], np.array([centre])) for kernel_F in fits]


def _logistic(
    x_NF: np.ndarray,
    wanted_NC: np.ndarray,
    one_of_all: bool,
    penalties: tuple[float, ...],
    say: Callable[[str], None],
) -> list[tuple[np.ndarray, np.ndarray]]:
    n, size = x_NF.shape
    classes = wanted_NC.shape[1]
    theta = np.zeros((size + 1) * classes)
    fits = []
    for penalty in penalties:

        def value(theta: np.ndarray, penalty: float = penalty) -> tuple[float, np.ndarray]:
            both = theta.reshape(size + 1, classes)
            kernel_FC, bias_C = both[:-1], both[-1]
            scores_NC = (x_NF @ kernel_FC.astype(x_NF.dtype)).astype(np.float64) + bias_C
            if one_of_all:
                top_N = _log_sum(scores_NC)
                total = (top_N - (scores_NC * wanted_NC).sum(-1)).mean()
                error_NC = np.exp(scores_NC - top_N[:, None]) - wanted_NC
            else:
                total = (np.logaddexp(0.0, scores_NC) - scores_NC * wanted_NC).sum(-1).mean()
                error_NC = 0.5 * (1 + np.tanh(0.5 * scores_NC)) - wanted_NC  # the logistic function, without overflow
            gradient = np.empty_like(both)
            gradient[:-1] = (x_NF.T @ error_NC.astype(x_NF.dtype)).astype(np.float64) / n + penalty * kernel_FC
            gradient[-1] = error_NC.mean(0)
            return float(total + 0.5 * penalty * np.sum(kernel_FC**2)), gradient.reshape(-1)

        theta = minimise(value, theta)
        both = theta.reshape(size + 1, classes)
        fits.append((both[:-1].copy(), both[-1].copy()))
        say(f"fitted with L2 {penalty:g}, {len(fits)} of {len(penalties)}")
    return fits


def minimise(value: Callable[[np.ndarray], tuple[float, np.ndarray]], theta: np.ndarray) -> np.ndarray:
    """The lowest point of a smooth convex function, by L-BFGS (Nocedal and Wright 2006, algorithm 7.5).

    Args:
      value: the function and its gradient at a point.
      theta: where to start, float64 [any].
    """
    now, slope = value(theta)
    pairs: collections.deque[tuple[np.ndarray, np.ndarray, float]] = collections.deque(maxlen=MEMORY)
    for _ in range(STEPS):
        if np.abs(slope).max() <= TOLERANCE:
            break
        direction = -_inverse_hessian(pairs, slope)
        along = float(direction @ slope)
        length = 1.0 if pairs else 1.0 / max(1.0, float(np.abs(slope).max()))
        for _ in range(40):
            there = theta + length * direction
            new, new_slope = value(there)
            if new <= now + 1e-4 * length * along:
                break
            length *= 0.5
        else:
            break  # rounding is all that is left
        step, change = there - theta, new_slope - slope
        if step @ change > 1e-12 * (change @ change):
            pairs.append((step, change, 1.0 / float(step @ change)))
        theta, now, slope = there, new, new_slope
    return theta


def _inverse_hessian(pairs: collections.deque[tuple[np.ndarray, np.ndarray, float]], slope: np.ndarray) -> np.ndarray:
    """The approximate inverse Hessian times the gradient: the two loops of the algorithm."""
    q, shares = slope.copy(), []
    for step, change, inverse in reversed(pairs):
        shares.append(inverse * float(step @ q))
        q -= shares[-1] * change
    if pairs:
        step, change, _ = pairs[-1]
        q *= float(step @ change) / float(change @ change)
    for (step, change, inverse), share in zip(pairs, reversed(shares), strict=True):
        q += step * (share - inverse * float(change @ q))
    return q


def _log_sum(scores_NC: np.ndarray) -> np.ndarray:
    top_N1 = scores_NC.max(-1, keepdims=True)
    return top_N1[:, 0] + np.log(np.exp(scores_NC - top_N1).sum(-1))
