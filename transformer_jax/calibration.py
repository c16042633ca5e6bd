"""What a step took on real machines beside what was planned: kept by `check`, and shown by `plan`.

A file holds a list of measurements. A plan for the same kind of chip is multiplied by the newest of them, one of the
same pod before others.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from transformer_jax import storage
from transformer_jax.config import UserError
from transformer_jax.topologies import Pod


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One `check` on a pod that can be planned."""

    pod: str
    chip: str
    run: str
    when: str
    """Date, as 2026-11-30."""
    step_seconds: float
    planned_seconds: tuple[float, ...]
    """The range, or the least alone where no more is planned (GPUs)."""
    peak_bytes: float
    """Of a device; 0 where it does not say."""
    planned_bytes: float
    versions: dict[str, str]

    @property
    def time_ratio(self) -> float:
        """Measured over the middle of the planned range."""
        return self.step_seconds / middle(self.planned_seconds)

    @property
    def memory_ratio(self) -> float:
        """Measured over planned; 0 where it was not measured."""
        return self.peak_bytes / self.planned_bytes if self.planned_bytes else 0.0


def middle(span: Sequence[float]) -> float:
    """The middle of a planned range."""
    return sum(span) / len(span)


def default_file() -> Path:
    """Where the measurements of this user are kept."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "transformer-jax" / "calibration.json"


def read(file: Path) -> list[Measurement]:
    """The measurements in a file, oldest first; none where there is no file.

    Raises:
      UserError: it is not such a file.
    """
    if not file.exists():
        return []
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Measurement])
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise UserError(f"{file}: not a file of measurements: {e}; `check` writes them; delete it to begin anew") from e


def add(file: Path, measurement: Measurement) -> None:
    """Add a measurement to a file, which is made if it is not there."""
    if not storage.is_remote(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    kept = [m for m in read(file) if (m.pod, m.run) != (measurement.pod, measurement.run)]
    text = json.dumps([dataclasses.asdict(m) for m in (*kept, measurement)], indent=1) + "\n"
    storage.write_whole(file, text)


def for_pod(measurements: Sequence[Measurement], pod: Pod) -> Measurement | None:
    """The newest measurement that says something of this pod: its own, or else that of another one of its chips."""
    same = [m for m in measurements if m.chip == pod.chip.name]
    return next((m for m in reversed(same) if m.pod == pod.name), same[-1] if same else None)


def calibrated(found: Mapping[str, Any], measurement: Measurement) -> dict[str, Any]:
    """What the measurement makes of a planned report that has `step_seconds` (see `plan_report.report`).

    Returns:
      Seconds of a step, days and chip-hours of the run, and where the ratio comes from.
    """
    times = found["step_seconds"]
    span = [times["least"], times["most"]] if times["most"] else [times["least"]]
    seconds = middle(span) * measurement.time_ratio
    return {
        "step_seconds": seconds,
        "days": found["steps"] * seconds / 86400,
        "chip_hours": found["steps"] * seconds * found["pod"]["chips"] / 3600,
        "time_ratio": measurement.time_ratio,
        "memory_ratio": measurement.memory_ratio,
        "pod": measurement.pod,
        "run": measurement.run,
        "when": measurement.when,
    }
