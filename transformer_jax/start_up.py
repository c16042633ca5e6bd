"""Where the time between the start of a process and the end of its first training step goes.

It is what a restart costs, besides the steps that are made again.
"""

from __future__ import annotations

import time
from typing import Any

PARTS = {
    "imports": "imports",
    "joining": "joining hosts",
    "devices": "devices",
    "reading": "reading data",
    "building": "building",
    "restoring": "state",
    "evaluation": "evaluation",
    "batch": "first batch",
    "tracing": "tracing",
    "compiling": "compiling",
    "step": "first step",
}
"""In the order in which they begin. `state` is restoring it or drawing a fresh one; `evaluation` is one that the step
of the checkpoint still owed; the time of the compiler is taken out of all others."""
KEY = "start_up_seconds"
"""Of the parts, in the first record that a process writes into `metrics.jsonl`."""


class StartUp:
    """Puts each second from the start of a process on down to one of PARTS, until `done`.

    Args:
      age: seconds that the process had lived before; they count as imports.
    """

    def __init__(self, age: float = 0.0):
        self._since = time.perf_counter() - age
        self._part = "imports"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._compiled = self._found = 0
        self._found_before_step = 0
        self.is_done = False
        self.kept = "programs are not kept"
        """Where compiled programs are kept, or why they are not."""

    def enter(self, part: str) -> None:
        """From now on seconds are put down to `part`."""
        if self.is_done:
            return
        now = time.perf_counter()
        self._seconds[self._part] += now - self._since
        self._since, self._part = now, part
        if part == "tracing":
            self._found_before_step = self._found

    def compiled(self, seconds: float) -> None:
        """XLA has compiled for so long, or read the program from where it is kept."""
        if not self.is_done:
            self._seconds[self._part] -= seconds
            self._seconds["compiling"] += seconds
            self._compiled += 1

    def found(self) -> None:
        """A program was found where programs are kept."""
        if not self.is_done:
            self._found += 1

    def done(self) -> None:
        """The first step is over."""
        self.enter("step")
        self.is_done = True

    def record(self) -> dict[str, Any]:
        """Seconds of each part that took any, and how many programs were compiled or found: for `metrics.jsonl`."""
        found: dict[str, Any] = {name: round(s, 4) for name, s in self._seconds.items() if s > 0}
        found["in_all"] = round(sum(self._seconds.values()), 4)
        found["programs"], found["programs_found"] = self._compiled, self._found
        return found | {"step_program": "found" if self._found > self._found_before_step else "compiled"}


def rows(record: dict[str, Any]) -> dict[str, str]:
    """A record of `StartUp.record` for people: name -> seconds and share."""
    total = record["in_all"]

    def shown(seconds: float) -> str:
        return f"{seconds:,.2f} s  {100 * seconds / max(total, 1e-9):5.1f} %"

    parts = {text: shown(record[name]) for name, text in PARTS.items() if name in record}
    return parts | {"in all": shown(total)}


def lines(record: dict[str, Any], kept: str) -> list[str]:
    """The record as two lines; `kept` as `StartUp.kept`."""
    parts = ", ".join(f"{text} {record[name]:.1f}" for name, text in PARTS.items() if record.get(name, 0.0) >= 0.05)
    program = "kept from before" if record["step_program"] == "found" else "compiled now"
    return [
        f"the first step was done {record['in_all']:.1f} s after the start: {parts}",
        f"the step's program was {program} ({record['programs']} programs in all, {record['programs_found']} of them "
        f"kept from before; {kept})",
    ]
