"""A plan: what a run will need on a pod, and about how long it will take, without the pod.

For TPUs the run's own training step is compiled by the TPU compiler (`compiled_step`); memory and collectives are read
from the program, time is bounded from it. For GPUs bytes and FLOPs are added up, and nothing is claimed of a compiled
program. docs/plan.md says how far each figure can be trusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax import compiled_step, hlo_text
from transformer_jax.compiled_step import Maker, StepFigures
from transformer_jax.run_file import with_value
from transformer_jax.topologies import Pod

FREE_SHARE = 0.05
"""Of the memory: what should stay free for batches in flight and the runtime."""
LEAST_OF_CYCLES = 0.8
"""The least time of a step is this share of the estimated cycles, or the products at peak rate if that is more."""
DOES_NOT_FIT = 3
"""Exit code."""


class Program(NamedTuple):
    """What planning needs of a program."""

    prog: str
    make: Maker
    resolved: Callable[[Any], tuple[Any, list[str]]]
    """A run's configuration -> the same with the sizes that only prepared data knows, and notes."""
    slots: Callable[[Any], str]
    """The length of a row, for people."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """What of a run that does not fit would fit, by a line through the needs of larger batches."""

    rows: int
    """Rows of a device that take at most 95 % of the memory; 0 if not even one does."""
    fixed_bytes: float
    """By the same line, the memory of a batch of no rows."""
    row_bytes: float
    accumulate: int
    """The least number of parts with which the same global batch comes down to so many rows; 0 if there is none."""
    probes: tuple[tuple[int, float], ...]
    """(rows of a device, bytes needed)."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step. A model and bounds, not a measurement."""

    products: float
    """The model FLOPs at peak rate."""
    state: float
    """Reading and writing parameters and moments once, at the rate of the memory."""
    links: float
    """All collectives within a slice around rings, at the rate of the links ..."""
    links_waited: float
    """... and of them those that nothing can hide."""
    operations: float
    """Estimated cycles over the clock; 0 if nothing was compiled."""
    least: float
    most: float

    @property
    def bound(self) -> str:
        """Which of the three rates holds the step up by itself."""
        return max(("products", "state", "links"), key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a run on a pod."""

    run: str
    pod: Pod
    figures: StepFigures
    form: str
    """ "scanned" or "unrolled": what was compiled."""
    run_form: str
    """What the run itself does."""
    batch_size: int
    accumulate: int
    steps: int
    slots: str
    settings: dict[str, Any]
    """The layout: preset, fsdp, tensor, remat, accumulate."""
    notes: tuple[str, ...]
    times: Times | None = None
    fit: Fit | None = None

    @property
    def rows(self) -> int:
        """Rows of a device in one part of the batch."""
        return self.batch_size // self.batch_devices // self.accumulate

    @property
    def batch_devices(self) -> int:
        return self.figures.mesh["data"] * self.figures.mesh["fsdp"]

    @property
    def state_bytes(self) -> float:
        """Of a device: parameters and moments."""
        return self.figures.parameter_bytes + self.figures.optimizer_bytes

    @property
    def gpu_bytes(self) -> float:
        """Of a GPU, with activations by estimate. Gradients are as large as parameters where those are whole."""
        return self.state_bytes + self.figures.parameter_bytes + self.figures.kept_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits: for certain (TPUs), or by estimate (GPUs)."""
        if self.pod.chip.kind == "gpu":
            return self.gpu_bytes <= self.pod.chip.usable_bytes
        return self.figures.shortage is None

    @property
    def exit_code(self) -> int:
        return 0 if self.fits else DOES_NOT_FIT


def scanned(config: Any) -> bool:
    """Whether the run scans over its layers."""
    return bool(config.model.scanned)


def for_pod(config: Any, pod: Pod) -> Any:
    """The configuration with the pod's number of slices."""
    return with_value(config, "mesh.slices", pod.slices) if pod.slices > 1 else config


def make_plan(
    program: Program,
    config: Any,
    pod: Pod,
    *,
    run: str,
    quick: bool = False,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    probe: bool = True,
) -> Plan:
    """Plan a resolved configuration on a pod.

    Args:
      quick: compile the scanned form, whatever the run does.
      probe: where it does not fit, find what would.

    Raises:
      UserError: see `compiled_step.figures`.
    """
    config = for_pod(config, pod)
    compiled = with_value(config, "model.layers", "scanned") if quick else config
    if pod.chip.kind == "tpu":
        say(f"compiling the {_form(compiled)} step for {pod.name}, which takes minutes ...")
    figures = compiled_step.figures(program.make, compiled, pod, cache=cache)
    train, mesh = config.train, config.mesh
    plan = Plan(
        run=run,
        pod=pod,
        figures=figures,
        form=_form(compiled) if pod.chip.kind == "tpu" else "none",
        run_form=_form(config),
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        steps=train.steps,
        slots=program.slots(config),
        settings={
            "mesh.preset": mesh.preset,
            "mesh.fsdp": figures.mesh["fsdp"],
            "mesh.tensor": figures.mesh["tensor"],
            "model.remat": config.model.remat,
            "train.accumulate": train.accumulate,
        },
        notes=(),
    )
    if figures.shortage is not None:
        return dataclasses.replace(plan, fit=_what_fits(program, compiled, plan, cache, say) if probe else None)
    if not plan.fits:
        # Activations grow with the rows of a part; the rest does not.
        rest = plan.gpu_bytes - figures.kept_bytes
        points = [(0, rest), (plan.rows, plan.gpu_bytes)]
        plan = dataclasses.replace(plan, fit=line_fit(points, pod.chip.usable_bytes, plan.rows * plan.accumulate))
    return dataclasses.replace(plan, times=step_times(figures, pod))


def step_times(figures: StepFigures, pod: Pod) -> Times:
    """Bounds and a range for the time of a step, from its figures and published rates."""
    chip = pod.chip

    def over(amount: float, rate: float) -> float:
        return amount / rate if rate else 0.0

    products = over(figures.flops, pod.peak_flops)
    state = over(2 * (figures.parameter_bytes + figures.optimizer_bytes), chip.hbm_rate / chip.devices)
    if figures.schedule is None:
        return Times(products, state, 0.0, 0.0, 0.0, max(products, state), 0.0)
    link_rate = chip.link_rate / chip.devices
    inside = [c for c in figures.schedule.collectives if c.kind != hlo_text.CROSS_SLICE]
    links = over(sum(hlo_text.ring_bytes(c) for c in inside), link_rate)
    waited = over(sum(hlo_text.ring_bytes(c, ahead=False) for c in inside), link_rate)
    operations = over(figures.schedule.cycles, chip.clock)
    least = max(products, state, LEAST_OF_CYCLES * operations)
    return Times(products, state, links, waited, operations, least, max(least, operations + links))


def _form(config: Any) -> str:
    return "scanned" if scanned(config) else "unrolled"


def _what_fits(program: Program, config: Any, plan: Plan, cache: Path | None, say: Callable[[str], None]) -> Fit | None:
    """The rows of a device that would fit, from two batches that do not: those are refused within seconds."""
    figures = plan.figures
    assert figures.shortage is not None
    probes = [] if figures.shortage.whole else [(plan.rows, figures.shortage.needed)]
    limit = figures.shortage.available
    for times in (2, 3):
        if len(probes) == 2:
            break
        larger = with_value(config, "train.batch_size", plan.batch_size * times)
        say(f"it does not fit; asking for {plan.rows * times} rows of a device, for the slope ...")
        found = compiled_step.figures(program.make, larger, plan.pod, cache=cache)
        probes.append((plan.rows * times, found.shortage.needed if found.shortage else found.peak_bytes))
    return line_fit(probes, limit, plan.batch_size // plan.batch_devices)


def line_fit(probes: list[tuple[int, float]], limit: float, rows_in_all: int) -> Fit | None:
    """The fit that two probes (rows of a device, bytes) point to; None where they give no rising line.

    Args:
      limit: bytes of a device.
      rows_in_all: rows that a device has of the global batch, over all parts.
    """
    (r1, n1), (r2, n2) = probes
    slope = (n2 - n1) / (r2 - r1)
    if slope <= 0:
        return None
    fixed = n1 - slope * r1
    rows = max(0, int(((1 - FREE_SHARE) * limit - fixed) / slope))
    parts = [k for k in range(1, rows_in_all + 1) if rows_in_all % k == 0 and rows_in_all // k <= rows]
    return Fit(rows, fixed, slope, parts[0] if parts else 0, tuple(probes))
