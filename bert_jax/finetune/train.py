"""One training of a head: from an encoder and encoded examples to a run folder whose best step is kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.config import BertConfig
from bert_jax.finetune.forward import Forward
from bert_jax.finetune.loading import Encoder
from bert_jax.finetune.rows import Arrays, TrainingRows
from bert_jax.finetune.task import FinetuneTask, targets
from bert_jax.finetune.task_file import TaskConfig
from bert_jax.heads import HeadConfig, abstract_params
from transformer_jax import config as core
from transformer_jax import optim, run, run_file
from transformer_jax.config import CheckpointConfig, ConfigError, MeshConfig, OptimizerConfig, TrainConfig
from transformer_jax.engine import Engine
from transformer_jax.run import Start
from transformer_jax.signals import StopSignal
from transformer_jax.train import RunResult, Validation

NAMING = 1
"""Version of the parameters' naming scheme (docs/parameters.md)."""
# What another value of a key means for a training that goes on, as in `bert_jax.run_file`.
FIXED = ("model.hidden_size", "model.num_", "model.intermediate_size", "model.vocab_", "model.max_position_embeddings",
         "model.type_vocab_size", "model.hidden_act", "head.", "task.kind", "task.labels")  # fmt: skip
UNSAFE = ("model.", "task.inputs.", "task.data.train", "optimizer.", "train.seed", "train.steps",
          "train.batch_size", "init.")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StartConfig:
    """Where the encoder comes from."""

    checkpoint: str = ""
    random: bool = False
    """Only settings and tokenizer are taken; all parameters are drawn."""


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """What `transformer_jax.run` calls the prepared data; here the training file."""

    prepared: str = ""


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """One training, resolved: what `config.toml` of its run folder holds."""

    preset: str = "fine-tuning"
    run_dir: str = ""
    model: BertConfig = dataclasses.field(default_factory=BertConfig)
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    data: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    init: StartConfig = dataclasses.field(default_factory=StartConfig)


def model_config(task: TaskConfig, encoder: BertConfig) -> BertConfig:
    """The encoder's settings with those that the task file changes.

    Raises:
      ConfigError: rows longer than the position table.
    """
    longest = encoder.max_position_embeddings
    if task.inputs.max_seq_length > longest:
        raise ConfigError(
            f"inputs.max_seq_length is {task.inputs.max_seq_length}, and the model has {longest} positions "
            f"(max_position_embeddings); set inputs.max_seq_length to {longest} or less: longer texts are cut, or read "
            'in windows (inputs.long_text = "windows")'
        )
    changes: dict[str, Any] = {}
    if task.train.dropout >= 0:
        changes = {"hidden_dropout_prob": task.train.dropout, "attention_probs_dropout_prob": task.train.dropout}
    if task.train.dtype:
        changes["dtype"] = task.train.dtype
    return dataclasses.replace(encoder, **changes)


