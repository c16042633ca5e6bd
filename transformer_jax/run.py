"""One run of training, whatever its task: the run folder, where training starts from, what is said and stored.

A program resolves its configuration, makes engine and data, and calls `run`. The configuration is any dataclass with
`run_dir`, `preset`, and the sections `data` (with `prepared`), `mesh`, `optimizer`, `train`, `checkpoint` and `init`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from transformer_jax import checkpoint, exit_codes, host_check, hosts, lock, mirror, optim, profiles, sharding, storage
from transformer_jax import config as core
from transformer_jax.checkpoint import Checkpoints, NoCheckpointError
from transformer_jax.config import ConfigError, UserError
from transformer_jax.engine import Data, Engine, Evaluation, TrainState
from transformer_jax.goodput import Clock
from transformer_jax.profiles import Profile, Steps
from transformer_jax.report import Reporter, read_records
from transformer_jax.shards import Shards
from transformer_jax.signals import StopSignal
from transformer_jax.train import RunResult, Validation, train
from transformer_jax.watchdog import Watchdog


class Stream(Data, Protocol):
    """A stream that goes round its rows."""

    def num_rows(self, epoch: int) -> int:
        """Rows of an epoch."""
        ...

    def start_at(self, row: int, epoch: int, row_in_epoch: int) -> None:
        """Say where a row lies that was reached before, which saves going through all epochs before it."""
        ...


CheckResume = Callable[[Mapping[str, Any]], list[str]]
"""Compares a checkpoint's stored configuration with the present one: lines to warn of, or a ConfigError."""


class Start(NamedTuple):
    """Where training starts from."""

    state: TrainState
    first_row: int
    """Rows of the data seen so far in this phase."""
    resumed: bool
    """The state comes from the run's own checkpoint."""
    notes: list[str]
    """Lines to print."""


def run(
    config: Any,
    engine: Engine,
    data: Stream,
    evaluation: Evaluation | None,
    meta: Mapping[str, Any],
    *,
    write_files: Callable[[Path], None],
    check_resume: CheckResume,
    start_elsewhere: Callable[[list[str]], Start] | None,
    warnings: Sequence[str],
    opening_lines: Sequence[str],
    force: bool = False,
    stop: StopSignal | None = None,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    validation: Validation | None = None,
    clock: Clock | None = None,
    profile: Steps | None = None,
) -> RunResult:
    """Train, or go on training: where the run folder holds a checkpoint, the run goes on exactly as if never stopped.

    Args:
      evaluation: held-out rows, if there are any.
      meta: from `make_meta`; stored with every checkpoint.
      write_files: writes `config.toml` and the tokenizer into the run folder.
      check_resume: see `CheckResume`.
      start_elsewhere: makes the start of a run that `[init]` has begin from other parameters; it is given the lines to
        print so far. None begins from fresh ones.
      warnings, opening_lines: printed before and after what is said of the start.
      force: go on although settings differ from those of the checkpoint in a way that makes it another run.
      stop: asks to save and leave; without it signals keep their usual meaning.
      on_step: called with each step's number and means, one step late.
      validation: figures beside the task's own, see `transformer_jax.train.Validation`.
      clock: where the time of this process goes; by default it begins now.
      profile: steps to trace into `profile` of the run folder.

    Raises:
      UserError: anything the user can mend, before a long job starts wherever that is possible.
    """
    clock = clock or Clock()
    with contextlib.ExitStack() as stack:
        # Process 0 alone writes the files of the run folder; where that is in storage, the others read what lies there.
        run_dir, send = storage.path(config.run_dir), lambda: None
        if jax.process_index() == 0:
            files = stack.enter_context(mirror.mirrored(config.run_dir))
            run_dir, send = files.local, files.send
        clock.start_up.enter("joining")
        alike = stack.enter_context(_together(config, engine, meta, clock))
        clock.start_up.enter("restoring")
        if jax.process_index() == 0:
            busy = f"another process is training in {config.run_dir}; wait for it or stop it, or name another run_dir"
            stack.enter_context(lock.locked(run_dir, busy))
        checkpoints = stack.enter_context(
            contextlib.closing(Checkpoints(storage.path(config.run_dir) / "checkpoints", config.checkpoint))
        )
        stack.enter_context(hosts.leaving_at_once())
        digest = meta["tokenizer_digest"]
        start = starting_point(config, engine, data, checkpoints, digest, check_resume, start_elsewhere, force)
        first_step = int(jax.device_get(start.state.step))
        done = first_step >= config.train.steps
        if profile is not None:
            profiles.check(profile, first_step, config.train.steps)
        if jax.process_index() == 0 and not done:  # of a run that is done, the files say what it was
            write_files(run_dir)
        checkpoints.try_to_write()
        with Reporter(run_dir, config.train.steps, config.train.log_every, first_step, clock, send) as reporter:
            for line in (*warnings, *_unmeasured(config, evaluation, validation), *start.notes, *opening_lines, *alike):
                reporter.line(line)
            if done:
                reporter.line(f"step {first_step} of {config.train.steps} is done: nothing to train")
            else:
                reporter.line("compiling the training step ...")
            result = train(
                engine,
                start.state,
                data,
                evaluation,
                checkpoints,
                dict(meta),
                reporter,
                save_every=config.checkpoint.every,
                stop=stop or StopSignal(),
                first_row=start.first_row,
                resumed=start.resumed,
                on_step=on_step,
                validation=validation,
                profile=Profile(profile, storage.path(config.run_dir) / "profile", reporter.line) if profile else None,
            )
            reporter.where_time_went()
            return result


