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


def smoothed_by_hand(labels: np.ndarray, smoothing: float, predictable: int) -> tuple[np.ndarray, np.ndarray]:
    """Minus the sum over v of q_v log p_v with q written out, and its gradient; softmax over what can be predicted."""
    logits = np.asarray(LOGITS_BPV, np.float64)
    p = np.where(np.arange(11) < predictable, np.exp(logits), 0)
    p /= p.sum(-1, keepdims=True)
    q = np.zeros_like(logits)
    q[..., :predictable] = smoothing / predictable
    for index in np.ndindex(labels.shape):
        q[*index, labels[index]] += 1 - smoothing
    np.testing.assert_allclose(q.sum(-1), 1)
    return -np.where(q > 0, q * np.log(np.where(p > 0, p, 1)), 0).sum(-1), p - q


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("predictable", [11, 7])
def test_label_smoothing_follows_its_formula_forward_and_backward(smoothing: float, predictable: int) -> None:
    """C061: 1 - e on the label plus e / V on each of the V entries that can be predicted, and none on any other."""
    labels = np.asarray(LABELS_BP) % predictable
    logits_BPV = jnp.where(jnp.arange(11)[None, None] < predictable, LOGITS_BPV, -1e9)
    losses_BP, expected_BPV = smoothed_by_hand(labels, smoothing, predictable)

    def total(x_BPV: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        smoothed, plain, count = losses.smoothed_cross_entropy(
            x_BPV, jnp.asarray(labels), WEIGHTS_BP, smoothing, predictable
        )
        return smoothed, (plain, count)

    (smoothed, (plain, count)), gradient_BPV = jax.value_and_grad(total, has_aux=True)(logits_BPV)
    weights = np.asarray(WEIGHTS_BP, np.float64)
    assert float(smoothed) == pytest.approx((losses_BP * weights).sum(), rel=1e-6)
    assert float(plain) == pytest.approx((smoothed_by_hand(labels, 0.0, predictable)[0] * weights).sum(), rel=1e-6)
    assert float(count) == 5.5
    np.testing.assert_allclose(gradient_BPV, expected_BPV * weights[..., None], rtol=1e-5, atol=1e-6)
    assert not np.asarray(gradient_BPV)[..., predictable:].any()


def test_the_sum_without_smoothing_has_the_gradient_of_the_cross_entropy() -> None:
    found = jax.grad(lambda x: losses.smoothed_cross_entropy(x, LABELS_BP, WEIGHTS_BP, 0.1, 11)[1])(LOGITS_BPV)
    expected = jax.grad(lambda x: losses.weighted_cross_entropy(x, LABELS_BP, WEIGHTS_BP)[0])(LOGITS_BPV)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_the_form_for_accelerators_takes_the_same_logit_of_each_label() -> None:
    logits_BV = jax.random.normal(jax.random.key(0), (9, 37))
    labels_B = jnp.arange(9, dtype=jnp.int32) * 4
    picked_B = np.asarray(logits_BV)[np.arange(9), np.asarray(labels_B)]
    np.testing.assert_array_equal(losses._compared(logits_BV, labels_B), picked_B)
    np.testing.assert_array_equal(jax.jit(losses._label_logit)(logits_BV, labels_B), picked_B)
