"""The small parent of a training process that is one of several: it waits, passes signals on, and says how it ended.

Where another host does not answer, JAX's runtime ends this process by SIGABRT, in which no Python runs any more. So the
training is a child, made by `fork` before JAX is imported; both write to the same standard output and error. The parent
holds no accelerator and next to no memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

from transformer_jax import exit_codes

PASSED_ON = {getattr(signal, "SIGRTMIN", 64) + 1 + i: s for i, s in enumerate((signal.SIGTERM, signal.SIGINT))}
"""The signals by which the parent passes on what it got. They differ from those, since a terminal or a cluster's
scheduler often signals parent and child both, which the child must not take for two signals."""
_DEATH_SIGNAL = 1


def supervise() -> None:
    """Fork; the child returns from this, and the parent ends with what became of the child.

    To be called before threads are started.
    """
    signals = set(PASSED_ON.values())
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        for passed, meant in PASSED_ON.items():
            if meant == number:
                os.kill(child, passed)

    for number in signals:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _, status = os.waitpid(child, 0)
    code, line = ending(os.waitstatus_to_exitcode(status))
    if line:
        os.write(2, f"{line}\n".encode())
    os._exit(code)


def ending(code: int) -> tuple[int, str]:
    """The exit code of the command, and a line of why, for a child that ended with `code` (negative: by a signal)."""
    if code >= 0:
        return code, ""
    if -code in PASSED_ON:  # it came before the child listened
        return exit_codes.of_signal(PASSED_ON[-code]), ""
    if -code == signal.SIGABRT:
        return exit_codes.RESTART, (
            "JAX's runtime has ended this process (SIGABRT), as it does when another host is lost or does not answer; "
            "which one stands above, beside `lost`, `no sign of life` or `tasks are unhealthy`. "
            f"Exit code {exit_codes.RESTART}: start all processes again, and the run goes on from its newest checkpoint"
        )
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    more = "; a machine that runs out of memory does that" if -code == signal.SIGKILL else ""
    return exit_codes.of_signal(-code), f"the training process was ended by {name}{more}"


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, so that a restart never finds an old one at work."""
    try:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    except (AttributeError, OSError):
        return  # not Linux
    if os.getppid() != parent:
        os._exit(exit_codes.RESTART)
