"""Parameters under the names that another library publishes them by: one table of entries, read both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from transformer_jax.config import UserError


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor under both names."""

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    """As published: tables not padded, kernels as [out, in]."""
    is_kernel: bool = False
    padded_rows: int = 0
    """Rows of our table where it is padded; 0 for all other tensors."""

    @property
    def our_shape(self) -> tuple[int, ...]:
        if self.padded_rows:
            return (self.padded_rows, *self.shape[1:])
        return self.shape[::-1] if self.is_kernel else self.shape


def dense(path: str, name: str, inputs: int, outputs: int) -> list[Entry]:
    """Kernel and bias of a dense layer; `path` is ours with slashes, `name` theirs without the last part."""
    parts = tuple(path.split("/"))
    kernel = Entry((*parts, "kernel"), f"{name}.weight", (outputs, inputs), is_kernel=True)
    return [kernel, Entry((*parts, "bias"), f"{name}.bias", (outputs,))]


def norm(path: str, name: str, size: int) -> list[Entry]:
    """Scale and bias of a layer norm."""
    parts = tuple(path.split("/"))
    return [Entry((*parts, "scale"), f"{name}.weight", (size,)), Entry((*parts, "bias"), f"{name}.bias", (size,))]


def publish(params: Mapping[str, Any], entries: Iterable[Entry], model: str) -> dict[str, np.ndarray]:
    """The parameters as float32 arrays in C order under their published names, padding rows cut off.

    Raises:
      UserError: the tree has other tensors or shapes than `entries`; `model` is what the message calls it.
    """
    entries = list(entries)
    found = dict(flatten(params))
    check_names({"/".join(e.path) for e in entries}, {"/".join(p) for p in found}, "parameters", model)
    out = {}
    for entry in entries:
        value = np.asarray(found[entry.path], np.float32)
        if value.shape != entry.our_shape:
            raise UserError(
                f"parameter {'/'.join(entry.path)} has shape {value.shape}; the model's is {entry.our_shape}"
            )
        value = value[: entry.shape[0]] if entry.padded_rows else value
        out[entry.name] = np.ascontiguousarray(value.T if entry.is_kernel else value)
    return out


def adopt(tensors: Mapping[str, np.ndarray], entries: Iterable[Entry], model: str) -> dict[str, Any]:
    """The parameter tree (float32) from tensors under their published names; tables are padded with zero rows.

    Raises:
      UserError: names are missing or unknown, a shape differs from that of its entry, or a tensor holds whole numbers.
    """
    entries = list(entries)
    check_names({e.name for e in entries}, set(tensors), "tensors", model)
    _check_floating({e.name: tensors[e.name] for e in entries})
    params: dict[str, Any] = {}
    for entry in entries:
        value = np.asarray(tensors[entry.name])
        if value.shape != entry.shape:
            raise UserError(f"tensor {entry.name} has shape {value.shape}; the configuration says {entry.shape}")
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, which an import refuses
            value = value.astype(np.float32)
        if entry.padded_rows:
            value = np.concatenate([value, np.zeros((entry.padded_rows - len(value), *value.shape[1:]), np.float32)])
        node = params
        for part in entry.path[:-1]:
            node = node.setdefault(part, {})
        node[entry.path[-1]] = np.ascontiguousarray(value.T if entry.is_kernel else value)
    return params


def _check_floating(tensors: Mapping[str, np.ndarray]) -> None:
    """UserError that names a tensor of whole numbers."""
    whole = sorted(name for name, value in tensors.items() if value.dtype.kind in "biu")
    if whole:
        raise UserError(
            f"{whole[0]} holds {tensors[whole[0]].dtype}, as quantised models do (of {len(whole)} tensors); floating "
            "point alone can be read: export the model in float32, float16 or bfloat16"
        )


def flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, leaf) of a nested dictionary."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def check_names(expected: set[str], found: set[str], what: str, model: str) -> None:
    """UserError that lists what is missing and what is unknown."""
    problems = []
    for word, names in (("missing", expected - found), ("unknown", found - expected)):
        if names:
            listed = sorted(names)
            more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
            problems.append(f"{len(listed)} {word}: {', '.join(listed[:20])}{more}")
    if problems:
        raise UserError(f"{what} do not fit {model} of this configuration; {'; '.join(problems)}")