@contextlib.contextmanager
def _together(config: Any, engine: Engine, meta: Mapping[str, Any], clock: Clock) -> Iterator[list[str]]:
    """Of several processes: check that they are alike, and watch that this one moves on. Gives lines to print."""
    if jax.process_count() == 1:
        yield []
        return
    run_dir, links = storage.path(config.run_dir), hosts.links()
    names = links.names if links is not None else ["?"] * jax.process_count()
    log = storage.place(config.run_dir) / "log.txt" if jax.process_index() == 0 else None

    def leave(why: str) -> None:
        if links is not None:
            links.say_goodbye(exit_codes.RESTART, why)
        os._exit(exit_codes.RESTART)

    with Watchdog(clock, config.hosts, log, leave):
        yield host_check.check(config, meta, engine.mesh, run_dir, names)


def _unmeasured(config: Any, evaluation: Evaluation | None, validation: Validation | None) -> list[str]:
    """A warning where steps are saved that cannot be among the best, since nothing is measured at them."""
    keep = config.checkpoint
    of_validation = validation is not None and keep.best_metric in validation.names
    every = (validation.every if validation is not None and of_validation else 0) or config.train.eval_every
    measured = (evaluation is not None or of_validation) and every > 0 and keep.every % every == 0
    if not keep.keep_best or measured:
        return []
    when = f"every {every} steps" if every else "at the end"
    return [
        f"warning: checkpoint.keep_best counts saved steps with a {keep.best_metric} alone; it is measured {when}, and "
        f"steps are saved every {keep.every}"
    ]


