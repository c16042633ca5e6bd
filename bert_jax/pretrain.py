"""One run of pretraining: from a resolved configuration to a trained, saved and evaluated model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax import examples, run_file
from bert_jax.config import BertConfig, PretrainConfig
from bert_jax.data import EvaluationData, PretrainingData
from bert_jax.loading import Loaded, load
from bert_jax.model import count_parameters
from bert_jax.task import PretrainingTask
from transformer_jax import checkpoint, corpora, lock, optim, sharding
from transformer_jax import config as core
from transformer_jax.checkpoint import Checkpoints, NoCheckpointError
from transformer_jax.config import ConfigError, UserError
from transformer_jax.prepare import asked_otherwise
from transformer_jax.report import Reporter
from transformer_jax.shards import Shards
from transformer_jax.signals import StopSignal
from transformer_jax.train import Engine, RunResult, TrainState, train

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


def open_prepared(config: PretrainConfig, split: str, check: Literal["sizes", "digests"] = "sizes") -> Shards:
    """The prepared shards of a run; where there are none, the message says which command makes them."""
    if not (Path(config.data.prepared) / "manifest.json").exists():
        raise UserError(f"{config.data.prepared}: no prepared data here; run `bert-jax prepare RUN.toml` first")
    return Shards.open(Path(config.data.prepared), split, check=check)


def check_prepared(config: PretrainConfig, shards: Shards, force: bool = False) -> list[str]:
    """Compare what the run file says of text and vocabulary with what the prepared data was made with.

    Returns:
      A line for each difference, if forced.

    Raises:
      ConfigError: there are differences: the run would silently be another than its file says.
    """
    recipe = None
    if config.data.recipe:
        with contextlib.suppress(UserError):  # recipe and text need not be where training is
            recipe = corpora.load_recipe(config.data.recipe)
    lines = asked_otherwise(shards.manifest, config.tokenizer, recipe)
    if lines and not force:
        raise ConfigError(
            f"{config.data.prepared}: not prepared as this run says:\n  " + "\n  ".join(lines)
            + "\nrun `bert-jax prepare` again, use the old values, or --force to train on what is there"
        )  # fmt: skip
    return lines


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
    # A long run reads every file once more before it trusts them: a flipped bit in a shard is another data set.
    shards = open_prepared(config, "train", check="digests")
    config = resolve(config, shards)
    otherwise = check_prepared(config, shards, force)
    mesh = sharding.make_mesh(config.mesh)
    engine = make_engine(config, mesh)
    data = PretrainingData(shards, config.examples, config.train.seed, Path(config.data.prepared) / "plans")
    heldout = open_prepared(config, "heldout", check="digests")
    evaluation = EvaluationData(heldout, config.examples) if heldout.num_documents else None

    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            busy = f"another process is training in {run_dir}; wait for it or stop it, or name another run_dir"
            stack.enter_context(lock.locked(run_dir, busy))
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(run_dir / "checkpoints", config.checkpoint)))
        start = starting_point(config, engine, data, checkpoints, shards, force)
        first_step = int(jax.device_get(start.state.step))
        _write_run_files(run_dir, config, shards)
        checkpoints.try_to_write()
        with Reporter(run_dir, config.train.steps, config.train.log_every, first_step) as reporter:
            warnings = [f"warning: not prepared as this run says: {line}" for line in otherwise]
            for line in (*warnings, *start.notes, *_opening_lines(config, engine, data)):
                reporter.line(line)
            if first_step >= config.train.steps:
                reporter.line(f"step {first_step} of {config.train.steps} is done: nothing to train")
            return train(
                engine,
                start.state,
                data,
                evaluation,
                checkpoints,
                make_meta(config, shards),
                reporter,
                save_every=config.checkpoint.every,
                stop=stop or StopSignal(),
                first_row=start.first_row,
                resumed=start.resumed,
                on_step=on_step,
            )


class Start(NamedTuple):
    """Where training starts from."""

    state: TrainState
    first_row: int
    """Rows of the data seen so far in this phase."""
    resumed: bool
    """The state comes from the run's own checkpoint."""
    notes: list[str]
    """Lines to print."""


