"""The numbered folders of a run's checkpoints: which are complete, which verify, and how one is named.

A step is complete once it has `digests.json`: size and SHA-256 of every other file of its folder, written last and
atomically, with the evaluation figure that the best steps are kept by. No Orbax and no device is needed here. All of it
holds for a folder in storage too (`gs://`), except that a step is taken away file by file there, its digests first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformer_jax import storage
from transformer_jax.config import CheckpointConfig, UserError
from transformer_jax.storage import write_whole

DIGESTS = "digests.json"
ITEMS = ("state", "data", "meta")
DELETING = ".deleting"
HASHED_AT_ONCE = 8
NOT_FINISHED = f"no {DIGESTS}: the save was stopped before its end"


class CheckpointError(UserError):
    """A checkpoint that could not be written, or that cannot be used."""


class NoCheckpointError(CheckpointError):
    """There is no complete step, so a run may start from its beginning.

    Attributes:
      skipped: (step, reason) of the steps that are there but were never completed.
    """

    def __init__(self, message: str, skipped: list[tuple[int, str]]):
        super().__init__(message)
        self.skipped = skipped


def steps(folder: Path | str) -> list[int]:
    """The complete steps of a run folder or its checkpoints folder, in order; digests are not compared."""
    root = _root(storage.path(folder))
    return [step for step in step_folders(root) if (root / str(step) / DIGESTS).is_file()]


def unfinished(folder: Path | str) -> list[tuple[int, str]]:
    """The steps that a stopped save left without digests, each with the reason it is passed over."""
    root = _root(storage.path(folder))
    return [(s, NOT_FINISHED) for s in step_folders(root) if not (root / str(s) / DIGESTS).is_file()]


def verify(checkpoint: Path | str) -> list[tuple[int, list[str]]]:
    """Compare every file with its digest.

    Args:
      checkpoint: a run folder, its checkpoints folder, or `RUN@STEP`.

    Returns:
      (step, problems) for each step in order; no problems means that it verifies.

    Raises:
      UserError: there is no such folder, or nothing in it.
    """
    root, step = locate(checkpoint)
    found = step_folders(root) if step is None else [step]
    if not found:
        raise NoCheckpointError(f"{root}: no checkpoints here{_apart(root)}", [])
    return [(number, problems_of(root / str(number))) for number in found]


def _apart(root: Path) -> str:
    """The end of a message about a folder without checkpoints: which folders in it have some."""
    below = sorted(p.name for p in root.iterdir() if (p / "checkpoints").is_dir()) if root.is_dir() else []
    if not below:
        return ""
    return f"; those of several trainings lie apart: name {' or '.join(str(root / name) for name in below)}"


def _root(folder: Path) -> Path:
    """The folder of the steps, given that or the run folder."""
    inner = folder / "checkpoints"
    return storage.absolute(inner if inner.is_dir() else folder)


def step_folders(root: Path) -> list[int]:
    """The numbers of all step folders in `root`, complete or not, in order."""
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and str(int(p.name)) == p.name and p.is_dir())


def kept(metrics: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Which of the complete steps stay: the last, every K-th, and the best by metric.

    A run that was interrupted keeps what it would have kept without: see `by_worth`.

    Args:
      metrics: the metric, or None, of each complete step.
      config: the policy.
    """
    ordered = sorted(metrics)
    stay = set(by_worth(ordered, config.every)[-config.keep_last :])
    if config.keep_every:
        stay |= {step for step in ordered if step % config.keep_every == 0}
    if config.keep_best:
        sign = 1 if config.best_is == "lowest" else -1
        age = 1 if config.best_of_equals == "earlier" else -1
        measured = [(sign * value, age * step, step) for step, value in metrics.items() if value is not None]
        stay |= {step for _, _, step in sorted(measured)[: config.keep_best]}
    return stay


def by_worth(steps: Sequence[int], every: int) -> list[int]:
    """The steps in the order in which they are given up: first those that a stop left between two regular ones.

    Args:
      every: steps between regular checkpoints (`checkpoint.every`); the newest step counts as one of them.
    """
    newest = max(steps, default=0)
    return sorted(steps, key=lambda step: (step == newest or not every or step % every == 0, step))


