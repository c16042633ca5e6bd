"""A trace of some training steps, and the operations that took most of their time.

The trace is JAX's own, a file of each process under RUN/profile, where TensorBoard's profile plugin and `xprof` find
it (extra `profile`). The table is made here with `jax.profiler.ProfileData`, which needs no further package.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax

from transformer_jax import storage
from transformer_jax.config import ConfigError, UserError

LISTED = 20
"""Operations of the table."""
_OPCODE = re.compile(r"^%?(?P<name>\S+) = .*? (?P<opcode>[a-z][a-z0-9-]*)\(")
_FUSION_KIND = re.compile(r"kind=k(\w+)")
_COLLECTIVE = re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|send|recv|ncclDevKernel")
_PRODUCT = re.compile(r"dot|gemm|convolution|cublas|matmul|cutlass")
_COPY = re.compile(r"copy|transpose|bitcast|memcpy|memset|slice|pad|concatenate|reshape|broadcast")
_LOOP = re.compile(r"while|conditional|call")


class Steps(NamedTuple):
    """The steps to trace, both included, as the log counts them."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse(text: str) -> Steps:
    """The steps that `--profile-steps A:B` names.

    Raises:
      ConfigError: it is not two numbers from 1 on, or the second is less than the first.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if found is None:
        raise ConfigError(
            f"--profile-steps {text}: write the first and the last step, as in --profile-steps 11:15, which is five"
        )
    steps = Steps(int(found[1]), int(found[2]))
    if steps.first < 1:
        raise ConfigError(f"--profile-steps {text}: steps are counted from 1")
    if steps.last < steps.first:
        raise ConfigError(
            f"--profile-steps {text}: step {steps.last} comes before step {steps.first}; write "
            f"--profile-steps {steps.last}:{steps.first}"
        )
    return steps


def check(steps: Steps, done: int, total: int) -> None:
    """Refuse steps that this start of a run does not make.

    Args:
      done: steps done before this start.
      total: steps of the run.

    Raises:
      UserError: says which steps there are.
    """
    there = f"this start makes steps {done + 1} to {total}"
    if done >= total:
        raise UserError(f"--profile-steps {steps}: step {total} of {total} is done, and nothing is left to trace")
    if steps.first <= done:
        raise UserError(f"--profile-steps {steps}: the run goes on from step {done}: {there}")
    if steps.last > total:
        raise UserError(f"--profile-steps {steps}: beyond the end of the run: {there}")


class Profile:
    """Traces `steps` of a run; a context within which the training steps are made.

    Args:
      folder: the run's `profile` folder, shared by all processes.
      say: told the table, and where the trace is.
    """

    def __init__(self, steps: Steps, folder: Path, say: Callable[[str], None]):
        self.steps, self.folder, self._say = steps, folder, say
        self._stack = contextlib.ExitStack()
        self._scratch: Path | None = None
        self._last = 0

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is not None and error is None:
            self._finish()  # the run leaves earlier than was asked for
        elif self._scratch is not None:
            with contextlib.suppress(Exception):
                jax.profiler.stop_trace()
            self._stack.close()

    @contextlib.contextmanager
    def step(self, number: int, state: Any) -> Iterator[None]:
        """Around the making of a step; the trace begins with the first of `steps`, once `state` is there."""
        if number == self.steps.first:
            jax.block_until_ready(state)
            self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trace-")))
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # each call of Python in the trace would slow the steps down
            jax.profiler.start_trace(str(self._scratch), profiler_options=options)
        if self._scratch is None:
            yield
            return
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        self._last = number

    def end(self, results: Any) -> None:
        """After the last of `steps` was made: the trace ends once its results are there."""
        if self._scratch is not None:
            jax.block_until_ready(results)
            self._finish()

    def _finish(self) -> None:
        scratch, self._scratch = self._scratch, None
        assert scratch is not None
        jax.profiler.stop_trace()
        made = Steps(self.steps.first, self._last)
        with self._stack:
            found = sorted(scratch.glob("plugins/profile/*/*.xplane.pb"))
            if not found:
                self._say("warning: the profiler wrote no trace")
                return
            folder = self.folder / "plugins" / "profile" / f"steps-{made.first}-{made.last}"
            _put(found[0], folder / f"process-{jax.process_index()}.xplane.pb")
            if jax.process_index() != 0:
                return
            summary = summarise(jax.profiler.ProfileData.from_file(str(found[0])), made.last - made.first + 1)
            _put_text(folder / "operations.json", json.dumps(dataclasses.asdict(summary), indent=1) + "\n")
        for line in table(summary, made):
            self._say(line)
        self._say(f"trace: {folder}; to look at it: xprof {self.folder}")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the compiled program, over all steps and devices of a trace."""

    name: str
    category: str
    seconds: float
    """Its own time, without that of the operations within it, a step and device."""
    count: float
    """How often it ran, a step and device."""
    share: float
    """Of the time of all operations."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a trace says of one process's devices."""

    devices: int
    step_seconds: float
    """From the first operation to the last, a step."""
    busy: float
    """The share of that time in which a device was at work, on average."""
    operations: tuple[Operation, ...]
    """By time, most first."""


class Event(NamedTuple):
    """One run of an operation."""

    device: str
    line: str
    name: str
    category: str
    start: float
    end: float


