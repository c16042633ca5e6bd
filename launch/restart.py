#!/usr/bin/env python3
"""Run a training command and start it again when it ends in a way that a new start mends (docs/hosts.md).

    python3 launch/restart.py --run-dir RUN [options] -- COMMAND ...

75 and 128 + N (ended by a signal) are started again; 130 and 143 (stopped), 0, 2 and codes that the programs do not
have are not; 1 is tried three times in all. It also gives up, with exit code 1, when the newest complete checkpoint of
RUN has not moved over `--no-progress` starts. Otherwise its exit code is the command's. SIGTERM and Ctrl-C are passed
on, after which nothing is started again; a terminal that closes (SIGHUP) counts as SIGTERM. Where this loop itself is
killed, the command gets SIGTERM (on Linux).

On several hosts each runs this loop with the same options; pauses have no random part, so that all come back together.
Nothing but Python 3.8 is needed. Progress in a bucket (`--run-dir gs://...`) is asked of the Python beside COMMAND,
which can read buckets.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

DONE, FAULT, MISTAKE, RESTART = 0, 1, 2, 75
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
NOT_FOUND = 127
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME = 1.0
"""Seconds within which a signal that comes again is the same one: schedulers often send it in two ways, and the
programs leave without a save at the second."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the loop puts up with."""

    pause: float = 5.0
    """Seconds before the next start; twice as long each time, until a checkpoint is completed."""
    longest: float = 120.0
    """Less than `hosts.join_limit`, so that a host that began its pause late is still waited for."""
    faults: int = 3
    """Ends with exit code 1, without a checkpoint between them, with which it gives up."""
    no_progress: int = 5
    """The same for all ends."""


@dataclasses.dataclass(frozen=True)
class Tally:
    """What has happened since the last complete checkpoint."""

    step: int = 0
    ends: int = 0
    faults: int = 0


ASK = """import sys
from transformer_jax import step_folders
print(max(step_folders.steps(sys.argv[1]), default=0))"""
"""What the Python of the command is asked of a run folder in a bucket."""
ASK_SECONDS = 120


def newest_step(run: str, command: list[str], known: int = 0) -> int:
    """The newest complete step of a run folder, 0 where there is none: a step is complete once it has its digests.

    Args:
      known: taken where a bucket cannot be asked.
    """
    if run.startswith("gs://"):
        python = Path(shutil.which(command[0]) or command[0]).with_name("python")
        try:
            done = subprocess.run(
                [str(python), "-c", ASK, run], stdout=subprocess.PIPE, timeout=ASK_SECONDS, check=True
            )
            return int(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as e:
            say(f"the steps of {run} cannot be seen, so progress is not noticed: {e}")
            return known
    found = (Path(run) / "checkpoints").glob("*/digests.json")
    return max((int(path.parent.name) for path in found if path.parent.name.isdigit()), default=0)


def after(code: int, tally: Tally, step: int, limits: Limits) -> tuple[Tally, float, str]:
    """What follows an end.

    Args:
      code: the command's exit code, 128 + N where a signal has ended it.
      tally: as it was before this end.
      step: the newest complete step now.

    Returns:
      The new tally, the pause before the next start (negative: there is none), and why.
    """
    if code == DONE:
        return tally, -1, "done"
    if code == MISTAKE:
        return tally, -1, "something to mend, which the lines above name; starting again as it is does not help"
    if code in STOPPED:
        return tally, -1, f"stopped by {signal.Signals(code - 128).name}; the same command goes on"
    if code not in (FAULT, RESTART) and not 128 < code <= 128 + 64:
        return tally, -1, f"exit code {code} is none of the programs'; is the command right?"
    if step > tally.step:
        tally = Tally(step)
    tally = Tally(tally.step, tally.ends + 1, tally.faults + (code == FAULT))
    if tally.faults >= limits.faults:
        return tally, -1, f"gives up: a fault of the program {tally.faults} times since step {tally.step}"
    if tally.ends >= limits.no_progress:
        return tally, -1, f"gives up: {tally.ends} starts without a new checkpoint since step {tally.step}"
    pause = min(limits.pause * 2 ** min(tally.ends - 1, 30), limits.longest)
    why = {FAULT: "a fault of the program", RESTART: "a host was lost or stalled"}.get(code, f"signal {code - 128}")
    return tally, pause, f"{why}; goes on from step {step} in {pause:g} s"


def gave_up(code: int, why: str) -> int:
    """The loop's own exit code: 1 where it has given up, so that what started the loop does not start it again."""
    return FAULT if why.startswith("gives up") else code


class Loop:
    """The command, again and again."""

    def __init__(self, command: list[str], run: str, limits: Limits):
        self.command, self.run_dir, self.limits = command, run, limits
        self.child: subprocess.Popen[bytes] | None = None
        self.asked, self.asked_at = 0, 0.0

    def run(self) -> int:
        """Until there is no reason to start again; the exit code."""
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._pass_on)
        step = newest_step(self.run_dir, self.command)
        tally = Tally(step)
        while True:
            code = self._once()
            step = newest_step(self.run_dir, self.command, step)
            tally, pause, why = after(code, tally, step, self.limits)
            if self.asked and pause >= 0:
                pause, why = -1, f"{signal.Signals(self.asked).name} came, so it is not started again"
            say(f"exit code {code}: {why}")
            if pause < 0:
                return gave_up(code, why)
            end = time.monotonic() + pause
            while not self.asked and time.monotonic() < end:
                time.sleep(min(0.2, max(end - time.monotonic(), 0)))
            if self.asked:
                say(f"{signal.Signals(self.asked).name} came in the pause")
                return 128 + self.asked

    def _once(self) -> int:
        say(f"starts {shlex.join(self.command)}")
        try:
            # A session of its own: Ctrl-C of a terminal would otherwise reach the command twice, and the second signal
            # makes it leave without a save.
            self.child = subprocess.Popen(self.command, start_new_session=True, preexec_fn=_end_with_this)
        except OSError as e:
            say(f"cannot start {self.command[0]}: {e.strerror}")
            return NOT_FOUND
        if self.asked:  # before the child was known
            self.child.send_signal(_as_sent(self.asked))
        code = self.child.wait()
        self.child = None
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == self.asked and now - self.asked_at < SAME:
            return
        self.asked, self.asked_at = number, now
        if self.child is not None:
            self.child.send_signal(_as_sent(number))