def locate(checkpoint: Path | str, step: int | None = None) -> tuple[Path, int | None]:
    """The folder of steps and the step that `RUN`, `RUN@STEP`, `RUN@best` or the folder of a step names."""
    path = storage.path(checkpoint)
    if not path.is_dir():
        head, at, tail = str(checkpoint).rpartition("@")
        if not at or not storage.path(head).is_dir():
            raise CheckpointError(f"{head or path}: no such folder; name a run folder, or RUN@STEP")
        if not tail.isdigit() and tail != "best":
            raise CheckpointError(f"{checkpoint}: after @ stands {tail!r}; it must be the number of a step, or `best`")
        path = storage.path(head)
        step = best_step(_root(path)) if tail == "best" else int(tail)
    elif path.name.isdigit() and (path / "state").is_dir():
        return storage.absolute(path.parent), int(path.name)
    root = _root(path)
    if step is not None and not (root / str(step)).is_dir():
        there = ", ".join(map(str, steps(root))) or "none"
        raise CheckpointError(f"{root}: there is no step {step}; complete steps: {there}")
    return root, step


def best_step(root: Path) -> int:
    """The complete step with the best held-out figure; the newest step says which figure it is, and which of equally
    good steps is taken.

    Raises:
      CheckpointError: no complete step has a figure.
    """
    found: dict[int, dict[str, Any]] = {}
    for step in steps(root):
        with contextlib.suppress(DamagedError):
            content = read_digests(root / str(step))
            if content["metric"] is not None:
                found[step] = content
    if not found:
        raise CheckpointError(f"{root}: no complete step has a held-out figure, so none is the best; name a step")
    newest = found[max(found)]
    name, sign = newest.get("metric_name", "loss"), -1 if newest.get("metric_is") == "highest" else 1
    age = 1 if newest.get("metric_of_equals") == "earlier" else -1
    return min((sign * c["metric"], age * s, s) for s, c in found.items() if c.get("metric_name", "loss") == name)[2]


def newest_verified(root: Path, step: int | None = None) -> tuple[int, list[tuple[int, str]]]:
    """The newest step that verifies, or `step`, and (step, reason) of the newer ones that were passed over.

    Raises:
      CheckpointError: nothing there can be used.
    """
    if step is not None:
        root, step = locate(root, step)
        assert step is not None
        problems = problems_of(root / str(step))
        if problems:
            raise CheckpointError(f"{root / str(step)} cannot be used: {_summary(problems)}")
        return step, []
    skipped: list[tuple[int, str]] = []
    for number in reversed(step_folders(root)):
        problems = problems_of(root / str(number))
        if not problems:
            return number, skipped
        skipped.append((number, _summary(problems)))
    if not steps(root):
        raise NoCheckpointError(f"{root}: no complete checkpoint here{_apart(root)}", skipped)
    lines = "".join(f"\n  step {number}: {reason}" for number, reason in skipped)
    raise CheckpointError(
        f"{root}: none of the checkpoints can be used; bring back an undamaged one, or name another run folder to "
        f"start from the beginning{lines}"
    )


def delete(path: Path) -> None:
    """Take the step away in one move, so that a kill meanwhile leaves no half of one that counts as complete."""
    if storage.is_remote(path):
        (path / DIGESTS).unlink(missing_ok=True)
        storage.remove_tree(path)
        return
    gone = path.with_name(f".{path.name}{DELETING}")
    if gone.exists():
        shutil.rmtree(gone)
    path.rename(gone)
    shutil.rmtree(gone)


def failed_save(folder: Path, step: int, error: BaseException) -> CheckpointError:
    """The error of a save into `folder` that failed: why, what to do if the disk is full, and what is still there."""
    try:
        with storage.reported(folder):
            complete = steps(folder)
    except storage.StorageError:
        newest = "the steps that were complete are as they were"
    else:
        newest = (
            f"step {complete[-1]} is the newest complete checkpoint" if complete else "there is no complete checkpoint"
        )
    text = (storage.explained(error) if storage.is_remote(folder) else None) or first_line(error)
    full = (errno.ENOSPC, errno.EDQUOT)
    if (isinstance(error, OSError) and error.errno in full) or "No space left" in str(error):
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free / 2**20
        text = (
            f"the disk is full ({free:,.1f} MiB free); make room, or lower checkpoint.keep_last, keep_every or "
            "keep_best (room for one step more than is kept is needed)"
        )
    return CheckpointError(f"{folder}: saving step {step} failed: {text}; {newest}")


