"""How a training command ends, for whatever started it (docs/hosts.md)."""

from __future__ import annotations

DONE = 0
FAULT = 1
"""A fault of the program: a traceback says where."""
MISTAKE = 2
"""Something the user can mend; starting again as it is does not help."""
RESTART = 75
"""A host was lost or stalled: start all processes again, and the run goes on from its newest checkpoint."""


def of_signal(number: int) -> int:
    """What a shell gives for a process that a signal has ended."""
    return 128 + number
