"""A folder that is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from transformer_jax import storage
from transformer_jax.config import UserError


def check_target(out: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Refuse a target that holds anything, or with `overwrite` anything but an earlier export.

    Args:
      marks: files by which an earlier export is known; none if nothing of the kind is ever replaced.

    Raises:
      UserError: `out` is a file, or a folder in use.
    """
    if not storage.is_remote(out) and out.is_symlink():
        raise UserError(f"{out} is a symbolic link; give the folder itself, or another one")
    if out.is_dir():
        contents = {p.name for p in out.iterdir()}
        if overwrite and storage.UNFINISHED in contents:  # of an export that did not arrive
            return
        if not contents:
            return
        if not overwrite:
            instead = ", or replace an earlier export with --overwrite" if marks else ""
            raise UserError(f"{out} is not empty; give another folder{instead}")
        if not set(marks) <= contents:
            raise UserError(f"{out} is not an earlier export of this kind (no {' and '.join(marks)}), so it is kept")
        # As `new_folder` refuses at the end what no export of the kind writes; of hidden files that is known before.
        if hidden := sorted(name for name in contents if name.startswith(".")):
            raise _loss(out, hidden[0])
    elif out.exists():
        raise UserError(f"{out} is a file; give a folder that is new or empty")


@contextlib.contextmanager
def new_folder(target: Path, replaces: tuple[str, ...] = ()) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and is gone when it does not.

    For a target in storage the folder is on this machine, and sent when the block ends well.

    Args:
      replaces: files that an earlier folder of the kind may have and this one need not.

    Raises:
      UserError: the disk refuses, or `target` holds what is not in the new folder and would be lost; the folder at
        `target` is then the one that was there before.
    """
    if storage.is_remote(target):
        with tempfile.TemporaryDirectory() as made_here:
            yield Path(made_here)
            _refuse_to_lose(target, Path(made_here), replaces)
            storage.send(Path(made_here), target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent / f".{target.name}.{os.getpid()}.partial"
    old = made.with_suffix(".old")
    try:
        made.mkdir()
        yield made
        _refuse_to_lose(target, made, replaces)
        if target.exists():
            target.rename(old)
        try:
            made.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    except (OSError, SafetensorError) as e:  # a full disk is one of either
        raise UserError(f"{target} cannot be written: {e}") from e
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _refuse_to_lose(target: Path, made: Path, replaces: tuple[str, ...]) -> None:
    """UserError if the folder to be replaced holds what the new one does not."""
    there = _contents(target) if target.is_dir() else set()
    lost = sorted(there - _contents(made) - set(replaces))
    if lost and storage.UNFINISHED not in there:
        raise _loss(target, lost[0])


def _contents(folder: Path) -> set[str]:
    """Names of all files and folders within, as paths from `folder`."""
    if storage.is_remote(folder):
        return {*storage.files(folder), *(p.name for p in folder.iterdir())}
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*")}


def _loss(target: Path, name: str) -> UserError:
    return UserError(
        f"{target} holds {name}, which this export does not write and which would be lost; move it away, or "
        "export to another folder"
    )
