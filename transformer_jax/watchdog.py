"""A thread that ends a process which no longer moves on, so that a hung device or file system ends the run.

Where another process is lost, the runtime or `transformer_jax.host_links` end this one. What neither of them sees is
a process that lives and waits for ever: for a collective that was never sent, a device, or a network drive.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from transformer_jax import exit_codes
from transformer_jax.config import HostsConfig
from transformer_jax.goodput import Clock

RHYTHM = ("step", "input")
"""Phases that `step_limit` is for; the others have `phase_limit`."""


class Watchdog:
    """A context; within it the process ends with `exit_codes.RESTART` if the clock shows no sign of progress.

    Args:
      clock: its `beats` are the signs of progress, its phase and its median step set the limit.
      log: a file that the places where all threads stand are added to; they go to standard error as well.
      leave: called with what happened, in place of the plain end.
    """

    def __init__(self, clock: Clock, limits: HostsConfig, log: Path | None, leave: Callable[[str], None] | None = None):
        self._clock, self._limits, self._log = clock, limits, log
        self._leave = leave or (lambda why: os._exit(exit_codes.RESTART))
        self._end = threading.Event()
        self._period = min(max(min(limits.step_limit, limits.phase_limit) / 20, 0.05), 5.0)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def limit(self) -> float:
        """Seconds without progress that are allowed just now."""
        if self._clock.phase in RHYTHM:
            return max(self._limits.step_limit, self._limits.step_factor * self._clock.median_step())
        return self._limits.phase_limit

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(self._period + 1)

    def _watch(self) -> None:
        beats, still, last = self._clock.beats, 0.0, time.monotonic()
        while not self._end.wait(self._period):
            now = time.monotonic()
            # A process that was stopped and goes on has not stalled meanwhile.
            still, last = still + min(now - last, 2 * self._period), now
            if self._clock.beats != beats:
                beats, still = self._clock.beats, 0.0
            elif still > self.limit():
                self._stalled(still)
                return

    def _stalled(self, seconds: float) -> None:
        phase = self._clock.phase
        what = "hosts.step_limit" if phase in RHYTHM else "hosts.phase_limit"
        why = f"stalled: no progress for {seconds:.0f} s in phase `{phase}` ({what})"
        os.write(2, f"{why}; where its threads stand:\n".encode())
        faulthandler.dump_traceback(sys.__stderr__ if sys.__stderr__ is not None else 2)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as f:
                f.write(f"{why}; where its threads stand:\n")
                f.flush()
                faulthandler.dump_traceback(f)
        os.write(2, f"leaving with exit code {exit_codes.RESTART}\n".encode())
        self._leave(why)