def _as_sent(number: int) -> int:
    """The signal that asks the programs to save and leave; SIGHUP would end them at once."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _end_with_this() -> None:
    """In the command, before it begins: have it sent SIGTERM when the loop is gone, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def say(line: str) -> None:
    """To standard error, with the time."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} restart: {line}", file=sys.stderr, flush=True)


def read_arguments(words: list[str]) -> tuple[list[str], str, Limits, bool]:
    """The command, the run folder, the limits, and whether to print only."""
    parser = argparse.ArgumentParser(
        prog="restart.py",
        description=(__doc__ or "").partition("\n")[0],
        usage="%(prog)s --run-dir RUN [options] -- COMMAND ...",
    )

    def refuse(message: str) -> NoReturn:
        print(f"restart.py: {message}; restart.py --help says more", file=sys.stderr)
        raise SystemExit(MISTAKE)

    parser.error = refuse  # type: ignore[method-assign]
    limits = Limits()
    add = parser.add_argument
    add("--run-dir", required=True, help="the run's folder, in whose checkpoints/ progress is seen; may be gs://")
    add("--pause", type=float, default=limits.pause, help="seconds before the first new start (%(default)g)")
    add("--longest", type=float, default=limits.longest, help="longest pause in seconds (%(default)g)")
    add("--faults", type=int, default=limits.faults, help="ends with exit code 1 to give up at (%(default)s)")
    add("--no-progress", type=int, default=limits.no_progress, help="ends without a new checkpoint (%(default)s)")
    add("--dry-run", action="store_true", help="print what would run, and start nothing")
    own, mark, command = _split(words) if "--" in words else (words, "", [])
    args = parser.parse_args(own)
    if not mark or not command:
        refuse("no command is given; write it after --")
    if not 0 <= args.pause <= args.longest < float("inf"):
        refuse(f"--pause is {args.pause:g} and --longest {args.longest:g}; 0 <= pause <= longest is needed")
    if args.faults < 1 or args.no_progress < 1:
        refuse("--faults and --no-progress must be 1 or more")
    return command, args.run_dir, Limits(args.pause, args.longest, args.faults, args.no_progress), args.dry_run


def _split(words: list[str]) -> tuple[list[str], str, list[str]]:
    place = words.index("--")
    return words[:place], "--", words[place + 1 :]


def main() -> int:
    """The exit code."""
    command, run, limits, dry = read_arguments(sys.argv[1:])
    if dry:
        print(
            f"{shlex.join(command)}\n"
            f"# newest complete checkpoint of {run}: step {newest_step(run, command)}\n"
            f"# again on 75 and 128+N but 130 and 143, after {limits.pause:g} s, doubled up to {limits.longest:g} s\n"
            f"# gives up after exit code 1 {limits.faults} times or {limits.no_progress} ends without a new checkpoint"
        )
        return DONE
    return Loop(command, run, limits).run()


if __name__ == "__main__":
    sys.exit(main())
