"""Loss sums and counts against numbers worked out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import losses

LOGITS_BPV = jax.random.normal(jax.random.key(0), (3, 4, 11)) * 3
LABELS_BP = jax.random.randint(jax.random.key(1), (3, 4), 0, 11)
WEIGHTS_BP = jnp.asarray([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0.5, 0, 1]], jnp.float32)


def test_cross_entropy_is_the_weighted_negative_log_probability() -> None:
    logits = np.asarray(LOGITS_BPV, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, np.asarray(LABELS_BP)[..., None], -1)[..., 0]
    loss_sum, weight_sum = losses.weighted_cross_entropy(LOGITS_BPV, LABELS_BP, WEIGHTS_BP)
    assert float(loss_sum) == pytest.approx(-(picked * np.asarray(WEIGHTS_BP)).sum(), rel=1e-6)
    assert float(weight_sum) == 5.5


def test_accuracy_counts_the_weights_of_right_answers() -> None:
    labels = LOGITS_BPV.argmax(-1).at[0, 0].add(1)
    right, weight_sum = losses.weighted_accuracy(LOGITS_BPV, labels, WEIGHTS_BP)
    assert (float(right), float(weight_sum)) == (4.5, 5.5)


def test_of_equal_logits_the_first_is_the_answer_and_nan_is_none() -> None:
    logits_XV = jnp.asarray([[2.0, 2.0, 1.0], [1.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, jnp.nan, 0.0]])
    for label in range(3):
        labels_X = jnp.full(4, label)
        right = [float(losses.weighted_accuracy(logits_XV, labels_X, jnp.eye(4)[i])[0]) for i in range(4)]
        assert right[:3] == [float(x) for x in (logits_XV[:3].argmax(-1) == label)]
        assert right[3] == 0


def test_gradient_of_the_cross_entropy_is_probability_minus_label() -> None:
    gradient_BPV = jax.grad(lambda x: losses.weighted_cross_entropy(x, LABELS_BP, WEIGHTS_BP)[0])(LOGITS_BPV)
    logits = np.asarray(LOGITS_BPV, np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) - np.eye(11)[np.asarray(LABELS_BP)]
    np.testing.assert_allclose(gradient_BPV, expected * np.asarray(WEIGHTS_BP)[..., None], rtol=1e-5, atol=1e-6)


def test_nothing_that_counts_gives_zero_loss_and_zero_gradient() -> None:
    """C027"""
    zero = jnp.zeros_like(WEIGHTS_BP)
    (loss_sum, weight_sum), pull = jax.vjp(lambda x: losses.weighted_cross_entropy(x, LABELS_BP, zero), LOGITS_BPV)
    assert float(loss_sum) == 0 and float(weight_sum) == 0
    assert not np.asarray(pull((jnp.ones(()), jnp.zeros(())))[0]).any()
    assert [float(x) for x in losses.weighted_accuracy(LOGITS_BPV, LABELS_BP, zero)] == [0, 0]


def test_parts_add_up_to_the_whole_batch() -> None:
    whole = losses.weighted_cross_entropy(LOGITS_BPV, LABELS_BP, WEIGHTS_BP)
    parts = [losses.weighted_cross_entropy(LOGITS_BPV[i], LABELS_BP[i], WEIGHTS_BP[i]) for i in range(3)]
    np.testing.assert_allclose(np.sum([[float(x) for x in p] for p in parts], 0), [float(x) for x in whole], rtol=1e-6)


def test_huge_and_half_precision_logits_stay_finite_and_the_sums_are_float32() -> None:
    logits = jnp.asarray([[3e4, -3e4, 0.0], [-1e9, -1e9, 5.0]])
    labels, weights = jnp.asarray([0, 2]), jnp.ones(2)
    loss_sum, _ = losses.weighted_cross_entropy(logits, labels, weights)
    assert float(loss_sum) == 0
    loss_sum, weight_sum = losses.weighted_cross_entropy(logits.clip(-6e4).astype(jnp.float16), labels, weights)
    assert loss_sum.dtype == weight_sum.dtype == jnp.float32 and np.isfinite(float(loss_sum))
