"""Folders and files in Google Cloud Storage: every path that a user gives may begin with `gs://`.

`path` gives what stands for a path: a `pathlib.Path` here, an `etils.epath.Path` there, which has the same methods.
Checkpoints are written and read where they are. What has to be appended to, mapped into memory or written by other
libraries has a copy on this machine (`place`), which is fetched, or sent, file by file:

- a run's records (`transformer_jax.mirror`) are sent while the run goes on, since an object cannot be appended to;
- a prepared folder is fetched once and held against its manifest (`transformer_jax.manifest.local_copy`);
- an export (`transformer_jax.new_folder`) is written here and sent when it is whole.

An object appears whole or not at all. A folder does not: while it is sent, `.unfinished` lies in it, and what has that
is not read. Requests that fail for a passing reason are made again, with growing pauses, for about half a minute.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar, cast

from transformer_jax.config import UserError

UNFINISHED = ".unfinished"
LAST = ("digests.json", "manifest.json", "config.json")
"""Files by which a folder is taken for whole: they are sent after all others."""
QUIET = 60.0
"""Seconds without a byte after which a request counts as failed."""
ATTEMPTS = 3
"""Besides the repetitions of a request: for an answer that never came, and for content that arrived changed."""
_AT_ONCE = 8
_ASIDE = re.compile(r"\.(unfinished|lock|.*\.(tmp|lock|partial|deleting))")
_log = logging.getLogger(__name__)
T = TypeVar("T")

# Read when gcsfs is imported: otherwise it asks another service, over gRPC, for the kind of each bucket.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")


class StorageError(UserError):
    """Storage that cannot be reached, or refuses."""


class Item(NamedTuple):
    """A file of a folder."""

    size: int
    md5: str
    """Hexadecimal; empty where the storage does not say."""


def is_remote(name: str | os.PathLike[str]) -> bool:
    """Whether a path names something in Google Cloud Storage."""
    return os.fspath(name).startswith("gs://")


def path(name: str | os.PathLike[str]) -> Path:
    """What stands for a path the user gave.

    Raises:
      UserError: a `gs://` path without the extra `gcs` or without a bucket, or another scheme.
    """
    text = os.fspath(name)
    if not is_remote(text):
        if re.match(r"[a-z][a-z0-9+]*://", text):
            raise UserError(
                f"{text}: of addresses only gs://BUCKET/... can be read and written; or name a local folder"
            )
        return Path(name)
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f'{text}: gs:// paths need the extra `gcs`: pip install "bert-transformer-jax[gcs]"')
    if not re.match(r"gs://[^/]+(/|$)", text):
        raise UserError(f"{text}: names no bucket; write gs://BUCKET/FOLDER")
    _filesystem()  # with our settings, before epath makes one with others
    from etils import epath

    return cast(Path, epath.Path(text))


def absolute(folder: Path) -> Path:
    """The path from the root; one in storage is that already."""
    return folder if is_remote(folder) else folder.absolute()


def place(name: str | os.PathLike[str]) -> Path:
    """Where the copy of a folder in storage lies on this machine; a local folder is its own copy.

    Copies are kept in `$XDG_CACHE_HOME/transformer-jax/gs` (default: `~/.cache`), and can be deleted when nothing runs.
    """
    if not is_remote(name):
        return Path(name)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [part for part in os.fspath(path(name)).removeprefix("gs://").split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise UserError(f"{name}: write the path without . and ..")
    return home.joinpath("transformer-jax", "gs", *parts)


# Single files


def read_text(file: Path) -> str:
    """The content as UTF-8; what is not UTF-8 is replaced."""
    return file.read_bytes().decode("utf-8", errors="replace")


def write_whole(file: Path, text: str) -> None:
    """Write the whole file or nothing, and have it on the disk, or in storage, before this returns."""
    if is_remote(file):
        with reported(file):
            file.write_bytes(text.encode())
        return
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(file)
    for folder in (file.parent, file.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_bytes(file: Path, content: bytes) -> None:
    """Write an object in storage."""
    with reported(file):
        again(lambda: _filesystem().pipe_file(os.fspath(file), content))


def size(file: Path) -> int:
    """Bytes of a file; FileNotFoundError where there is none."""
    return int(_filesystem().info(os.fspath(file))["size"]) if is_remote(file) else file.stat().st_size


def sha256(file: Path) -> str:
    """The digest of a file's content, hexadecimal."""
    if is_remote(file):
        with _filesystem().open(os.fspath(file), "rb", block_size=1 << 24, cache_type="readahead") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch_file(source: Path, target: Path, wrong: Callable[[Path], str | None]) -> None:
    """Copy a file from storage, under another name until it has been found right.

    Args:
      wrong: what is wrong with the copy, in words, if anything; it is then fetched again.

    Raises:
      StorageError: it cannot be fetched, or arrives wrong each time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    problem: str | None = None
    try:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            with reported(source):
                again(lambda: _filesystem().get_file(os.fspath(source), os.fspath(temporary)))
            problem = wrong(temporary)
            if problem is None:
                temporary.replace(target)
                return
        raise StorageError(f"{source}: {problem}, {ATTEMPTS} times over; bring back the file as it was")
    finally:
        temporary.unlink(missing_ok=True)


# Folders


def files(folder: Path) -> dict[str, Item]:
    """The files below a folder, in order of their names; empty where there is no such folder.

    Marks, locks and half-written files, whose names begin with a dot, are left out.
    """
    found = {}
    if is_remote(folder):
        prefix = os.fspath(folder).removeprefix("gs://").rstrip("/") + "/"
        with reported(folder):
            listed = again(lambda: _filesystem().find(os.fspath(folder), detail=True))
        for name, info in listed.items():
            if name.startswith(prefix) and info["type"] == "file" and not name.endswith("/"):
                md5 = base64.b64decode(info.get("md5Hash") or "").hex()
                found[name.removeprefix(prefix)] = Item(int(info["size"]), md5)
    else:
        for file in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # it may be on its way to another name
                if file.is_file():
                    found[file.relative_to(folder).as_posix()] = Item(file.stat().st_size, "")
    return {name: found[name] for name in sorted(found) if not any(map(_ASIDE.fullmatch, name.split("/")))}


def matching(pattern: str) -> list[Path]:
    """The files in storage that a path or glob names, as they are copied to this machine; in order of their names."""
    if not glob.has_magic(pattern):
        return [local_file(pattern)] if not path(pattern).is_dir() else []
    fixed = pattern.split("/")
    fixed = fixed[: next(i for i, part in enumerate(fixed) if glob.has_magic(part))]
    folder, rest = path("/".join(fixed)), pattern.split("/")[len(fixed) :]
    depth = len(rest)
    names = [n for n in files(folder) if n.count("/") + 1 == depth and PurePosixPath(n).match("/".join(rest))]
    return [local_file(folder / name) for name in names]


def local_file(name: str | os.PathLike[str]) -> Path:
    """A file as it lies on this machine: itself, or the copy of one in storage, which is fetched if it has changed.

    Raises:
      UserError: there is no such file in storage, or it cannot be fetched.
    """
    if not is_remote(name):
        return Path(name)
    source, target = path(name), place(name)
    with reported(source):
        info = again(lambda: _filesystem().info(os.fspath(source)))
    item = Item(int(info["size"] or 0), base64.b64decode(info.get("md5Hash") or "").hex())
    with locked(target.parent):
        fetch_changed(source, target, item)
    return target


def remove_tree(folder: Path, ignore_errors: bool = False) -> None:
    """Remove a folder and all that is in it."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=ignore_errors)
        return
    try:
        with reported(folder), contextlib.suppress(FileNotFoundError):
            _filesystem().rm(os.fspath(folder), recursive=True)
    except StorageError:
        if not ignore_errors:
            raise


