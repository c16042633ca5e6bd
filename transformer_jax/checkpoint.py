"""Checkpoints: asynchronous saves, digests that make a step complete, restore that verifies and falls back.

A run's checkpoints are the numbered folders of `RUN/checkpoints`. Each holds three Orbax items, `state` (arrays),
`data` (JSON: where in the data training stands) and `meta` (JSON: resolved config, tokenizer files, versions), and
`digests.json`: size and SHA-256 of every other file of the step. Orbax commits a step by renaming its temporary
folder; the digests are then made off the training thread and written last, atomically. Only a step with
`digests.json` is complete. A kill before that leaves a folder that is passed over, named in `Restored.skipped`, and
replaced when training reaches that step again. Orbax by itself would offer the step, and restores a flipped bit in
silence.

Older steps are deleted by this module and not by Orbax, and only after a newer step has its digests.

The stored form of the state is a nested dict of arrays named by their path in the tree (dict keys, fields of named
tuples, indices of tuples), so no library class is needed to read it; parts without arrays, such as
`optax.EmptyState`, come back from the abstract tree given to `restore`.

Several processes must see one shared folder: Orbax writes each process's shards and synchronises the commit,
process 0 alone writes digests and deletes, and `save`, `restore`, `wait` and `close` are collective calls. Tested
with one process over 1 to 8 devices, and with two processes on one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from transformer_jax.config import CheckpointConfig, ConfigError, UserError

DIGESTS = "digests.json"
ITEMS = ("state", "data", "meta")
_TEMPORARY = ".orbax-checkpoint-tmp"
_DELETING = ".deleting"
_log = logging.getLogger(__name__)


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


@dataclasses.dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found."""

    step: int
    state: Any
    """Tree of arrays of the class, dtypes and shardings of the abstract state."""
    data: dict[str, Any]
    meta: dict[str, Any]
    skipped: list[tuple[int, str]]
    """Newer steps that were passed over, newest first, each with the reason."""


