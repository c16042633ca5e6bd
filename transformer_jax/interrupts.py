"""Ctrl-C that is not lost: in Python alone it is an exception, which is swallowed where nobody can catch it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformer_jax import exit_codes

AGAIN_SECONDS = 0.1
"""After which an interrupt that was ignored comes again: the callback has ended by then."""


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """A context in which Ctrl-C raises KeyboardInterrupt in the main thread, but

    - while a module is imported, the process ends at once, with exit code 130: an extension that is being initialised
      takes the exception for a failed import, or aborts;
    - where it came in a callback whose errors Python ignores, as JAX has one for garbage collection, it comes again
      once that has ended.

    Nothing is changed where SIGINT is ignored or has a handler already, or in another thread.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    before = sys.unraisablehook

    def ignored(what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            # Not at once: it would be raised in this function, where it is ignored too.
            thread, number = threading.main_thread().ident, signal.SIGINT
            threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (thread, number)).start()
        else:
            before(what)

    signal.signal(signal.SIGINT, _handle)
    sys.unraisablehook = ignored
    try:
        yield
    finally:
        sys.unraisablehook = before
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _handle(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"stopped\n")
            os._exit(exit_codes.of_signal(number))
        frame = frame.f_back
    raise KeyboardInterrupt
