"""A lock on a folder: one process at a time is at work in it. It goes with the process, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from transformer_jax.config import UserError

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if need be, and taken away if nothing is in it at the end.

    On a file system without locks nothing is kept out.

    Raises:
      UserError: another process holds it; the message is `busy`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    try:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(busy) from None
            except OSError:
                pass
            if not _is_file_of(lock.fileno(), path):  # whoever had it has just taken it away
                raise UserError(busy)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
