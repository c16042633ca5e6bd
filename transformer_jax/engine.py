"""The engine: the train step and its state, compiled for a mesh. It knows no task.

A task hands it `init`, `counts`, `loss_fn` and `flops` (see `Task`); data hands it batches by row number.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from transformer_jax import sharding
from transformer_jax.config import TrainConfig
from transformer_jax.losses import means, sum_of_means
from transformer_jax.optim import Optimizer

Params = Any
Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


class Task(Protocol):
    """What the engine asks of a task. Losses are sums; the engine divides by the counts of the whole global batch."""

    losses: tuple[str, ...]
    """Keys of `counts` and of the sums: the loss is the sum over them of sum / count."""
    frozen: tuple[str, ...]
    """Top-level parameters that the loss does not use: they stay as they are, weight decay or not."""

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters, boxed with their logical axes."""
        ...

    def counts(self, batch: Batch) -> Sums:
        """What each sum is divided by, from the batch alone (float32 scalars), and what `flops` needs."""
        ...

    def loss_fn(self, params: Params, batch: Batch, key: jax.Array | None) -> tuple[Sums, Sums]:
        """Float32 sums and counts over the batch; `key` is for dropout, None switches it off."""
        ...

    def flops(self, counts: dict[str, float]) -> float:
        """Model FLOPs of a training step with these counts: matrix products, real tokens, no recomputation."""
        ...


class Data(Protocol):
    """An endless stream of rows; a batch is a pure function of the data's fingerprint, the seed and the row number."""

    fingerprint: str

    def batch(self, first_row: int, count: int, offset: int = 0) -> dict[str, np.ndarray]:
        """Rows first_row .. first_row + count; `row_ids` count from `offset`."""
        ...

    def position(self, row: int) -> dict[str, int]:
        """Where in its epoch a row lies, for the checkpoint and the log."""
        ...


class Evaluation(Protocol):
    """A fixed list of rows; past its end come filler rows that count nothing."""

    num_rows: int

    def batch(self, first_row: int, count: int, offset: int = 0) -> dict[str, np.ndarray]: ...


class TrainState(NamedTuple):
    """All that a step changes. The step, and with it data and learning rate, moves on when an update is skipped too."""

    step: jax.Array
    """int32: steps done."""
    params: Params
    opt_state: Any
    nonfinite_total: jax.Array
    """int32: steps skipped because a gradient was not finite ..."""
    nonfinite_in_row: jax.Array
    """int32: ... and how many of them were the latest ones."""


def init_state(task: Task, optimizer: Optimizer, key: jax.Array) -> TrainState:
    """The state before the first step, parameters boxed with their logical axes."""
    params = task.init(key)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(sharding.unbox(params)), zero, zero)


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    *,
    task: Task,
    optimizer: Optimizer,
    accumulate: int,
    clip_norm: float,
    layouts: tuple[Params, ...] = (),
) -> tuple[TrainState, Sums]:
    """One step: gradients of the global mean loss, clipped, applied unless one of them is not finite.

    Args:
      layouts: see `gradients`.

    Returns:
      The new state, and float32 scalars: `sum/...` and `count/...` of the task, `learning_rate`, `gradient_norm` before
      clipping, and the counters of skipped steps.
    """
    counts = task.counts(batch)
    dropout_key = jax.random.fold_in(key, state.step)

    def loss_fn(params: Params, part: Batch) -> tuple[jax.Array, Sums]:
        sums, _ = task.loss_fn(params, part, dropout_key)
        return sum_of_means(sums, counts, task.losses), sums

    grads, sums = gradients(loss_fn, state.params, batch, accumulate, layouts)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    scale = jnp.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm > 0 else jnp.ones((), norm.dtype)
    direction, opt_state = optimizer.update(jax.tree.map(lambda g: g * scale, grads), state.opt_state, state.params)
    rate = optimizer.schedule(state.step)
    params = jax.tree.map(lambda p, d: p - rate.astype(p.dtype) * d, state.params, direction)
    params |= {name: state.params[name] for name in task.frozen}

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    skipped = 1 - finite.astype(jnp.int32)
    new_state = TrainState(
        state.step + 1,
        keep(params, state.params),
        keep(opt_state, state.opt_state),
        state.nonfinite_total + skipped,
        (state.nonfinite_in_row + 1) * skipped,
    )
    metrics = {f"sum/{k}": v for k, v in sums.items()} | {f"count/{k}": v for k, v in counts.items()}
    progress = {"nonfinite_total": new_state.nonfinite_total, "nonfinite_in_row": new_state.nonfinite_in_row}
    return new_state, metrics | {"learning_rate": rate, "gradient_norm": norm} | progress


def gradients(
    loss_fn: Callable[[Params, Batch], tuple[jax.Array, Sums]],
    params: Params,
    batch: Batch,
    parts: int,
    layouts: tuple[Params, ...] = (),
) -> tuple[Params, Sums]:
    """Gradients and sums over the batch, taken in `parts` equal parts of which only one is in memory at a time.

    Part j holds rows j, j + parts, ...: each device's rows stay on that device. Rows carry their index in the global
    batch, so dropout does not depend on the cut.

    Args:
      layouts: shardings that the gradients of a part take, one after the other; in the last one they are added up.
    """

    def grad_fn(params: Params, part: Batch) -> tuple[Params, Sums]:
        grads, sums = jax.grad(loss_fn, has_aux=True)(params, part)
        for layout in layouts:
            grads = jax.lax.with_sharding_constraint(grads, layout)
        return grads, sums

    if parts == 1:
        return grad_fn(params, batch)
    split = jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    shapes = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad_fn(params, part)), None

    return jax.lax.scan(body, zeros, split)[0]


