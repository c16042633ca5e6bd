"""The folder a preparation works in: one at a time, what has been made in it, and disks that are full."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer_jax import data_report, lock, shards, storage
from transformer_jax.config import UserError

CHUNKS = "chunks"
"""Folder of the sidecars of finished chunks, and of what else a preparation needs to go on."""
KEPT_BESIDE_CHUNKS = ("settings.json", "vocabulary.json", "survey.json", "survey.npy")
"""The other files in it."""
SPLITS = ("train", "heldout")
"""Of documents."""
ALL_SPLITS = (*SPLITS, "validation", "test")
"""What shard folders may be named after: of pairs too."""


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second preparation out of the folder, and every preparation out of a folder of other files."""
    with disk_errors(out):
        if out.is_dir() and not (out / shards.MANIFEST).exists() and not (out / CHUNKS).exists():
            strangers = sorted(p.name for p in out.iterdir() if p.name not in (lock.NAME, shards.CACHES))
            if strangers:
                raise UserError(
                    f"{out} holds files that `prepare` did not make ({', '.join(strangers[:3])}); name a new folder"
                )
    with contextlib.ExitStack() as stack:
        with disk_errors(out):
            stack.enter_context(
                lock.locked(out, f"another `prepare` is at work in {out}; wait for it, or name another folder")
            )
        yield


@contextlib.contextmanager
def working_copy(prepared: str | Path) -> Iterator[Path]:
    """Where to prepare data: the folder itself, or the copy of one in storage, which is sent when the block ends well.

    A preparation that was stopped on this machine goes on; one that was made elsewhere is fetched first.

    Raises:
      UserError: storage cannot be reached, or refuses. What was made stays in the copy.
    """
    remote, local = storage.path(prepared), storage.place(prepared)
    if not storage.is_remote(remote):
        yield local
        return
    if not (local / CHUNKS).is_dir() and storage.files(remote):
        storage.fetch(remote, leave_out=(shards.CACHES,))
    yield local
    storage.send(local, remote, leave_out=(shards.CACHES,))


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """A full disk, or one that cannot be written, as a message that says what is kept."""
    try:
        yield
    except OSError as e:
        if e.filename is not None and not str(e.filename).startswith(str(out)):
            raise UserError(f"{e.filename} cannot be read: {e.strerror}") from None
        # numpy's own error for a file that was written in part has neither a number nor a name.
        if e.filename is None and e.errno not in (None, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(out).free / 1e6:.0f} MB free"
        raise UserError(
            f"{out}: cannot be written ({e}{free}); finished shards are kept: make room and run `prepare` again, it "
            "goes on where it stopped"
        ) from None


def remove_made(out: Path) -> None:
    """Take away everything a preparation has made in `out`, the manifest first."""
    (out / shards.MANIFEST).unlink(missing_ok=True)
    for path in made_shards(out):
        shutil.rmtree(path, ignore_errors=True)
    for folder in (CHUNKS, shards.TOKENIZER, shards.CACHES):
        shutil.rmtree(out / folder, ignore_errors=True)
    for file in (data_report.JSON, data_report.TEXT):
        (out / file).unlink(missing_ok=True)


def made_shards(out: Path) -> list[Path]:
    """Shard folders, and what is left of half-written ones."""
    found = [p for split in ALL_SPLITS for pattern in (f"{split}-*", f".{split}-*.tmp") for p in out.glob(pattern)]
    return [path for path in found if path.is_dir()]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
