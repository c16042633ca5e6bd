"""Losses and accuracies as sums with the weights that count them.

Sums and counts, not means: a batch cut in parts or spread over devices has one global sum over one global count, and a
part in which nothing counts gives 0 and not NaN. Everything is float32 (float64 for float64 logits).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp


def weighted_cross_entropy(
    logits_XV: jax.Array, labels_X: jax.Array, weights_X: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sum of weight x cross-entropy, and sum of weights.

    Args:
      logits_XV: scores [..., V]; `...` is any number of axes.
      labels_X: integers [...] in 0..V-1; the value under a zero weight has no influence.
      weights_X: floats [...].

    Returns:
      (loss_sum, weight_sum), two scalars.
    """
    logits_XV = _wide(logits_XV)
    weights_X = weights_X.astype(logits_XV.dtype)
    return (weights_X * _cross_entropy(logits_XV, labels_X)).sum(), weights_X.sum()


def smoothed_cross_entropy(
    logits_XV: jax.Array, labels_X: jax.Array, weights_X: jax.Array, smoothing: float, predictable: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross-entropy with label smoothing (Szegedy et al. 2016, section 7), and without.

    The target is 1 - smoothing on the label plus smoothing / predictable on each of the first `predictable` entries,
    the label among them; entries past them (`<pad>` and the padding of the table) get none.

    Args:
      logits_XV: scores [..., V], those of the entries that cannot be predicted far below all others.
      labels_X: integers [...] in 0..predictable-1; the value under a zero weight has no influence.
      weights_X: floats [...].

    Returns:
      (smoothed_sum, plain_sum, weight_sum), three scalars.
    """
    logits_XV = _wide(logits_XV)
    weights_X = weights_X.astype(logits_XV.dtype)
    smoothed_X, plain_X = _smoothed_cross_entropy(logits_XV, labels_X, smoothing, predictable)
    return (weights_X * smoothed_X).sum(), (weights_X * plain_X).sum(), weights_X.sum()


def weighted_accuracy(logits_XV: jax.Array, labels_X: jax.Array, weights_X: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of the weights where the largest logit is the label's, and sum of weights; shapes as in the cross-entropy.

    Of equally large logits the first one is taken, as `argmax` does.
    """
    weights_X = weights_X.astype(_wide(logits_XV).dtype)
    logits_XV = _wide(logits_XV)
    label_logit_X = _label_logit(logits_XV, labels_X)
    index_XV = jax.lax.broadcasted_iota(labels_X.dtype, logits_XV.shape, logits_XV.ndim - 1)
    before_X = jnp.where(index_XV < labels_X[..., None], logits_XV, -jnp.inf).max(-1)
    # `argmax` would be a slow pass of its own; the cross-entropy needs the maximum too.
    is_top_X = (label_logit_X > before_X) & (label_logit_X >= logits_XV.max(-1))
    return jnp.where(is_top_X, weights_X, 0).sum(), weights_X.sum()


def _label_logit(logits_XV: jax.Array, labels_X: jax.Array) -> jax.Array:
    """The logit of each label, [...].

    By comparison in place of a gather, which fuses, and leaves a vocabulary split that is split over devices; on CPU,
    where a pass over all logits is dear, by a gather.
    """

    def gathered(logits_XV: jax.Array, labels_X: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logits_XV, labels_X[..., None], axis=-1, mode="clip")[..., 0]

    return jax.lax.platform_dependent(logits_XV, labels_X, cpu=gathered, default=_compared)


def _compared(logits_XV: jax.Array, labels_X: jax.Array) -> jax.Array:
    index_XV = jax.lax.broadcasted_iota(labels_X.dtype, logits_XV.shape, logits_XV.ndim - 1)
    return jnp.where(index_XV == labels_X[..., None], logits_XV, 0).sum(-1)


@jax.custom_vjp
def _cross_entropy(logits_XV: jax.Array, labels_X: jax.Array) -> jax.Array:
    """Minus the log probability of each label, [...]."""
    return _cross_entropy_forward(logits_XV, labels_X)[0]


def _cross_entropy_forward(
    logits_XV: jax.Array, labels_X: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    label_logit_X, top_X = _label_logit(logits_XV, labels_X), logits_XV.max(-1)
    log_normaliser_X = jnp.log(jnp.exp(logits_XV - top_X[..., None]).sum(-1)) + top_X
    return log_normaliser_X - label_logit_X, (logits_XV, labels_X, log_normaliser_X)


def _cross_entropy_backward(
    residuals: tuple[jax.Array, jax.Array, jax.Array], g_X: jax.Array
) -> tuple[jax.Array, None]:
    # From the logits again; autodiff would store their exponentials besides.
    logits_XV, labels_X, log_normaliser_X = residuals
    is_label_XV = jax.lax.broadcasted_iota(labels_X.dtype, logits_XV.shape, logits_XV.ndim - 1) == labels_X[..., None]
    probability_XV = jnp.exp(logits_XV - log_normaliser_X[..., None])
    return g_X[..., None] * (probability_XV - is_label_XV.astype(logits_XV.dtype)), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _smoothed_cross_entropy(
    logits_XV: jax.Array, labels_X: jax.Array, smoothing: float, predictable: int
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy with each smoothed target and with each label, both [...]."""
    return _smoothed_cross_entropy_forward(logits_XV, labels_X, smoothing, predictable)[0]


def _smoothed_cross_entropy_forward(
    logits_XV: jax.Array, labels_X: jax.Array, smoothing: float, predictable: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    plain_X, residuals = _cross_entropy_forward(logits_XV, labels_X)
    log_normaliser_X = residuals[2]
    index_XV = jax.lax.broadcasted_iota(jnp.int32, logits_XV.shape, logits_XV.ndim - 1)
    mean_X = jnp.where(index_XV < predictable, logits_XV, 0).sum(-1) / predictable
    smoothed_X = (1 - smoothing) * plain_X + smoothing * (log_normaliser_X - mean_X)
    return (smoothed_X, plain_X), residuals


def _smoothed_cross_entropy_backward(
    smoothing: float,
    predictable: int,
    residuals: tuple[jax.Array, jax.Array, jax.Array],
    g: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, None]:
    logits_XV, labels_X, log_normaliser_X = residuals
    g_smoothed_X1, g_plain_X1 = (x[..., None] for x in g)
    index_XV = jax.lax.broadcasted_iota(labels_X.dtype, logits_XV.shape, logits_XV.ndim - 1)
    probability_XV = jnp.exp(logits_XV - log_normaliser_X[..., None])
    label_XV = jnp.where(index_XV == labels_X[..., None], (1 - smoothing) * g_smoothed_X1 + g_plain_X1, 0)
    spread_XV = jnp.where(index_XV < predictable, (smoothing / predictable) * g_smoothed_X1, 0)
    return (g_smoothed_X1 + g_plain_X1) * probability_XV - label_XV - spread_XV, None


_smoothed_cross_entropy.defvjp(_smoothed_cross_entropy_forward, _smoothed_cross_entropy_backward)


def _wide(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def sum_of_means(sums: Mapping[str, jax.Array], counts: Mapping[str, jax.Array], losses: tuple[str, ...]) -> jax.Array:
    """The loss: one global sum over one global count for each term; a term that counts nothing is 0."""
    terms = [sums[k] / jnp.maximum(counts[k], 1.0) for k in losses]
    return functools.reduce(jnp.add, terms)


def means(totals: dict[str, float], losses: tuple[str, ...]) -> dict[str, float]:
    """Each sum over its count, `loss` as the total over `losses`, and each count as `n/NAME`.

    A sum's count is the one that its name begins with: `mlm` and `mlm_accuracy` are both divided by the count `mlm`.
    """
    out: dict[str, float] = {}
    for key, value in totals.items():
        kind, name = key.split("/", 1) if "/" in key else ("", key)
        if kind == "sum":
            mean = value / max(totals[f"count/{name.split('_')[0]}"], 1.0)
            out[f"{name}_loss" if name in losses else name] = mean
        elif kind == "count":
            out[f"n/{name}"] = value
        else:
            out[name] = value
    return {"loss": sum(out[f"{k}_loss"] for k in losses)} | out
