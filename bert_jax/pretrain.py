"""One run of pretraining: from a resolved configuration to a trained, saved and evaluated model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax import examples, run_file
from bert_jax.config import PretrainConfig
from bert_jax.data import EvaluationData, PretrainingData
from bert_jax.loading import load
from bert_jax.task import PretrainingTask
from transformer_jax import checkpoint, config as core, optim, sharding
from transformer_jax.checkpoint import Checkpoints, NoCheckpointError
from transformer_jax.config import ConfigError, UserError
from transformer_jax.report import Reporter
from transformer_jax.shards import Shards
from transformer_jax.signals import StopSignal
from transformer_jax.train import Engine, RunResult, TrainState, start_step, train

NAMING = 1
"""Version of the parameters' naming scheme (docs/parameters.md); it is stored with every checkpoint."""


def resolve(config: PretrainConfig, shards: Shards) -> PretrainConfig:
    """Fill in what only the prepared data knows: the size of the vocabulary.

    Raises:
      ConfigError: a vocabulary size in the run file that is not that of the data, or rows longer than the model's
        position table.
    """
    found = shards.tokenizer.vocab_size
    if config.model.vocab_size not in (0, found):
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, and the vocabulary of {config.data.prepared} has {found} "
            "entries; leave model.vocab_size out, or prepare the data with that vocabulary"
        )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=found))
    examples.check(config.examples, config.model)
    return config


def open_prepared(config: PretrainConfig, split: str) -> Shards:
    """The prepared shards of a run; where there are none, the message says which command makes them."""
    if not (Path(config.data.prepared) / "manifest.json").exists():
        raise UserError(f"{config.data.prepared}: no prepared data here; run `bert-jax prepare RUN.toml` first")
    return Shards.open(Path(config.data.prepared), split)


def make_engine(config: PretrainConfig, mesh: Mesh) -> Engine:
    """The task compiled for a mesh, with the run's optimizer."""
    task = PretrainingTask(config.model, config.examples.max_seq_length, config.examples.sentence_task != "none")
    optimizer = optim.make(config.optimizer, config.train.steps)
    return Engine(task, optimizer, config.train, mesh, config.mesh.preset, config.optimizer.clip_norm)


