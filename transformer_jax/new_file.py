"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformer_jax import storage
from transformer_jax.config import UserError


def check_place(target: Path, replaced: bool = False) -> None:
    """Refuse a place where no file can be made, before the work whose result goes there.

    Args:
      replaced: a file that is there will be replaced as a whole, as `new_file` does, and not opened and written.

    Raises:
      UserError: the folder of `target` is missing or takes no files, or `target` is a folder or cannot be written; of a
        symbolic link it is what it leads to that counts. If it is to be replaced, also if it is no plain file, or where
        this process prints, or its folder takes no other.
    """
    if replaced and _printed_to(target):
        raise UserError(f"{target} is where this program prints; name a file")
    target = Path(os.path.realpath(target))
    if target.is_symlink():
        raise UserError(f"{target}: a symbolic link that leads back to itself; name another file")
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent}: no such folder; make it, or name a file elsewhere")
    if target.exists():
        if not os.access(target, os.W_OK):
            raise UserError(f"{target} cannot be written; name another file")
        if not replaced:
            return
        if not target.is_file():
            raise UserError(f"{target} is a device or a pipe, whose place a file would take; name a file")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as e:
        raise UserError(f"{target.parent}: no file can be made there ({e.strerror}); name a file elsewhere") from None


def _printed_to(target: Path) -> bool:
    """Whether standard output or standard error goes there, whatever it is called (`/dev/stdout`)."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed, or nothing there
            if os.path.samestat(target.stat(), os.fstat(descriptor)) and not target.samefile(os.devnull):
                return True
    return False


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path beside `target`; the file written there takes its place when the block ends well, and is gone otherwise.

    A symbolic link stays one: what it leads to is replaced.

    Raises:
      UserError: as `check_place` of what is replaced.
    """
    if storage.is_remote(target):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / target.name
            storage.send_file(Path(folder) / target.name, target)
        return
    check_place(target, replaced=True)
    target = Path(os.path.realpath(target))
    made = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield made
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
