"""The files that a recipe names: globs resolved, sizes and digests checked, names that do not depend on the machine."""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax import storage
from transformer_jax.config import ConfigError, UserError, nearest


@dataclasses.dataclass(frozen=True)
class Input:
    """One file (or TFDS folder) to read, and what is known of it beforehand."""

    source: Any
    """The table of the recipe that names it."""
    name: str
    path: Path
    sha256: str = ""
    size: int | None = None


class Found(NamedTuple):
    """Files as they lie on this machine."""

    files: tuple[str, ...]
    """Absolute paths, those of a glob in order of name."""
    sha256: dict[str, str]
    """Absolute path to the digest the file must have."""
    sizes: dict[str, int]


def find(
    patterns: Sequence[str], sha256: Mapping[str, str], sizes: Mapping[str, int], folder: Path, fetch: bool = True
) -> Found:
    """Resolve paths and globs, relative to `folder`, and the tables of digests and sizes that go with them.

    Args:
      sha256, sizes: by a path as in `patterns`, or as a glob finds it.
      fetch: copy files in storage to this machine; without it they are an error.

    Raises:
      ConfigError: a file that is not there or is named twice, or a digest for none of them.
    """
    files: list[str] = []
    names: dict[str, str] = {}
    for pattern in patterns:
        found = _matching(pattern, folder, fetch)
        for path in found:
            if str(path) in files:
                raise ConfigError(f"{path} is named twice; a file is read once")
            files.append(str(path))
            names[str(path)] = str(path)
            if not storage.is_remote(folder):
                names[os.path.relpath(path, folder)] = str(path)
        names[pattern] = str(found[0])
    for table in (sha256, sizes):
        for name in table:
            if name not in names:
                raise ConfigError(
                    f"a digest or size is given for {name}, which is not among the files{nearest(name, names)}; take "
                    "it out of [sources.sha256] or [sources.sizes], or name that file"
                )
    return Found(
        tuple(files), {names[k]: v.lower() for k, v in sha256.items()}, {names[k]: v for k, v in sizes.items()}
    )


def _matching(pattern: str, folder: Path, fetch: bool) -> list[Path]:
    if storage.is_remote(pattern) or (storage.is_remote(folder) and not Path(pattern).is_absolute()):
        if not fetch:
            raise ConfigError(f"{pattern} is in storage")
        found = storage.matching(pattern if storage.is_remote(pattern) else str(folder / pattern))
        if not found:
            raise ConfigError(f"no file matches {pattern}")
        return found
    wanted = folder / Path(pattern).expanduser()
    if wanted.is_file():
        return [wanted]
    if wanted.is_dir():
        raise ConfigError(f"{wanted} is a folder; name the files in it, as in {Path(pattern) / '*.txt'}")
    if not glob.has_magic(pattern):
        raise ConfigError(f"{wanted}: no such file{_near(wanted)}")
    start = Path(wanted.anchor)
    found = sorted(p for p in start.glob(str(wanted.relative_to(start))) if p.is_file())
    if not found:
        raise ConfigError(f"no file matches {wanted}")
    return found


def _near(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return f" (and no folder {path.parent})"
    return nearest(path.name, names) if names else ""


def named(inputs: Sequence[Input]) -> list[Input]:
    """The inputs with the least part of each path that tells the files apart as their name, where they have none."""
    names = [item.name or item.path.name for item in inputs]
    depth = 1
    while len(set(names)) < len(names) and depth < 32:
        depth += 1
        twice = {n for n in names if names.count(n) > 1}
        names = [
            "/".join(i.path.parts[-depth:]) if n in twice and not i.name else n
            for i, n in zip(inputs, names, strict=True)
        ]
    return [dataclasses.replace(item, name=name) for item, name in zip(inputs, names, strict=True)]


def check(item: Input) -> None:
    """Size and digest, where the recipe gives them; a part of a file is not taken for the file.

    Raises:
      UserError: the file is not what they say.
    """
    if item.size is not None:
        size = stat(item.path).st_size
        if size != item.size:
            raise UserError(f"{item.path} has {size} bytes and not the {item.size} the recipe says; get it again")
    if item.sha256 and digest(item.path) != item.sha256:
        raise UserError(f"{item.path}: SHA-256 {digest(item.path)} is not the recipe's {item.sha256}; get it again")


def stat(path: Path) -> os.stat_result:
    """`Path.stat`; a missing file is a UserError."""
    try:
        return path.stat()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None


def digest(path: Path) -> str:
    """SHA-256 of a file, or over the names and digests of the files of a folder."""
    if not path.is_dir():
        found = stat(path)
        return _digest_of(path, found.st_size, found.st_mtime_ns)
    whole = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        whole.update(f"{file.relative_to(path).as_posix()} {digest(file)}\n".encode())
    return whole.hexdigest()


@functools.lru_cache(maxsize=1 << 16)
def _digest_of(path: Path, size: int, changed_ns: int) -> str:
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