def starting_point(
    config: PretrainConfig,
    engine: Engine,
    data: PretrainingData,
    checkpoints: Checkpoints,
    shards: Shards,
    force: bool = False,
) -> Start:
    """The state to train from. There are three ways to start, tried in this order:

    1. the run folder holds a checkpoint: go on from the newest step that verifies;
    2. `[init] from` names a checkpoint or a Hugging Face folder: take its parameters, and if said its optimizer;
    3. fresh parameters from `train.seed`.

    Raises:
      UserError: a checkpoint that cannot be used, or that is of another model, vocabulary or data.
    """
    try:
        # The settings are compared first: a model of another size is better named than its arrays' shapes.
        stored = checkpoint.read_meta(checkpoints.folder)[2] if checkpoint.steps(checkpoints.folder) else None
        if stored and "imported_from" in stored:
            raise ConfigError(
                f"{config.run_dir} holds an imported model and no training to go on with; name another run_dir, with "
                f'[init] from = "{config.run_dir}", optimizer = "reset" and schedule = "restart"'
            )
        changes = run_file.check_resume(stored["config"], config, force) if stored else []
        restored = checkpoints.restore(engine.abstract_state._asdict())
    except NoCheckpointError as e:
        passed_over = [f"step {step} passed over: {why}" for step, why in e.skipped]
        if config.init.checkpoint:
            return _start_from_other(config, engine, shards, passed_over)
        return Start(engine.init(), 0, False, passed_over)
    notes = [f"step {step} passed over: {why}" for step, why in restored.skipped]
    where = config.data.prepared
    if restored.meta["tokenizer_digest"] != shards.tokenizer.digest:
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


def _start_from_other(config: PretrainConfig, engine: Engine, shards: Shards, notes: list[str]) -> Start:
    """The beginning of a phase that takes its parameters from elsewhere; its data starts at row 0."""
    init, where = config.init, f"[init] from = {config.init.checkpoint!r}"
    loaded = load(init.checkpoint, seed=config.train.seed, say=notes.append)
    if loaded.step is not None and not (init.optimizer and init.schedule):
        raise ConfigError(f"{where} is a run, so say both optimizer (keep or reset) and schedule (continue or restart)")
    if loaded.step is None and (init.optimizer == "keep" or init.schedule == "continue"):
        raise ConfigError(f"{where} is a Hugging Face folder: it has no optimizer to keep and no schedule to continue")
    if init.optimizer == "keep" and "imported_from" in loaded.meta:
        raise ConfigError(f'{where} is an imported model: it has no optimizer to keep, so say optimizer = "reset"')
    _check_fit(where, loaded, config, shards)
    step = loaded.step if loaded.step is not None and init.schedule == "continue" else 0
    if step >= config.train.steps:
        raise ConfigError(
            f"{where} is at step {step}, where the schedule goes on, and train.steps is {config.train.steps}, which "
            "counts from the first phase: make it larger"
        )
    if init.optimizer == "keep":
        folder, _ = checkpoint.locate(init.checkpoint)
        with contextlib.closing(Checkpoints(folder, config.checkpoint)) as other:
            state = TrainState(**other.restore(engine.abstract_state._asdict(), loaded.step).state)
    else:
        params = with_padding(loaded.params, config.model)
        state = engine.init()._replace(params=jax.tree.map(jax.device_put, params, engine.shardings.params))
    put = jax.device_put
    whole = engine.shardings.step
    state = state._replace(
        step=put(jnp.int32(step), whole),
        nonfinite_total=put(jnp.int32(0), whole),
        nonfinite_in_row=put(jnp.int32(0), whole),
    )
    notes.append(f"starting from {init.checkpoint}: optimizer {init.optimizer or 'reset'}, schedule at step {step}")
    return Start(state, 0, False, notes)


