"""A run folder in storage while a run works in it: its records lie on this machine and are sent as they grow.

An object cannot be appended to, so what a run appends to (`log.txt`, `metrics.jsonl`, `times.jsonl`, TensorBoard's
events) is written to a copy and sent whole, in a thread of its own: training does not wait for storage. Storage has the
truth: what lies there replaces the copy at the start of a run, except a copy that goes on where the object ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from transformer_jax import storage
from transformer_jax.config import UserError

SEND_EVERY = 20.0
"""Seconds between two times that the records are sent while the run goes on."""
APART = ("checkpoints", "programs", "profile")
"""Of a run folder: what is written to storage by other means than with its records."""
_log = logging.getLogger(__name__)


class Mirrored:
    """A run folder as it is worked in: `local`, whose files go to storage if that is where the run folder is.

    Records are appended to here and sent as they stand, in a thread of its own: training does not wait for storage.
    """

    def __init__(self, name: str | Path):
        self.remote, self.local = storage.path(name), storage.place(name)
        self._sent: dict[str, tuple[int, int]] = {}
        self._wanted, self._leaving = threading.Event(), threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._go, name="storage", daemon=True)

    def send(self) -> None:
        """Have what has changed sent soon; returns at once."""
        self._wanted.set()

    def _go(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._leaving.is_set():
                return
            try:
                self.send_now()
                self._warned = False
            except UserError as e:
                if not self._warned:
                    _log.warning("the run's records were not sent, they will be later: %s", e)
                self._warned = True
            self._leaving.wait(SEND_EVERY)

    def send_now(self) -> None:
        """Send what has changed, and wait for it."""
        for name in storage.files(self.local):
            file, target = self.local / name, self.remote / name
            try:
                state = _state(file)
                content = file.read_bytes() if self._sent.get(name) != state else None  # all of it, for it may grow
            except FileNotFoundError:
                continue
            if content is not None:
                storage.write_bytes(target, content)
                self._sent[name] = state

    def begin(self, apart: tuple[str, ...]) -> None:
        """Fetch what is there. A copy that goes on where the object ends was not sent to its end, and is kept."""
        with storage.reported(self.remote):  # that nothing can be written is better known now
            (self.remote / ".probe.tmp").write_text("")
            (self.remote / ".probe.tmp").unlink()
        there = {k: item for k, item in storage.files(self.remote).items() if k.partition("/")[0] not in apart}
        for name in storage.files(self.local).keys() - there.keys():
            (self.local / name).unlink()
        for name, item in there.items():
            if not _goes_on(self.local / name, item):
                storage.fetch_changed(self.remote / name, self.local / name, item)
            if storage.same(self.local / name, item):
                self._sent[name] = _state(self.local / name)
        self.send_now()
        self._thread.start()

    def end(self) -> None:
        """Send the rest."""
        self._leaving.set()
        self._wanted.set()
        self._thread.join()
        try:
            self.send_now()
        except UserError as e:
            raise storage.StorageError(
                f"{e}\nthe run's newest records are in {self.local}; the same command on this machine sends them"
            ) from None


@contextlib.contextmanager
def mirrored(name: str | Path, apart: tuple[str, ...] = APART) -> Iterator[Mirrored]:
    """Work in a run folder; what is in storage is brought up to date now and then, and at the end.

    Args:
      apart: first parts of names that are written to storage by other means.
    """
    folder = Mirrored(name)
    if not storage.is_remote(name):
        yield folder
        return
    folder.local.mkdir(parents=True, exist_ok=True)
    folder.begin(apart)
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(UserError):  # there is an error to report already
            folder.end()
        raise
    folder.end()


def _goes_on(file: Path, item: storage.Item) -> bool:
    """Whether a local file is longer than an object, and begins with its content."""
    return (
        bool(item.md5)
        and file.exists()
        and file.stat().st_size > item.size
        and storage.md5_of(file, item.size) == item.md5
    )


def _state(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
