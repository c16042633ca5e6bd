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
    elif out.exists():
        raise UserError(f"{out} is a file; give a folder that is new or empty")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place when the block ends well, and is gone when it does not.

    For a target in storage the folder is on this machine, and sent when the block ends well.

    Raises:
      UserError: the disk refuses, or `target` holds what is not in the new folder and would be lost; the folder at
        `target` is then the one that was there before.
    """
    if storage.is_remote(target):
        with tempfile.TemporaryDirectory() as made_here:
            yield Path(made_here)
            _refuse_to_lose(target, Path(made_here))
            storage.send(Path(made_here), target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent / f".{target.name}.{os.getpid()}.partial"
    old = made.with_suffix(".old")
    try:
        made.mkdir()
        yield made
        _refuse_to_lose(target, made)
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


def _refuse_to_lose(target: Path, made: Path) -> None:
    """UserError if the folder to be replaced holds what the new one does not."""
    there = {p.name for p in target.iterdir()} if target.is_dir() else set()
    lost = sorted(there - {p.name for p in made.iterdir()})
    if lost and storage.UNFINISHED not in there:
        raise UserError(
            f"{target} holds {lost[0]}, which this export does not write and which would be lost; move it away, or "
            "export to another folder"
        )
