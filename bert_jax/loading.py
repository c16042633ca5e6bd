"""A trained model ready for use: from a run folder, RUN@STEP, a Hugging Face folder or a TensorFlow 1 folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop import huggingface, tf1
from bert_jax.interop.huggingface_names import to_hf
from bert_jax.interop.published import Published
from bert_jax.model import BertForPreTraining
from transformer_jax import checkpoint as checkpoints
from transformer_jax import config as core
from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece

_log = logging.getLogger(__name__).warning


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, its parameters and its tokenizer, ready for `model.apply({"params": params}, ...)`."""

    model: BertForPreTraining
    params: dict[str, Any]
    """Nested dict of numpy arrays."""
    tokenizer: WordPiece
    config: BertConfig
    step: int | None = None
    """Training step of a run; None for another program's folder."""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What a run stored beside its parameters: resolved configuration, versions; empty for another program's folder."""
    drawn: tuple[str, ...] = ()
    """Parts ("pooler", "mlm", "nsp") that the checkpoint did not have: here they hold random numbers."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a checkpoint holds, its own head included."""

    params: dict[str, Any]
    """Those of `BertForPreTraining`, or with a head those of `BertWithHead`."""
    tokenizer: WordPiece
    config: BertConfig
    head: HeadConfig | None = None
    step: int | None = None
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    drawn: tuple[str, ...] = ()


def load(
    checkpoint: str | Path,
    *,
    seed: int | None = 0,
    say: Callable[[str], None] = _log,
) -> Loaded:
    """Load a checkpoint.

        import bert_jax
        bert = bert_jax.load("runs/demo")               # or "runs/demo@2000", or a Hugging Face folder
        ids, _ = bert.tokenizer.encode_query("Good [MASK], sir.")
        row = jnp.array([[bert.tokenizer.cls_id, *ids, bert.tokenizer.sep_id]])
        out = jax.jit(bert.model.apply)({"params": bert.params}, row, 0 * row, jnp.arange(row.size)[None], 0 * row + 1)

    The arguments of `apply` are ids, segments (0 or 1), positions, and 1 where there is a piece or 0 for padding.

    Args:
      checkpoint: a run folder (its newest step that verifies), RUN@STEP, a Hugging Face folder, or a folder of
        google-research/bert. Of a fine-tuned model the head is left out.
      seed: draws parts that the checkpoint lacks (`Loaded.drawn` names them); None refuses such a checkpoint.
      say: called with one line for whatever was left out, drawn or converted.

    Raises:
      UserError: there is nothing of the kind, or it is damaged or of another kind of model.
    """
    published = read_published(checkpoint, say)
    stored = None if published else read_run(checkpoint)
    if stored is not None and stored.head is not None:
        tensors = to_hf(stored.params, stored.config, stored.head)
        published = Published(str(checkpoint), stored.config, tensors, stored.tokenizer, stored.head)
    if published is not None:
        if published.head is not None:
            say(f"{checkpoint}: its head ({published.head.kind}) is left out")
        params, drawn = published.pretraining(seed, say)
        found = Stored(params, published.tokenizer, published.config, drawn=drawn)
        stored = dataclasses.replace(found, step=stored.step, meta=stored.meta) if stored else found
    assert stored is not None
    model = BertForPreTraining(stored.config)
    return Loaded(
        model, stored.params, stored.tokenizer, stored.config, step=stored.step, meta=stored.meta, drawn=stored.drawn
    )


def read(checkpoint: str | Path, *, seed: int | None = 0, say: Callable[[str], None] = _log) -> Stored:
    """Read a checkpoint as what it is: a fine-tuned model keeps its head. Args and errors as `load`."""
    published = read_published(checkpoint, say)
    if published is None:
        return read_run(checkpoint)
    if published.head is not None:
        params = published.fine_tuned(say)
        return Stored(params, published.tokenizer, published.config, published.head)
    params, drawn = published.pretraining(seed, say)
    return Stored(params, published.tokenizer, published.config, drawn=drawn)


def read_published(checkpoint: str | Path, say: Callable[[str], None] = _log) -> Published | None:
    """What another program's folder holds; None for a run."""
    path = storage.path(checkpoint)
    if (path / "model.safetensors").is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"{checkpoint} has a model.safetensors and no config.json, without which its sizes are not known"
        )
    if (path / "config.json").is_file():
        return huggingface.read(storage.fetch(path), say)
    return tf1.read(storage.fetch(path), say) if tf1.is_folder(path) else None


def read_run(checkpoint: str | Path) -> Stored:
    """What a run holds at its newest step that verifies, or at RUN@STEP; a fine-tuned one at its best step."""
    from bert_jax.finetune.loading import best_of, is_finetuned  # it imports this module

    step, params, _, meta = checkpoints.read_params(best_of(checkpoint) if is_finetuned(checkpoint) else checkpoint)
    if meta.get("naming") != 1:
        raise UserError(
            f"{checkpoint}: naming scheme {meta.get('naming')!r} of its parameters is not known here, only 1"
        )
    where = f"{checkpoint}, stored configuration"
    config = core.load(BertConfig, meta["config"]["model"], where)
    tokenizer = WordPiece.from_files(meta["tokenizer"])
    if not config.vocab_size:
        config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
    head = core.load(HeadConfig, meta["head"], where) if "head" in meta else None
    return Stored(params, tokenizer, config, head, step, meta, tuple(meta.get("drawn", ())))