def resolve(
    task: TaskConfig,
    head: HeadConfig,
    model: BertConfig,
    num_rows: int,
    *,
    start: StartConfig,
    rate: float,
    seed: int,
    run_dir: str,
    measured: bool,
) -> FinetuneConfig:
    """The settings of one training.

    Args:
      num_rows: training rows, of which follows how many steps the epochs are.
      measured: there is a dev file, whose figures choose the best step.
    """
    t = task.train
    total = max(1, round(num_rows * t.epochs))
    steps = -(-total // t.batch_size)
    every = min(t.eval_every or -(-num_rows // t.batch_size), steps)
    optimizer = OptimizerConfig(
        learning_rate=rate,
        warmup_steps=min(math.ceil(steps * t.warmup), steps),
        weight_decay=t.weight_decay,
        epsilon=t.epsilon,
        clip_norm=t.clip_norm,
    )
    # Each training says only its own rate and seed, so that more of them can be added to the task file later.
    own = dataclasses.replace(task, run_dir=run_dir, train=dataclasses.replace(t, learning_rate=rate, seeds=(seed,)))
    train = TrainConfig(
        steps=steps,
        batch_size=t.batch_size,
        accumulate=t.accumulate,
        seed=seed,
        log_every=t.log_every,
        eval_every=every,
        eval_batch_size=t.eval_batch_size,
        max_nonfinite_steps=t.max_nonfinite_steps,
        matmul_precision=t.matmul_precision,
    )
    checkpoint = CheckpointConfig(
        every=every,
        keep_last=1,
        keep_best=1 if measured else 0,
        best_metric=task.best_metric,
        best_is="lowest" if task.lower_is_better else "highest",
        best_of_equals="earlier",
    )
    return FinetuneConfig(
        preset=f"fine-tuning {task.name}",
        run_dir=run_dir,
        model=model,
        head=head,
        task=own,
        data=SourceConfig(task.data.train),
        mesh=task.mesh,
        optimizer=optimizer,
        train=train,
        checkpoint=checkpoint,
        init=start,
    )


def make_engine(config: FinetuneConfig, mesh: Mesh, choices: int = 0) -> Engine:
    """The task compiled for a mesh, with AdamW."""
    task = FinetuneTask(config.model, config.head, config.task.inputs.max_seq_length, choices)
    optimizer = optim.make(config.optimizer, config.train.steps, config.model.hidden_size)
    # Evaluation goes through `Forward`, which takes any batch size.
    train = dataclasses.replace(config.train, eval_batch_size=0)
    return Engine(task, optimizer, train, mesh, config.mesh.preset, config.optimizer.clip_norm)


def make_forward(config: FinetuneConfig, engine: Engine) -> Forward:
    """The engine's model, to score rows on its mesh."""
    size = config.train.eval_batch_size or config.train.batch_size
    assert isinstance(engine.task, FinetuneTask)
    return Forward(engine.task, engine.mesh, size, config.mesh.preset, config.train.matmul_precision)


def train(
    config: FinetuneConfig,
    engine: Engine,
    encoder: Encoder,
    arrays: Arrays,
    score: Callable[[Any, Callable[[], bool]], dict[str, float] | None] | None,
    names: tuple[str, ...],
    *,
    force: bool = False,
    stop: StopSignal | None = None,
    notes: tuple[str, ...] = (),
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> RunResult:
    """Train, or go on training: where the run folder holds a checkpoint, it goes on exactly as if never stopped.

    Args:
      engine: of these settings and this seed.
      encoder: where it starts from.
      arrays: training rows, see `FinetuneTask`.
      score: (parameters, stop) -> the figures `names`; None without a dev file.
      force, stop, on_step: see `transformer_jax.run.run`.
      notes: lines to print before the start.

    Raises:
      UserError: anything the user can mend.
    """
    t, epochs = config.train, config.task.train.epochs
    rows = TrainingRows(arrays, targets(config.head.kind), t.batch_size, t.seed, epochs)
    meta = run.make_meta(
        config,
        tokenizer_files=encoder.tokenizer.files(),
        tokenizer_digest=encoder.tokenizer.digest,
        fingerprint=rows.fingerprint,
        sources=[config.data.prepared],
        naming=NAMING,
        packages=("tokenizers",),
    )
    meta |= {"head": core.to_builtins(config.head), "task": core.to_builtins(config.task)}

    def start(said: list[str]) -> Start:
        state = engine.init()
        ours = {k: v for k, v in encoder.params.items() if k in state.params}
        placed = jax.tree.map(jax.device_put, ours, {k: engine.shardings.params[k] for k in ours})
        drawn = [name for name in state.params if name not in ours]
        where = f"{config.init.checkpoint}" + (" (settings and tokenizer alone)" if config.init.random else "")
        line = f"starting from {where}; drawn at random: {', '.join(drawn)}"
        return Start(state._replace(params=state.params | placed), 0, False, [*said, line])

    return run.run(
        config,
        engine,
        rows,
        None,
        meta,
        write_files=lambda folder: write_run_files(folder, config, encoder),
        check_resume=lambda stored: check_resume(stored, config, force),
        start_elsewhere=start,
        warnings=notes,
        opening_lines=run.opening_lines(config, engine, rows, _model(config), str(config.task.inputs.max_seq_length)),
        force=force,
        stop=stop,
        on_step=on_step,
        validation=None if score is None else Validation(names, 0, score),
    )


def check_resume(stored: Mapping[str, Any], config: FinetuneConfig, force: bool) -> list[str]:
    """Compare the stored settings with the present ones; see `transformer_jax.run_file.check_resume`."""
    if "head" not in stored:
        raise ConfigError(f"{config.run_dir} holds another kind of run; name another folder with --out")
    return run_file.check_resume(stored, config, force, fixed=FIXED, unsafe=UNSAFE)


def write_run_files(folder: Path, config: FinetuneConfig, encoder: Encoder) -> None:
    """`config.toml` and the tokenizer."""
    run_file.write_config(folder, config)
    encoder.tokenizer.save(folder / "tokenizer")


def count_parameters(config: BertConfig, head: HeadConfig) -> int:
    """Parameters of encoder and head, without the vocabulary's padding rows."""
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config, head)))
    return total - (config.padded_vocab_size - config.vocab_size) * config.hidden_size


def _model(config: FinetuneConfig) -> str:
    total = count_parameters(config.model, config.head)
    return f"{total:,} parameters, vocabulary {config.model.vocab_size:,}, a head for {config.head.kind}"
