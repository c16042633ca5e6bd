"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformer_jax import storage
from transformer_jax.config import UserError


def check_place(target: Path) -> None:
    """Refuse a place where no file can be made, before the work whose result goes there.

    Raises:
      UserError: the folder of `target` is missing or takes no files, or `target` is a folder or cannot be written.
    """
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent}: no such folder; make it, or name a file elsewhere")
    if target.exists():
        if not os.access(target, os.W_OK):
            raise UserError(f"{target} cannot be written; name another file")
        return
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as e:
        raise UserError(f"{target.parent}: no file can be made there ({e.strerror}); name a file elsewhere") from None


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path beside `target`; the file written there takes its place when the block ends well, and is gone otherwise.

    Raises:
      UserError: as `check_place`.
    """
    if storage.is_remote(target):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / target.name
            storage.send_file(Path(folder) / target.name, target)
        return
    check_place(target)
    if target.exists() and not target.is_file():
        raise UserError(f"{target} is a device or a pipe, whose place a file would take; name a file")
    made = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield made
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
