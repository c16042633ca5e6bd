"""What the programs share: how a command is called, how it ends, and how results are printed.

Libraries are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_jax import interrupts, step_folders, storage
from transformer_jax.config import UserError

if TYPE_CHECKING:
    from transformer_jax.config import HostsConfig
    from transformer_jax.goodput import Clock
    from transformer_jax.preparation import Progress
    from transformer_jax.profiles import Steps
    from transformer_jax.signals import StopSignal
    from transformer_jax.train import RunResult

Function = Callable[[argparse.Namespace, list[str]], int]
"""A command: (its arguments, the overrides `--section.key value`) -> exit code."""


READ = ("file", "input", "hypotheses", "references", "add_tokens")
"""Arguments that name a file to read; those that name a file to write are in `writes` of the parsed arguments."""


class Help(argparse.HelpFormatter):
    """The help of a program: a longer name of a command stands on one line with what the command does."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        # argparse forgets that commands are indented further than options.
        self._action_max_length = max(self._action_max_length, 13)


def main(of: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run one command; returns the exit code: 0 done, 2 a mistake the user can mend, 128 + N stopped by signal N, and
    75 for training on several hosts of which one is lost (see `transformer_jax.exit_codes`)."""
    for argument in sys.argv[1:] if arguments is None else arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            print(f"error: {argument!r} on the command line is not UTF-8; write it in UTF-8", file=sys.stderr)
            return 2
    args, rest = of.parse_known_args(arguments)
    if rest and not args.takes_overrides:
        of.error(f"unrecognised arguments: {' '.join(rest)}{_meant(rest, args.options)}")
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the program: nothing comes in, and nothing is kept
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    try:
        with interrupts.heard(), files_at_hand(args):
            return int(args.function(args, rest) or 0)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except Exception as e:
        said = storage.explained(e) if "gcsfs" in sys.modules else None
        if said is not None:
            print(f"error: {said}", file=sys.stderr)
            return 2
        if not isinstance(e, OSError) or (e.filename is None and e.errno not in (errno.ENOSPC, errno.EDQUOT)):
            raise  # not about a file of the user's
        print(f"error: {e.filename or 'a file could not be written'}: {e.strerror}", file=sys.stderr)
        return 2


def _meant(unknown: Sequence[str], options: Iterable[str]) -> str:
    """The end of a message: the option that comes nearest to the first unknown one, if any does."""
    flag = next((a.partition("=")[0] for a in unknown if a.startswith("--")), "")
    # `--beam-size` is `--beam` said at more length, though more letters of it are in `--batch-size`.
    longest = sorted((o for o in options if flag.startswith(f"{o}-")), key=len, reverse=True)
    close = longest or difflib.get_close_matches(flag, options, 1)
    return f"; did you mean {close[0]}?" if close else ""


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """The parser of a program; its help is the list of commands, which fills a screen without a section for --help."""
    made = argparse.ArgumentParser(prog=program, description=description, formatter_class=Help, add_help=False)
    made.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return made


@contextlib.contextmanager
def files_at_hand(args: argparse.Namespace) -> Iterator[None]:
    """Single files in storage (`gs://`) as files on this machine while a command runs.

    What it reads is fetched, what it writes is sent when it has ended well. Folders are the business of the functions
    that a command calls.
    """
    read = {name: value for name in READ if (value := getattr(args, name, None))}
    written = [(name, getattr(args, name)) for name in getattr(args, "writes", ())]
    for _, target in written:
        for source in read.values():
            if target and _same(source, target):
                raise UserError(f"{target} is read and would be written over; name another file to write")
        if target:
            run = getattr(args, "checkpoint", "") or getattr(args, "run", "")
            _refuse_own(run, target, getattr(args, "overwrite", False))
    targets = [x if storage.is_remote(x) else os.path.realpath(x) for _, x in written if x]
    for target in targets:
        if targets.count(target) > 1:
            raise UserError(f"{target} is named for two things to write; name a file for each")
    for name, value in read.items():
        if storage.is_remote(value):
            setattr(args, name, str(storage.local_file(value)))
    remote = {name: storage.path(value) for name, value in written if value and storage.is_remote(value)}
    with tempfile.TemporaryDirectory() if remote else contextlib.nullcontext("") as folder:
        for name, target in remote.items():
            with storage.reported(target):
                if getattr(args, "overwrite", True) is False and target.exists():
                    raise UserError(f"{target} is there already; name another file, or --overwrite")
            setattr(args, name, str(Path(folder) / target.name))
        yield
        for target in remote.values():  # and what is written beside it
            for file in Path(folder).iterdir():
                storage.send_file(file, target.parent / file.name)
                say(f"sent: {target.parent / file.name}")


def _same(one: str, other: str) -> bool:
    """Whether two names are of one file that is there."""
    if storage.is_remote(one) or storage.is_remote(other):
        return one == other
    return Path(other).exists() and Path(one).exists() and Path(one).samefile(other)


def _refuse_own(checkpoint: str, target: str, overwrite: bool) -> None:
    """UserError if a file to write is one of the run that `checkpoint` names, or would lie among its checkpoints.

    With `overwrite` a file in the run's folder is replaced if it is named itself, and not by a link that leads to it.
    """
    if not checkpoint or storage.is_remote(checkpoint) or storage.is_remote(target):
        return
    try:
        steps, _ = step_folders.locate(checkpoint)
    except step_folders.CheckpointError:
        return  # which the command says itself
    steps, file = steps.resolve(), Path(os.path.realpath(target))
    inner = steps.name == "checkpoints"
    if inner and steps in file.parents:
        raise UserError(f"{target} lies among the run's checkpoints; name a file elsewhere")
    named = overwrite and not Path(target).is_symlink()
    if file.exists() and not named and (steps.parent if inner else steps) in file.parents:
        raise UserError(f"{target} is there already, in the run's own folder; name another file to write")


def add(commands: Any, name: str, function: Function, summary: str, overrides: bool = False) -> argparse.ArgumentParser:
    """Add a command to the sub-parsers `commands`; with `overrides` it takes `--section.key value` too."""
    sub: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    # The options are a live view: those that are added to the command later are in it too.
    sub.set_defaults(function=function, takes_overrides=overrides, options=sub._option_string_actions.keys())
    return sub


def add_run_file(sub: argparse.ArgumentParser) -> None:
    """The argument RUN.toml."""
    sub.add_argument("run", metavar="RUN.toml", help="a run file; any of its keys can be given as --section.key value")


def add_prepare(commands: Any, function: Function, summary: str) -> None:
    """The command `prepare RUN.toml`."""
    sub = add(commands, "prepare", function, summary, overrides=True)
    add_run_file(sub)
    sub.add_argument("--workers", type=int, default=None, help="processes (default: one a core)")
    sub.add_argument("--json", action="store_true", help="the data report as JSON")


def add_training(commands: Any, name: str, function: Function) -> None:
    """The command that trains, with its switches."""
    sub = add(commands, name, function, "train, or go on training: the same command resumes", overrides=True)
    add_run_file(sub)
    sub.add_argument("--keys", action="store_true", help="list all keys with their present values, and stop")
    sub.add_argument("--force", action="store_true", help="go on although changed settings make it another run")
    sub.add_argument("--profile-steps", metavar="A:B", help="trace these steps, and list where their time goes")
    sub.add_argument("--json", action="store_true", help="the held-out figures as JSON on standard output")


def add_plan(commands: Any, function: Function) -> None:
    """The command `plan RUN.toml --topology POD`."""
    summary = "what a run needs on a pod that is not there; exit code 3 if it does not fit"
    sub = add(commands, "plan", function, summary, overrides=True)
    add_run_file(sub)
    sub.add_argument("--topology", required=True, metavar="POD", help="v5e-256, v5p-16, ..., h100-8, gpu:80GiB x 8")
    sub.add_argument("--chips-per-host", type=int, default=0, metavar="N", help="8 for v5e and v6e (default: 4)")
    sub.add_argument("--slices", type=int, default=1, metavar="N", help="so many pods, joined over the network")
    sub.add_argument("--quick", action="store_true", help="compile the layers as a loop, whatever the run does")
    sub.add_argument("--search", action="store_true", help="try meshes, recomputation and parts of the batch")
    sub.add_argument("--write", action="store_true", help="write what --search finds into the run file")
    sub.add_argument("--calibration", default="", metavar="FILE", help="measured by `check` (default: the user's own)")
    sub.add_argument("--json", action="store_true")


def add_check(commands: Any, function: Function) -> None:
    """The command `check RUN.toml --out FOLDER`."""
    summary = "try a run on these machines: train, kill, resume, compare, export"
    sub = add(commands, "check", function, summary, overrides=True)
    add_run_file(sub)
    sub.add_argument("--out", required=True, metavar="FOLDER", help="a new folder, the same for all hosts")
    sub.add_argument("--steps", type=int, default=20, metavar="N", help="of the run (%(default)s)")
    sub.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for all of it (%(default)g)")
    sub.add_argument(
        "--topology", default="", metavar="POD", help="what `plan` calls the machines (default: found out)"
    )
    sub.add_argument("--plan", default="", metavar="FILE", help="what `plan --json` printed, in place of planning here")
    sub.add_argument("--json", action="store_true")
    sub.add_argument("--part", choices=["whole", "broken", "resumed"], help=argparse.SUPPRESS)
    sub.add_argument("--answer", help=argparse.SUPPRESS)


def add_report(commands: Any, function: Function) -> None:
    """The command `report RUN`."""
    sub = add(commands, "report", function, "write the run's page, report.html, and print its path")
    sub.add_argument("run", metavar="RUN")


def add_verify(commands: Any) -> None:
    """The command `verify RUN`."""
    sub = add(commands, "verify", _verify, "check each checkpoint's files against their digests")
    sub.add_argument("run", metavar="RUN", help="a run folder or RUN@STEP")


def profile_steps(args: argparse.Namespace) -> Steps | None:
    """The steps that `--profile-steps` names; ConfigError where it names none."""
    if args.profile_steps is None:
        return None
    from transformer_jax import profiles

    return profiles.parse(args.profile_steps)


def before_training(hosts: HostsConfig) -> None:
    """Before JAX is imported for training: memory (see `keep_freed_memory`), and a parent where there are several hosts
    (see `transformer_jax.supervisor`)."""
    from transformer_jax import supervisor
    from transformer_jax.hosts import several_asked_for

    keep_freed_memory()
    if several_asked_for(hosts):
        supervisor.supervise()


def training(
    train: Callable[[StopSignal, Clock], RunResult], write_page: Callable[[Path], Path], config: Any, as_json: bool
) -> int:
    """Join the other hosts, train under the signals that ask to stop, print the held-out figures if asked to, and write
    the run's page.

    Args:
      train: the training, to be called with the signal and the clock.
      config: has `hosts` and `run_dir`.
    """
    import jax

    from transformer_jax import hosts, program_cache
    from transformer_jax.goodput import Clock, process_age
    from transformer_jax.report import quiet_libraries
    from transformer_jax.signals import StopSignal

    clock = Clock(process_age())
    quiet_libraries()
    clock.start_up.enter("joining")
    with hosts.joined(config.hosts) as links:
        clock.start_up.enter("devices")
        kept = program_cache.for_training(config.train, config.run_dir, jax.process_count(), say)
        clock.start_up.kept = kept.folder or f"programs are not kept: {kept.why}"
        with StopSignal() as stop:
            result = train(stop, clock)
        if result.interrupted:
            return stop.exit_code
        if links is None or links.index == 0:
            if as_json and result.evaluation is not None:
                print(json_line(result.evaluation))
            print(f"page: {write_page(storage.path(config.run_dir))}", file=sys.stderr)
    return 0


def keep_freed_memory() -> None:
    """Before JAX is imported for training: on CPU, freed memory stays with the process (see `allocator`)."""
    from transformer_jax import allocator

    if allocator.on_cpu():
        allocator.keep_freed_memory()


def keep_programs() -> None:
    """Compiled programs stay in the user's cache folder, so that the next start need not compile them.

    What is set already, as by JAX_COMPILATION_CACHE_DIR, stays.
    """
    from transformer_jax import program_cache

    program_cache.keep(program_cache.user_folder(), say)


def json_line(value: Any) -> str:
    """One line that every reader of JSON takes: a number that is not finite is null."""

    def strict(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: strict(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [strict(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(strict(value), ensure_ascii=False, allow_nan=False)


def say(message: str) -> None:
    """A line for people, on standard error."""
    print(message, file=sys.stderr, flush=True)


class ProgressLines:
    """A line of a preparation's progress on standard error, every few seconds: how much, how fast, how long still.

    Args:
      unit: what the corpus consists of, as in "documents".
    """

    def __init__(self, unit: str, every_seconds: float = 2.0):
        self.unit, self.every, self.last, self.stage = unit, every_seconds, 0.0, ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage == self.stage and now - self.last < self.every:
            return
        self.last, self.stage = now, progress.stage
        megabytes, rate = progress.text_bytes / 1e6, progress.text_bytes / 1e6 / max(progress.seconds, 1e-9)
        left = ""
        if progress.total_bytes and rate:
            left = f", {(progress.total_bytes - progress.text_bytes) / 1e6 / rate:.0f} s left"
        say(f"{progress.stage}: {progress.documents:,} {self.unit}, {megabytes:.1f} MB, {rate:.1f} MB/s{left}")


def _verify(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.checkpoint import verify

    found = verify(args.run)
    for step, problems in found:
        print(f"step {step}: " + ("; ".join(problems) if problems else "verified"))
    if not found:
        raise UserError(f"{args.run}: no checkpoint here")
    return 1 if any(problems for _, problems in found) else 0
