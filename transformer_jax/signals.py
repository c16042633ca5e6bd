"""SIGTERM and Ctrl-C: the first asks the run to save and leave, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """A context in which signals set a flag; calling it tells whether one came.

        with StopSignal() as stop:
            while not stop(): ...
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self._received is not None

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        return signal.Signals(self._received).name if self._received is not None else ""

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell gives it."""
        return 128 + (self._received or 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            os.write(2, b"second signal: leaving at once, without saving\n")
            os._exit(128 + number)
        self._received = number
        os.write(2, f"{signal.Signals(number).name}: saving after this step, then leaving; again to leave at once\n".encode())


def print_error(message: str) -> None:
    """A user's mistake, on standard error, without a traceback."""
    print(f"error: {message}", file=sys.stderr, flush=True)
