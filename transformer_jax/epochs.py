"""An endless stream of rows, epoch after epoch, each with a plan that is made when it is first needed.

The rows of an epoch come in an order drawn from the seed. The plan of the next epoch is made ahead, in a thread.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from transformer_jax import inputs
from transformer_jax.inputs import derive_key

P = TypeVar("P")
PLAN_AHEAD = 0.9
"""Share of an epoch after which the next epoch's plan is made in the background."""
LAST_PLANS = 3
"""Plans held at once: the current one, the next, and the one before for a batch that straddles."""


class Part(NamedTuple, Generic[P]):
    """Rows of one epoch."""

    epoch: int
    draw: int
    plan: P
    rows: np.ndarray
    """int64: numbers of rows in the plan, in the order of the stream."""


class Epochs(Generic[P]):
    """Which rows of which plan stand at a place of the stream."""

    def __init__(self, make: Callable[[int], P], count: Callable[[P], int], seed: int, draws: int = 0) -> None:
        """Nothing is planned yet.

        Args:
          make: the plan of a draw, a pure function of its number.
          count: how many rows a plan has.
          draws: 0 makes a plan for each epoch; N makes N and goes round them.
        """
        self._make_plan, self._count, self.seed, self.draws = make, count, seed, draws
        self._lock = threading.Lock()
        self._plans: dict[int, concurrent.futures.Future[P]] = {}
        self._first_rows = {0: 0}  # epoch -> its first row, for epochs known so far

    def num_rows(self, epoch: int) -> int:
        """Rows of an epoch; makes its plan if it is not there."""
        return self._count(self.plan(self.draw_of(epoch)))

    def prepare_epoch(self, epoch: int) -> None:
        """Start making an epoch's plan in a thread; whoever needs it first waits for it."""
        self._future(self.draw_of(epoch), background=True)

    def start_at(self, row: int, epoch: int, row_in_epoch: int) -> None:
        """Take the place of a row from a checkpoint (what `position` gave), so that no earlier epoch is planned."""
        self._first_rows[epoch] = row - row_in_epoch

    def position(self, row: int) -> dict[str, int]:
        """The epoch in which a row of the stream lies, and its number there."""
        epoch = max((e for e, first in self._first_rows.items() if first <= row), default=0)
        first = self._first_rows[epoch]
        while row >= first + (rows := self.num_rows(epoch)):
            first += rows
            epoch += 1
            self._first_rows[epoch] = first
        return {"epoch": epoch, "row_in_epoch": row - first}

    def parts(self, first_row: int, count: int) -> list[Part[P]]:
        """Rows first_row .. first_row + count - 1 of the stream, one part an epoch."""
        found = []
        row, end = first_row, first_row + count
        while row < end:
            place = self.position(row)
            epoch, start = place["epoch"], place["row_in_epoch"]
            draw = self.draw_of(epoch)
            plan = self.plan(draw)
            rows = self._count(plan)
            stop = min(rows, start + end - row)
            order = inputs.permute(derive_key(self.seed, "rows", epoch), rows, np.arange(start, stop))
            found.append(Part(epoch, draw, plan, order))
            if stop > PLAN_AHEAD * rows:
                self.prepare_epoch(epoch + 1)
            row += stop - start
        return found

    def draw_of(self, epoch: int) -> int:
        """Which plan an epoch has. Frozen draws come round again; only the order of rows is new in each epoch."""
        return epoch % self.draws if self.draws else epoch

    def plan(self, draw: int) -> P:
        """The plan of a draw, made now if it is not there."""
        return self._future(draw, background=False).result()

    def _future(self, draw: int, background: bool) -> concurrent.futures.Future[P]:
        with self._lock:
            known = self._plans.pop(draw, None)
            future = known or concurrent.futures.Future()
            self._plans[draw] = future  # the latest used comes last
            while len(self._plans) > LAST_PLANS:
                del self._plans[next(iter(self._plans))]
        if known is None and background:
            threading.Thread(target=self._make, args=(draw, future), name="plan", daemon=True).start()
        elif known is None:
            self._make(draw, future)
        return future

    def _make(self, draw: int, future: concurrent.futures.Future[P]) -> None:
        try:
            future.set_result(self._make_plan(draw))
        except BaseException as e:
            future.set_exception(e)
