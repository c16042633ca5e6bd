"""The loop: steps, evaluation, checkpoints and reports, until the last step or a stop.

From disk to loss there are four hops: main -> train -> task -> model; `transformer_jax.engine` has the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax import config as core
from transformer_jax import sharding
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import CheckpointConfig, ConfigError, UserError
from transformer_jax.engine import Data, Engine, Evaluation, Params, Sums, TrainState
from transformer_jax.inputs import prefetch
from transformer_jax.losses import means
from transformer_jax.profiles import Profile
from transformer_jax.report import Reporter
from transformer_jax.signals import StopSignal


class Validation(NamedTuple):
    """Held-out figures beside the task's own, such as BLEU through a decoder. They are part of the evaluation's record,
    and can decide which checkpoints are the best."""

    names: tuple[str, ...]
    """Of the figures that `score` gives."""
    every: int
    """Steps between them, besides the last step; 0 makes them with each evaluation of the loss."""
    score: Callable[[Params, Callable[[], bool]], dict[str, float] | None]
    """(params, stop) -> figures; None if `stop` asked to leave half-way."""


def check_best_metric(
    engine: Engine, evaluation: Evaluation | None, validation: Validation | None, config: CheckpointConfig
) -> None:
    """Refuse, before any step, to keep the best checkpoints by a figure that no evaluation gives."""
    if not config.keep_best or (evaluation is None and validation is None):
        return
    names = set(validation.names if validation is not None else ())
    if evaluation is not None:
        batch = engine.make(evaluation, 0, engine.eval_batch_size)
        with jax.set_mesh(engine.mesh):
            shapes = jax.eval_shape(engine.eval_step, engine.abstract_state.params, batch)
        names |= {name for name in means(dict.fromkeys(shapes, 0.0), engine.task.losses) if not name.startswith("n/")}
    if config.best_metric not in names:
        raise ConfigError(
            f"checkpoint.best_metric is {config.best_metric!r}, which is no figure of this run's evaluations"
            + core.nearest(config.best_metric, sorted(names))
        )


class RunResult(NamedTuple):
    state: TrainState
    evaluation: dict[str, float] | None
    """The last evaluation, or the recorded one of a run that was finished before; None without held-out data."""
    interrupted: bool
    """A signal came before the last step was trained and evaluated."""


def train(
    engine: Engine,
    state: TrainState,
    data: Data,
    evaluation: Evaluation | None,
    checkpoints: Checkpoints,
    meta: dict[str, Any],
    reporter: Reporter,
    *,
    save_every: int,
    stop: StopSignal,
    first_row: int = 0,
    resumed: bool = False,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    validation: Validation | None = None,
    profile: Profile | None = None,
) -> RunResult:
    """Train from `state` to the last step, or until a signal asks to stop; save, evaluate and report on the way.

    Args:
      save_every: steps between checkpoints; the last step is always saved.
      first_row: the row of the data at which the next step's batch starts: the rows seen so far.
      resumed: `state` comes from these checkpoints, so an evaluation that its step still owes is made first.
      on_step: called with each step's number and means, one step late.
      validation: further held-out figures.
      profile: the steps to trace.

    Raises:
      ConfigError: `best_metric` of the checkpoints is no figure of this run's evaluations.
      UserError: `max_nonfinite_steps` steps in a row had a gradient that was not finite, or a save failed.
    """
    config, best_metric = engine.config, checkpoints.config.best_metric
    check_best_metric(engine, evaluation, validation, checkpoints.config)
    step = first = int(jax.device_get(state.step))
    last_evaluation: dict[str, float] | None = None
    pending: tuple[int, Sums] | None = None
    vote = sharding.Vote(engine.mesh, stop)
    start_up = reporter.clock.start_up
    around = profile.step if profile is not None else lambda step, state: contextlib.nullcontext()

    def leave() -> bool:
        reporter.clock.beat()  # asked for with each step and each batch of an evaluation
        return vote()

    def rows_before(step: int) -> int:
        return first_row + (step - first) * config.batch_size

    def make(step: int) -> dict[str, np.ndarray]:
        return engine.make(data, rows_before(step), config.batch_size)

    def finish(step: int, metrics: Sums) -> None:
        """Read a step's metrics and report them."""
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        averaged = means(values, engine.task.losses)
        counts = {k.removeprefix("count/"): v for k, v in values.items() if k.startswith("count/")}
        if step == first + 1:
            reporter.started()
        reporter.step(step, averaged, engine.task.flops(counts), batches.waited_seconds())
        on_step(step, averaged)
        if values["nonfinite_in_row"] >= config.max_nonfinite_steps:
            raise UserError(
                f"step {step}: {int(values['nonfinite_in_row'])} steps in a row had a gradient that was not finite "
                f"(train.max_nonfinite_steps is {config.max_nonfinite_steps}), so the run stops; the parameters are "
                "those of before. Lower optimizer.learning_rate, lengthen the warm-up, or use model.dtype float32"
            )

    def due(step: int, every: int) -> bool:
        return (every > 0 and step % every == 0) or step == config.steps

    def loss_due(step: int) -> bool:
        return evaluation is not None and due(step, config.eval_every)

    def validation_due(step: int) -> bool:
        return validation is not None and due(step, validation.every or config.eval_every)

    def evaluation_due(step: int) -> bool:
        return loss_due(step) or validation_due(step)

    def evaluate(step: int) -> dict[str, float] | None:
        found: dict[str, float] = {}
        with reporter.timed("evaluation"):
            if loss_due(step):
                assert evaluation is not None
                part = engine.evaluate(state.params, evaluation, leave)
                if part is None:
                    return None
                found |= part
            if validation_due(step):
                assert validation is not None
                part = validation.score(state.params, leave)
                if part is None:
                    return None
                found |= part
        reporter.evaluation(step, found)
        return found

    def save(step: int) -> None:
        rows = rows_before(step)
        position: dict[str, Any] = {"step": step, "rows": rows, **data.position(rows), "batch_size": config.batch_size}
        position |= {"seed": config.seed, "fingerprint": data.fingerprint}
        metric = (last_evaluation or {}).get(best_metric)
        with reporter.timed("saving"):
            reporter.note_time(step)
            checkpoints.save(step, state._asdict(), position, meta, metric)

    batches = prefetch(make, first, config.steps, config.prefetch, engine.put)
    with batches, jax.set_mesh(engine.mesh), profile or contextlib.nullcontext():
        leaving = False
        if resumed and evaluation_due(first):
            start_up.enter("evaluation")
            last_evaluation = reporter.evaluations.get(first) or evaluate(first)
            leaving = last_evaluation is None
            if last_evaluation is not None and best_metric in last_evaluation:
                checkpoints.set_metric(first, last_evaluation[best_metric])

        reporter.clock.enter("step")
        while step < config.steps and not leaving:
            starting = step == first
            if starting:
                start_up.enter("batch")
            with reporter.timed("input"):
                batch = next(batches)
            if starting:
                start_up.enter("tracing")
            with reporter.timed("compile" if starting else "step"), around(step + 1, state):
                state, metrics = engine.train_step(state, batch, engine.dropout_key)
                if starting:  # Waited for, this once: with its end the start is over.
                    start_up.enter("step")
                    jax.block_until_ready(metrics)
                    start_up.done()
            step += 1
            reporter.clock.stepped()
            if profile is not None and step == profile.steps.last:
                with reporter.timed("profile"):
                    profile.end(metrics)
            # Step n's numbers are read only now that step n + 1 runs: the host never holds up the device.
            if pending is not None:
                finish(*pending)
            pending = (step, metrics)
            if jax.process_count() == 1:  # Several leave together, at the next save.
                checkpoints.check()
            leaving = leave()
            last_evaluation = None
            saving = leaving or step == config.steps or (save_every > 0 and step % save_every == 0)
            if saving or evaluation_due(step):
                # Both wait for this step in any case, and its record has to be there before its checkpoint.
                finish(*pending)
                pending = None
            if evaluation_due(step):
                last_evaluation = evaluate(step)
                leaving = leaving or last_evaluation is None
            if saving or leaving:
                save(step)

        with reporter.timed("saving"):
            checkpoints.wait()
        reporter.clock.enter("end")

    interrupted = step < config.steps or (evaluation_due(step) and last_evaluation is None)
    if interrupted:
        cause = stop.name or "a signal to another process"
        reporter.line(f"{cause}: step {step} is saved; the same command goes on from there")
    return RunResult(state, last_evaluation, interrupted)
