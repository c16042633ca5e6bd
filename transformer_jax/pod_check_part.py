"""One part of a `check` (see `pod_check`): the run's own training for a few steps, on this host."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from transformer_jax import command, storage
from transformer_jax.config import UserError
from transformer_jax.run_file import with_value
from transformer_jax.signals import StopSignal

SAVE_LIMIT = 240.0
"""Seconds that the checkpoint before the kill may take."""


class Train(Protocol):
    """A program's training, as `bert_jax.pretrain.pretrain` is."""

    def __call__(
        self, config: Any, *, stop: Any, on_step: Callable[[int, dict[str, float]], None], clock: Any
    ) -> Any: ...


class Until:
    """A stop signal that also comes after so many steps of this process."""

    def __init__(self, stop: StopSignal, steps: int, processes: int):
        # Several processes agree on a stop one step after it was asked for.
        self._stop, self._left = stop, steps - (processes > 1)
        self.name = "the end of this part"

    def __call__(self) -> bool:
        self._left -= 1
        return self._stop() or self._left <= 0

    @property
    def exit_code(self) -> int:
        return self._stop.exit_code


def settings(config: Any, part: str, out: str, steps: int) -> Any:
    """A run's configuration for a part: another folder, a save half-way, and nothing that takes long beside steps.

    The model, the data, the batch, the learning rate's schedule and the layout stay.
    """
    changes: dict[str, Any] = {
        "run_dir": folder(out, part),
        "train.log_every": 1,
        "train.eval_every": 0,
        "checkpoint.every": steps // 2,
        "checkpoint.keep_last": 2,
        "checkpoint.keep_every": 0,
        "checkpoint.keep_best": 0,
    }
    if config.train.compile_cache == "auto":
        changes["train.compile_cache"] = f"{out.rstrip('/')}/programs" if "/" in out else f"./{out}/programs"
    if hasattr(config, "validation"):
        changes["validation.lines"] = 0
    for key, value in changes.items():
        config = with_value(config, key, value)
    return config


def folder(out: str, part: str) -> str:
    """The run folder of a part; what was broken is resumed."""
    return f"{out.rstrip('/')}/{'whole' if part == 'whole' else 'broken'}"


def run(args: argparse.Namespace, config: Any, train: Train, write_page: Callable[[Path], Path]) -> int:
    """The part `args.part`; returns the exit code. The facts that the parent asks for are written to `args.answer`."""
    part, steps = args.part, args.steps
    config = settings(config, part, args.out, steps)
    half = steps // 2

    def part_of_run(stop: StopSignal, clock: Any) -> Any:
        import jax

        from transformer_jax import checkpoint

        run_dir = storage.path(config.run_dir)
        processes, me = jax.process_count(), jax.process_index()
        if part != "resumed" and me == 0 and checkpoint.steps(run_dir):
            raise UserError(f"{args.out} holds an earlier check; name another folder, or delete it")

        def on_step(step: int, values: dict[str, float]) -> None:
            if part == "broken" and me == processes - 1 and step >= half + half // 2:
                end = time.monotonic() + SAVE_LIMIT
                while half not in checkpoint.steps(run_dir) and time.monotonic() < end:
                    time.sleep(0.1)
                command.say(f"process {me} of {processes} kills itself now, as the check asks for")
                os.kill(os.getpid(), signal.SIGKILL)

        _answer(args.answer, {"process": me, "processes": processes})
        until = Until(stop, steps - half if part == "resumed" else steps, processes)
        result = train(config, stop=until, on_step=on_step, clock=clock)
        _answer(args.answer, {"process": me, "processes": processes, **facts()})
        return result if stop() else result._replace(interrupted=False, evaluation=None)

    return command.training(part_of_run, write_page, config, as_json=False)


def facts() -> dict[str, Any]:
    """The devices, and the most memory that one of this process's held; 0 where they do not say."""
    import jax

    devices, own = jax.devices(), jax.local_devices()
    memory = [device.memory_stats() or {} for device in own]
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "local_devices": len(own),
        "slices": len({getattr(device, "slice_index", 0) for device in devices}),
        "peak_bytes": max(m.get("peak_bytes_in_use", 0) for m in memory),
        "limit_bytes": max(m.get("bytes_limit", 0) for m in memory),
        "versions": {"jax": jax.__version__},
    }


def _answer(file: str, found: dict[str, Any]) -> None:
    temporary = Path(f"{file}.tmp")
    temporary.write_text(json.dumps(found))
    temporary.replace(file)