class Checkpoints:
    """Saves and restores the steps of one run.

    Args:
      folder: the folder of the numbered steps, `RUN/checkpoints`; made at the first save. Nothing in it is changed
        before that.
      config: what to keep.

    Raises:
      ConfigError: a keep policy that would keep nothing.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        if config.keep_last < 1:
            raise ConfigError(f"checkpoint.keep_last is {config.keep_last}; it must be at least 1")
        for name in ("every", "keep_every", "keep_best"):
            if getattr(config, name) < 0:
                raise ConfigError(f"checkpoint.{name} is {getattr(config, name)}; it must be 0 or more")
        self.folder = Path(folder).absolute()
        self.config = config
        self._manager: ocp.CheckpointManager | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []
        # Steps that hold what training would write again: those saved by this object, and the one it restored.
        self._own: set[int] = set()
        self._bad: set[int] = set()
        self._swept = False

    def save(
        self, step: int, state: Any, data: Mapping[str, Any], meta: Mapping[str, Any], metric: float | None = None
    ) -> bool:
        """Start to save `step`, and return when the arrays have been copied from the devices.

        The buffers of `state` may be donated afterwards. One save is under way at a time: a second one waits for the
        first. A step that this object has saved or restored is not written again; any other folder of that step (an
        unfinished or damaged one, or one that a run restored from an earlier step has come back to) is replaced.

        Args:
          step: number of training steps done.
          state: tree of jax arrays.
          data, meta: what JSON can hold; copied before this returns.
          metric: evaluation loss at this step, lower is better, for `keep_best`; `set_metric` can add it later.

        Returns:
          Whether a save was started.

        Raises:
          CheckpointError: an earlier save failed (this one was then not started, and may be tried again), or this one
            could not be started. Complete steps are as they were.
        """
        self.wait()
        if step in self._own:
            if metric is not None:
                self.set_metric(step, metric)
            return False
        tree = _named_tree(state)
        items = {"data": _json_copy(data), "meta": _json_copy(meta)}
        try:
            self._make_way(step)
            _drop_late_calls()  # and on, for writes go on after this returns
            if self._manager is None:
                options = ocp.CheckpointManagerOptions(save_root_metadata=False, lightweight_initialize=True)
                self._manager = ocp.CheckpointManager(self.folder, options=options)
            arguments = ocp.args.Composite(
                state=ocp.args.StandardSave(tree), **{name: ocp.args.JsonSave(value) for name, value in items.items()}
            )
            self._manager.save(step, args=arguments, force=True)
        except Exception as e:
            self._forget(step)
            raise self._failure(step, e) from e
        self._own.add(step)
        self._pending.append(self._worker.submit(self._complete, step, metric))
        return True

    def try_to_write(self) -> None:
        """Find out before a long job whether a step can be saved; the folder is made.

        Raises:
          CheckpointError: the folder cannot be made or written.
        """
        try:
            if jax.process_index() == 0:
                self._probe()
        except OSError as e:
            raise CheckpointError(f"{self.folder}: no checkpoint can be saved here: {_first_line(e)}") from e

    def _probe(self) -> None:
        probe = self.folder / f".0{_DELETING}"  # which is swept up if this is cut off
        if probe.is_dir():
            shutil.rmtree(probe)
        probe.mkdir(parents=True)
        probe.rmdir()

    def set_metric(self, step: int, metric: float) -> None:
        """Note the evaluation loss of a step saved before; returns at once. A step that is not complete is ignored."""
        self._pending.append(self._worker.submit(self._note_metric, step, metric))

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile, without waiting for one that is under way."""
        if self._pending and self._pending[0].done():
            error = self._pending.pop(0).exception()
            if error is not None:
                raise error

    def wait(self) -> None:
        """Wait until every save is complete, digests included.

        Raises:
          CheckpointError: a save failed; says why and which step is now the newest complete one. It is raised once.
        """
        first: BaseException | None = None
        while self._pending:
            error = self._pending[0].exception()
            self._pending.pop(0)
            first = first or error
        if jax.process_count() > 1:
            failed = multihost_utils.process_allgather(np.asarray(first is not None))
            if first is None and failed.any():
                first = CheckpointError(
                    f"saving a checkpoint failed on process {int(np.argmax(failed))}; see its message"
                )
                self._close_manager()
        if first is not None:
            raise first

    def close(self) -> None:
        """Wait as `wait` does, then end the background threads."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._close_manager()

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
        """Read the newest step that verifies, or `step`, onto the devices that the abstract state names.

        Args:
          abstract_state: tree of `jax.ShapeDtypeStruct` with shardings, for any number of devices; a leaf without a
            sharding goes to the first device.
          step: read this one and no other.

        Raises:
          NoCheckpointError: there is no complete step, so nothing was ever saved to go on from.
          CheckpointError: steps are there but none verifies (each is named with its reason), `step` does not, or what
            is stored has other names, shapes or dtypes than the abstract state.
        """
        self.wait()
        chosen, skipped = _agree_on_step(self.folder, step)
        path = self.folder / str(chosen)
        names, abstract, treedef = _named_leaves(abstract_state)
        stored = _stored_leaves(path)
        _refuse_mismatch(path, stored, dict(zip(names, abstract, strict=True)))
        wanted = _nest(zip(names, (_with_sharding(x) for x in abstract), strict=True))
        with _explained(path), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            tree = checkpointer.restore(path / "state", args=ocp.args.StandardRestore(wanted))
        flat = _flat(tree)
        state = jax.tree.unflatten(treedef, [flat[name] for name in names])
        self._own = {chosen}
        self._bad = {s for s, _ in skipped}
        return Restored(chosen, state, _read_json(path, "data"), _read_json(path, "meta"), skipped)

    # What follows runs on the worker thread, or on the training thread while the worker is idle.

    def _complete(self, step: int, metric: float | None) -> None:
        assert self._manager is not None
        try:
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                _write_digests(self.folder / str(step), metric)
                self._bad.discard(step)
                self._delete_old(step)
        except Exception as e:
            self._forget(step)
            raise self._failure(step, e) from e

    def _note_metric(self, step: int, metric: float) -> None:
        if jax.process_index() != 0:
            return
        path = self.folder / str(step)
        try:
            content = _read_digests(path)
            _write_json(path / DIGESTS, _sealed({**content, "metric": _finite(metric)}))
            self._delete_old(max(steps(self.folder)))
        except _DamagedError as e:
            _log.warning("%s: its metric was not noted: %s", path, e)
        except OSError as e:
            raise self._failure(step, e) from e

    def _delete_old(self, newest: int) -> None:
        """Carry out the keep policy over the complete steps up to `newest`, which has its digests."""
        metrics: dict[int, float | None] = {}
        for step in steps(self.folder):
            # A damaged step does not count towards those kept, and stays for its owner to look at. Steps after the
            # newest belong to a history that training is about to write again.
            if step <= newest and step not in self._bad:
                with contextlib.suppress(_DamagedError):
                    metrics[step] = _read_digests(self.folder / str(step))["metric"]
        for step in sorted(set(metrics) - kept(metrics, self.config)):
            try:
                _delete(self.folder / str(step))
            except OSError as e:
                _log.warning("could not delete the old checkpoint %s: %s", self.folder / str(step), e)

    def _make_way(self, step: int) -> None:
        """Remove what an earlier process left unfinished, and an old folder of this step."""
        path = self.folder / str(step)
        if jax.process_index() == 0:
            if not self._swept and self.folder.is_dir():
                for left_over in self.folder.iterdir():
                    name = left_over.name.lstrip(".")
                    number, _, rest = name.partition(".")
                    if number.isdigit() and f".{rest}".startswith((_TEMPORARY, _DELETING)):
                        _log.info("removing %s, left by a run that was stopped", left_over)
                        shutil.rmtree(left_over)
            if path.exists():
                _log.info("replacing %s", path)
                _delete(path)
            # Where Orbax cannot make its first folder, its threads wait twenty minutes for it, whatever is raised.
            self._probe()
        self._swept = True
        if self._manager is not None and step in self._manager.all_steps():
            self._close_manager()  # It remembers the steps it has seen; a new one looks again.
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step}")

    def _forget(self, step: int) -> None:
        """After a failed save: give its disk space back, and start afresh with a manager that knows no error."""
        self._own.discard(step)
        self._close_manager()
        if jax.process_index() == 0 and self.folder.is_dir():
            for path in (self.folder / str(step), *self.folder.glob(f"{step}{_TEMPORARY}*")):
                if path.exists() and not (path / DIGESTS).exists():
                    shutil.rmtree(path, ignore_errors=True)

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            # Its error, if it has one, has been reported by then.
            with contextlib.suppress(Exception):
                manager.close()

    def _failure(self, step: int, error: BaseException) -> CheckpointError:
        complete = steps(self.folder)
        newest = (
            f"step {complete[-1]} is the newest complete checkpoint" if complete else "there is no complete checkpoint"
        )
        text = _first_line(error)
        full = (errno.ENOSPC, errno.EDQUOT)
        if (isinstance(error, OSError) and error.errno in full) or "No space left" in str(error):
            existing = next(p for p in (self.folder, *self.folder.parents) if p.exists())
            free = shutil.disk_usage(existing).free / 2**20
            text = (
                f"the disk is full ({free:,.1f} MiB free); make room, or lower checkpoint.keep_last, keep_every or "
                "keep_best (room for one step more than is kept is needed)"
            )
        return CheckpointError(f"{self.folder}: saving step {step} failed: {text}; {newest}")


def kept(metrics: Mapping[int, float | None], config: CheckpointConfig) -> set[int]:
    """Which of the complete steps stay: the last, every K-th, and the best (lowest metric; of equals the newer).

    Args:
      metrics: the metric, or None, of each complete step.
      config: the policy.
    """
    ordered = sorted(metrics)
    stay = set(ordered[-config.keep_last :])
    if config.keep_every:
        stay |= {step for step in ordered if step % config.keep_every == 0}
    if config.keep_best:
        measured = [(value, -step) for step, value in metrics.items() if value is not None]
        stay |= {-negative for _, negative in sorted(measured)[: config.keep_best]}
    return stay


def steps(folder: Path | str) -> list[int]:
    """The complete steps of a run folder or its checkpoints folder, in order; digests are not compared."""
    root = _root(Path(folder))
    return [step for step in _step_folders(root) if (root / str(step) / DIGESTS).is_file()]


def unfinished(folder: Path | str) -> list[tuple[int, str]]:
    """The steps that a stopped save left without digests, each with the reason it is passed over."""
    root = _root(Path(folder))
    return [(s, _NOT_FINISHED) for s in _step_folders(root) if not (root / str(s) / DIGESTS).is_file()]


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
    found = _step_folders(root) if step is None else [step]
    if not found:
        raise NoCheckpointError(f"{root}: no checkpoints here", [])
    return [(number, _problems(root / str(number))) for number in found]


def read_params(checkpoint: Path | str) -> tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Read the parameters only, as numpy arrays, on any machine: no mesh and none of the saving devices is needed.

    Args:
      checkpoint: a run folder (its newest step that verifies; steps passed over are logged as warnings) or `RUN@STEP`.

    Returns:
      (step, parameters as a nested dict of numpy arrays, data, meta).

    Raises:
      UserError: there is no such folder or step, or it does not verify.
    """
    path = _open(checkpoint)
    with _explained(path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path / "state").item_metadata.tree
        if "params" not in tree:
            raise CheckpointError(f"{path}: holds no parameters; found {', '.join(sorted(tree)) or 'nothing'}")
        wanted = {"params": tree["params"]}
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted),
            partial_restore=True,
        )
        params = checkpointer.restore(path / "state", args=arguments)["params"]
    return int(path.name), params, _read_json(path, "data"), _read_json(path, "meta")


