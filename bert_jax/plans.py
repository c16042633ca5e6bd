"""The plan of a draw: its sentence pairs and which of them share a row; made, and kept in a cache on disk.

A cached plan carries the digest of what it depends on and of each of its files: one that is damaged, or was made for
other data or settings, is made anew and never trusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_jax import examples
from bert_jax.config import ExamplesConfig
from bert_jax.examples import PairPlan
from transformer_jax import inputs
from transformer_jax.config import UserError
from transformer_jax.inputs import Packing, derive_key
from transformer_jax.shards import Shards

VERSION = 1
"""Goes into every fingerprint; raised when the same settings would give other batches."""
LAST_PLANS = 3
"""Plans held at once: the current one, the next, and the one before for a batch that straddles."""


class Plan(NamedTuple):
    """The pairs of one draw and their rows."""

    pairs: PairPlan
    packing: Packing


def make_plan(shards: Shards, config: ExamplesConfig, seed: int, draw: int) -> Plan:
    """Draw pairs from the whole split and pack them into rows.

    Raises:
      UserError: no example comes out of the split, or the sentence task cannot be done with it.
    """
    pairs = examples.plan_pairs(
        derive_key(seed, "pairs", draw),
        shards.document_offsets,
        shards.sentence_offsets,
        shards.document_sources,
        shards.document_hashes,
        config,
        shards.gather,
        list(shards.source_names),
    )
    if not len(pairs.label):
        raise UserError(
            f"0 examples: {shards.num_documents} documents with {shards.num_tokens} tokens give no sentence pair; use "
            "more text or another examples.sentence_task"
        )
    # One kind of start for the whole file: half the memory as long as the split has fewer than 2^32 tokens.
    start_type = np.uint32 if shards.num_tokens < 1 << 32 else np.int64
    pairs = pairs._replace(a_start=pairs.a_start.astype(start_type), b_start=pairs.b_start.astype(start_type))
    if not config.pack:
        return Plan(pairs, inputs.one_a_row(len(pairs.label)))
    packing = inputs.pack(
        pairs.lengths,
        examples.numbers_to_predict(pairs, config),
        config.max_seq_length,
        examples.max_sequences(config),
        examples.max_predictions(config),
        derive_key(seed, "packing", draw),
    )
    return Plan(pairs, packing)


def fingerprint(shards: Shards, config: ExamplesConfig, seed: int) -> str:
    """SHA-256 over all that the stream of batches depends on."""
    parts = [VERSION, shards.fingerprint, dataclasses.asdict(config), int(seed)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def cached_plan(shards: Shards, config: ExamplesConfig, seed: int, draw: int, cache_dir: Path | None) -> Plan:
    """The plan of a draw, from the cache if a whole and matching one lies there, else made and put there.

    A folder that cannot be written costs a warning and the time to plan again, not the run.
    """
    if cache_dir is None:
        return make_plan(shards, config, seed, draw)
    parts = [VERSION, shards.fingerprint, dataclasses.asdict(config), int(seed), draw]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    folder = cache_dir / f"plan-{draw:05d}-{digest[:16]}"
    plan = _read_plan(folder, digest)
    if plan is None:
        plan = make_plan(shards, config, seed, draw)
        try:
            _write_plan(folder, digest, plan)
            _drop_old(cache_dir, keep=folder, number=max(LAST_PLANS, config.dupe_factor))
        except OSError as e:
            warnings.warn(f"the plan of draw {draw} could not be kept in {cache_dir}: {e}", UserWarning, stacklevel=2)
    return plan


def _columns(plan: Plan) -> dict[str, np.ndarray]:
    return plan.pairs._asdict() | plan.packing._asdict()


def _write_plan(folder: Path, digest: str, plan: Plan) -> None:
    """Write a plan whole under another name, then rename; one that another process has put there meanwhile goes."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        files = {}
        for name, column in _columns(plan).items():
            np.save(temporary / f"{name}.npy", column, allow_pickle=False)
            files[name] = _digest(temporary / f"{name}.npy")
        (temporary / "plan.json").write_text(json.dumps({"digest": digest, "files": files}), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_plan(folder: Path, digest: str) -> Plan | None:
    """The plan in a folder, or None if it is not there, not whole, or another one."""
    try:
        stated = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        if stated["digest"] != digest:
            return None
        names = (*PairPlan._fields, *Packing._fields)
        if any(_digest(folder / f"{name}.npy") != stated["files"][name] for name in names):
            return None
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Plain views of the maps: indexing numpy's memmap subclass is several times slower.
    columns = {name: np.asarray(column) for name, column in columns.items()}
    return Plan(
        PairPlan(*(columns[name] for name in PairPlan._fields)), Packing(*(columns[name] for name in Packing._fields))
    )


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _drop_old(cache_dir: Path, keep: Path, number: int) -> None:
    """Leave the newest plans; the arrays of a plan in use stay readable until they are let go.

    What a killed process was writing goes too, once it is so old that nobody can still be at it.
    """
    plans = sorted(cache_dir.glob("plan-*"), key=_age)
    old = [p for p in reversed(plans) if p != keep][: max(0, len(plans) - number)]
    for path in [*old, *(p for p in cache_dir.glob(".plan-*.tmp") if _age(p) > 3600)]:
        shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    """Seconds since the last change; 0 for what has gone meanwhile."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
