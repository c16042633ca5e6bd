"""The plan of a draw: its sentence pairs and which of them share a row; made, and kept in a cache on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax import examples
from bert_jax.config import ExamplesConfig
from bert_jax.examples import PairPlan
from transformer_jax import inputs, plan_cache
from transformer_jax.config import UserError
from transformer_jax.epochs import LAST_PLANS
from transformer_jax.inputs import Packing, derive_key
from transformer_jax.shards import Shards

VERSION = 1
"""Goes into every fingerprint; raised when the same settings would give other batches."""


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


def _settings(config: ExamplesConfig) -> dict[str, Any]:
    """The settings; a newer one is left out where it stands as it was before, so that earlier runs go on."""
    found = dataclasses.asdict(config)
    if config.objective == "masked":
        del found["objective"]
    return found


def fingerprint(shards: Shards, config: ExamplesConfig, seed: int) -> str:
    """SHA-256 over all that the stream of batches depends on."""
    parts = [VERSION, shards.fingerprint, _settings(config), int(seed)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def cached_plan(shards: Shards, config: ExamplesConfig, seed: int, draw: int, cache_dir: Path | None) -> Plan:
    """The plan of a draw, from the cache if a whole and matching one lies there, else made and put there.

    See `plan_cache.cached`.
    """
    parts = [VERSION, shards.fingerprint, _settings(config), int(seed), draw]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def make() -> plan_cache.Columns:
        plan = make_plan(shards, config, seed, draw)
        return plan.pairs._asdict() | plan.packing._asdict()

    names = (*PairPlan._fields, *Packing._fields)
    columns = plan_cache.cached(cache_dir, draw, digest, names, make, keep=max(LAST_PLANS, config.dupe_factor))
    return Plan(
        PairPlan(*(columns[name] for name in PairPlan._fields)), Packing(*(columns[name] for name in Packing._fields))
    )