def _check_fit(where: str, loaded: Loaded, config: PretrainConfig, shards: Shards) -> None:
    if loaded.tokenizer.digest != shards.tokenizer.digest:
        raise ConfigError(
            f"{where} has another vocabulary than {config.data.prepared}; prepare the data with tokenizer.vocab_file "
            "set to the vocab.txt of that checkpoint, and its other tokenizer settings"
        )
    changed = core.differences(core.to_builtins(loaded.config), core.to_builtins(config.model), "model.")
    if config.init.optimizer != "keep":
        changed.pop("model.vocab_multiple", None)  # the padding is made anew
    fixed = [f"{k}: {a!r} there, {b!r} here" for k, (a, b) in changed.items() if k.startswith(run_file.FIXED)]
    if fixed:
        raise ConfigError(f"{where} does not fit this model:\n  " + "\n  ".join(fixed))


def with_padding(params: dict[str, Any], config: BertConfig) -> dict[str, Any]:
    """Parameters whose vocabulary is padded as `config` says, with the zeros that padding rows are born with."""

    def pad(x: np.ndarray) -> np.ndarray:
        used = np.asarray(x)[: config.vocab_size]
        return np.pad(used, [(0, config.padded_vocab_size - config.vocab_size), *[(0, 0)] * (used.ndim - 1)])

    word = {"embedding": pad(params["embeddings"]["word"]["embedding"])}
    mlm = params["mlm"] | {"bias": pad(params["mlm"]["bias"])}
    return params | {"embeddings": params["embeddings"] | {"word": word}, "mlm": mlm}


def _opening_lines(config: PretrainConfig, engine: Engine, data: PretrainingData) -> list[str]:
    train, devices = config.train, sharding.batch_devices(engine.mesh)
    decayed = jax.tree_util.tree_leaves_with_path(optim.decay_mask(engine.abstract_state.params))
    exempt = sorted({"/".join(str(p.key) for p in path[-2:]) for path, on in decayed if not on})
    shape = ", ".join(f"{k} {v}" for k, v in engine.mesh.shape.items())
    parameters = count_parameters(config.model)["total"]
    rows = data.num_rows(0)
    return [
        f"{config.preset}: {parameters:,} parameters, vocabulary {config.model.vocab_size:,}",
        f"mesh {shape} of {jax.device_count()} {jax.devices()[0].device_kind} devices, preset {config.mesh.preset}",
        f"batch {train.batch_size} rows of {config.examples.max_seq_length}: "
        f"{train.batch_size // jax.process_count()} per host, {train.batch_size // devices} per device"
        + (f", in {train.accumulate} parts" if train.accumulate > 1 else ""),
        f"data {data.fingerprint[:12]}, {rows:,} rows in the first epoch, "
        f"{train.steps * train.batch_size / max(rows, 1):.2f} epochs in all",
        "not decayed: " + ", ".join(exempt),
    ]


def _write_run_files(run_dir: Path, config: PretrainConfig, shards: Shards) -> None:
    """`config.toml`, with the files that it names seen from its own folder, and the tokenizer."""
    if jax.process_index() != 0:
        return
    run_dir.mkdir(parents=True, exist_ok=True)

    def seen_from_here(name: str) -> str:
        return os.path.relpath(name, run_dir) if name and not Path(name).is_absolute() else name

    written = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, recipe=seen_from_here(config.data.recipe)),
        tokenizer=dataclasses.replace(config.tokenizer, vocab_file=seen_from_here(config.tokenizer.vocab_file)),
    )
    temporary = run_dir / ".config.toml.tmp"
    temporary.write_text(core.dump_toml(written), encoding="utf-8")
    temporary.replace(run_dir / "config.toml")
    shards.tokenizer.save(run_dir / "tokenizer")