def fetch(source: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """Bring the copy of a folder in storage up to date; returns where it lies. A local folder is returned as it is.

    Args:
      leave_out: first parts of names that are not copied.

    Raises:
      UserError: nothing is there, it was never finished, or it cannot be fetched.
    """
    if not is_remote(source):
        return source
    target, there = place(source), files(source)
    refuse_unfinished(source)
    there = {name: item for name, item in there.items() if name.partition("/")[0] not in leave_out}
    if not there:
        raise StorageError(f"{source}: no such folder")
    with locked(target):
        for name in files(target).keys() - there.keys():
            (target / name).unlink()
        each(lambda name: fetch_changed(source / name, target / name, there[name]), there)
    return target


def send(source: Path, target: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Make the folder `target` in storage as the local folder `source` is; files that are there already are not sent.

    Raises:
      StorageError: it could not be done; the folder in storage is then marked as unfinished.
    """
    here = {name: item for name, item in files(source).items() if name.partition("/")[0] not in leave_out}
    there = files(target)
    changed = {name for name, item in here.items() if name not in there or not same(source / name, there[name])}
    gone = there.keys() - here.keys()
    if not changed and not gone:
        with reported(target):
            (target / UNFINISHED).unlink(missing_ok=True)
        return
    write_whole(target / UNFINISHED, "the files of this folder were not all sent; do again what made it\n")
    last = {name for name in changed if name.rpartition("/")[2] in LAST}
    each(lambda name: send_file(source / name, target / name), sorted(changed - last))
    each(lambda name: send_file(source / name, target / name), sorted(last))
    with reported(target):
        for name in gone:
            (target / name).unlink(missing_ok=True)
        (target / UNFINISHED).unlink(missing_ok=True)


def refuse_unfinished(folder: Path) -> None:
    """UserError for a folder in storage of which not all files were sent."""
    with reported(folder):
        unfinished = is_remote(folder) and (folder / UNFINISHED).exists()
    if unfinished:
        raise UserError(f"{folder} is not whole: sending it was stopped before its end; do again what made it")


def send_file(source: Path, target: Path) -> None:
    """Copy a file to storage, and see that it arrived as it is."""
    with reported(target):
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(2.0 ** (attempt - 1))
            again(lambda: _filesystem().put_file(os.fspath(source), os.fspath(target)))
            info = _filesystem().info(os.fspath(target))
            if same(source, Item(int(info["size"]), base64.b64decode(info.get("md5Hash") or "").hex())):
                return
    raise StorageError(f"{target}: what arrived is not what was sent, {ATTEMPTS} times over")


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Wait until no other process of this machine changes the copy `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# Errors


@contextlib.contextmanager
def reported(where: str | Path) -> Iterator[None]:
    """Turn what the network and the storage raise into one message."""
    try:
        yield
    except Exception as e:
        said = explained(e) if is_remote(where) else None
        if said is None and is_remote(where) and isinstance(e, FileNotFoundError):
            said = "no such bucket or object"
        if said is None:
            raise
        raise StorageError(f"{where}: {said}") from e


def explained(error: BaseException) -> str | None:
    """What an error of the network or the storage says, or None for any other error."""
    of = type(error).__module__.partition(".")[0]
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, OSError) and text.startswith("Forbidden"):
        return f"storage refuses: {text}; see that the credentials of this machine may read and write there"
    if type(error).__module__.startswith("google.auth") or getattr(error, "code", None) == 401:
        return f"no valid credentials: {text}; run `gcloud auth application-default login`"
    if of in ("gcsfs", "aiohttp", "requests", "google") or isinstance(error, TimeoutError):
        return f"storage cannot be reached or does not answer, tried again without success: {text}"
    return None


def again(request: Callable[[], T]) -> T:
    """The answer to a request; an answer that never comes is asked for again (gcsfs repeats all else by itself)."""
    for attempt in range(ATTEMPTS - 1):
        with contextlib.suppress(TimeoutError):
            return request()
        time.sleep(2.0**attempt)
    return request()


def each(function: Callable[[str], None], names: Iterable[str]) -> None:
    """Call the function with each name, several at once; the first error is raised."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(function, names))


def fetch_changed(source: Path, target: Path, item: Item) -> None:
    """Copy an object from storage to this machine, unless it is there as it is."""
    if not same(target, item):
        fetch_file(source, target, lambda file: None if same(file, item) else "arrives changed")


def same(file: Path, item: Item) -> bool:
    """Whether a local file has the content of an object."""
    try:
        return file.stat().st_size == item.size and (not item.md5 or md5_of(file) == item.md5)
    except FileNotFoundError:
        return False


def md5_of(file: Path, first: int | None = None) -> str:
    """The digest of a local file, or of its first bytes, as storage gives it."""
    digest, left = hashlib.md5(usedforsecurity=False), file.stat().st_size if first is None else first
    with file.open("rb") as f:
        while left and (block := f.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _filesystem() -> Any:
    """The file system of gcsfs that etils uses too.

    Listings are not kept: TensorStore and other machines write as well.
    """
    import fsspec
    from aiohttp import ClientTimeout
    from fsspec.config import conf

    for scheme in ("gcs", "gs"):
        own = conf.setdefault(scheme, {})
        own.setdefault("use_listings_cache", False)
        # Without one, a connection on which nothing comes any more is waited for without end.
        own.setdefault("requests_timeout", ClientTimeout(total=None, sock_connect=QUIET, sock_read=QUIET))
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what it says is raised as well
    return fsspec.filesystem("gcs", finalize_on_close=True)