class DamagedError(Exception):
    """The digest file of a step is missing or is not what was written."""


def write_digests(path: Path, metric: float | None, config: CheckpointConfig) -> None:
    """Make the step complete; `config` says which figure the metric is, and which way it is better."""
    for item in ITEMS:
        if not (path / item).is_dir():
            raise OSError(f"the writer left no {item} in {path}")
    sizes = {name: item.size for name, item in storage.files(path).items()}
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        digests = list(pool.map(lambda name: storage.sha256(path / name), sizes))
    files = {n: {"size": sizes[n], "sha256": digest} for n, digest in zip(sizes, digests, strict=True)}
    content = {"format": 1, "step": int(path.name), "metric": finite(metric)}
    _write(path, {**content, **_named(config), "files": files})


def write_metric(path: Path, metric: float, config: CheckpointConfig) -> None:
    """Note the metric of a complete step; raises DamagedError as `read_digests`."""
    _write(path, {**read_digests(path), "metric": finite(metric), **_named(config)})


def metric_of(path: Path, metric_name: str) -> float | None:
    """The metric of a complete step, None if it has none or one of another name; raises as `read_digests`."""
    content = read_digests(path)
    return content["metric"] if content.get("metric_name", "loss") == metric_name else None


def read_digests(path: Path) -> dict[str, Any]:
    """What `write_digests` wrote into the step folder `path`.

    Raises:
      DamagedError: there is none, or it has changed since.
    """
    try:
        text = (path / DIGESTS).read_text(encoding="utf-8")
        content = json.loads(text)
        del content["seal"]
        sound = _sealed(content) == text
    except FileNotFoundError:
        raise DamagedError(NOT_FINISHED) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise DamagedError(f"{DIGESTS} cannot be read: {first_line(e)}") from None
    if not sound:
        raise DamagedError(f"{DIGESTS} is not as it was written")
    if content["step"] != int(path.name):
        raise DamagedError(f"this folder was written as step {content['step']}")
    return content


def problems_of(path: Path) -> list[str]:
    """What keeps the step in `path` from being used, or nothing."""
    try:
        files = read_digests(path)["files"]
    except DamagedError as e:
        return [str(e)]
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        found = list(pool.map(lambda name: _problem_of(path / name, name, files[name]), files))
    return [problem for problem in found if problem is not None]


def _problem_of(file: Path, name: str, known: Mapping[str, Any]) -> str | None:
    try:
        size = storage.size(file)
        if size != known["size"]:
            return f"{name} has {size} bytes in place of {known['size']}"
        return None if storage.sha256(file) == known["sha256"] else f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as e:
        return f"{name} cannot be read: {first_line(e)}"


def _named(config: CheckpointConfig) -> dict[str, str]:
    of_equals = {"metric_of_equals": config.best_of_equals}
    return {"metric_name": config.best_metric, "metric_is": config.best_is, **of_equals}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path / DIGESTS, _sealed(content))


def _sealed(content: Mapping[str, Any]) -> str:
    """The text of the digest file, with a digest of its own, so that a change in it is found too."""
    plain = json.dumps(content, indent=1, sort_keys=True)
    return json.dumps({**content, "seal": hashlib.sha256(plain.encode()).hexdigest()}, indent=1, sort_keys=True) + "\n"


def finite(metric: float | None) -> float | None:
    """The metric as it is stored: what is not a number counts as none."""
    return float(metric) if metric is not None and math.isfinite(metric) else None


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one line."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    # TensorStore says which array first, then why, then codes and places in its source.
    line = re.sub(r" \[(os_error_code|source locations)=.*", "", line)
    return line if len(line) <= 300 else f"{line[:90]} ... {line[-200:]}"


def _summary(problems: list[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
