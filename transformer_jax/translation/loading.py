"""A trained translation model ready for use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformer_jax import checkpoint as checkpoints
from transformer_jax import config as core
from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.translation.config import TransformerConfig
from transformer_jax.translation.model import Transformer
from transformer_jax.translation.vocabularies import Vocabularies

NAMING = 1
"""Version of the parameters' naming scheme (docs/parameters.md); it is stored with every checkpoint."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model, its parameters and its vocabularies, ready for `model.apply({"params": params}, ...)`."""

    model: Transformer
    params: dict[str, Any]
    """Nested dict of numpy arrays."""
    vocabularies: Vocabularies
    """`source` and `target`, which cut text into ids and put it together again."""
    config: TransformerConfig
    step: int
    """Training step of the run."""
    meta: dict[str, Any]
    """What the run stored beside its parameters: resolved configuration, versions."""

    @property
    def max_source_length(self) -> int:
        """Pieces of the longest source in training, `</s>` included; positions beyond have never been trained."""
        trained = int(self.meta["config"]["examples"]["max_source_length"])
        return min(trained, self.config.max_position_embeddings)


def read_vocabularies(name: str | Path) -> Vocabularies:
    """The vocabularies of a run folder, or of a folder in Marian's format.

    Raises:
      UserError: there is neither, or its files are damaged.
    """
    from transformer_jax.translation.interop import marian

    folder = storage.path(name)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run folder, or a folder in Marian's format")
    if marian.is_folder(folder):
        return marian.read_vocabularies(storage.fetch(folder))
    return Vocabularies.load(storage.fetch(folder / "tokenizer"))


def load(checkpoint: str | Path) -> Loaded:
    """Load a run folder (its newest step that verifies), RUN@STEP, or RUN@best (by its held-out figure).

        from transformer_jax import translation
        mt = translation.load("runs/demo_en_de")
        ids = [*mt.vocabularies.source.encode("Good morning."), *mt.vocabularies.source_end]
        row = jnp.array([ids])
        memory = mt.model.apply({"params": mt.params}, row, jnp.arange(row.size)[None], 0 * row + 1, method="encode")

    The arguments of `encode` are ids, positions, and 1 where there is a piece or 0 for padding.

    Raises:
      UserError: there is nothing of the kind, or it is damaged or of another kind of model.
    """
    if (storage.path(checkpoint) / "config.json").is_file():
        raise UserError(
            f"{checkpoint} is a folder of another program, not a run; make a run of a folder in Marian's format with "
            "`transformer-jax import FOLDER RUN`"
        )
    step, params, _, meta = checkpoints.read_params(checkpoint)
    if "decoder" not in params:
        raise UserError(f"{checkpoint} holds no translation model: its parameters are {', '.join(sorted(params))}")
    if meta.get("naming") != NAMING:
        raise UserError(
            f"{checkpoint}: naming scheme {meta.get('naming')!r} of its parameters is not known here, only {NAMING}"
        )
    config = core.load(TransformerConfig, meta["config"]["model"], f"{checkpoint}, stored configuration")
    vocabularies = Vocabularies.from_files(meta["tokenizer"])
    return Loaded(Transformer(config), params, vocabularies, config, step, meta)