def make_meta(config: PretrainConfig, shards: Shards) -> dict[str, Any]:
    """What makes a checkpoint self-contained: configuration, versions, tokenizer and where the data came from."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "tokenizers", "numpy", "bert-transformer-jax")
    return {
        "config": core.to_builtins(config),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "tokenizer": shards.tokenizer.files(),
        "tokenizer_digest": shards.tokenizer.digest,
        "data": {"fingerprint": shards.fingerprint, "sources": list(shards.source_names)},
        "naming": NAMING,
    }


def pretrain(
    config: PretrainConfig,
    *,
    force: bool = False,
    stop: StopSignal | None = None,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> RunResult:
    """Train, or go on training: where the run folder holds a checkpoint, the run goes on exactly as if never stopped.

    Args:
      config: from `run_file.load_run`.
      force: go on although settings differ from those of the checkpoint in a way that makes it another run.
      stop: asks to save and leave; without it signals keep their usual meaning.
      on_step: called with each step's number and means, one step late.

    Raises:
      UserError: anything the user can mend, before a long job starts wherever that is possible.
    """
    run_dir = Path(config.run_dir)
    shards = open_prepared(config, "train")
    config = resolve(config, shards)
    mesh = sharding.make_mesh(config.mesh)
    engine = make_engine(config, mesh)
    data = PretrainingData(shards, config.examples, config.train.seed, Path(config.data.prepared) / "plans")
    heldout = open_prepared(config, "heldout")
    evaluation = EvaluationData(heldout, config.examples) if heldout.num_documents else None

    with contextlib.closing(Checkpoints(run_dir / "checkpoints", config.checkpoint)) as checkpoints:
        state, phase_start, notes = starting_state(config, engine, data, checkpoints, shards, force)
        first_step = int(jax.device_get(state.step))
        _write_run_files(run_dir, config, shards)
        with Reporter(run_dir, config.train.steps, config.train.log_every, first_step) as reporter:
            for note in notes:
                reporter.line(note)
            for line in _opening_lines(config, engine, data):
                reporter.line(line)
            if first_step >= config.train.steps:
                reporter.line(f"step {first_step} of {config.train.steps} is done: nothing to train")
            result = train(
                engine,
                state,
                data,
                evaluation,
                checkpoints,
                make_meta(config, shards),
                reporter,
                save_every=config.checkpoint.every,
                stop=stop or StopSignal(),
                phase_start=phase_start,
                on_step=on_step,
            )
    return result


def starting_state(
    config: PretrainConfig,
    engine: Engine,
    data: PretrainingData,
    checkpoints: Checkpoints,
    shards: Shards,
    force: bool,
) -> tuple[TrainState, int, list[str]]:
    """The state to train from. There are three ways to start, tried in this order:

    1. the run folder holds a checkpoint: go on from the newest step that verifies;
    2. `[init] from` names a checkpoint or a Hugging Face folder: take its parameters, and if said its optimizer;
    3. fresh parameters from `train.seed`.

    Returns:
      The state, the step at which this phase's data begins, and lines to print.
    """
    notes: list[str] = []
    checkpoints.folder.mkdir(parents=True, exist_ok=True)
    try:
        # The settings are compared first: a model of another size is better named than its arrays' shapes.
        stored = checkpoint.read_meta(checkpoints.folder)[2]
        differences = run_file.check_resume(stored["config"], config, force)
        restored = checkpoints.restore(engine.abstract_state._asdict())
    except NoCheckpointError as e:
        notes = [f"step {step} passed over: {why}" for step, why in e.skipped]
    else:
        notes = [f"step {step} passed over: {why}" for step, why in restored.skipped]
        if restored.meta["tokenizer_digest"] != shards.tokenizer.digest:
            raise ConfigError(f"{config.data.prepared}: made with another vocabulary than this run's checkpoint has")
        if restored.data["fingerprint"] != data.fingerprint and not force:
            raise ConfigError(
                f"{config.data.prepared}: not the data this run was trained on (fingerprint {data.fingerprint[:12]}, in the "
                f"checkpoint {restored.data['fingerprint'][:12]}); restore that data, use another run_dir, or --force"
            )
        notes += [f"changed since the checkpoint: {line}" for line in differences]
        step = start_step(restored.data, config.train)
        data.start_at(restored.data["rows"], restored.data["epoch"], restored.data["row_in_epoch"])
        state = TrainState(**restored.state)
        if step != restored.step:
            notes.append(f"train.batch_size changed: {restored.data['rows']} rows seen make this step {step}")
            state = state._replace(step=jax.device_put(jnp.asarray(step, jnp.int32), state.step.sharding))
        return state, int(restored.data["phase_start"]), [*notes, f"going on from step {step}"]
    if config.init.checkpoint:
        return _initial_from(config, engine, shards, notes)
    return engine.init(), 0, notes


def _initial_from(
    config: PretrainConfig, engine: Engine, shards: Shards, notes: list[str]
) -> tuple[TrainState, int, list[str]]:
    init, where = config.init, f"[init] from {config.init.checkpoint}"
    is_run = not (Path(init.checkpoint) / "config.json").exists()
    if is_run and not (init.optimizer and init.schedule):
        raise ConfigError(f"{where} is a run, so say both optimizer (keep or reset) and schedule (continue or restart)")
    if not is_run and (init.optimizer == "keep" or init.schedule == "continue"):
        raise ConfigError(f"{where} is a Hugging Face folder: it has no optimizer and no schedule to keep")
    loaded = load(init.checkpoint)
    if loaded.tokenizer.digest != shards.tokenizer.digest:
        raise ConfigError(
            f"{where} has another vocabulary than {config.data.prepared}; prepare the data with tokenizer.vocab_file set "
            "to the vocab.txt of that checkpoint, and its other tokenizer settings"
        )
    there, here = core.to_builtins(loaded.config), core.to_builtins(config.model)
    changed = {k: v for k, v in core.differences(there, here, "model.").items() if k.startswith(run_file.FIXED)}
    if changed:
        lines = "\n  ".join(f"{k}: {old!r} there, {new!r} here" for k, (old, new) in changed.items())
        raise ConfigError(f"{where} does not fit this model:\n  {lines}")
    if init.optimizer == "keep":
        folder, step = checkpoint.locate(init.checkpoint)
        with contextlib.closing(Checkpoints(folder, config.checkpoint)) as other:
            state = TrainState(**other.restore(engine.abstract_state._asdict(), step).state)
    else:
        state = engine.init()
        state = state._replace(params=jax.tree.map(jax.device_put, loaded.params, engine.shardings.params))
    start = loaded.step if init.schedule == "continue" else 0

    def scalar(value: int) -> jax.Array:
        return jax.device_put(jnp.asarray(value, jnp.int32), engine.shardings.step)

    state = state._replace(step=scalar(start), nonfinite_total=scalar(0), nonfinite_in_row=scalar(0))
    notes.append(f"starting from {init.checkpoint}: optimizer {init.optimizer or 'reset'}, schedule at step {start}")
    return state, start, notes


def _opening_lines(config: PretrainConfig, engine: Engine, data: PretrainingData) -> list[str]:
    from bert_jax.model import count_parameters

    devices = sharding.batch_devices(engine.mesh)
    decayed = optim.decay_mask(engine.abstract_state.params)
    skipped = sorted({"/".join(str(p.key) for p in path[-2:]) for path, on in jax.tree_util.tree_leaves_with_path(decayed) if not on})
    shape = ", ".join(f"{k} {v}" for k, v in engine.mesh.shape.items())
    return [
        f"{config.preset}: {count_parameters(config.model)['total']:,} parameters, vocabulary {config.model.vocab_size:,}",
        f"mesh {shape} of {jax.device_count()} {jax.devices()[0].device_kind} devices, preset {config.mesh.preset}",
        f"batch {config.train.batch_size} rows of {config.examples.max_seq_length}: "
        f"{config.train.batch_size // jax.process_count()} per host, {config.train.batch_size // devices} per device"
        + (f", in {config.train.accumulate} parts" if config.train.accumulate > 1 else ""),
        f"data {data.fingerprint[:12]}, {data.num_rows(0):,} rows in the first epoch, "
        f"{config.train.steps * config.train.batch_size / max(data.num_rows(0), 1):.2f} epochs in all",
        "not decayed: " + ", ".join(skipped),
    ]


def _write_run_files(run_dir: Path, config: PretrainConfig, shards: Shards) -> None:
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.toml").write_text(core.dump_toml(config), encoding="utf-8")
        shards.tokenizer.save(run_dir / "tokenizer")
