"""Translation: the Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv 1706.03762), end to end."""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from pathlib import Path

    from transformer_jax.translation.loading import Loaded


def load(checkpoint: str | Path) -> Loaded:
    """A model, its parameters and vocabularies; see `translation.loading.load`, which is imported at the first call."""
    from transformer_jax.translation import loading

    return loading.load(checkpoint)
