"""Scores of rows in batches, over all devices, each row exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.finetune.rows import Arrays, FixedRows
from bert_jax.finetune.task import FinetuneTask, loss_sums, scored, targets
from transformer_jax import sharding

Params = Any
UNSCORED = -1e9
"""What stands at the places of a row past the length of its batch, where the head was not run."""


class Forward:
    """The model compiled for a mesh, to score rows and to compute their loss.

    Args:
      batch_size: rows of a batch; rounded up to what the devices divide.
      preset: how the parameters are split over the mesh.
    """

    def __init__(self, task: FinetuneTask, mesh: Mesh, batch_size: int, preset: str, precision: str = "default"):
        devices = sharding.batch_devices(mesh)
        self.task, self.mesh, self.batch_size = task, mesh, -(-batch_size // devices) * devices
        boxed = jax.eval_shape(task.init, jax.random.key(0))
        self.params_sharding = sharding.tree_shardings(boxed, sharding.PARAMETER_RULES[preset], mesh)
        rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
        kind = task.head.kind

        def score(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            with jax.default_matmul_precision(precision):
                logits = task.logits(params, batch)
            if targets(kind)[0] not in batch:
                return logits, {}
            sums = {"loss": loss_sums(task.head, logits, batch)["head"], "count": scored(kind, batch).sum()}
            return logits, sums

        self._score = jax.jit(score, in_shardings=(self.params_sharding, rows), out_shardings=whole)

    def put(self, params: Params) -> Params:
        """Parameters on the devices."""
        return jax.tree.map(jax.device_put, params, self.params_sharding)

    def __call__(
        self, params: Params, arrays: Arrays, *, loss: bool = False, stop: Callable[[], bool] = lambda: False
    ) -> tuple[np.ndarray, float] | None:
        """Score every row.

        Args:
          params: on the devices.
          arrays: see `FixedRows`; the targets are looked at only if `loss`.

        Returns:
          (logits float32 [n, ...] in the order of the rows, mean loss or NaN); None if `stop` asked to leave half-way.
        """
        rows = FixedRows(arrays, targets(self.task.head.kind) if loss else (), self.batch_size)
        out: np.ndarray | None = None
        sums = {"loss": 0.0, "count": 0.0}
        pending: tuple[int, Any] | None = None

        def take(first: int, found: Any) -> None:
            nonlocal out
            logits, batch_sums = jax.device_get(found)
            places = rows.order[first : first + len(logits)]
            if out is None:
                shape = self._shape(arrays, logits)
                out = np.full(shape, UNSCORED, np.float32)
            if self.task.head.has_pooler:
                out[places] = logits[: len(places)]
            else:
                out[places, : logits.shape[1]] = logits[: len(places)]
            for name, value in batch_sums.items():
                sums[name] += float(value)

        with jax.set_mesh(self.mesh):
            for first in range(0, rows.num_rows, self.batch_size):
                if stop():
                    return None
                runs = sharding.host_rows(self.batch_size, self.mesh)
                parts = [rows.batch(first + start, count, start) for start, count in runs]
                batch = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
                found = self._score(params, sharding.put_batch(batch, self.mesh))
                # The last batch is read only now that this one runs.
                if pending is not None:
                    take(*pending)
                pending = (first, found)
        if pending is not None:
            take(*pending)
        assert out is not None, "no rows to score"
        return out, sums["loss"] / sums["count"] if sums["count"] else float("nan")

    def _shape(self, arrays: Arrays, logits: np.ndarray) -> tuple[int, ...]:
        n, length = len(arrays["input_ids"]), arrays["input_ids"].shape[-1]
        if self.task.head.has_pooler:
            return (n, *logits.shape[1:])
        return (n, length, *logits.shape[2:])