def read_meta(checkpoint: Path | str, step: int | None = None) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(step, data, meta) of the newest step that verifies, or of `step` or `RUN@STEP`; errors as `read_params`."""
    path = _open(checkpoint, step)
    return int(path.name), _read_json(path, "data"), _read_json(path, "meta")


def contents(checkpoint: Path | str) -> dict[str, jax.ShapeDtypeStruct]:
    """Names (`params/pooler/bias`), shapes and dtypes of the arrays, without devices; errors as `read_params`."""
    return _stored_leaves(_open(checkpoint))


# Trees


def _named_leaves(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Names of the leaves, the leaves, and the structure that puts them together again."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = ["/".join(_key(k) for k in path) for path, _ in with_paths]
    assert names and len(set(names)) == len(names), f"no leaves, or two of one name: {names}"
    return names, [leaf for _, leaf in with_paths], treedef


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):  # Dict entries, named tuples and dataclasses, lists and tuples.
        if hasattr(key, attribute):
            text = str(getattr(key, attribute))
            assert text and not set(text) & set("/."), f"{text!r} cannot name an array"
            return text
    raise AssertionError(f"unknown kind of tree key: {key!r}")


def _named_tree(tree: Any) -> dict[str, Any]:
    names, leaves, _ = _named_leaves(tree)
    return _nest(zip(names, leaves, strict=True))


def _nest(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, leaf in named:
        *parents, last = name.split("/")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return out


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return out


def _stored_leaves(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    with _explained(path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path / "state").item_metadata.tree
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in _flat(tree).items()}


def _with_sharding(x: Any) -> jax.ShapeDtypeStruct:
    # Without one, Orbax would look for the devices that saved the array.
    sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _refuse_mismatch(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    def show(x: Any) -> str:
        return "nothing" if x is None else f"{x.dtype}{list(x.shape)}"

    wrong = [
        f"{name}: stored {show(stored.get(name))}, the run needs {show(wanted.get(name))}"
        for name in (*wanted, *(n for n in stored if n not in wanted))
        if show(stored.get(name)) != show(wanted.get(name))
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"{path}: this checkpoint is of another model or optimizer than the run file describes; use the run file "
            "it was made with, or another run folder\n  " + "\n  ".join(wrong[:5]) + more
        )


# Folders

_NOT_FINISHED = f"no {DIGESTS}: the save was stopped before its end"


def _root(folder: Path) -> Path:
    """The folder of the steps, given that or the run folder."""
    inner = folder / "checkpoints"
    return (inner if inner.is_dir() else folder).absolute()


def _step_folders(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and str(int(p.name)) == p.name and p.is_dir())


def locate(checkpoint: Path | str, step: int | None = None) -> tuple[Path, int | None]:
    """The folder of steps and the step that `RUN`, `RUN@STEP` or the folder of a step names."""
    path = Path(checkpoint)
    if not path.is_dir():
        head, at, tail = str(checkpoint).rpartition("@")
        if not at or not Path(head).is_dir():
            raise CheckpointError(f"{head or path}: no such folder; name a run folder, or RUN@STEP")
        if not tail.isdigit():
            raise CheckpointError(f"{checkpoint}: after @ stands {tail!r}; it must be the number of a step")
        path, step = Path(head), int(tail)
    elif path.name.isdigit() and (path / "state").is_dir():
        return path.parent.absolute(), int(path.name)
    root = _root(path)
    if step is not None and not (root / str(step)).is_dir():
        there = ", ".join(map(str, steps(root))) or "none"
        raise CheckpointError(f"{root}: there is no step {step}; complete steps: {there}")
    return root, step


def _open(checkpoint: Path | str, step: int | None = None) -> Path:
    """The folder of the step to read, verified; the steps passed over are logged."""
    root, step = locate(checkpoint, step)
    chosen, skipped = _newest_verified(root, step)
    for number, reason in skipped:
        _log.warning("%s: passed over step %d: %s", root, number, reason)
    return root / str(chosen)


def _newest_verified(root: Path, step: int | None = None) -> tuple[int, list[tuple[int, str]]]:
    if step is not None:
        root, step = locate(root, step)
        assert step is not None
        problems = _problems(root / str(step))
        if problems:
            raise CheckpointError(f"{root / str(step)} cannot be used: {_summary(problems)}")
        return step, []
    skipped: list[tuple[int, str]] = []
    for number in reversed(_step_folders(root)):
        problems = _problems(root / str(number))
        if not problems:
            return number, skipped
        skipped.append((number, _summary(problems)))
    if not steps(root):
        raise NoCheckpointError(f"{root}: no complete checkpoint here", skipped)
    lines = "".join(f"\n  step {number}: {reason}" for number, reason in skipped)
    raise CheckpointError(
        f"{root}: none of the checkpoints can be used; bring back an undamaged one, or name another run folder to "
        f"start from the beginning{lines}"
    )


def _agree_on_step(root: Path, step: int | None) -> tuple[int, list[tuple[int, str]]]:
    """As `_newest_verified`; of several processes only the first reads the files and makes the digests."""
    if jax.process_count() == 1:
        return _newest_verified(root, step)
    chosen, error = -1, None
    skipped: list[tuple[int, str]] = []
    if jax.process_index() == 0:
        try:
            chosen, skipped = _newest_verified(root, step)
        except CheckpointError as e:
            chosen, error = (-2 if isinstance(e, NoCheckpointError) else -1), e
    chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
    if error is not None:
        raise error
    if chosen == -2:
        raise NoCheckpointError(f"{root}: no complete checkpoint here", [])
    if chosen == -1:
        raise CheckpointError(f"{root}: no checkpoint can be used; see the message of process 0")
    return chosen, skipped


def _delete(path: Path) -> None:
    """Take the step away in one move, so that a kill meanwhile leaves no half of one."""
    gone = path.with_name(f".{path.name}{_DELETING}")
    if gone.exists():
        shutil.rmtree(gone)
    path.rename(gone)
    shutil.rmtree(gone)


# Digests


class _DamagedError(Exception):
    """The digest file of a step is missing or is not what was written."""


def _write_digests(path: Path, metric: float | None) -> None:
    """Make the step complete."""
    for item in ITEMS:
        if not (path / item).is_dir():
            raise OSError(f"the writer left no {item} in {path}")
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        files[file.relative_to(path).as_posix()] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    content = {"format": 1, "step": int(path.name), "metric": _finite(metric), "files": files}
    _write_json(path / DIGESTS, _sealed(content))


def _read_digests(path: Path) -> dict[str, Any]:
    try:
        text = (path / DIGESTS).read_text(encoding="utf-8")
        content = json.loads(text)
        del content["seal"]
        sound = _sealed(content) == text
    except FileNotFoundError:
        raise _DamagedError(_NOT_FINISHED) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise _DamagedError(f"{DIGESTS} cannot be read: {_first_line(e)}") from None
    if not sound:
        raise _DamagedError(f"{DIGESTS} is not as it was written")
    if content["step"] != int(path.name):
        raise _DamagedError(f"this folder was written as step {content['step']}")
    return content


def _problems(path: Path) -> list[str]:
    """What keeps the step in `path` from being used, or nothing."""
    try:
        files = _read_digests(path)["files"]
    except _DamagedError as e:
        return [str(e)]
    problems = []
    for name, known in files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != known["size"]:
                problems.append(f"{name} has {size} bytes in place of {known['size']}")
            elif _sha256(file) != known["sha256"]:
                problems.append(f"{name} has changed since it was written")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as e:
            problems.append(f"{name} cannot be read: {_first_line(e)}")
    return problems


def _sealed(content: Mapping[str, Any]) -> str:
    """The text of the digest file, with a digest of its own, so that a change in it is found too."""
    plain = json.dumps(content, indent=1, sort_keys=True)
    return json.dumps({**content, "seal": hashlib.sha256(plain.encode()).hexdigest()}, indent=1, sort_keys=True) + "\n"


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _write_json(path: Path, text: str) -> None:
    """Write the whole file or nothing, and have it on the disk before this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
    for folder in (path.parent, path.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _finite(metric: float | None) -> float | None:
    return float(metric) if metric is not None and math.isfinite(metric) else None


def _json_copy(value: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(value, allow_nan=False))


def _read_json(path: Path, item: str) -> dict[str, Any]:
    with _explained(path), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path / item, args=ocp.args.JsonRestore())


