"""The mean of several checkpoints' parameters (Vaswani et al. 2017, section 6.1) as a run of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import checkpoint as checkpoints
from transformer_jax import config as core
from transformer_jax import storage
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import UserError
from transformer_jax.named_trees import flat, nest
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.run_file import write_config
from transformer_jax.step_folders import by_worth
from transformer_jax.translation import run_file
from transformer_jax.translation.vocabularies import Vocabularies

Say = Callable[[str], None]
_log = logging.getLogger(__name__)


def average(names: Sequence[str], out: str | Path, last: int = 0, say: Say = _log.info) -> Path:
    """Write a run folder whose one step holds the mean of the parameters, in which every command finds a model.

    It has no optimizer, so training does not go on in it, but may start from it by `[init]`. One checkpoint at a time
    is in memory beside the sum, which is taken in float64.

    Args:
      names: RUN or RUN@STEP each; with `last`, one run.
      last: take this many of the newest steps of the run.
      say: called with one line that names the steps.

    Returns:
      `out`.

    Raises:
      UserError: a checkpoint that cannot be read, or is of another model or vocabulary than the first; fewer steps than
        `last`; `out` is in use, or the disk refuses. Nothing is then left at `out`.
    """
    out = storage.path(out)
    check_target(out, overwrite=False, marks=())
    names = _newest(names, last) if last else list(names)
    if not names:
        raise UserError("name at least one checkpoint")
    total: dict[str, np.ndarray] = {}
    steps: list[int] = []
    first: dict[str, Any] = {}
    for name in names:
        step, params, _, meta = checkpoints.read_params(name)
        if not total:
            first = meta
            total = {key: np.asarray(x, np.float64) for key, x in flat(params).items()}
        else:
            _check_same(names[0], first, name, meta)
            for key, x in flat(params).items():
                total[key] += x
        steps.append(step)
    mean = {key: (x / len(names)).astype(np.float32) for key, x in total.items()}
    say(f"the mean of {len(steps)} checkpoints, of steps {', '.join(map(str, steps))}")
    _write(
        out, mean, max(steps), first, [f"{Path(n).name.split('@')[0]}@{s}" for n, s in zip(names, steps, strict=True)]
    )
    return out


def _newest(names: Sequence[str], last: int) -> list[str]:
    if last < 1:
        raise UserError(f"--last is {last}; it must be at least 1")
    if len(names) != 1:
        raise UserError(f"--last takes the newest steps of one run, and {len(names)} checkpoints are named")
    root, step = checkpoints.locate(names[0])
    if step is not None:
        raise UserError(f"--last takes the newest steps of a run; name the run alone, without @{step}")
    there = checkpoints.steps(root)
    if len(there) < last:
        listed = ", ".join(map(str, there)) or "none"
        raise UserError(
            f"{names[0]} has {len(there)} complete checkpoints ({listed}), fewer than --last {last}; lower it, or keep "
            "more of them with checkpoint.keep_last"
        )
    # Not those that a stop left in between: the mean is that of a run without stops.
    every = checkpoints.read_meta(root)[2]["config"].get("checkpoint", {}).get("every", 0)
    return [f"{names[0]}@{number}" for number in sorted(by_worth(there, every)[-last:])]


def _check_same(one: str, first: dict[str, Any], other: str, meta: dict[str, Any]) -> None:
    """Refuse two checkpoints whose parameters do not mean the same."""
    # Through the dataclass: the older of two may have been written before a setting was there.
    a, b = (core.to_builtins(run_file.config_of(x).model) for x in (first, meta))
    changed = core.differences(a, b, "model.")
    lines = [f"{k}: {x!r} and {y!r}" for k, (x, y) in changed.items() if k.startswith(run_file.FIXED)]
    if first.get("naming") != meta.get("naming"):
        lines.append(f"naming scheme: {first.get('naming')} and {meta.get('naming')}")
    if first["tokenizer_digest"] != meta["tokenizer_digest"]:
        lines.append("the vocabularies")
    if lines:
        raise UserError(f"{one} and {other} are different models, so their mean is none:\n  " + "\n  ".join(lines))


def _write(out: Path, mean: dict[str, np.ndarray], step: int, meta: dict[str, Any], sources: list[str]) -> None:
    config = dataclasses.replace(run_file.config_of(meta), run_dir=str(out))
    vocabularies = Vocabularies.from_files(meta["tokenizer"])
    meta = {**meta, "config": core.to_builtins(config), "averaged_from": sources}
    zero = np.zeros((), np.int32)
    state = {"step": np.int32(step), "params": nest(mean.items()), "nonfinite_total": zero, "nonfinite_in_row": zero}
    with new_folder(out) as folder:
        # Paths in the configuration are seen from where the folder will be.
        write_config(folder, config, run_file.BESIDE)
        vocabularies.save(folder / "tokenizer")
        stored = Checkpoints(folder / "checkpoints", config.checkpoint)
        stored.save(step, jax.tree.map(jnp.asarray, state), {}, meta)
        stored.close()
        for key, x in flat(checkpoints.read_params(folder)[1]).items():
            if not np.array_equal(x, mean[key], equal_nan=True):
                raise UserError(f"the average failed its own check: {key} reads back changed; nothing was written")
