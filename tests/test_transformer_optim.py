"""Schedules and optimizers against hand calculations and PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax import optim
from transformer_jax.config import ConfigError, OptimizerConfig


def rates(config, steps):
    schedule = optim.make_schedule(config, steps, hidden_size=512)
    return np.array([float(schedule(i)) for i in range(steps + 1)])


@pytest.mark.parametrize("name", ["linear", "polynomial", "constant", "noam", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
def test_every_rate_of_a_run_is_finite_and_positive(name, warmup):
    """C029: no warm-up from none to the whole run gives a division by zero or a wasted step."""
    found = rates(OptimizerConfig(schedule=name, power=2.0, learning_rate=1.0, warmup_steps=warmup), 10)
    assert np.all(np.isfinite(found))
    assert np.all(found[:10] > 0)
    assert found.max() <= 1.0


def test_rates_are_the_documented_ones():
    """C029: warm-up reaches the peak at its last step; the last step is one part above zero."""
    found = rates(OptimizerConfig(learning_rate=0.8, warmup_steps=4), 10)
    expected = 0.8 * np.array([0.25, 0.5, 0.75, 1.0, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0.0])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(rates(OptimizerConfig(learning_rate=0.8, warmup_steps=10), 10)[9], 0.8, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
def test_the_rates_with_the_root_of_the_step_are_the_documented_ones(warmup):
    """C029: equation 3 of arXiv 1706.03762 with t counted from 1, and the same scaled to a peak of learning_rate."""
    t, w = np.arange(1, 12), max(warmup, 1)
    noam = 2.0 * 512**-0.5 * np.minimum(t**-0.5, t * w**-1.5)
    settings = {"learning_rate": 2.0, "warmup_steps": warmup}
    np.testing.assert_allclose(rates(OptimizerConfig(schedule="noam", **settings), 10), noam, rtol=1e-6)
    inverse = np.where(t <= warmup, 2.0 * t / w, 2.0 * np.sqrt(w / t))
    np.testing.assert_allclose(rates(OptimizerConfig(schedule="inverse_sqrt", **settings), 10), inverse, rtol=1e-6)
    assert inverse.max() == 2.0 == inverse[w - 1]


def test_the_paper_schedule_needs_the_width_of_the_model():
    with pytest.raises(ConfigError, match='"noam" depends on the model'):
        optim.make(OptimizerConfig(schedule="noam"), 10)
    peak = optim.make(OptimizerConfig(schedule="noam", learning_rate=1.0, warmup_steps=4), 10, 512).schedule(3)
    assert float(peak) == pytest.approx((512 * 4) ** -0.5)


def test_adam_without_decay_is_adamw_without_decay_and_refuses_any():
    with pytest.raises(ConfigError, match=r"weight_decay is 0\.01, and adam has none; set it to 0, or use adamw"):
        OptimizerConfig(name="adam")
    params, gradients = named_params(), jax.tree.map(lambda x: 0.1 * x, named_params())
    for name in ("adam", "adamw"):
        optimizer = optim.make(OptimizerConfig(name=name, weight_decay=0.0, beta2=0.98, epsilon=1e-9), 10)
        direction, _ = optimizer.update(gradients, optimizer.init(params), params)
        jax.tree.map(lambda d: np.testing.assert_allclose(d, 1.0, rtol=1e-5), direction)


def test_a_schedule_can_be_longer_than_its_phase():
    first = optim.make(OptimizerConfig(learning_rate=1.0, total_steps=10), 6).schedule
    whole = optim.make(OptimizerConfig(learning_rate=1.0), 10).schedule
    assert [float(first(i)) for i in range(6)] == [float(whole(i)) for i in range(6)]
    with pytest.raises(ConfigError, match=r"total_steps is 5; it must be 0, or at least train\.steps 6"):
        optim.make(OptimizerConfig(total_steps=5), 6)


def test_a_learning_rate_without_end_is_refused():
    with pytest.raises(ConfigError, match=r"learning_rate is inf; it must be a number above 0"):
        optim.make(OptimizerConfig(learning_rate=float("inf")), 10)


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps is 11; it must lie between 0 and 10"):
        optim.make(OptimizerConfig(warmup_steps=11), 10)


def first_step(name):
    optimizer = optim.make(OptimizerConfig(name=name, weight_decay=0.0, epsilon=1e-12, learning_rate=0.1), 10)
    params = {"kernel": jnp.zeros((1,))}
    direction, _ = optimizer.update({"kernel": jnp.ones((1,))}, optimizer.init(params), params)
    return -0.1 * float(direction["kernel"][0])


def test_the_first_step_with_and_without_bias_correction():
    """C059: -0.1 with correction, -0.3162 (0.1 * 0.1 / sqrt(0.001)) without."""
    assert first_step("adamw") == pytest.approx(-0.1, rel=1e-4)
    assert first_step("bert_adam") == pytest.approx(-0.31623, rel=1e-4)


def named_params():
    leaf = jnp.full((3, 4), 2.0)
    return {
        "word": {"embedding": leaf},
        "dense": {"kernel": leaf, "bias": jnp.full((4,), 2.0)},
        "norm": {"scale": jnp.full((4,), 2.0), "bias": jnp.full((4,), 2.0)},
    }


@pytest.mark.parametrize("name", ["adamw", "bert_adam", "lamb"])
def test_weight_decay_leaves_biases_and_norms_alone(name):
    """C076: one step with zero gradients; kernels and embeddings shrink, the rest is unchanged bit for bit."""
    params = named_params()
    optimizer = optim.make(OptimizerConfig(name=name, weight_decay=0.1), 10)
    direction, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    after = jax.tree.map(lambda p, d: p - 0.01 * d, params, direction)
    for path in (("word", "embedding"), ("dense", "kernel")):
        assert np.all(after[path[0]][path[1]] < params[path[0]][path[1]])
    for path in (("dense", "bias"), ("norm", "scale"), ("norm", "bias")):
        np.testing.assert_array_equal(after[path[0]][path[1]], params[path[0]][path[1]])


def test_lamb_scales_each_tensor_by_its_own_trust_ratio():
    """Algorithm 2 of arXiv 1904.00962, written out: ratio |w| / |u| with u = Adam's direction + decay."""
    rng = np.random.default_rng(0)
    w = {
        "a": {"kernel": rng.normal(size=(3, 2))},
        "b": {"kernel": 5 * rng.normal(size=(2, 2)), "bias": rng.normal(size=2)},
    }
    g = jax.tree.map(lambda x: rng.normal(size=x.shape), w)
    params, grads = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), t) for t in (w, g))
    optimizer = optim.make(OptimizerConfig(name="lamb", weight_decay=0.01, epsilon=1e-6), 10)
    state = optimizer.init(params)
    m = jax.tree.map(np.zeros_like, w)
    v = jax.tree.map(np.zeros_like, w)
    for t in (1, 2):
        direction, state = optimizer.update(grads, state, params)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
        plain = jax.tree.map(lambda m, v, t=t: m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6), m, v)
        for name in ("a", "b"):
            u = plain[name]["kernel"] + 0.01 * w[name]["kernel"]
            ratio = np.linalg.norm(w[name]["kernel"]) / np.linalg.norm(u)
            np.testing.assert_allclose(direction[name]["kernel"], ratio * u, rtol=2e-4)
        np.testing.assert_allclose(direction["b"]["bias"], plain["b"]["bias"], rtol=2e-4)


def test_moments_mirror_the_parameters_for_sharding():
    """Every optimizer's state maps leaf by leaf to the parameters, which is what shards it."""
    params = named_params()
    for name in ("adamw", "bert_adam", "lamb"):
        optimizer = optim.make(OptimizerConfig(name=name), 10)
        marked = optax.tree_utils.tree_map_params(
            optimizer.transformation, lambda _: "moment", optimizer.init(params), transform_non_params=lambda _: "other"
        )
        assert jax.tree.leaves(marked).count("moment") == 2 * len(jax.tree.leaves(params))
