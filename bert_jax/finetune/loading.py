"""Fine-tuned models from their run folders, and the encoder that a fine-tuning starts from."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert_jax import loading
from bert_jax.config import BertConfig
from bert_jax.finetune.task_file import TaskConfig, of_meta
from bert_jax.heads import BertWithHead, HeadConfig
from transformer_jax import checkpoint as checkpoints
from transformer_jax import config as core
from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.step_folders import CheckpointError
from transformer_jax.tokenizer import WordPiece

RESULTS = "results.json"
"""What `finetune` writes last into its run folder ..."""
RESULT = "result.json"
"""... and each of its trainings into its own."""
_log = logging.getLogger(__name__).warning


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A fine-tuned model, ready for `model.apply({"params": params}, ...)`."""

    model: BertWithHead
    params: dict[str, Any]
    """Nested dict of numpy arrays."""
    tokenizer: WordPiece
    config: BertConfig
    head: HeadConfig
    task: TaskConfig
    step: int
    meta: dict[str, Any]
    null_threshold: float = 0.0
    """Of span with unanswerable questions: what was found on dev when the training ended."""


@dataclasses.dataclass(frozen=True)
class Encoder:
    """What a fine-tuning starts from."""

    config: BertConfig
    params: dict[str, Any]
    """embeddings, encoder, and pooler where the checkpoint has one; empty for a start from random numbers."""
    tokenizer: WordPiece


def load_finetuned(run: str | Path) -> LoadedHead:
    """Load a fine-tuned model.

    Args:
      run: a run folder of `finetune` (of several trainings the best one, of its steps the best), or RUN@STEP.

    Raises:
      UserError: there is none, it is damaged, or it is no fine-tuned model.
    """
    if (storage.path(run) / "config.json").is_file():
        raise UserError(
            f"{run} is a folder of another program, not a run; make a run of it with `bert-jax import {run} RUN`"
        )
    name = best_of(run)
    step, params, _, meta = checkpoints.read_params(name)
    if "head" not in meta:
        raise UserError(f"{run} is not a fine-tuned model; make one with `bert-jax finetune TASK.toml --from {run}`")
    if meta.get("naming") != 1:
        raise UserError(f"{run}: naming scheme {meta.get('naming')!r} of its parameters is not known here, only 1")
    where = f"{run}, stored configuration"
    config, head = core.load(BertConfig, meta["config"]["model"], where), core.load(HeadConfig, meta["head"], where)
    tokenizer = WordPiece.from_files(meta["tokenizer"])
    task, threshold = of_meta(meta, where), _null_threshold(name)
    return LoadedHead(BertWithHead(config, head), params, tokenizer, config, head, task, step, meta, threshold)


def _null_threshold(name: str) -> float:
    """From the result of the training, which is beside its checkpoints."""
    try:
        found = json.loads((checkpoints.locate(name)[0].parent / RESULT).read_text(encoding="utf-8"))
        return float(found["result"]["settings"]["null_threshold"])
    except (OSError, ValueError, KeyError):
        return 0.0


def best_of(run: str | Path) -> str:
    """The checkpoint that a fine-tuned run stands for: RUN@best of its best training, or `run` where it names a step.

    A run whose steps have no figure, for want of a dev file, stands for its newest step.
    """
    folder = storage.path(run)
    if not folder.is_dir() or (folder / "state").is_dir():
        return str(run)
    if not (folder / "checkpoints").is_dir():
        if not (folder / RESULTS).is_file():
            return str(run)
        try:
            folder = folder / json.loads((folder / RESULTS).read_text(encoding="utf-8"))["best"]["folder"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{folder / RESULTS} is damaged: it does not say which training is the best; name the folder of one of "
                "them, or remove the file and give the same `finetune` command, which writes it again"
            ) from None
    try:
        checkpoints.locate(f"{folder}@best")
    except CheckpointError:
        return str(folder)
    return f"{folder}@best"


def unfinished(run: str | Path, meta: Mapping[str, Any]) -> str:
    """A line for people if `run`, the name of a whole run, has not been trained to its end; else an empty text.

    Args:
      meta: of a fine-tuned checkpoint of it.
    """
    planned = meta["config"].get("train", {}).get("steps")  # an imported run has none
    if not planned or not storage.path(run).is_dir() or (storage.path(run) / "state").is_dir():
        return ""
    newest = max(checkpoints.steps(checkpoints.locate(best_of(run))[0]))
    if newest >= planned:
        return ""
    return f"{run} is not finished: step {newest} of {planned}; the same `finetune` command goes on"


def is_finetuned(checkpoint: str | Path) -> bool:
    """Whether a run folder or RUN@STEP is one of `finetune`; False for what is no run at all."""
    try:
        steps = checkpoints.locate(best_of(checkpoint))[0]
        settings = core.read_toml((steps.parent if steps.name == "checkpoints" else steps) / "config.toml")
    except UserError:
        return False
    return "head" in settings


def load_encoder(checkpoint: str | Path, *, random: bool = False, say: Callable[[str], None] = _log) -> Encoder:
    """The encoder, its settings and its tokenizer.

    Args:
      checkpoint: anything that `bert_jax.load` takes; the head of a fine-tuned model is left out.
      random: take only settings and tokenizer, to start from random numbers.
      say: called with one line for what was left out, drawn or converted.

    Raises:
      UserError: as `bert_jax.load`.
    """
    found = loading.read(checkpoint, say=say)
    if found.head is not None:
        say(f"{checkpoint}: its head ({found.head.kind}) is left out")
    kept = [name for name in ("embeddings", "encoder", "pooler") if name in found.params and name not in found.drawn]
    return Encoder(found.config, {} if random else {name: found.params[name] for name in kept}, found.tokenizer)