def starting_point(
    config: Any,
    engine: Engine,
    data: Stream,
    checkpoints: Checkpoints,
    tokenizer_digest: str,
    check_resume: CheckResume,
    start_elsewhere: Callable[[list[str]], Start] | None = None,
    force: bool = False,
) -> Start:
    """The state to train from. There are three ways to start, tried in this order:

    1. the run folder holds a checkpoint: go on from the newest step that verifies;
    2. `[init]` names where parameters come from: `start_elsewhere` takes them from there;
    3. fresh parameters from `train.seed`.

    Raises:
      UserError: a checkpoint that cannot be used, or that is of another model, vocabulary or data.
    """
    try:
        # The settings are compared first: a model of another size is better named than its arrays' shapes.
        stored = checkpoint.read_meta(checkpoints.folder)[2] if checkpoint.steps(checkpoints.folder) else None
        made = untrained(stored or {})
        if made:
            raise ConfigError(
                f"{config.run_dir} holds an {made} model and no training to go on with; name another run_dir, with "
                f'[init] from = "{config.run_dir}", optimizer = "reset" and schedule = "restart"'
            )
        changes = check_resume(stored["config"]) if stored else []
        restored = checkpoints.restore(engine.abstract_state._asdict())
    except NoCheckpointError as e:
        passed_over = [f"step {step} passed over: {why}" for step, why in e.skipped]
        known = max((r["step"] for r in read_records(storage.place(config.run_dir) / "metrics.jsonl")), default=0)
        if known:  # a stop before the first save, or a folder that somebody has cleaned, or a disk that is not mounted
            passed_over.append(
                f"warning: the records here reach step {known}, and there is no checkpoint to go on from: training "
                "begins again, and replaces them"
            )
        if start_elsewhere is not None:
            return start_elsewhere(passed_over)
        return Start(engine.init(), 0, False, passed_over)
    notes = [f"step {step} passed over: {why}" for step, why in restored.skipped]
    where = config.data.prepared
    if restored.meta["tokenizer_digest"] != tokenizer_digest:
        raise ConfigError(
            f"{where}: made with another vocabulary than this run's checkpoint; prepare it with the old one again, or "
            "use another run_dir"
        )
    old, rows = restored.data["fingerprint"], int(restored.data["rows"])
    if old == data.fingerprint:
        data.start_at(rows, restored.data["epoch"], restored.data["row_in_epoch"])
    elif force:
        notes.append(f"other data or examples settings than before: going on from row {rows} of the new stream")
    else:
        raise ConfigError(
            f"{where}: not the data this run was trained on (fingerprint {data.fingerprint[:12]}, in the checkpoint "
            f"{old[:12]}); bring that data back, use another run_dir, or --force"
        )
    notes += [f"warning: changed since the checkpoint: {line}" for line in changes]
    notes.append(f"going on from step {restored.step}, {rows:,} rows seen")
    return Start(TrainState(**restored.state), rows, True, notes)


def open_prepared(prepared: str, split: str, program: str, check: Literal["sizes", "digests"] = "sizes") -> Shards:
    """The prepared shards of a run; where there are none, the message says which command makes them."""
    with storage.reported(prepared):
        there = (storage.path(prepared) / "manifest.json").exists()
    if not there:
        raise UserError(f"{prepared}: no prepared data here; run `{program} prepare RUN.toml` first")
    return Shards.open(prepared, split, check=check)


def refuse_otherwise(prepared: str, lines: list[str], program: str, force: bool) -> list[str]:
    """The lines that say in what prepared data is not as the run file says, if they are forced.

    Raises:
      ConfigError: there are some, and they are not forced: the run would silently be another than its file says.
    """
    if lines and not force:
        raise ConfigError(
            f"{prepared}: not prepared as this run says:\n  " + "\n  ".join(lines)
            + f"\nrun `{program} prepare` again, use the old values, or --force to train on what is there"
        )  # fmt: skip
    return lines


def untrained(meta: Mapping[str, Any]) -> str | None:
    """ "imported" or "averaged" for a run folder that was not made by training; it has no optimizer."""
    return next((kind for kind in ("imported", "averaged") if f"{kind}_from" in meta), None)


def check_init(config: Any, step: int | None, meta: Mapping[str, Any], folder_kind: str) -> None:
    """Refuse an `[init]` that asks of a checkpoint what it has not.

    Args:
      step, meta: what a run's checkpoint holds; step None for a folder of another program, `folder_kind`.
    """
    init, where = config.init, f"[init] from = {config.init.checkpoint!r}"
    if step is not None and not (init.optimizer and init.schedule):
        raise ConfigError(f"{where} is a run, so say both optimizer (keep or reset) and schedule (continue or restart)")
    if step is None and (init.optimizer == "keep" or init.schedule == "continue"):
        raise ConfigError(f"{where} is a {folder_kind}: it has no optimizer to keep and no schedule to continue")
    made = untrained(meta)
    if init.optimizer == "keep" and made:
        raise ConfigError(f'{where} is an {made} model: it has no optimizer to keep, so say optimizer = "reset"')
    if init.optimizer == "keep" and step is not None:
        other = meta["config"]["optimizer"]["name"]
        if other != config.optimizer.name:
            raise ConfigError(
                f"{where} was trained with {other}, whose moments are not those of {config.optimizer.name}: set "
                f'optimizer.name = "{other}", or say optimizer = "reset" in [init]'
            )


