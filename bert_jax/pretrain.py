"""One run of pretraining: from a resolved configuration to a trained, saved and evaluated model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from bert_jax import examples, resize, run_file
from bert_jax.config import BertConfig, PretrainConfig
from bert_jax.data import EvaluationData, PretrainingData
from bert_jax.loading import Loaded, load
from bert_jax.model import count_parameters
from bert_jax.task import PretrainingTask
from transformer_jax import config as core
from transformer_jax import corpora, optim, run, sharding
from transformer_jax.config import ConfigError, UserError
from transformer_jax.engine import Engine
from transformer_jax.goodput import Clock
from transformer_jax.prepare import asked_otherwise
from transformer_jax.profiles import Steps
from transformer_jax.run import Start
from transformer_jax.run_file import write_config
from transformer_jax.shards import Shards
from transformer_jax.signals import StopSignal
from transformer_jax.train import RunResult

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
    return run.open_prepared(config.data.prepared, split, "bert-jax", check)


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
            recipe = corpora.load_recipe(config.data.recipe, fetch=False)
    lines = asked_otherwise(shards.manifest, config.tokenizer, recipe)
    return run.refuse_otherwise(config.data.prepared, lines, "bert-jax", force)


def make_engine(config: PretrainConfig, mesh: Mesh) -> Engine:
    """The task compiled for a mesh, with the run's optimizer."""
    task = PretrainingTask(config.model, config.examples.max_seq_length, config.examples.sentence_task != "none")
    optimizer = optim.make(config.optimizer, config.train.steps, config.model.hidden_size)
    return Engine(task, optimizer, config.train, mesh, config.mesh.preset, config.optimizer.clip_norm)


def make_meta(config: PretrainConfig, shards: Shards) -> dict[str, Any]:
    """What makes a checkpoint self-contained; see `transformer_jax.run.make_meta`."""
    meta = run.make_meta(
        config,
        tokenizer_files=shards.tokenizer.files(),
        tokenizer_digest=shards.tokenizer.digest,
        fingerprint=shards.fingerprint,
        sources=shards.source_names,
        naming=NAMING,
        packages=("tokenizers",),
    )
    about = shards.manifest["made_from"].get("about", {})
    meta["data"] |= {key: about[key] for key in ("license", "language") if about.get(key)}
    return meta


def pretrain(
    config: PretrainConfig,
    *,
    force: bool = False,
    stop: StopSignal | None = None,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    clock: Clock | None = None,
    profile: Steps | None = None,
) -> RunResult:
    """Train, or go on training: where the run folder holds a checkpoint, the run goes on exactly as if never stopped.

    Args:
      config: from `run_file.load_run`.
      force, stop, on_step, clock, profile: see `transformer_jax.run.run`.

    Raises:
      UserError: anything the user can mend, before a long job starts wherever that is possible.
    """
    clock = clock or Clock()
    clock.start_up.enter("reading")
    # A long run reads every file once more before it trusts them: a flipped bit in a shard is another data set.
    shards = open_prepared(config, "train", check="digests")
    config = resolve(config, shards)
    otherwise = check_prepared(config, shards, force)
    heldout = open_prepared(config, "heldout", check="digests")
    clock.start_up.enter("building")
    engine = make_engine(config, sharding.make_mesh(config.mesh))
    data = PretrainingData(shards, config.examples, config.train.seed, shards.folder / "plans")
    return run.run(
        config,
        engine,
        data,
        EvaluationData(heldout, config.examples) if heldout.num_documents else None,
        make_meta(config, shards),
        write_files=lambda run_dir: write_run_files(run_dir, config, shards),
        check_resume=lambda stored: run_file.check_resume(stored, config, force),
        start_elsewhere=elsewhere(config, engine, shards),
        warnings=[f"warning: not prepared as this run says: {line}" for line in otherwise],
        opening_lines=opening_lines(config, engine, data),
        force=force,
        stop=stop,
        on_step=on_step,
        clock=clock,
        profile=profile,
    )


def elsewhere(config: PretrainConfig, engine: Engine, shards: Shards) -> Callable[[list[str]], Start] | None:
    """The start that `[init] from` asks for, a run or another program's folder; None where it names nothing."""
    if not config.init.checkpoint:
        return None

    def start(notes: list[str]) -> Start:
        loaded = load(config.init.checkpoint, seed=config.train.seed, say=notes.append)
        run.check_init(config, loaded.step, loaded.meta, "folder of another program")
        if config.init.optimizer != "keep":
            loaded = _enlarged(loaded, config, shards, notes.append)
        _check_fit(f"[init] from = {config.init.checkpoint!r}", loaded, config, shards)
        return run.start_of_phase(config, engine, loaded.step, lambda: with_padding(loaded.params, config.model), notes)

    return start


def _enlarged(loaded: Loaded, config: PretrainConfig, shards: Shards, say: Callable[[str], None]) -> Loaded:
    """The checkpoint with the positions, segments and tokens that this run has more; see `bert_jax.resize`."""
    model, seed = config.model, config.train.seed
    sized = resize.resize(
        loaded.params,
        loaded.config,
        loaded.tokenizer,
        max_position_embeddings=max(model.max_position_embeddings, loaded.config.max_position_embeddings),
        type_vocab_size=max(model.type_vocab_size, loaded.config.type_vocab_size),
        say=say,
    )
    new = shards.tokenizer
    if new.digest != sized.tokenizer.digest and resize.extends(new, sized.tokenizer):
        sized = resize.to_vocabulary(sized.params, sized.config, sized.tokenizer, new, seed=seed, say=say)
    return dataclasses.replace(loaded, params=sized.params, config=sized.config, tokenizer=sized.tokenizer)


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


def opening_lines(config: PretrainConfig, engine: Engine, data: PretrainingData) -> list[str]:
    """What is about to run, for people."""
    model = f"{count_parameters(config.model)['total']:,} parameters, vocabulary {config.model.vocab_size:,}"
    return run.opening_lines(config, engine, data, model, str(config.examples.max_seq_length))


def write_run_files(run_dir: Path, config: PretrainConfig, shards: Shards) -> None:
    """`config.toml` and the tokenizer."""
    write_config(run_dir, config, run_file.BESIDE)
    shards.tokenizer.save(run_dir / "tokenizer")
