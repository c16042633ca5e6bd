"""The command `plan`, which both programs have."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from transformer_jax import calibration, compiled_step, plan_report, plan_search, run_file_edit, storage, topologies
from transformer_jax.command import json_line, say
from transformer_jax.config import UserError
from transformer_jax.plan import DOES_NOT_FIT, Plan, Program, make_plan


def plan(args: argparse.Namespace, program: Program, config: Any) -> int:
    """Print the plan of a run; returns 0, or 3 where it does not fit."""
    pod = topologies.pod(args.topology, args.chips_per_host, args.slices)
    if args.write and not args.search:
        raise UserError("--write writes what --search finds; give both")
    if args.search and pod.chip.kind != "tpu":
        raise UserError(f"--search compares compiled programs, and there is no compiler here for {pod.chip.name}")
    if pod.chip.kind == "tpu":
        compiled_step.check_compiler()
    config, notes = program.resolved(config)
    settings: dict[str, Any] = {"run": args.run, "quick": args.quick, "cache": compiled_step.cache_folder(), "say": say}
    if args.search:
        return _search(args, program, config, pod, settings, notes)
    made = dataclasses.replace(make_plan(program, config, pod, **settings), notes=tuple(notes))
    _print(args, made, {})
    return made.exit_code


def _search(
    args: argparse.Namespace, program: Program, config: Any, pod: topologies.Pod, settings: dict[str, Any],
    notes: list[str],
) -> int:  # fmt: skip
    tries = plan_search.search(program, config, pod, **settings)
    best = tries[0]
    say("\n" + plan_search.table(tries))
    if best.plan is None or not best.usable:
        say("none of these layouts fits with 5 % of the memory free; use more chips, or a smaller batch")
        return DOES_NOT_FIT
    changes = plan_search.to_write(config, best)
    said = " ".join(f"--{key} {value}" for key, value in changes.items()) or "nothing: it is the run's own"
    say(f"the best differs from the run file in {said}")
    if args.write and changes:
        run_file_edit.set_values(Path(args.run), changes)
        say(f"written to {args.run}")
    layouts = [{**t.changes, "outcome": plan_search.outcome(t), "usable": t.usable} for t in tries]
    # What the best layout is compiled as is what it says.
    found = dataclasses.replace(best.plan, notes=tuple(notes), run_form=best.plan.form)
    _print(args, found, {"layouts": layouts, "changes": changes})
    return 0


def _print(args: argparse.Namespace, made: Plan, more: dict[str, Any]) -> None:
    found = plan_report.report(made) | more
    file = storage.path(args.calibration) if args.calibration else calibration.default_file()
    if args.calibration and not file.exists():
        raise UserError(f"--calibration {args.calibration}: no such file; `check` writes one into its folder")
    measurement = calibration.for_pod(calibration.read(file), made.pod)
    if measurement is not None and made.times is not None and made.times.least:
        found["calibrated"] = calibration.calibrated(found, measurement)
    print(json_line(found) if args.json else plan_report.render(found))
