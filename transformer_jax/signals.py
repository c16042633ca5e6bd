"""SIGTERM and Ctrl-C: the first asks the run to save and leave, the second leaves at once.

A scheduler and a script that restarts the run may both send SIGTERM when a machine is taken away; two that come within
a second are one.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from transformer_jax.supervisor import PASSED_ON

STOPPING = (signal.SIGTERM, signal.SIGINT)
SAME_SECONDS = 1.0
"""A SIGTERM that comes so soon after the first signal is the same one. (Somebody who types Ctrl-C twice means it.)"""


class StopSignal:
    """A context, for the main thread, in which signals set a flag; calling it tells whether one came.

        with StopSignal() as stop:
            while not stop(): ...

    Python runs a handler only between two of its own instructions, which is never while XLA compiles for a minute. So
    a thread reads the signals from a socket, into which Python writes them at once: it answers the first and ends the
    process at the second, whatever the main thread does.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._came_here = False  # a signal to this process itself, not through its parent
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*STOPPING, *PASSED_ON):
            self._before[number] = signal.signal(number, self._handle)
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # What the parent passes on late, and what comes here after it has, is the signal that is being obeyed;
            # unhandled it would end the process.
            late = self._received is not None and (number in PASSED_ON or not self._came_here)
            signal.signal(number, signal.SIG_IGN if late else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # which ends the thread, once it has read what came
        self._watcher.join(1)

    def __call__(self) -> bool:
        return self._received is not None

    @property
    def name(self) -> str:
        """The signal's name, such as SIGTERM."""
        return signal.Signals(self._received).name if self._received is not None else ""

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell gives it; SIGTERM's where another process received the signal."""
        return 128 + (self._received or signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The flag is set here too, in case a library has put its own socket in the place of ours for a while.
        self._received = self._received or PASSED_ON.get(number, number)
        self._came_here = self._came_here or number not in PASSED_ON

    def _watch(self) -> None:
        with self._reader:
            came: dict[str, float] = {}
            while numbers := self._reader.recv(1):
                way = "parent" if numbers[0] in PASSED_ON else "here"
                number = PASSED_ON.get(numbers[0], numbers[0])
                if number not in STOPPING:
                    continue
                now = time.monotonic()
                if way in came:
                    if number == signal.SIGTERM and now - came[way] < SAME_SECONDS:
                        continue
                    os.write(2, b"second signal: leaving at once, without saving\n")
                    os._exit(128 + number)
                came[way] = now
                self._came_here = "here" in came
                if len(came) > 1:
                    continue  # the same signal, to the parent and to this process
                self._received = self._received or number
                name = signal.Signals(number).name
                os.write(2, f"{name}: saving after this step, then leaving; once more leaves at once\n".encode())
