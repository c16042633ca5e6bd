"""Before the first step of several processes: whether they are about to do the same thing.

Each process tells all others what it has: its code, its settings, its data and which rows of a batch it makes. A
difference would otherwise be a hang, or worse, a run whose parameters are quietly a mixture of two.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from transformer_jax import config as core
from transformer_jax import sharding, storage
from transformer_jax.config import ConfigError, UserError

OWN = ("hosts.", "data.prepared")
"""Beginnings of settings that may differ: who a process is, and where on its machine the data lies."""
PACKAGES = ("transformer_jax", "bert_jax")
SEEN_AFTER = 20.0
"""Seconds in which a file that process 0 writes must be seen by all, where they share a folder."""


def code_digest() -> str:
    """A digest of the project's own code as it is installed here."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in sorted(spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def facts(config: Any, meta: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """What this process has, as JSON can hold it; `same` must be equal on all."""
    settings = {key: value for key, value in _flat(core.to_builtins(config)).items() if not key.startswith(OWN)}
    same = {
        "code": code_digest()[:16],
        **{f"version of {name}": version for name, version in meta["versions"].items()},
        "data": meta["data"]["fingerprint"][:16],
        "tokenizer": meta["tokenizer_digest"][:16],
        "devices a process": jax.local_device_count(),
        "kind of device": jax.local_devices()[0].device_kind,
        **settings,
    }
    rows = {"train.batch_size": sharding.host_rows(config.train.batch_size, mesh)}
    return {"same": same, "rows": rows}


def check(config: Any, meta: Mapping[str, Any], mesh: Mesh, run_dir: Path, names: Sequence[str]) -> list[str]:
    """Compare the facts of all processes; every process calls this at the same time and comes to the same result.

    Args:
      names: of the machines, for messages.

    Returns:
      Lines for people.

    Raises:
      ConfigError: the processes differ; each difference names the process and both values.
      UserError: the run folder is not one folder for all.
    """
    found = gather({**facts(config, meta, mesh), "nonce": secrets.token_hex(8)})
    lines = differences([f["same"] for f in found], names)
    if lines:
        raise ConfigError("the processes of this run are not alike:\n  " + "\n  ".join(lines))
    check_rows([f["rows"]["train.batch_size"] for f in found], config.train.batch_size)
    _check_folder(run_dir, found[0]["nonce"], names)
    mine = sum(count for _, count in found[jax.process_index()]["rows"]["train.batch_size"])
    return [
        f"{len(found)} processes alike: code {found[0]['same']['code'][:12]}, settings, data and tokenizer; "
        f"each step's {config.train.batch_size} rows are made once, {mine} of them here"
    ]


def differences(same: Sequence[Mapping[str, Any]], names: Sequence[str], most: int = 10) -> list[str]:
    """A line for each fact in which a process differs from process 0."""
    lines = []
    for process, here in enumerate(same):
        for key, (first, other) in core.differences(same[0], here).items():
            lines.append(
                f"{key}: {other!r} on process {process} ({names[process]}), {first!r} on process 0 ({names[0]})"
            )
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def check_rows(rows: Sequence[Sequence[Sequence[int]]], batch_size: int) -> None:
    """Whether the processes' rows make up the batch, each row once; those that share a row (a tensor axis over hosts)
    must share all of theirs.

    Args:
      rows: (first, count) of each run of rows, of each process.

    Raises:
      UserError: rows that nobody makes, or that two make.
    """
    kinds = {tuple((int(first), int(count)) for first, count in runs) for runs in rows}
    made = np.zeros(batch_size, np.int64)
    for runs in kinds:
        for first, count in runs:
            made[first : first + count] += 1
    if (made != 1).any():
        row = int(np.argmax(made != 1))
        raise UserError(
            f"row {row} of the {batch_size} rows of a batch is made {int(made[row])} times by the processes' devices; "
            "change [mesh] so that each process has its own part of the rows"
        )


def gather(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each process gives, in order of the processes; all must call this."""
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.asarray([len(content)], np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(content)] = content
    everything = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(everything, sizes, strict=True)]


def _check_folder(run_dir: Path, nonce: str, names: Sequence[str]) -> None:
    """Whether what process 0 writes into the run folder is there for all."""
    mark = run_dir / f".seen-by-all-{nonce}"
    if jax.process_index() == 0:
        if not storage.is_remote(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        mark.write_text("")
    multihost_utils.sync_global_devices("run folder is marked")
    deadline = time.monotonic() + SEEN_AFTER
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [i for i, there in enumerate(gather({"seen": seen})) if not there["seen"]]
    if jax.process_index() == 0:
        mark.unlink()
    if blind:
        shown = ", ".join(f"{i} ({names[i]})" for i in blind[:8]) + (" ..." if len(blind) > 8 else "")
        raise UserError(
            f"run_dir {run_dir}: what process 0 writes there is not there for process {shown}; all hosts must share "
            "one run folder, as on a network drive"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return out
