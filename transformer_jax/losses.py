"""Losses and accuracies as sums with the weights that count them.

Sums and counts, not means: a batch cut in parts or spread over devices has one global sum over one global count, and a
part in which nothing counts gives 0 and not NaN. Everything is float32 (float64 for float64 logits).
"""

from __future__ import annotations

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
    top_X1 = jax.lax.stop_gradient(logits_XV.max(-1, keepdims=True))
    log_normaliser_X = jnp.log(jnp.exp(logits_XV - top_X1).sum(-1)) + top_X1[..., 0]
    # A comparison in place of a gather: it fuses forward and backward, and a vocabulary split over devices stays split.
    is_label_XV = jax.lax.broadcasted_iota(labels_X.dtype, logits_XV.shape, logits_XV.ndim - 1) == labels_X[..., None]
    label_logit_X = jnp.where(is_label_XV, logits_XV, 0).sum(-1)
    return (weights_X * (log_normaliser_X - label_logit_X)).sum(), weights_X.sum()


def weighted_accuracy(logits_XV: jax.Array, labels_X: jax.Array, weights_X: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of the weights where the largest logit is the label's, and sum of weights; shapes as in the cross-entropy."""
    weights_X = weights_X.astype(_wide(logits_XV).dtype)
    right_X = logits_XV.argmax(-1).astype(labels_X.dtype) == labels_X
    return jnp.where(right_X, weights_X, 0).sum(), weights_X.sum()


def _wide(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
