"""Tries layouts of a run on a pod and ranks them: mesh, recomputation, parts of the batch, form of the layers.

The global batch stays, so every layout trains the same run. Layouts are compared in the scanned form, which compiles
fastest; the best one is compiled in the unrolled form as well where that is what the run uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformer_jax.config import UserError
from transformer_jax.plan import FREE_SHARE, Plan, Program, make_plan
from transformer_jax.run_file import value_of, with_value
from transformer_jax.topologies import Pod

REMATS = ("none", "names", "dots", "full")
"""From the least to the most that is computed again."""
MOST_PARTS = 64
FSDP_SIZES = (8, 16)

Changes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Try:
    """One layout."""

    changes: Changes
    """Dotted keys of the run file."""
    plan: Plan | None
    refused: str = ""
    """Why there is no plan."""

    @property
    def usable(self) -> bool:
        """It fits, with what should stay free."""
        if self.plan is None or not self.plan.fits:
            return False
        return self.plan.figures.peak_bytes <= (1 - FREE_SHARE) * self.plan.pod.chip.usable_bytes

    @property
    def seconds(self) -> float:
        """The middle of the step's range."""
        times = self.plan.times if self.plan else None
        return (times.least + times.most) / 2 if times else float("inf")

    @property
    def needed(self) -> float:
        if self.plan is None:
            return float("inf")
        shortage = self.plan.figures.shortage
        return shortage.needed if shortage else self.plan.figures.peak_bytes


def meshes(devices: int) -> Iterator[Changes]:
    """The meshes that are tried on so many devices."""
    yield {"mesh.preset": "data_parallel", "mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1}
    for fsdp in FSDP_SIZES:
        if devices % fsdp == 0:
            yield {"mesh.preset": "fsdp", "mesh.data": -1, "mesh.fsdp": fsdp, "mesh.tensor": 1}
    if devices % 16 == 0:
        yield {"mesh.preset": "fsdp_tensor", "mesh.data": -1, "mesh.fsdp": 8, "mesh.tensor": 2}


def search(
    program: Program,
    config: Any,
    pod: Pod,
    *,
    run: str,
    quick: bool = False,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    plan: Callable[..., Plan] = make_plan,
) -> list[Try]:
    """Every layout that was tried, the best first: those that fit by time, then the others by what they need.

    Args:
      quick: leave out the unrolled form of the best layout.
      plan: makes the plan of a layout.
    """
    tried: dict[tuple[tuple[str, Any], ...], Try] = {}

    def attempt(changes: Changes, scanned: bool = True) -> Try:
        changes = {**changes, "model.layers": "scanned" if scanned else "unrolled"}
        key = tuple(sorted(changes.items()))
        if key not in tried:
            say("trying " + describe(changes))
            try:
                made = plan(program, apply(config, changes), pod, run=run, cache=cache, probe=False)
                tried[key] = Try(changes, made)
            except UserError as e:
                lines = str(e).splitlines()  # what the compiler said last is why
                tried[key] = Try(changes, None, ": ".join(dict.fromkeys([lines[0], lines[-1].strip()])))
            say("  " + outcome(tried[key]))
        return tried[key]

    own = {"model.remat": config.model.remat, "train.accumulate": config.train.accumulate}
    first = [attempt({**mesh, **own}) for mesh in meshes(pod.devices)]
    mesh = {k: v for k, v in _rank(first)[0].changes.items() if k.startswith("mesh.")}
    for remat in REMATS:
        parts = 1
        while parts <= MOST_PARTS:
            tried_now = attempt({**mesh, "model.remat": remat, "train.accumulate": parts})
            if tried_now.usable or tried_now.plan is None:  # what is refused for another reason than memory stays so
                break
            parts *= 2
    best = _rank(list(tried.values()))[0]
    if not config.model.scanned and not quick and best.usable:
        attempt(best.changes, scanned=False)
    return _rank(list(tried.values()))


def _rank(tries: list[Try]) -> list[Try]:
    return sorted(tries, key=lambda t: (not t.usable, t.seconds if t.usable else t.needed, t.needed))


def apply(config: Any, changes: Changes) -> Any:
    """The configuration with these values."""
    for key, value in changes.items():
        config = with_value(config, key, value)
    return config


def to_write(config: Any, best: Try) -> Changes:
    """Those values of a layout that are not the run's own already."""
    assert best.plan is not None
    changes = dict(best.changes)
    if changes["mesh.preset"] == "data_parallel" and config.mesh.fsdp == 0:
        changes.pop("mesh.fsdp")  # 0 says the same
    form = changes.pop("model.layers")
    if form != ("scanned" if config.model.scanned else "unrolled"):
        changes["model.layers"] = form
    return {key: value for key, value in changes.items() if value_of(config, key) != value}


def describe(changes: Changes) -> str:
    """A layout in a line."""
    return (
        f"{changes['mesh.preset']} fsdp {changes['mesh.fsdp']} tensor {changes['mesh.tensor']}, remat "
        f"{changes['model.remat']}, {changes['train.accumulate']} parts, {changes['model.layers']}"
    )


def outcome(one: Try) -> str:
    """What came of a layout, in a line."""
    if one.plan is None:
        return f"not possible: {one.refused}"
    limit = one.plan.pod.chip.usable_bytes
    memory = f"{one.needed / 2**30:.2f} of {limit / 2**30:.2f} GiB"
    if not one.plan.fits:
        return f"does not fit: {memory}"
    times = one.plan.times
    assert times is not None
    tight = "" if one.usable else ", less than 5 % free"
    return f"{1e3 * times.least:.3g} to {1e3 * times.most:.3g} ms, {memory}{tight}"


def table(tries: list[Try]) -> str:
    """All layouts, the best first."""
    return "\n".join(f"{i:>3}  {describe(t.changes):<72} {outcome(t)}" for i, t in enumerate(tries, 1))
