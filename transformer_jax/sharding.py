"""Where arrays live: the mesh, and the one table from logical axes to mesh axes.

A model names each parameter's axes ("embed", "mlp", ...) beside its shape; the table below says what a mesh makes of
them. The presets differ in nothing but this table. Batches are always split by rows over `data` and `fsdp`.

    logical axis   length                 data_parallel   fsdp     fsdp_tensor
    embed          hidden size            -               fsdp     fsdp
    heads          heads x head size      -               -        tensor
    mlp            feed-forward size      -               -        tensor
    vocab          padded vocabulary      -               -        tensor
    all others                            -               -        -

Optimizer moments are sharded further: their `embed` axis is also split over `data` (ZeRO-1), in every preset, since
each device needs only its own part of them. An axis that a mesh dimension does not divide stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ConfigError, MeshConfig

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
LARGEST_FSDP = 16
"""Devices that the fsdp axis takes by default; the rest go to `data`."""

PARAMETER_RULES: dict[str, dict[str, tuple[str, ...]]] = {
    "data_parallel": {},
    "fsdp": {"embed": ("fsdp",)},
    "fsdp_tensor": {"embed": ("fsdp",), "heads": ("tensor",), "mlp": ("tensor",), "vocab": ("tensor",)},
}


def moment_rules(preset: str) -> dict[str, tuple[str, ...]]:
    """The rules for optimizer moments: as the parameters', and `embed` over `data` as well (ZeRO-1)."""
    rules = dict(PARAMETER_RULES[preset])
    return {**rules, "embed": ("data", *rules.get("embed", ()))}


def gradient_rules(preset: str) -> dict[str, tuple[str, ...]]:
    """The rules for gradients where they are summed over the devices: as the parameters', and `embed` whole.

    Only then are they split as the moments are. Left to itself, the partitioner cuts the product that makes a gradient
    into a loop over the devices' shares of its columns: 768 columns on 16 devices are 48 at a time, which a TPU's units
    of 128 take nearly three times as long for.
    """
    return {axis: mesh_axes for axis, mesh_axes in PARAMETER_RULES[preset].items() if axis != "embed"}


def mesh_shape(config: MeshConfig, device_count: int) -> tuple[int, int, int]:
    """The sizes of the axes `data`, `fsdp`, `tensor`.

    One of them may be -1, which takes what the others leave. An fsdp of 0 follows the preset: 1 for data_parallel, else
    the most devices up to 16 that the others leave evenly.

    Raises:
      ConfigError: if the sizes do not multiply to the number of devices.
    """
    data, fsdp, tensor = config.data, config.fsdp, config.tensor
    asked = f"mesh data={data}, fsdp={fsdp}, tensor={tensor}"
    if [data, fsdp, tensor].count(-1) > 1 or 0 in (data, tensor) or min(data, fsdp, tensor) < -1:
        raise ConfigError(f"{asked}: each must be a positive number; one may be -1 (all that is left), fsdp also 0")
    if fsdp == 0:
        left = device_count // max(1, tensor) // max(1, data)
        fits = [n for n in range(1, LARGEST_FSDP + 1) if left % n == 0]
        fsdp = 1 if config.preset == "data_parallel" else max(fits)
    sizes = (data, fsdp, tensor)
    known = math.prod(size for size in sizes if size != -1)
    if device_count % known or (-1 not in sizes and known != device_count):
        multiple = " or a multiple of it" if -1 in sizes else ""
        raise ConfigError(
            f"{asked} asks for {known} devices{multiple}, and there are {device_count}; change [mesh], or the number "
            "of devices"
        )
    data, fsdp, tensor = (device_count // known if size == -1 else size for size in sizes)
    return data, fsdp, tensor


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """A mesh over `devices` (all of them by default); with several TPU slices, `data` spans the slices.

    The axes are Auto: the partitioner decides between the places where shardings are given.
    """
    devices = list(jax.devices()) if devices is None else devices
    shape = mesh_shape(config, len(devices))
    if config.slices > 1:
        if shape[0] % config.slices:
            raise ConfigError(f"mesh.data is {shape[0]}; it must be a multiple of mesh.slices {config.slices}")
        inner = (shape[0] // config.slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, (config.slices, 1, 1), devices, allow_split_physical_axes=True
        )
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(
    shape: tuple[int, ...], names: tuple[str | None, ...], rules: dict[str, tuple[str, ...]], mesh: Mesh
) -> PartitionSpec:
    """The partition of one array: each logical axis by the rules, where the mesh divides it and is not used up."""
    used: set[str] = set()
    out: list[Any] = []
    for size, name in zip(shape, names, strict=True):
        axes = tuple(a for a in rules.get(name or "", ()) if a not in used and mesh.shape[a] > 1)
        while axes and size % math.prod(mesh.shape[a] for a in axes):
            axes = axes[:-1]
        used.update(axes)
        out.append(axes[0] if len(axes) == 1 else (axes or None))
    return PartitionSpec(*out)


def tree_shardings(boxed: Any, rules: dict[str, tuple[str, ...]], mesh: Mesh) -> Any:
    """Shardings for a tree of abstract parameters boxed with their logical axes (`jax.eval_shape` of an init)."""

    def one(box: Any) -> NamedSharding:
        if isinstance(box, nn.LogicallyPartitioned):
            return NamedSharding(mesh, spec(box.value.shape, box.names, rules, mesh))
        return replicated(mesh)

    return jax.tree.map(one, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))


