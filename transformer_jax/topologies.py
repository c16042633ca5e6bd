"""The pods that a plan can be made for: a closed table, since the TPU compiler ends the process over some names.

A product name (`v5e-16`) counts what its maker counts: chips for v5e and v6e, TensorCores (two a chip) for v2, v3, v4
and v5p. The shape is what the compiler knows a pod by (`v5e:4x4`). With `slices` N there are N such pods, joined over
the data-centre network.

Sources of the figures below: Cloud TPU's pages on system architecture (docs.cloud.google.com/tpu/docs/v3, v4, v5e,
v5p-training, v6e, tpu7x; read November 2026), and for the links of v2, v3 and v4 Jouppi et al., "A Domain-Specific
Supercomputer for Training Deep Neural Networks" (CACM 2020) and "TPU v4" (ISCA 2023). Clocks and the usable memory are
those of the compiler, libtpu 0.0.42. For GPUs: NVIDIA's data sheets of the SXM modules, dense rates.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from typing import Any

from transformer_jax.config import UserError

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation; rates are those of a chip."""

    name: str
    peak_flops: float
    """bfloat16 FLOP/s."""
    hbm_bytes: float
    """Memory of a device, as sold."""
    usable_bytes: float
    """Memory of a device that the compiler gives to a program; for a GPU what is sold."""
    hbm_rate: float
    """Bytes/s."""
    link_rate: float
    """Bytes/s that a chip can send to its neighbours, all links together; half of what is published both ways."""
    clock: float = 0.0
    """Hz, of the compiler's cycles; 0 for GPUs."""
    devices: int = 1
    """Devices that a chip is to JAX."""
    kind: str = "tpu"


def _tpu(
    name: str, tflops: float, hbm: float, usable: float, rate: float, link: float, ghz: float, devices: int = 1
) -> Chip:
    return Chip(name, tflops * 1e12, hbm * GIB, usable * GIB, rate * 1e9, link * 1e9, ghz * 1e9, devices)


def _gpu(name: str, tflops: float, hbm: float, rate: float, link: float) -> Chip:
    return Chip(name, tflops * 1e12, hbm * GIB, hbm * GIB, rate * 1e9, link * 1e9, kind="gpu")


CHIPS: dict[str, Chip] = {
    # TFLOP/s, GiB a device, usable, GB/s of memory, GB/s of links, GHz
    "v2": _tpu("TPU v2", 45, 8, 7.48, 700, 248, 0.70, 2),
    "v3": _tpu("TPU v3", 123, 16, 15.48, 900, 328, 0.94, 2),
    "v4": _tpu("TPU v4", 275, 32, 30.75, 1200, 300, 1.05),
    "v5e": _tpu("TPU v5e", 197, 16, 15.75, 819, 200, 1.50),
    "v5p": _tpu("TPU v5p", 459, 96, 95.74, 2765, 600, 1.75),
    "v6e": _tpu("TPU v6e", 918, 32, 31.25, 1638, 400, 1.75),
    "tpu7x": _tpu("TPU7x", 2307, 96, 94.75, 7380, 600, 2.20, 2),
}

SHAPES: dict[str, tuple[str, ...]] = {
    "v2": ("2x2", "4x4", "8x8", "8x16", "16x16"),
    "v3": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"),
    "v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "12x16x16"),
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x24"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "tpu7x": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x8x8", "8x8x8", "16x16x16"),
}
"""By generation, each shape that the compiler was seen to take."""

CORES_COUNTED = ("v2", "v3", "v4", "v5p")
"""Generations whose product names count TensorCores."""

GPUS: dict[str, Chip] = {
    "a100-40": _gpu("A100 40 GB", 312, 40, 1555, 300),
    "a100": _gpu("A100 80 GB", 312, 80, 2039, 300),
    "h100": _gpu("H100", 989, 80, 3350, 450),
    "h200": _gpu("H200", 989, 141, 4800, 450),
}


@dataclasses.dataclass(frozen=True)
class Pod:
    """What a plan is made for."""

    name: str
    chip: Chip
    chips: int
    """Over all slices."""
    hosts: int
    slices: int = 1
    topology: str = ""
    """What the compiler knows one slice by; "" for GPUs."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `jax.experimental.topologies.get_topology_desc`, besides the name and the platform."""

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def peak_flops(self) -> float:
        """Of all chips together."""
        return self.chips * self.chip.peak_flops


OF_KIND = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}
"""What JAX calls a device -> the generation."""


