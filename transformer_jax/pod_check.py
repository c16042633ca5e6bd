"""The command `check`: everything that a long run on these machines will need, tried in a few minutes.

Each host calls it with the same words. It starts the run's own training as a child process, three times: some steps
without a stop; the same steps with a save half-way, after which one process is killed; and the rest of those. Then
the losses are compared, the model is exported, and the time and memory of a step are set beside what `plan` says.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax import calibration, exit_codes, pod_check_part, start_up, storage, supervisor, topologies
from transformer_jax.calibration import Measurement
from transformer_jax.command import json_line, say
from transformer_jax.config import ConfigError, UserError

SETTLED = 5
"""Steps that are left out of the time of a step."""
PAUSE = 6.0
"""Seconds after the kill, within which every process has left (see `host_links.GRACE`)."""
TOLERANCE = {"gpu": 1e-3}
"""The largest relative difference of a loss that is put up with: GPUs add up in an order of their own."""
TOLERANCE_ELSEWHERE = 1e-5
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class Line(NamedTuple):
    """One thing that was tried."""

    what: str
    ok: bool | None
    """None: it could not be tried, or is a figure."""
    found: str


class Part(NamedTuple):
    """A part that has ended."""

    code: int
    seconds: float
    answer: dict[str, Any]


class Check:
    """What the hosts' parents do.

    Args:
      module: of the program, for `python -m`.
      words: overrides of the run file.
    """

    def __init__(self, args: argparse.Namespace, module: str, words: Sequence[str]):
        self.args, self.module, self.words = args, module, list(words)
        self.began = time.monotonic()
        self.lines: list[Line] = []

    def left(self) -> float:
        """Seconds that are left of `--limit`."""
        return self.args.limit - (time.monotonic() - self.began)

    def note(self, what: str, ok: bool | None, found: str) -> None:
        """Keep what was found, and say it."""
        self.lines.append(Line(what, ok, found))
        say(f"check: {_line(self.lines[-1])}")

    def part(self, name: str) -> Part:
        """Run a part on this host and wait for it."""
        args, began = self.args, time.monotonic()
        say(f"check: part `{name}` begins")
        with tempfile.TemporaryDirectory(prefix="check-") as scratch:
            answer = Path(scratch) / "answer.json"
            words = ["check", args.run, "--out", args.out, "--steps", str(args.steps), "--part", name]
            code, _ = self.child([*words, "--answer", str(answer), *self.words], os.environ)
            found = json.loads(answer.read_text()) if answer.exists() else {}
        return Part(code, time.monotonic() - began, found)

    def child(self, words: Sequence[str], environment: Mapping[str, str], output: bool = False) -> tuple[int, str]:
        """A command of the program; its exit code, and its standard output if asked for (it is else shown as an error
        output, since standard output is for the result)."""
        process = subprocess.Popen(
            [sys.executable, "-m", self.module, *words],
            env=dict(environment),
            stdout=subprocess.PIPE if output else sys.stderr.fileno(),
            text=True,
            preexec_fn=functools.partial(supervisor.end_with, os.getpid()),
        )
        try:
            said, _ = process.communicate(timeout=max(self.left(), 1.0))
        except subprocess.TimeoutExpired:
            raise UserError(
                f"`{words[0]}` was ended after {self.args.limit:.0f} s of this check; give it more by --limit, or see "
                "above where it stood"
            ) from None
        finally:
            _end(process)
        return process.returncode, said or ""


def check(args: argparse.Namespace, module: str, config: Any, words: Sequence[str]) -> int:
    """The command; returns 0 if all was well, 1 if something was not, else the code that a part ended with.

    Args:
      module: of the program, for `python -m`.
      config: of the run.
      words: overrides of the run file, as they stand on the command line.
    """
    if args.steps < 4:
        raise ConfigError(f"--steps is {args.steps}; it must be at least 4, so that there is a half to go on from")
    if config.train.steps <= args.steps:
        raise ConfigError(
            f"train.steps is {config.train.steps}, and a check makes {args.steps} of a run's first steps: give fewer, "
            f"as in --steps {max(config.train.steps // 2, 4)}, or a longer run"
        )
    if any(word.partition("=")[0] == "--run_dir" for word in words):
        raise ConfigError("--run_dir is no option of a check, which has folders of its own; say --out FOLDER")
    if not args.limit > 0:
        raise ConfigError(f"--limit is {args.limit}; it must be a number of seconds")
    if args.plan:
        _read_plan(args.plan)
    elif args.topology:
        topologies.pod(args.topology)
    job = Check(args, module, words)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return _check(job)
    finally:
        signal.signal(signal.SIGTERM, before)


def _check(job: Check) -> int:
    args, half = job.args, job.args.steps // 2
    whole = job.part("whole")
    if whole.code != exit_codes.DONE:
        say(f"check: the first {args.steps} steps ended with exit code {whole.code}; the lines above say why")
        return whole.code if whole.code > 0 else 128 - whole.code
    processes, me = whole.answer["processes"], whole.answer["process"]
    broken = job.part("broken")
    expected = KILLED if me == processes - 1 else (exit_codes.RESTART,)
    time.sleep(PAUSE if processes > 1 else 0.0)
    resumed = job.part("resumed")
    if me != 0:
        said = f"exit codes {whole.code}, {broken.code}, {resumed.code}"
        good = broken.code in expected and resumed.code == exit_codes.DONE
        say(f"check: process {me} is {'done' if good else 'done, not as it should be'}: {said}")
        return exit_codes.DONE if good else exit_codes.FAULT
    facts = whole.answer
    on = f"{processes} processes, {facts['devices']} devices ({facts['device_kind']})"
    job.note("joined", True, on)
    job.note(f"{args.steps} steps", True, f"{whole.seconds:.0f} s{_start(args.out, 'whole', first=1)}")
    who = f"process {processes - 1} of {processes}"
    job.note(
        "killed",
        broken.code in expected,
        f"{who}, after step {half} was saved; this process left with exit code {broken.code}"
        + ("" if broken.code in expected else f" and not {expected[-1]}"),
    )
    started = _start(args.out, "broken", first=half + 1)
    good = resumed.code == exit_codes.DONE and bool(started)
    wrong = f"exit code {resumed.code}; it should have gone on from step {half}"
    job.note("resumed", good, f"from step {half}{started}" if good else wrong)
    if resumed.code == exit_codes.DONE:
        job.note("losses", *_compare(args.out, args.steps, facts["platform"]))
        _export(job)
    _beside_plan(job, facts)
    return _result(job)


def _compare(out: str, steps: int, platform: str) -> tuple[bool, str]:
    """Whether the broken and resumed run has the numbers of the whole one, step for step."""
    from transformer_jax.report import read_records

    runs = []
    for part in ("whole", "broken"):
        records = read_records(storage.path(pod_check_part.folder(out, part)) / "metrics.jsonl")
        runs.append({r["step"]: r for r in records if r["split"] == "train" and r["step"] <= steps})
    return differences(runs[0], runs[1], steps, TOLERANCE.get(platform, TOLERANCE_ELSEWHERE))


def differences(
    whole: Mapping[int, Mapping[str, Any]], broken: Mapping[int, Mapping[str, Any]], steps: int, tolerance: float
) -> tuple[bool, str]:
    """Compare the records of two runs: counts exactly, losses and the norm of the gradient to a relative tolerance.

    The norm tells more than the loss, which hardly moves in the first steps of a warm-up.
    """
    missing = [step for step in range(1, steps + 1) if step not in whole or step not in broken]
    if missing:
        return False, f"no record of step {missing[0]}"
    largest, where = 0.0, ""
    for step in range(1, steps + 1):
        one, other = whole[step], broken[step]
        for name in one:
            a, b = one[name], other.get(name)
            if (name.startswith("n/") or name == "learning_rate") and a != b:
                return False, f"{name} of step {step} is {b} after the kill, and {a} without it: other rows, or steps"
            if name == "loss" or name.endswith("_loss") or name == "gradient_norm":
                if a is None or b is None:
                    return False, f"{name} of step {step} is not finite"
                difference = abs(a - b) / max(abs(a), 1e-30)
                if difference > largest:
                    largest, where = difference, f"{name} of step {step}"
    if not largest:
        return True, f"equal in all {steps} steps, exactly"
    said = f"differ by {largest:.1e} at most ({where}); {tolerance:g} is allowed"
    return largest <= tolerance, said


def _export(job: Check) -> None:
    """Export as the program does by default, on the CPU of this host: other processes of a pod are not there for it."""
    began, out = time.monotonic(), job.args.out.rstrip("/")
    aside = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in aside} | {"JAX_PLATFORMS": "cpu"}
    code, _ = job.child(["export", f"{out}/broken@{job.args.steps}", f"{out}/export"], environment)
    said = f"{out}/export, loaded again and compared, {time.monotonic() - began:.0f} s"
    job.note("export", code == 0, said if code == 0 else f"exit code {code}; the lines above say why")


def _beside_plan(job: Check, facts: Mapping[str, Any]) -> None:
    """Measured time and memory of a step beside the planned, and the measurement kept."""
    from transformer_jax.report import read_records

    file = storage.path(pod_check_part.folder(job.args.out, "whole")) / "metrics.jsonl"
    seconds = [
        r["seconds"] for r in read_records(file) if r["split"] == "train" and SETTLED < r["step"] <= job.args.steps
    ]
    if not seconds:
        job.note("step time", None, f"not told: fewer than {SETTLED + 1} steps")
        return
    step, peak = statistics.median(seconds), facts["peak_bytes"]
    plan, why = _plan(job, facts)
    planned = _planned_seconds(plan) if plan else ()
    job.note("step time", None, f"{1e3 * step:,.1f} ms measured (median); " + (_beside(step, planned) if plan else why))
    bytes_planned = _planned_bytes(plan) if plan else 0.0
    measured = f"{peak / topologies.GIB:.2f} GiB of a device at most" if peak else "this device does not tell"
    beside = f"planned {bytes_planned / topologies.GIB:.2f}" if plan else why
    job.note("memory", None, f"{measured}; {beside}")
    if plan is None or not planned:
        return
    measurement = Measurement(
        pod=plan["pod"]["name"],
        chip=plan["pod"]["chip"],
        run=job.args.run,
        when=datetime.date.today().isoformat(),
        step_seconds=step,
        planned_seconds=planned,
        peak_bytes=float(peak),
        planned_bytes=bytes_planned,
        versions=facts["versions"],
    )
    kept = []
    for place in (storage.path(job.args.out) / "calibration.json", calibration.default_file()):
        with contextlib.suppress(OSError):
            calibration.add(place, measurement)
            kept.append(str(place))
    job.note("calibration", None, f"{measurement.time_ratio:.2f} x the planned time, kept in {' and '.join(kept)}")


def _plan(job: Check, facts: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The plan of the run on these devices as `plan --json` gives it, or why there is none."""
    args = job.args
    if args.plan:
        return _read_plan(args.plan), ""
    topology = args.topology or topologies.of_devices(facts["device_kind"], facts["devices"] // facts["slices"])
    if not topology:
        return None, f"no plan: none can be made for {facts['devices']} devices of kind {facts['device_kind']!r}"
    words = ["plan", args.run, "--topology", topology, "--json", *job.words]
    if facts["slices"] > 1:
        words += ["--slices", str(facts["slices"])]
    if facts["platform"] == "tpu" and facts["local_devices"] == 8:
        words += ["--chips-per-host", "8"]
    try:
        code, said = job.child(words, os.environ, output=True)
    except UserError:
        return None, f"no plan: compiling it took longer than the rest of --limit {args.limit:g}; give --plan FILE"
    if not said.strip():
        return None, f"no plan: `plan --topology {topology}` ended with exit code {code}; the lines above say why"
    return json.loads(said), ""


def _read_plan(name: str) -> dict[str, Any]:
    """Raises ConfigError for a file that is not there, or that `plan --json` has not printed."""
    try:
        found = json.loads(storage.path(name).read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(f"--plan {name} cannot be read: {e}") from None
    if not isinstance(found, dict) or not {"pod", "memory"} <= found.keys():
        raise ConfigError(f"--plan {name} is not what `plan --json` prints")
    return found


def _planned_seconds(plan: Mapping[str, Any]) -> tuple[float, ...]:
    times = plan.get("step_seconds", {})
    return tuple(times[name] for name in ("least", "most") if times.get(name))


def _planned_bytes(plan: Mapping[str, Any]) -> float:
    memory = plan["memory"]
    return float(memory.get("peak") or memory.get("estimate") or memory.get("needed") or 0.0)


def _beside(step: float, planned: Sequence[float]) -> str:
    if not planned:
        return "the plan has no time for it"
    span = " to ".join(f"{1e3 * x:,.1f}" for x in planned)
    return f"planned {span} ms: {step / calibration.middle(planned):.2f} x its middle"


def _start(out: str, part: str, first: int) -> str:
    """How long the start of a part took, for people."""
    from transformer_jax.report import read_records

    records = read_records(storage.path(pod_check_part.folder(out, part)) / "metrics.jsonl")
    found = next((r[start_up.KEY] for r in records if r["step"] == first and start_up.KEY in r), None)
    if found is None:
        return ""
    kept = ", the program kept from before" if found["step_program"] == "found" else ""
    return f"; {found['in_all']:.1f} s to the first one, {found.get('compiling', 0.0):.1f} of them compiling{kept}"


def _line(line: Line) -> str:
    mark = {True: "ok", False: "FAILED", None: ""}[line.ok]
    return f"{line.what:<12} {mark:<7} {line.found}"


def _result(job: Check) -> int:
    good = all(line.ok is not False for line in job.lines)
    seconds = time.monotonic() - job.began
    if job.args.json:
        print(json_line({"passed": good, "seconds": seconds, "lines": [line._asdict() for line in job.lines]}))
    else:
        print(f"check of {job.args.run}, {seconds:.0f} s")
        for line in job.lines:
            print(f"  {_line(line)}".rstrip())
        print("passed" if good else "FAILED")
    return exit_codes.DONE if good else exit_codes.FAULT


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(exit_codes.of_signal(number))


def _end(process: subprocess.Popen[str]) -> None:
    """End a child that is still there: asked to save at first, since others may wait for it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