def unbox(tree: Any) -> Any:
    """The plain nested dictionary of arrays: logical axis names taken off."""
    return nn.meta.unbox(tree)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data` and `fsdp`, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def split_rows(x: jax.Array) -> jax.Array:
    """Have the compiler keep activations [B, ...] split by rows, and by nothing else, where a mesh is set.

    Left to itself it carries the splits of a parameter over to what comes out of it: on a mesh with both fsdp and
    tensor it then moved activations to and fro, and some small batches got wrong gradients.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(BATCH_AXES) <= set(mesh.axis_names) or x.shape[0] % math.prod(mesh.shape[a] for a in BATCH_AXES):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES, *(None for _ in x.shape[1:])))


def whole_vectors(table: jax.Array) -> jax.Array:
    """A table [rows, H] with its vectors whole on each device, gathered as fsdp gathers every parameter it uses.

    Otherwise a lookup gives vectors split over fsdp, and what follows is moved to and fro, whole, to mend that.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(BATCH_AXES) <= set(mesh.axis_names):
        return table
    return jax.lax.with_sharding_constraint(table, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))


def batch_devices(mesh: Mesh) -> int:
    """The number of parts into which a batch's rows are split."""
    return math.prod(mesh.shape[a] for a in BATCH_AXES)


def check_batch(batch_size: int, accumulate: int, mesh: Mesh, key: str = "train.batch_size") -> None:
    """Refuse a batch that does not divide, naming both numbers, before anything is compiled."""
    devices = batch_devices(mesh)
    parts = devices * accumulate
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        near = f"the nearest are {below} and {above}" if below else f"the nearest is {above}"
        raise ConfigError(
            f"{key} is {batch_size} rows over all devices; it must be a multiple of {parts} "
            f"({devices} devices that share the rows x {accumulate} accumulation parts); {near}"
        )


def host_rows(batch_size: int, mesh: Mesh) -> list[tuple[int, int]]:
    """The rows of a global batch that this process makes: (first, count) of each run of rows, in order.

    On most machines that is one run. Where the mesh orders devices by their place in the network it can be several,
    and where a tensor axis spans processes, several of them make the same rows.
    """
    places = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    slices = sorted({index[0].indices(batch_size)[:2] for index in places.values() if index is not None})
    runs: list[tuple[int, int]] = []
    for first, stop in slices:
        if runs and sum(runs[-1]) == first:
            runs[-1] = (runs[-1][0], runs[-1][1] + stop - first)
        else:
            runs.append((first, stop - first))
    return runs


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows as global arrays, split over the mesh by rows. Returns at once; the copy goes on behind."""
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return {k: jax.device_put(v, sharding) for k, v in batch.items()}
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


class Vote:
    """Whether any process has raised its flag, told to all of them at the same call, so that they leave together.

    With several processes an answer is one call late: it is asked for behind the step that is running, and read when
    the next one has been dispatched, so that no device waits for it.
    """

    def __init__(self, mesh: Mesh, flag: Callable[[], bool]):
        self._flag, self._pending = flag, None if jax.process_count() == 1 else False
        self._each = NamedSharding(mesh, PartitionSpec(AXES))
        self._own = len(self._each.addressable_devices)
        self._any: Any = jax.jit(lambda flags: flags.max(), out_shardings=replicated(mesh))

    def __call__(self) -> bool:
        if self._pending is None:
            return self._flag()
        flags = jax.make_array_from_process_local_data(self._each, np.full(self._own, self._flag(), np.int32))
        answer, self._pending = self._pending, self._any(flags)
        return bool(answer)
