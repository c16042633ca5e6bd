"""A run folder made from another program's model: step 0 holds its parameters, and training can start from there."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import config as core
from transformer_jax.checkpoint import Checkpoints, read_params
from transformer_jax.config import CheckpointConfig, UserError
from transformer_jax.named_trees import flat
from transformer_jax.new_folder import new_folder


class Texts(Protocol):
    """A tokenizer, or the two of a translation model, as the files that it is made of."""

    @property
    def digest(self) -> str:
        """SHA-256 over the files."""
        ...

    def files(self) -> dict[str, str]:
        """Name and text of each file."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files into a folder, which is made."""
        ...


def check_unused(run_dir: Path) -> None:
    """UserError unless `run_dir` is new or an empty folder; asked before the source is read."""
    if run_dir.exists() and not (run_dir.is_dir() and not any(run_dir.iterdir())):
        raise UserError(f"{run_dir} is in use; give a folder that is new or empty")


def write(
    run_dir: Path,
    source: str | Path,
    config: Any,
    params: Mapping[str, Any],
    tokenizer: Texts,
    naming: int,
    more_meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write `config.toml`, the tokenizer and a checkpoint of step 0, which is read back and compared bit for bit.

    Args:
      source: where the model comes from; its last part is kept in the checkpoint.
      config: what goes into `config.toml`, a dataclass or nested dictionary with `run_dir` and the model's settings.
      params: nested dict of numpy arrays.
      naming: version of the parameters' naming scheme.
      more_meta: stored with the checkpoint besides.

    Returns:
      `run_dir`.

    Raises:
      UserError: `run_dir` is in use, a parameter is not finite, the disk refuses, or the checkpoint reads back changed.
        Nothing is then left at `run_dir`.
    """
    check_unused(run_dir)
    for name, value in flat(params).items():
        if not np.all(np.isfinite(value)):
            raise UserError(
                f"{source}: {name} holds numbers that are not finite in float32; the file is damaged, or its training "
                "diverged"
            )
    meta = {
        "config": core.to_builtins(config),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "orbax-checkpoint")},
        "tokenizer": tokenizer.files(),
        "tokenizer_digest": tokenizer.digest,
        "imported_from": Path(source).name,
        "naming": naming,
    } | dict(more_meta or {})
    zero = np.zeros((), np.int32)
    state = {"step": zero, "params": dict(params), "nonfinite_total": zero, "nonfinite_in_row": zero}
    with new_folder(run_dir) as folder:
        (folder / "config.toml").write_text(core.dump_toml(config), encoding="utf-8")
        tokenizer.save(folder / "tokenizer")
        checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
        checkpoints.save(0, jax.tree.map(jnp.asarray, state), {}, meta)
        checkpoints.close()
        stored = flat(read_params(folder)[1])
        for name, value in flat(params).items():
            if not np.array_equal(stored[name], value, equal_nan=True):
                raise UserError(f"import failed its own check: {name} reads back changed; nothing was written")
    return run_dir
