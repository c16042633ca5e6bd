"""BERT: pretraining, and everything around it."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from pathlib import Path

    from bert_jax.loading import Loaded


def load(checkpoint: str | Path, **options: typing.Any) -> Loaded:
    """A model, its parameters and its tokenizer; see `bert_jax.loading.load`, which is imported at the first call."""
    from bert_jax import loading

    return loading.load(checkpoint, **options)
