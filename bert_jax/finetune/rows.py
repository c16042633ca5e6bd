"""Rows of fine-tuning as the engine takes them: the training order, and fixed rows for evaluation and prediction.

A batch is as long as its longest row needs, from a short ladder of lengths, so that few programs are compiled and short
texts cost little. The length follows from the whole global batch, so every host makes arrays of the same shape.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping

import numpy as np

from bert_jax.finetune.task import INPUTS
from transformer_jax.inputs import derive_key, permute

Arrays = Mapping[str, np.ndarray]
SHORTEST = 32
"""Tokens; no batch is made shorter than this."""


def ladder(longest: int) -> tuple[int, ...]:
    """The lengths that batches may have: SHORTEST and its doubles, and the longest."""
    found = [SHORTEST]
    while found[-1] * 2 < longest:
        found.append(found[-1] * 2)
    return (*[n for n in found if n < longest], longest)


def lengths(arrays: Arrays) -> np.ndarray:
    """Real tokens of each row, of several choices the most: int64 [n]."""
    real = (arrays["sequence_ids"] > 0).sum(-1, dtype=np.int64)
    return real if real.ndim == 1 else real.max(-1)


def fingerprint(arrays: Arrays) -> str:
    """A digest of names, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


class _Batches(abc.ABC):
    """Batches of the rows that `_rows` puts at each place."""

    def __init__(self, arrays: Arrays, names: tuple[str, ...], batch_size: int):
        self.arrays = {name: arrays[name] for name in (*INPUTS, *names)}
        self.batch_size = batch_size
        self.row_length: int = arrays["input_ids"].shape[-1]
        self._lengths, self._ladder = lengths(arrays), ladder(self.row_length)

    def batch(self, first_row: int, count: int, offset: int = 0) -> dict[str, np.ndarray]:
        """The rows at places first_row .. first_row + count; `row_ids` count from `offset`."""
        start = first_row - offset
        everyone = self._rows(np.arange(start, start + self.batch_size))
        length = self._length(everyone)
        rows = self._rows(np.arange(first_row, first_row + count))
        out = {}
        for name, array in self.arrays.items():
            along_length = name in INPUTS or (array.ndim == 2 and array.dtype.kind == "i")  # tags, not label sets
            out[name] = array[np.maximum(rows, 0)][..., : length if along_length else None]
        filler = rows < 0
        out["sequence_ids"][filler] = 0
        out["weights"] = (~filler).astype(np.float32)
        out["row_ids"] = np.arange(offset, offset + count, dtype=np.int32)
        return out

    @abc.abstractmethod
    def _rows(self, places: np.ndarray) -> np.ndarray:
        """The number of the row at each place, -1 for a filler: int [places]."""

    def _length(self, rows: np.ndarray) -> int:
        real = rows[rows >= 0]
        longest = int(self._lengths[real].max()) if len(real) else 0
        return next(n for n in self._ladder if n >= longest)


class FixedRows(_Batches):
    """Rows in order of length, each once; past their end come filler rows that weigh nothing.

    Args:
      arrays: INPUTS int32 [n, L] (choice: [n, K, L]) and, to compute a loss, the targets of the kind, with n rows.
      names: the targets that go into a batch.
      batch_size: rows of the global batch, which decide how long its rows are.
    """

    def __init__(self, arrays: Arrays, names: tuple[str, ...], batch_size: int):
        super().__init__(arrays, names, batch_size)
        self.order = np.argsort(self._lengths, kind="stable")
        """The number of the row at each place: int64 [n]."""
        self.num_rows = len(self.order)

    def _rows(self, places: np.ndarray) -> np.ndarray:
        return np.append(self.order, -1)[np.minimum(places, self.num_rows)]


class TrainingRows(_Batches):
    """The rows of training: each epoch holds every row once, in an order drawn from the seed and the epoch.

    The order goes on from one epoch to the next without a short batch in between; past the last epoch come fillers, so
    that every row counts equally often.

    Args:
      epochs: a fraction ends within an epoch.
    """

    def __init__(self, arrays: Arrays, names: tuple[str, ...], batch_size: int, seed: int, epochs: float):
        super().__init__(arrays, names, batch_size)
        self.seed, self.count = seed, len(arrays["input_ids"])
        self.total = max(1, round(self.count * epochs))
        self.steps = -(-self.total // batch_size)
        """Steps that all epochs take."""
        self.fingerprint = fingerprint(self.arrays)

    def num_rows(self, epoch: int) -> int:
        """Rows of an epoch."""
        return self.count

    def start_at(self, row: int, epoch: int, row_in_epoch: int) -> None:
        """Nothing to do: what stands at a place follows from its number."""

    def position(self, row: int) -> dict[str, int]:
        """Where in its epoch a row lies."""
        return {"epoch": row // self.count, "row_in_epoch": row % self.count}

    def _rows(self, places: np.ndarray) -> np.ndarray:
        epochs, within = np.divmod(places, self.count)
        rows = np.full(len(places), -1)
        for epoch in np.unique(epochs):
            chosen = (epochs == epoch) & (places < self.total)
            key = derive_key(self.seed, "fine-tuning order", int(epoch))
            rows[chosen] = permute(key, self.count, within[chosen])
        return rows