class Engine:
    """A task compiled for a mesh: sharded state, the jitted steps, and where batches go.

    Raises:
      ConfigError: a batch size that the devices (and `accumulate`) do not divide.
    """

    def __init__(
        self, task: Task, optimizer: Optimizer, config: TrainConfig, mesh: Mesh, preset: str, clip_norm: float
    ):
        self.task, self.optimizer, self.mesh = task, optimizer, mesh
        sharding.check_batch(config.batch_size, config.accumulate, mesh)
        self.eval_batch_size = config.eval_batch_size or config.batch_size
        sharding.check_batch(self.eval_batch_size, 1, mesh, "train.eval_batch_size")
        self._set_seed(config)
        boxed = jax.eval_shape(lambda key: init_state(task, optimizer, key), self.init_key)
        self.shardings = state_shardings(boxed, optimizer, mesh, preset)
        self.abstract_state = jax.tree.map(
            lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), sharding.unbox(boxed), self.shardings
        )
        rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
        rules = (sharding.gradient_rules(preset), sharding.moment_rules(preset))
        layouts = tuple(sharding.tree_shardings(boxed.params, each, mesh) for each in rules)

        def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Sums]:
            with jax.default_matmul_precision(config.matmul_precision):
                return train_step(
                    state,
                    batch,
                    key,
                    task=task,
                    optimizer=optimizer,
                    accumulate=config.accumulate,
                    clip_norm=clip_norm,
                    layouts=layouts,
                )

        def evaluate(params: Params, batch: Batch) -> Sums:
            with jax.default_matmul_precision(config.matmul_precision):
                sums, counts = task.loss_fn(params, batch, None)
            return {f"sum/{k}": v for k, v in sums.items()} | {f"count/{k}": v for k, v in counts.items()}

        # The state is donated: the new one takes its place in memory.
        self.train_step = jax.jit(
            step, in_shardings=(self.shardings, rows, whole), out_shardings=(self.shardings, whole), donate_argnums=0
        )
        self.eval_step = jax.jit(evaluate, in_shardings=(self.shardings.params, rows), out_shardings=whole)

        def build(key: jax.Array) -> TrainState:
            return sharding.unbox(init_state(task, optimizer, key))

        self._build = jax.jit(build, out_shardings=self.shardings)

    def _set_seed(self, config: TrainConfig) -> None:
        self.config = config
        self.init_key, self.dropout_key = jax.random.split(jax.random.key(config.seed))

    def with_seed(self, seed: int) -> Engine:
        """The same compiled programs with the keys of another seed."""
        other = copy.copy(self)
        other._set_seed(dataclasses.replace(self.config, seed=seed))
        return other

    def init(self) -> TrainState:
        """A fresh state, born sharded: no device ever holds the whole of it unless the mesh says so."""
        with jax.set_mesh(self.mesh):
            return self._build(self.init_key)

    def make(self, data: Data | Evaluation, first_row: int, batch_size: int) -> dict[str, np.ndarray]:
        """This process's rows of the global batch that starts at `first_row` of the data."""
        runs = sharding.host_rows(batch_size, self.mesh)
        parts = [data.batch(first_row + first, count, first) for first, count in runs]
        return parts[0] if len(parts) == 1 else {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        return sharding.put_batch(batch, self.mesh)

    def evaluate(
        self, params: Params, data: Evaluation, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Means over every row of `data`, each exactly once, and counts; None if `stop` asked to leave half-way.

        Sums are added up in float64 on the host, so the figure does not depend on the batch size beyond rounding.
        """
        total: dict[str, float] = {}

        def add(sums: Sums) -> None:
            for key, value in jax.device_get(sums).items():
                total[key] = total.get(key, 0.0) + float(value)

        pending: Sums | None = None
        with jax.set_mesh(self.mesh):
            for first in range(0, data.num_rows, self.eval_batch_size):
                if stop():
                    return None
                sums = self.eval_step(params, self.put(self.make(data, first, self.eval_batch_size)))
                if pending is not None:
                    add(pending)
                pending = sums
        if pending is not None:
            add(pending)
        return means(total, self.task.losses)


def state_shardings(boxed: TrainState, optimizer: Optimizer, mesh: Mesh, preset: str) -> TrainState:
    """A sharding for each leaf of the state: parameters by the preset's rules, moments split further (ZeRO-1)."""
    whole = sharding.replicated(mesh)
    params = sharding.tree_shardings(boxed.params, sharding.PARAMETER_RULES[preset], mesh)
    moments = sharding.tree_shardings(boxed.params, sharding.moment_rules(preset), mesh)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer.transformation, lambda _, s: s, boxed.opt_state, moments, transform_non_params=lambda _: whole
    )
    return TrainState._make((whole, params, opt_state, whole, whole))
