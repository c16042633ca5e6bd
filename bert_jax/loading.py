"""A trained model ready for use: from a run folder, RUN@STEP or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_jax.config import BertConfig
from bert_jax.interop import huggingface
from bert_jax.model import BertForPreTraining
from transformer_jax import checkpoint as checkpoints
from transformer_jax import config as core
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
    """Training step of a run; None for a Hugging Face folder."""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What a run stored beside its parameters: resolved configuration, versions; empty for a Hugging Face folder."""
    drawn: tuple[str, ...] = ()
    """Heads ("pooler", "mlm", "nsp") that the Hugging Face folder did not have: here they hold random numbers."""


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
      checkpoint: a run folder (its newest step that verifies), RUN@STEP, or a Hugging Face folder.
      seed: draws heads that a Hugging Face folder lacks (`Loaded.drawn` names them); None refuses such a folder.
      say: called with one line for whatever of a Hugging Face folder was left out, drawn or converted.

    Raises:
      UserError: there is nothing of the kind, or it is damaged or of another kind of model.
    """
    path = Path(checkpoint)
    if (path / "config.json").is_file():
        folder = huggingface.open_folder(path, seed=seed, say=say)
        model = BertForPreTraining(folder.config)
        return Loaded(model, folder.params, folder.tokenizer, folder.config, drawn=folder.drawn)
    step, params, _, meta = checkpoints.read_params(checkpoint)
    if meta.get("naming") != 1:
        raise UserError(
            f"{checkpoint}: naming scheme {meta.get('naming')!r} of its parameters is not known here, only 1"
        )
    config = core.load(BertConfig, meta["config"]["model"], f"{checkpoint}, stored configuration")
    tokenizer = WordPiece.from_files(meta["tokenizer"])
    if not config.vocab_size:
        config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
    model, drawn = BertForPreTraining(config), tuple(meta.get("drawn", ()))
    return Loaded(model, params, tokenizer, config, step=step, meta=meta, drawn=drawn)
