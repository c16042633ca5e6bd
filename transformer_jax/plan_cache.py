"""Plans kept on disk: arrays that can always be made again, with digests.

A cached plan carries the digest of what it depends on and of each of its files: one that is damaged, or was made for
other data or settings, is made anew and never trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

Columns = Mapping[str, np.ndarray]


def cached(
    cache_dir: Path | None, draw: int, digest: str, names: Sequence[str], make: Callable[[], Columns], keep: int
) -> Columns:
    """The arrays of a plan, from the cache if whole and matching ones lie there, else made and put there.

    A folder that cannot be written costs a warning and the time to plan again, not the run.

    Args:
      digest: of all that the plan depends on, in hexadecimal.
      names: of its arrays.
      keep: how many plans stay in the folder.
    """
    if cache_dir is None:
        return make()
    folder = cache_dir / f"plan-{draw:05d}-{digest[:16]}"
    columns = _read(folder, digest, names)
    if columns is None:
        columns = make()
        try:
            _write(folder, digest, columns)
            _drop_old(cache_dir, folder, keep)
        except OSError as e:
            warnings.warn(f"the plan of draw {draw} could not be kept in {cache_dir}: {e}", UserWarning, stacklevel=2)
    return columns


def _write(folder: Path, digest: str, columns: Columns) -> None:
    """Write a plan whole under another name, then rename; one that another process has put there meanwhile goes."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        files = {}
        for name, column in columns.items():
            np.save(temporary / f"{name}.npy", column, allow_pickle=False)
            files[name] = _digest(temporary / f"{name}.npy")
        (temporary / "plan.json").write_text(json.dumps({"digest": digest, "files": files}), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(folder: Path, digest: str, names: Sequence[str]) -> Columns | None:
    """The arrays in a folder, or None if they are not there, not whole, or another plan's."""
    try:
        stated = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        if stated["digest"] != digest:
            return None
        if any(_digest(folder / f"{name}.npy") != stated["files"][name] for name in names):
            return None
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Plain views of the maps: indexing numpy's memmap subclass is several times slower.
    return {name: np.asarray(column) for name, column in columns.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _drop_old(cache_dir: Path, current: Path, number: int) -> None:
    """Leave the newest plans; the arrays of a plan in use stay readable until they are let go.

    What a killed process was writing goes too, once it is so old that nobody can still be at it.
    """
    plans = sorted(cache_dir.glob("plan-*"), key=_age)
    old = [p for p in reversed(plans) if p != current][: max(0, len(plans) - number)]
    for path in [*old, *(p for p in cache_dir.glob(".plan-*.tmp") if _age(p) > 3600)]:
        shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    """Seconds since the last change; 0 for what has gone meanwhile."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
