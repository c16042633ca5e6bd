"""A run's figures for TensorBoard."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


class Board:
    """TensorBoard's events of a run, which are written at once.

    tensorboardX's own writer hands them to a thread; with the disk full the thread ends, and training then waits for
    ever for a place in its queue. So only the library's files and messages are used.

    Args:
      folder: of the run's events; made if it is not there.
      purge_step: events of earlier starts from this step on are hidden.
    """

    def __init__(self, folder: Path, purge_step: int):
        # tensorboardX imports PyTorch where it finds it, which takes seconds, for nothing here.
        had = "torch" in sys.modules
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # with which an import of it fails
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        finally:
            if not had:
                del sys.modules["torch"]
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=purge_step, session_log=start)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Write the values of a step.

        Raises:
          OSError: there is no room.
        """
        found = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step=step, summary=self._summary(value=found))

    def _write(self, **fields: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), **fields))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