def of_devices(kind: str, devices: int) -> str:
    """The product name of so many devices, which are one slice; empty where no plan can be made for them."""
    generation = OF_KIND.get(kind, "")
    if generation in GPUS:
        return f"{generation}-{devices}"
    for name, shape in _of_generation(generation).items() if generation else ():
        if math.prod(map(int, shape.split("x"))) * CHIPS[generation].devices == devices:
            return name
    return ""


def names() -> list[str]:
    """Every product name of a TPU pod."""
    return [name for generation in SHAPES for name in _of_generation(generation)]


def _of_generation(generation: str) -> dict[str, str]:
    """Product name -> shape."""
    found = {}
    for shape in SHAPES[generation]:
        chips = math.prod(map(int, shape.split("x")))
        number = chips * 2 if generation in CORES_COUNTED else chips
        # Of TPU7x, both chips and cores are counted in use: its pods go by their shape.
        found[f"{generation}-{shape}" if generation == "tpu7x" else f"{generation}-{number}"] = shape
    return found


def pod(name: str, chips_per_host: int = 0, slices: int = 1) -> Pod:
    """The pod of a product name such as v5e-256, h100-8 or `gpu:80GiB x 8`.

    Args:
      chips_per_host: 0 takes what is usual: 4, or 1 where there is only one (GPUs: 8, or as many as there are).
      slices: how many such pods work together (TPUs only).

    Raises:
      UserError: a name that is not in the table, with those that are near, or hosts that the pod has not.
    """
    if slices < 1:
        raise UserError(f"--slices is {slices}; it must be at least 1")
    asked = re.sub(r"^v5litepod-", "v5e-", name.strip().lower())  # as Google names the machines themselves
    gpu = _gpu_pod(asked, chips_per_host)
    if gpu is not None:
        if slices > 1:
            raise UserError(f"--slices is {slices}, and {name} is no TPU: give the number of all GPUs instead")
        return gpu
    generation = asked.split("-")[0]
    shape = _of_generation(generation).get(asked) if generation in SHAPES else None
    if shape is None:
        raise UserError(f"--topology {name}: no such pod{_near(asked, generation)}")
    chips = math.prod(map(int, shape.split("x")))
    usual = min(4, chips)
    per_host = chips_per_host or usual
    arguments: dict[str, Any] = {}
    if per_host != usual:
        eights = generation in ("v5e", "v6e") and chips % 8 == 0
        if per_host != 8 or not eights:
            raise UserError(f"--chips-per-host {per_host}: hosts of {asked} have {usual} chips{', or 8' * eights}")
        arguments["chips_per_host_bounds"] = (2, 4, 1)
    elif chips == 1:
        arguments["chips_per_host_bounds"] = (1, 1, 1)
    if generation == "v4":
        arguments["chip_config_name"] = "megacore"
    if slices > 1:
        arguments["num_slices"] = slices
    return Pod(
        name=asked,
        chip=CHIPS[generation],
        chips=chips * slices,
        hosts=chips * slices // per_host,
        slices=slices,
        topology=f"{generation}:{shape}",
        arguments=arguments,
    )


def _gpu_pod(asked: str, chips_per_host: int) -> Pod | None:
    free = re.fullmatch(r"gpu:\s*([\d.]+)\s*gib(?:\s*[x*]\s*(\d+))?", asked)
    known = re.fullmatch(r"(.+)-(\d+)", asked)
    if free:
        count, memory = int(free.group(2) or 1), float(free.group(1))
        if not memory > 0:
            raise UserError(f"--topology {asked}: a GPU needs memory; write its GiB, as in gpu:80GiB x 8")
        chip = Chip(f"GPU of {memory:g} GiB", 0.0, memory * GIB, memory * GIB, 0.0, 0.0, kind="gpu")
    elif known and known.group(1) in GPUS:
        count, chip = int(known.group(2)), GPUS[known.group(1)]
    else:
        return None
    per_host = chips_per_host or min(8, max(count, 1))
    if count < 1 or count % per_host:
        raise UserError(f"--topology {asked}: {count} GPUs do not make up hosts of {per_host}")
    return Pod(asked.replace("gib", "GiB"), chip, count, count // per_host)


def _near(asked: str, generation: str) -> str:
    """The end of a message: the pods of that generation, or the nearest name and where the others stand."""
    if generation in SHAPES:
        return f"; of {generation} there are " + ", ".join(_of_generation(generation))
    gpus = ", ".join(f"{name}-N" for name in GPUS)
    if asked in GPUS:
        return f"; write how many, as in {asked}-8"
    table = "; ".join(f"{g}: " + ", ".join(_of_generation(g)) for g in SHAPES)
    near = difflib.get_close_matches(asked, names(), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{hint}\nTPUs: {table}\nGPUs: {gpus}, or gpu:80GiB x 8"
