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
      UserError: the folder of `target` is missing or takes no files, or `target` is a folder or cannot be written; of a
        symbolic link it is what it leads to that counts.
    """
    target = Path(os.path.realpath(target))
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent}: no such folder; make it, or name a file elsewhere")
    if target.exists():
        if not os.access(target, os.W_OK):
            raise UserError(f"{target} cannot be written; name another file")
    else:
        _check_folder(target.parent)


def _check_folder(folder: Path) -> None:
    """UserError if no file can be made in the folder."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise UserError(f"{folder}: no file can be made there ({e.strerror}); name a file elsewhere") from None


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path beside `target`; the file written there takes its place when the block ends well, and is gone otherwise.

    A symbolic link stays one: what it leads to is replaced.

    Raises:
      UserError: as `check_place`; also if `target` is no plain file, or the folder of one that is there takes no other.
    """
    if storage.is_remote(target):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / target.name
            storage.send_file(Path(folder) / target.name, target)
        return
    target = Path(os.path.realpath(target))
    check_place(target)
    if target.exists() and not target.is_file():
        raise UserError(f"{target} is a device or a pipe, whose place a file would take; name a file")
    _check_folder(target.parent)
    made = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield made
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