# Orbax's ways


class _WithoutLateCalls:
    """An unraisable hook that drops what other reads or writes say when they end after one of them has failed."""

    def __init__(self, previous: Callable[[Any], Any]):
        self.previous = previous

    def __call__(self, event: Any) -> None:
        if not (isinstance(event.exc_value, RuntimeError) and str(event.exc_value) == "Event loop is closed"):
            self.previous(event)


def _drop_late_calls() -> None:
    if not isinstance(sys.unraisablehook, _WithoutLateCalls):
        sys.unraisablehook = _WithoutLateCalls(sys.unraisablehook)
        warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what Orbax and TensorStore raise while reading into one message."""
    before = sys.unraisablehook
    _drop_late_calls()
    try:
        yield
    except CheckpointError:
        sys.unraisablehook = before
        raise
    except Exception as e:
        # The hook stays: other reads of the same call may still be under way.
        raise CheckpointError(f"{path} cannot be read: {_first_line(e)}") from e
    sys.unraisablehook = before


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    # TensorStore says which array first, then why, then codes and places in its source.
    line = re.sub(r" \[(os_error_code|source locations)=.*", "", line)
    return line if len(line) <= 300 else f"{line[:90]} ... {line[-200:]}"


def _summary(problems: list[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


class _WithoutOrbax(logging.Filter):
    """Keeps Orbax's warnings and tracebacks out of the log: this module raises, once, what went wrong."""

    def filter(self, record: logging.LogRecord) -> bool:
        from_orbax = f"{os.sep}orbax{os.sep}checkpoint{os.sep}" in record.pathname
        return not from_orbax or (record.levelno >= logging.ERROR and not record.exc_info)


class _WithoutItsTasks(logging.Filter):
    """The same for asyncio, which logs each further write of Orbax that failed beside the one that is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.getMessage())  # its code, or its temporary folder


logging.getLogger("absl").addFilter(_WithoutOrbax())
logging.getLogger("asyncio").addFilter(_WithoutItsTasks())
