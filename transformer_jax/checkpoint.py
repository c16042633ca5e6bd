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
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from transformer_jax import step_folders, storage
from transformer_jax.config import CheckpointConfig, ConfigError
from transformer_jax.named_trees import flat, named_leaves, named_tree, nest
from transformer_jax.step_folders import (
    DIGESTS,
    CheckpointError,
    NoCheckpointError,
    first_line,
    kept,
    locate,
    steps,
    unfinished,
    verify,
)

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "NoCheckpointError",
    "Restored",
    "contents",
    "kept",
    "locate",
    "read_meta",
    "read_params",
    "steps",
    "unfinished",
    "verify",
]

_TEMPORARY = ".orbax-checkpoint-tmp"
_log = logging.getLogger(__name__)


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
        self.folder = storage.absolute(storage.path(folder))
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
          metric: the evaluation figure `best_metric` at this step, for `keep_best`; `set_metric` can add it later.

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
        tree = named_tree(state)
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
            raise step_folders.failed_save(self.folder, step, e) from e
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
                with storage.reported(self.folder):
                    self._probe()
        except (OSError, storage.StorageError) as e:
            raise CheckpointError(f"{self.folder}: no checkpoint can be saved here: {first_line(e)}") from e

    def _probe(self) -> None:
        probe = self.folder / f".0{step_folders.DELETING}"  # which is swept up if this is cut off
        if storage.is_remote(probe):
            probe.write_text("")
            probe.unlink()
            return
        if probe.is_dir():
            shutil.rmtree(probe)
        probe.mkdir(parents=True)
        probe.rmdir()

    def set_metric(self, step: int, metric: float) -> None:
        """Note the metric of a step saved before; returns at once. A step that is not complete is ignored."""
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
        names, abstract, treedef = named_leaves(abstract_state)
        stored = _stored_leaves(path)
        _refuse_mismatch(path, stored, dict(zip(names, abstract, strict=True)))
        wanted = nest(zip(names, (_with_sharding(x) for x in abstract), strict=True))
        with _explained(path), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            tree = checkpointer.restore(path / "state", args=ocp.args.StandardRestore(wanted))
        arrays = flat(tree)
        state = jax.tree.unflatten(treedef, [arrays[name] for name in names])
        self._own = {chosen}
        self._bad = {s for s, _ in skipped}
        return Restored(chosen, state, _read_json(path, "data"), _read_json(path, "meta"), skipped)

    # What follows runs on the worker thread, or on the training thread while the worker is idle.

    def _complete(self, step: int, metric: float | None) -> None:
        assert self._manager is not None
        try:
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                step_folders.write_digests(self.folder / str(step), metric, self.config)
                self._bad.discard(step)
                self._delete_old(step)
        except Exception as e:
            self._forget(step)
            raise step_folders.failed_save(self.folder, step, e) from e

    def _note_metric(self, step: int, metric: float) -> None:
        if jax.process_index() != 0:
            return
        path = self.folder / str(step)
        try:
            step_folders.write_metric(path, metric, self.config)
            self._delete_old(max(steps(self.folder)))
        except step_folders.DamagedError as e:
            _log.warning("%s: its metric was not noted: %s", path, e)
        except OSError as e:
            raise step_folders.failed_save(self.folder, step, e) from e

    def _delete_old(self, newest: int) -> None:
        """Carry out the keep policy over the complete steps up to `newest`, which has its digests."""
        metrics: dict[int, float | None] = {}
        for step in steps(self.folder):
            # A damaged step does not count towards those kept, and stays for its owner to look at. Steps after the
            # newest belong to a history that training is about to write again.
            if step <= newest and step not in self._bad:
                with contextlib.suppress(step_folders.DamagedError):
                    metrics[step] = step_folders.metric_of(self.folder / str(step), self.config.best_metric)
        for step in sorted(set(metrics) - kept(metrics, self.config)):
            try:
                step_folders.delete(self.folder / str(step))
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
                    if number.isdigit() and f".{rest}".startswith((_TEMPORARY, step_folders.DELETING)):
                        _log.info("removing %s, left by a run that was stopped", left_over)
                        storage.remove_tree(left_over)
                if storage.is_remote(self.folder):  # where a step is deleted file by file, and a stop may leave some
                    complete = steps(self.folder)
                    for old, _ in unfinished(self.folder):
                        if complete and old < complete[-1]:
                            storage.remove_tree(self.folder / str(old))
            if path.exists():
                _log.info("replacing %s", path)
                step_folders.delete(path)
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
        if jax.process_index() == 0:
            with contextlib.suppress(storage.StorageError), storage.reported(self.folder):
                for path in (self.folder / str(step), *self.folder.glob(f"{step}{_TEMPORARY}*")):
                    if path.exists() and not (path / DIGESTS).exists():
                        storage.remove_tree(path, ignore_errors=True)

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            # Its error, if it has one, has been reported by then.
            with contextlib.suppress(Exception):
                manager.close()


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


def _stored_leaves(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    with _explained(path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path / "state").item_metadata.tree
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in flat(tree).items()}


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


def _open(checkpoint: Path | str, step: int | None = None) -> Path:
    """The folder of the step to read, verified; the steps passed over are logged."""
    root, step = locate(checkpoint, step)
    chosen, skipped = step_folders.newest_verified(root, step)
    for number, reason in skipped:
        _log.warning("%s: passed over step %d: %s", root, number, reason)
    return root / str(chosen)


def _agree_on_step(root: Path, step: int | None) -> tuple[int, list[tuple[int, str]]]:
    """As `step_folders.newest_verified`; of several processes only the first reads the files and makes the digests."""
    if jax.process_count() == 1:
        return step_folders.newest_verified(root, step)
    chosen, error = -1, None
    skipped: list[tuple[int, str]] = []
    if jax.process_index() == 0:
        try:
            chosen, skipped = step_folders.newest_verified(root, step)
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
        raise CheckpointError(f"{path} cannot be read: {first_line(e)}") from e
    sys.unraisablehook = before


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
