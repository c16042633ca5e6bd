"""Runs made from other programs' models, to go on training, to evaluate or to predict with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.config import PretrainConfig
from bert_jax.finetune.task_file import InputsConfig, TaskConfig
from bert_jax.interop.huggingface_names import Say
from bert_jax.loading import read
from bert_jax.presets import nearest_preset
from bert_jax.resize import resize
from transformer_jax import config as core
from transformer_jax import imported_run, storage

_warn = logging.getLogger(__name__).warning


def import_folder(
    source: str | Path,
    run_dir: str | Path,
    *,
    seed: int | None = 0,
    max_position_embeddings: int = 0,
    type_vocab_size: int = 0,
    add_tokens: Sequence[str] = (),
    say: Say = _warn,
) -> Path:
    """Make a run folder whose step 0 holds the parameters and tokenizer of a model, enlarged if so asked.

    `pretrain` and `finetune` start from it, and `export` gives the same tensors again. A fine-tuned model becomes a
    fine-tuned run, with which `predict` works.

    Args:
      source: a Hugging Face folder, a folder of google-research/bert, or a run to be enlarged.
      seed: draws heads that the source lacks; None refuses such a source.
      max_position_embeddings, type_vocab_size, add_tokens: see `bert_jax.resize.resize`.
      say: called with one line for whatever was left out, drawn, converted or added.

    Returns:
      `run_dir`.

    Raises:
      UserError: as `bert_jax.loading.read` and `resize`; or `run_dir` is in use, the disk refuses, or the checkpoint
        reads back changed. Nothing is then left at `run_dir`.
    """
    run_dir = storage.path(run_dir)
    imported_run.check_unused(run_dir)
    found = read(source, seed=seed, say=say)
    sized = resize(
        found.params,
        found.config,
        found.tokenizer,
        max_position_embeddings=max_position_embeddings,
        type_vocab_size=type_vocab_size,
        add_tokens=add_tokens,
        seed=seed or 0,
        say=say,
    )
    preset = nearest_preset(sized.config)
    meta: dict[str, Any] = {"drawn": list(found.drawn)}
    config: Any = PretrainConfig(
        preset=preset, run_dir=str(run_dir), model=sized.config, tokenizer=sized.tokenizer.config
    )
    if found.head is not None:
        length = min(InputsConfig.max_seq_length, sized.config.max_position_embeddings)
        task = TaskConfig(
            name=run_dir.name,
            kind=found.head.kind,
            labels=found.head.labels,
            run_dir=str(run_dir),
            inputs=InputsConfig(max_seq_length=length),
        )
        meta |= {"head": core.to_builtins(found.head), "task": core.to_builtins(task)}
        config = {"run_dir": str(run_dir), "model": core.to_builtins(sized.config), "head": meta["head"]}
        config["task"] = meta["task"]
    return imported_run.write(run_dir, source, config, sized.params, sized.tokenizer, naming=1, more_meta=meta)