def summarise(data: Any, steps: int) -> Summary:
    """Sum up a trace.

    Args:
      data: a `jax.profiler.ProfileData`.
      steps: how many it covers.
    """
    with warnings.catch_warnings():
        # Of JAX 0.12's own types on Python 3.12; as an error it would end the process from within native code.
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        events = list(read_events(data))
    devices = {e.device for e in events}
    if not events:
        return Summary(0, 0.0, 0.0, ())
    own: dict[tuple[str, str], float] = collections.defaultdict(float)
    count: dict[tuple[str, str], int] = collections.defaultdict(int)
    for event, nanoseconds in own_times(events):
        own[event.name, event.category] += nanoseconds
        count[event.name, event.category] += 1
    total, each = sum(own.values()), steps * len(devices)
    operations = [
        Operation(name, category, ns * 1e-9 / each, count[name, category] / each, ns / max(total, 1e-9))
        for (name, category), ns in sorted(own.items(), key=lambda item: -item[1])
    ]
    length = max(e.end for e in events) - min(e.start for e in events)
    at_work = sum(covered((e.start, e.end) for e in events if e.device == device) for device in devices)
    busy = at_work / max(length * len(devices), 1e-9)
    return Summary(len(devices), length * 1e-9 / steps, busy, tuple(operations))


def read_events(data: Any) -> Iterator[Event]:
    """The runs of compiled operations in a trace: on a TPU the line `XLA Ops` of each device, else whatever names the
    operation of the program that it belongs to."""
    for plane in data.planes:
        lines = list(plane.lines)
        of_tpu = [line for line in lines if line.name == "XLA Ops"] if plane.name.startswith("/device:") else []
        for line in of_tpu or lines:
            for event in line.events:
                stats = dict(event.stats)
                if not of_tpu and "hlo_op" not in stats:
                    continue
                name, category = describe(str(stats.get("hlo_op") or event.name), event.name, stats)
                device = plane.name if plane.name.startswith("/device:") else f"cpu {stats.get('device_ordinal', 0)}"
                yield Event(device, f"{plane.name} {line.name}", name, category, event.start_ns, event.end_ns)


def describe(operation: str, event: str, stats: dict[str, Any]) -> tuple[str, str]:
    """The name of an operation, and what kind it is.

    Args:
      operation: its name, or its line of HLO as TPUs give it.
      event: what the trace calls it: of a GPU, the kernel.
    """
    line = _OPCODE.match(operation)
    name = (line["name"] if line else operation).lstrip("%")
    if stats.get("hlo_category"):
        return name, str(stats["hlo_category"])
    kind = _FUSION_KIND.search(operation)
    if line and line["opcode"] != "fusion":
        name_of_kind = line["opcode"]
    elif kind:
        return name, f"{kind[1].lower()} fusion"
    else:
        name_of_kind = f"{name} {event if event != operation else ''}"
    for pattern, category in ((_COLLECTIVE, "collective"), (_LOOP, "loop"), (_PRODUCT, "product")):
        if pattern.search(name_of_kind):
            return name, category
    if "fusion" in name_of_kind:
        return name, "fusion"
    return name, "data movement" if _COPY.search(name_of_kind) else "other"


def own_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with its nanoseconds less those of the events within it on the same line."""
    by_line: dict[tuple[str, str], list[Event]] = collections.defaultdict(list)
    for event in events:
        by_line[event.device, event.line].append(event)
    for line in by_line.values():
        own = [e.end - e.start for e in line]
        around: list[int] = []
        for i in sorted(range(len(line)), key=lambda i: (line[i].start, -line[i].end)):
            while around and line[around[-1]].end <= line[i].start:
                around.pop()
            if around:
                own[around[-1]] -= line[i].end - line[i].start
            around.append(i)
        yield from ((event, max(ns, 0.0)) for event, ns in zip(line, own, strict=True))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def table(summary: Summary, steps: Steps) -> list[str]:
    """The summary as lines."""
    if not summary.operations:
        return [f"steps {steps.first} to {steps.last}: the trace names no operations of the program"]
    listed = summary.operations[:LISTED]
    rest = summary.operations[LISTED:]
    width = max(len(op.category) for op in listed)
    lines = [
        f"steps {steps.first} to {steps.last}: {1e3 * summary.step_seconds:,.2f} ms a step; "
        + (f"{summary.devices} devices of this process are" if summary.devices > 1 else "the device is")
        + f" at work {100 * summary.busy:.0f} % of it",
        f"{'ms a step':>12} {'share':>7} {'count':>8}  {'category':<{width}}  operation",
    ]
    for op in listed:
        lines.append(
            f"{1e3 * op.seconds:12,.3f} {100 * op.share:6.1f}% {op.count:8,.1f}  {op.category:<{width}}  {op.name}"
        )
    if rest:
        seconds, count, share = (sum(getattr(op, f) for op in rest) for f in ("seconds", "count", "share"))
        what = f"{len(rest)} others"
        lines.append(f"{1e3 * seconds:12,.3f} {100 * share:6.1f}% {count:8,.1f}  {'':<{width}}  {what}")
    kinds: dict[str, float] = collections.defaultdict(float)
    for op in summary.operations:
        kinds[op.category] += op.share
    shown = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in sorted(kinds.items(), key=lambda i: -i[1]))
    return [*lines, f"by category: {shown}"]


def _put(source: Path, target: Path) -> None:
    if storage.is_remote(target):
        storage.send_file(source, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.copyfile(source, temporary)
    temporary.replace(target)


def _put_text(target: Path, text: str) -> None:
    target.write_bytes(text.encode())