def start_of_phase(config: Any, engine: Engine, step: int | None, params: Callable[[], Any], notes: list[str]) -> Start:
    """The beginning of a phase whose parameters come from `init.checkpoint`; its data starts at row 0.

    Args:
      step: of the checkpoint; None for a folder of another program.
      params: gives the parameters (numpy, padded as this run pads), where the optimizer is not kept.
    """
    init = config.init
    first = step if step is not None and init.schedule == "continue" else 0
    if first >= config.train.steps:
        raise ConfigError(
            f"[init] from = {init.checkpoint!r} is at step {first}, where the schedule goes on, and train.steps is "
            f"{config.train.steps}, which counts from the first phase: make it larger"
        )
    if init.optimizer == "keep":
        folder, _ = checkpoint.locate(init.checkpoint)
        with contextlib.closing(Checkpoints(folder, config.checkpoint)) as other:
            state = TrainState(**other.restore(engine.abstract_state._asdict(), step).state)
    else:
        state = engine.init()._replace(params=jax.tree.map(jax.device_put, params(), engine.shardings.params))
    put = jax.device_put
    whole = engine.shardings.step
    state = state._replace(
        step=put(jnp.int32(first), whole),
        nonfinite_total=put(jnp.int32(0), whole),
        nonfinite_in_row=put(jnp.int32(0), whole),
    )
    said = f"optimizer {init.optimizer or 'reset'}, schedule at step {first}"
    return Start(state, 0, False, [*notes, f"starting from {init.checkpoint}: {said}"])


def make_meta(
    config: Any,
    *,
    tokenizer_files: Mapping[str, str],
    tokenizer_digest: str,
    fingerprint: str,
    sources: Sequence[str],
    naming: int,
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """What makes a checkpoint self-contained: configuration, versions, tokenizer and where the data came from.

    Args:
      naming: version of the parameters' naming scheme (docs/parameters.md).
      packages: those whose versions are noted beside the core's.
    """
    names = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", *packages, "bert-transformer-jax")
    return {
        "config": core.to_builtins(config),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "tokenizer": dict(tokenizer_files),
        "tokenizer_digest": tokenizer_digest,
        "data": {"fingerprint": fingerprint, "sources": list(sources)},
        "naming": naming,
    }


def opening_lines(config: Any, engine: Engine, data: Stream, model: str, row_length: str) -> list[str]:
    """What is about to run, for people.

    Args:
      model: says what the model is, as in "1,234 parameters, vocabulary 61".
      row_length: slots of a row, as in "128".
    """
    train, devices = config.train, sharding.batch_devices(engine.mesh)
    decayed = jax.tree_util.tree_leaves_with_path(optim.decay_mask(engine.abstract_state.params))
    exempt = sorted({"/".join(str(p.key) for p in path[-2:]) for path, on in decayed if not on})
    shape = ", ".join(f"{k} {v}" for k, v in engine.mesh.shape.items())
    rows = data.num_rows(0)
    return [
        f"{config.preset}: {model}",
        f"mesh {shape} of {jax.device_count()} {jax.devices()[0].device_kind} devices, preset {config.mesh.preset}",
        f"batch {train.batch_size} rows of {row_length}: "
        f"{sum(count for _, count in sharding.host_rows(train.batch_size, engine.mesh))} per host, "
        f"{train.batch_size // devices} per device"
        + (f", in {train.accumulate} parts" if train.accumulate > 1 else ""),
        f"data {data.fingerprint[:12]}, {rows:,} rows in the first epoch, "
        f"{train.steps * train.batch_size / max(rows, 1):.2f} epochs in all",
        "not decayed: " + ", ".join(exempt),
    ]
