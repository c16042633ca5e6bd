"""Optimizers and schedules.

An optimizer here gives a direction; the training step multiplies it by the learning rate of the global step. So the
rate is a pure function of the step that is stored with the checkpoint, and a step that is skipped moves it on while the
moments stay as they are.

    adamw      Adam with bias correction and decoupled weight decay (arXiv 1711.05101)
    adam       the same without weight decay (Vaswani et al. 2017, section 5.3, with its betas and epsilon)
    bert_adam  the 2018 BERT code: the same without bias correction, so that with its betas the first step is 3.16
               times as long
    lamb       Adam's direction with decay, scaled for each tensor by norm(weights) / norm(direction) (arXiv 1904.00962,
               algorithm 2). As in the authors' code, tensors that are not decayed are not scaled either. Parameters are
               kept layer by layer, so the ratio is per layer in the scanned form too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import ConfigError, OptimizerConfig

Params = Any
Schedule = Callable[[jax.Array | int], jax.Array]


class Optimizer(NamedTuple):
    """`init(params) -> state`; `update(gradients, state, params) -> (direction, state)`; `schedule(step) -> rate`."""

    transformation: optax.GradientTransformation
    schedule: Schedule

    def init(self, params: Params) -> Any:
        return self.transformation.init(params)

    def update(self, gradients: Params, state: Any, params: Params) -> tuple[Params, Any]:
        return self.transformation.update(gradients, state, params)


def make(config: OptimizerConfig, steps: int, hidden_size: int = 0) -> Optimizer:
    """The optimizer that a run file asks for, for a run of `steps` steps.

    Args:
      hidden_size: the model's, which the noam schedule is scaled by; no other needs it.

    Raises:
      ConfigError: a warm-up longer than the run, or numbers outside their range.
    """
    total_steps = config.total_steps or steps
    if total_steps < steps:
        raise ConfigError(f"optimizer.total_steps is {total_steps}; it must be 0, or at least train.steps {steps}")
    if not 0 <= config.warmup_steps <= total_steps:
        raise ConfigError(
            f"optimizer.warmup_steps is {config.warmup_steps}; it must lie between 0 and {total_steps}, the steps "
            "of the schedule"
        )
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ConfigError(f"optimizer.{name} is {getattr(config, name)}; it must be at least 0 and below 1")
    for name in ("learning_rate", "epsilon"):
        if not 0.0 < getattr(config, name) < math.inf:
            raise ConfigError(f"optimizer.{name} is {getattr(config, name)}; it must be a number above 0")
    adam = scale_by_adam(config.beta1, config.beta2, config.epsilon, corrected=config.name != "bert_adam")
    if config.schedule == "noam" and hidden_size < 1:
        raise ConfigError('optimizer.schedule "noam" depends on the model\'s width, which this task does not give')
    parts = [adam, optax.add_decayed_weights(config.weight_decay, mask=decay_mask)]
    if config.name == "lamb":
        parts.append(optax.masked(optax.scale_by_trust_ratio(), decay_mask))
    return Optimizer(optax.chain(*parts), make_schedule(config, total_steps, hidden_size))


def make_schedule(config: OptimizerConfig, total_steps: int, hidden_size: int = 1) -> Schedule:
    """The learning rate of step 0, 1, ... (float32), finite and positive for each step of the run.

    With t = step + 1, W warm-up steps and N steps in all: learning_rate * t / W up to t = W, then
    learning_rate * ((N + 1 - t) / (N + 1 - W)) ** power. So the first step has 1/W of the peak, step W - 1 the peak,
    the last step a little above zero, and no step is wasted on a rate of 0 (the 2018 code and Hugging Face start with
    one, so that their step i + 1 has about the rate of our step i).

    Two more fall with the root of the step, whatever N is; W counts as 1 where it is 0:

        inverse_sqrt  learning_rate * min(t / W, sqrt(W / t))
        noam          learning_rate * hidden_size^-0.5 * min(t^-0.5, t * W^-1.5) (Vaswani et al. 2017, equation 3):
                      the same with a peak of learning_rate / sqrt(hidden_size * W)
    """
    warmup, peak = config.warmup_steps, config.learning_rate
    if config.schedule in ("noam", "inverse_sqrt"):
        least = max(warmup, 1)
        peak = peak * (hidden_size * least) ** -0.5 if config.schedule == "noam" else peak
        return lambda step: _inverse_root(peak, least, jnp.asarray(step, jnp.float32) + 1.0)
    power = {"linear": 1.0, "polynomial": config.power, "constant": 0.0}[config.schedule]

    def schedule(step: jax.Array | int) -> jax.Array:
        t = jnp.asarray(step, jnp.float32) + 1.0
        rising = t / max(warmup, 1)
        left = jnp.clip((total_steps + 1.0 - t) / (total_steps + 1.0 - min(warmup, total_steps)), 0.0, 1.0)
        return jnp.asarray(peak, jnp.float32) * jnp.where(t <= warmup, rising, left**power)

    return schedule


def _inverse_root(peak: float, warmup: int, t: jax.Array) -> jax.Array:
    return jnp.asarray(peak, jnp.float32) * jnp.minimum(t / warmup, jnp.sqrt(warmup / t))


def decay_mask(params: Params) -> Params:
    """True for what weight decay applies to: all but biases and LayerNorm's scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


class AdamState(NamedTuple):
    updates: jax.Array
    mu: Params
    nu: Params


def scale_by_adam(beta1: float, beta2: float, epsilon: float, corrected: bool) -> optax.GradientTransformation:
    """Adam's direction m / (sqrt(v) + epsilon), with bias correction or, as in the 2018 BERT code, without.

    (optax has only the corrected form, and that raises the betas to an integer power, which strict promotion refuses.)
    """

    def init(params: Params) -> AdamState:
        return AdamState(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
        )

    def update(gradients: Params, state: AdamState, params: Params | None = None) -> tuple[Params, AdamState]:
        del params
        updates = state.updates + 1
        mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, gradients)
        nu = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.nu, gradients)
        t = updates.astype(jnp.float32)
        scale1 = 1 / (1 - beta1**t) if corrected else jnp.ones_like(t)
        scale2 = 1 / (1 - beta2**t) if corrected else jnp.ones_like(t)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            return m * scale1.astype(m.dtype) / (jnp.sqrt(v * scale2.astype(v.dtype)) + epsilon)

        return jax.tree.map(direction, mu, nu), AdamState(updates, mu, nu)

    return optax.GradientTransformation(init, update)
