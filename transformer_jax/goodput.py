"""Where the time of a run goes: every second of every process that worked on it, and what stops have cost.

A `Clock` puts each second of a process down to one of PHASES. `times.jsonl` in the run folder holds its state, a line
at each line of the log and at each save; it is never cut, so the work that a stop has lost can be told: what came
after the step from which the next process went on.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax import storage
from transformer_jax.start_up import StartUp

PHASES = {
    "start": "starting: imports, joining, reading data, restoring",
    "compile": "compiling",
    "input": "waiting for batches",
    "step": "training steps",
    "evaluation": "evaluation",
    "saving": "saving",
    "profile": "writing and reading a trace",
    "end": "ending",
}
FILE = "times.jsonl"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_FOUND = "/jax/compilation_cache/cache_hits"
_watched: Clock | None = None


class Clock:
    """Which phase each second of this process belongs to; the phases' seconds add up to its time.

    Args:
      age: seconds that the process had lived before (see `process_age`), which count as `start`.
    """

    def __init__(self, age: float = 0.0):
        self._since = time.perf_counter() - age
        self.began = time.time() - age
        self.phase = "start"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._thread = threading.get_ident()
        self._steps: collections.deque[float] = collections.deque(maxlen=101)
        self._stepped = 0.0
        self.start_up = StartUp(age)
        """The same time up to the end of the first step, in smaller parts."""
        self.beats = 0
        """Signs that something moves on: changes of phase, steps, and batches of an evaluation."""
        _listen(self)

    def enter(self, phase: str) -> None:
        """From now on seconds are put down to `phase`."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._since
        self._since, self.phase = now, phase
        self.beats += 1

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Seconds inside are put down to `phase`."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def beat(self) -> None:
        """Something has moved on within the phase."""
        self.beats += 1

    def stepped(self) -> None:
        """A step is done; how long it took is what it took from the last one in `step` and `input`."""
        self.beats += 1
        totals = self.totals()
        spent = totals["step"] + totals["input"]
        self._steps.append(spent - self._stepped)
        self._stepped = spent

    def median_step(self) -> float:
        """Seconds of the median of the last steps; 0 before there are five."""
        return statistics.median(self._steps) if len(self._steps) >= 5 else 0.0

    def compiled(self, seconds: float) -> None:
        """XLA has compiled for so long, in whatever phase: it is moved to `compile`."""
        if threading.get_ident() != self._thread:
            return
        self.start_up.compiled(seconds)
        if self.phase != "compile":
            self._seconds[self.phase] -= seconds
            self._seconds["compile"] += seconds

    def totals(self) -> dict[str, float]:
        """Seconds of each phase up to now."""
        totals = dict(self._seconds)
        totals[self.phase] += time.perf_counter() - self._since
        return totals


def process_age() -> float:
    """Seconds since this process was started, or 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class TimesFile:
    """Writes a clock's state into the run folder.

    Args:
      first_step: the step that this process goes on from.
    """

    def __init__(self, run_dir: Path, clock: Clock, first_step: int):
        self._clock, self._first_step = clock, first_step
        self._file = (run_dir / FILE).open("a", encoding="utf-8")
        self.write(first_step)

    def write(self, step: int) -> None:
        """A line: the seconds up to now, with `step` steps done."""
        clock = self._clock
        seconds = {name: round(value, 4) for name, value in clock.totals().items()}
        line = {"process": f"{clock.began:.3f}", "began": clock.began, "first_step": self._first_step, "step": step}
        self._file.write(json.dumps({**line, "seconds": seconds}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def account(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up the lines of a `times.jsonl`.

    Returns:
      `seconds` by phase, without what was lost; `lost_seconds` and `lost_steps`, which stops have undone; `stops` and
      `stopped_seconds`, in which no process was at work; `total_seconds` from the first start to the last line, which
      is the sum of all of these; and `goodput`, the share of the training steps that count.
    """
    processes: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        processes.setdefault(line["process"], []).append(line)
    runs = list(processes.values())
    seconds = dict.fromkeys(PHASES, 0.0)
    lost_seconds = stopped = 0.0
    lost_steps = 0
    for i, run in enumerate(runs):
        first, last = run[0], run[-1]
        went_on_from = min((later[0]["first_step"] for later in runs[i + 1 :]), default=last["step"])
        kept = next((line for line in reversed(run) if line["step"] <= went_on_from), first)
        if i + 1 < len(runs):
            stopped += max(runs[i + 1][0]["began"] - last["began"] - sum(last["seconds"].values()), 0.0)
        else:
            kept = last
        lost_steps += max(last["step"] - max(kept["step"], went_on_from), 0)
        lost_seconds += sum(last["seconds"].values()) - sum(kept["seconds"].values())
        for name in PHASES:
            seconds[name] += kept["seconds"].get(name, 0.0)
    total = sum(seconds.values()) + lost_seconds + stopped
    return {
        "seconds": seconds,
        "stops": max(len(runs) - 1, 0),
        "lost_steps": lost_steps,
        "lost_seconds": lost_seconds,
        "stopped_seconds": stopped,
        "total_seconds": total,
        "goodput": seconds["step"] / total if total else 0.0,
    }


def read_times(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's `times.jsonl`; what a kill has cut off, or what else is no such line, is left out."""
    found = []
    path = run_dir / FILE
    for line in storage.read_text(path).splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict) and {"process", "began", "first_step", "step", "seconds"} <= set(value):
                found.append(value)
    return found


def rows(run_dir: Path) -> dict[str, str]:
    """What each kind of time comes to, for people: name -> seconds and share. Empty for a run without records."""
    lines = read_times(run_dir)
    if not lines:
        return {}
    found = account(lines)
    total = found["total_seconds"]

    def shown(seconds: float) -> str:
        return f"{seconds:,.1f} s  {100 * seconds / max(total, 1e-9):5.1f} %"

    table = {PHASES[name]: shown(value) for name, value in found["seconds"].items() if value or name != "profile"}
    if found["stops"]:
        lost = f"work lost between {found['stops'] + 1} starts: {found['lost_steps']} steps"
        table[lost] = shown(found["lost_seconds"])
        table["not running"] = shown(found["stopped_seconds"])
    return {**table, "in all": shown(total)}


def table(run_dir: Path) -> list[str]:
    """`rows` as lines."""
    found = rows(run_dir)
    width = max(map(len, found), default=0)
    return [f"  {name:<{width}}  {value:>20}" for name, value in found.items()]


def _listen(clock: Clock) -> None:
    """Have JAX tell the newest clock of its compilations; a listener cannot be taken away again."""
    global _watched
    if _watched is None:
        import jax.monitoring

        def told(event: str, duration_secs: float, **_: str | int) -> None:
            if event == _COMPILED and _watched is not None:
                _watched.compiled(duration_secs)

        def happened(event: str, **_: str | int) -> None:
            if event == _FOUND and _watched is not None:
                _watched.start_up.found()

        jax.monitoring.register_event_duration_secs_listener(told)
        jax.monitoring.register_event_listener(happened)
    _watched = clock
