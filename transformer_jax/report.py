"""What a run says of itself: the console, `metrics.jsonl`, TensorBoard, `log.txt`.

One Reporter lives as long as the run. On a terminal it draws a progress bar; piped, it prints plain lines. Everything
goes to standard error: results, which go to standard output, are the commands' business.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from transformer_jax import start_up, storage
from transformer_jax.board import Board
from transformer_jax.config import UserError
from transformer_jax.goodput import Clock, TimesFile, table

# Peak bfloat16 FLOP/s of one device, by what JAX calls it (vendors' data sheets; v2 and v3 count cores, 7x halves).
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops() -> float | None:
    """Peak bfloat16 FLOP/s of all devices of the run, or None where the device is not in the table (a CPU)."""
    each = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return None if each is None else each * jax.device_count()


class Reporter:
    """Collects a run's numbers between two log lines and writes them.

    Args:
      run_dir: the run folder; only process 0 writes into it.
      total_steps: for progress and the time left.
      log_every: steps between log lines.
      first_step: the step the run goes on from; records of later steps, from before a stop, are taken out. With several
        processes, make one only when all of them have that step.
      clock: where the process's time goes; by default it begins now.
      send: called when there are new lines.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        log_every: int,
        first_step: int = 0,
        clock: Clock | None = None,
        send: Callable[[], None] = lambda: None,
    ):
        self.clock, self._send = clock or Clock(), send
        self.run_dir, self.total_steps, self.log_every = run_dir, total_steps, max(log_every, 1)
        self._first_step = first_step
        self._start_up: dict[str, Any] = {}
        self.writes = jax.process_index() == 0
        self.peak = peak_flops()
        self.console = Console(stderr=True)
        self._progress: Progress | None = None
        if self.writes:
            run_dir.mkdir(parents=True, exist_ok=True)
            drop_records_after(run_dir / "metrics.jsonl", first_step)
        records = read_records(run_dir / "metrics.jsonl")
        self.evaluations = {r["step"]: _values(r) for r in records if r["split"] == "heldout"}
        """What the run recorded up to `first_step`, by step."""
        if self.writes:
            self._records = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
            self._log = (run_dir / "log.txt").open("a", encoding="utf-8")
            self._times = TimesFile(run_dir, self.clock, first_step)
            self._step = first_step
            self._board = Board(run_dir / "tensorboard", first_step + 1)
            if self.console.is_terminal:
                self._progress = Progress(
                    TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
                    console=self.console,
                )  # fmt: skip
                self._bar = self._progress.add_task("training", total=total_steps, completed=first_step)
                self._progress.start()
        self._reset()

    def _reset(self) -> None:
        self._before = self.clock.totals()
        self._steps, self._tokens, self._flops, self._waited = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error it is the error that counts, and what is closed may have met the same.
        with contextlib.suppress(OSError, UserError) if kind is not None else contextlib.nullcontext():
            self.close()

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Say in which folder a full disk is."""
        try:
            yield
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"{self.run_dir}: the disk is full, so the run's records cannot be written; make room, and the same "
                "command goes on from the newest checkpoint"
            ) from e

    def timed(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Time of a phase of the clock. What is not training (compilation, evaluation, saving) is kept out of the rates
        and recorded under its own name."""
        return self.clock.within(what)

    def note_time(self, step: int) -> None:
        """Note what the time went to up to this step, of which a save has begun or a line was written."""
        if self.writes:
            self._step = step
            with self._room():
                self._times.write(step)
            self._send()

    def step(self, step: int, values: dict[str, float], flops: float, waited: float) -> None:
        """One training step's means, its model FLOPs, and the seconds that the loop waited for its batch."""
        self._steps += 1
        self._tokens += values.get("n/tokens", 0.0)
        self._flops += flops
        self._waited += waited
        if self._progress is not None:
            self._progress.update(self._bar, completed=step)
        if step % self.log_every and step != self.total_steps and step != 1:
            return
        now = self.clock.totals()
        spent = {name: now[name] - self._before[name] for name in now}
        seconds = max(spent["step"] + spent["input"], 1e-9)
        record: dict[str, Any] = {"step": step, "split": "train"} | values
        if slots := values.get("n/slots"):
            record["fill"] = values["n/tokens"] / slots
        record |= {
            "tokens_per_second": self._tokens / seconds,
            "steps_per_second": self._steps / seconds,
            "input_wait_seconds": self._waited,
            "seconds": seconds,
        }
        aside = ("start", "compile", "evaluation", "saving", "profile")
        record |= {f"{name}_seconds": spent[name] for name in aside if spent[name] > 0}
        record |= self._start_up
        self._start_up = {}
        if self.peak is not None:
            record["mfu"] = self._flops / seconds / self.peak
        self._write(record)
        # The first step of a process says nothing of the others.
        left = _clock((self.total_steps - step) * seconds / self._steps) if step > self._first_step + 1 else "?"
        shown = "  ".join(f"{k} {record[k]:.4g}" for k in _shown(record))
        rate = f"{record['tokens_per_second']:,.0f} tokens/s"
        self.line(f"step {step}/{self.total_steps}  {shown}  {rate}  {left} left")
        self.note_time(step)
        self._reset()

    def started(self) -> None:
        """The first step is done: where the time up to its end went, for the log and the next record."""
        self._start_up = {start_up.KEY: self.clock.start_up.record()}
        for line in start_up.lines(self._start_up[start_up.KEY], self.clock.start_up.kept):
            self.line(line)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Means over the whole evaluation set, with their counts."""
        self._write({"step": step, "split": "heldout"} | values)
        means = "  ".join(f"{k} {v:.4g}" for k, v in values.items() if not k.startswith("n/"))
        counts = {k[2:]: v for k, v in values.items() if k.startswith("n/") and f"{k[2:]}_loss" in values}
        shown = f"  (n: {', '.join(f'{k} {v:.0f}' for k, v in counts.items())})" if counts else ""
        self.line(f"step {step}  held out: {means}{shown}")

    def line(self, text: str) -> None:
        """A line for people, on standard error and in log.txt."""
        if not self.writes:
            return
        with self._room():
            self._log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + text + "\n")
            self._log.flush()
        if self._progress is not None:
            self.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def where_time_went(self) -> None:
        """The table of the run's time, as lines."""
        if self.writes:
            with self._room():
                self._times.write(self._step)
            self.line("where the time went, over all starts of this run:")
            for line in table(self.run_dir):
                self.line(line)

    def close(self) -> None:
        if not self.writes or self._records.closed:
            return
        if self._progress is not None:
            self._progress.stop()
        with self._room():
            self._times.write(self._step)
            self._times.close()
            self._records.close()
            self._log.close()
            self._board.close()

    def _write(self, record: dict[str, Any]) -> None:
        if not self.writes:
            return
        # JSON has no NaN and no infinity: a number that is not finite is written as null.
        shown = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with self._room():
            self._records.write(json.dumps(shown, allow_nan=False) + "\n")
            self._records.flush()
            numbers = {f"{record['split']}/{k}": v for k, v in record.items() if isinstance(v, float)}
            self._board.add(record["step"], numbers)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line cut off by a kill, or what else is no record, is left out."""
    records = []
    if path.exists():
        for line in storage.read_text(path).splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int) and "split" in record:
                    records.append(record)
    return records


def drop_records_after(path: Path, step: int) -> None:
    """Take out records of steps that a resumed run makes again, so that each step has one record."""
    records = read_records(path)
    if path.exists():
        kept = [json.dumps(r) + "\n" for r in records if r["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)


def _values(record: dict[str, Any]) -> dict[str, float]:
    return {k: math.nan if v is None else float(v) for k, v in record.items() if k not in ("step", "split")}


def quiet_libraries() -> None:
    """Keep libraries' informational messages out of the user's terminal; warnings and errors stay."""
    # Its own logger says where a message comes from, which `checkpoint` goes by; asked for first, it is a plain one.
    import absl.logging  # noqa: F401

    for name in ("jax", "absl", "orbax", "tensorboardX"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # of each number that is not finite


def _shown(record: dict[str, Any]) -> list[str]:
    names = [k for k in record if k.endswith(("loss", "accuracy"))]
    return names + [k for k in ("learning_rate", "gradient_norm", "mfu") if k in record]


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{whole % 60:02d}s"
