"""Packed rows against length buckets, and how fast batches of pairs are made, on a prepared folder.

    python tests/benchmarks/pair_rows.py PREPARED [--source 128] [--target 128]

Buckets are a few fixed shapes; a pair goes into the first that both its sides fit, one pair a row. Their shapes are
chosen from the lengths themselves, so that each holds equally many pieces. For both, the fill of each side and the
matrix products a pair costs in transformer-base (forward): padding and masked attention cost what real pieces cost.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from transformer_jax.inputs import derive_key
from transformer_jax.shards import Shards
from transformer_jax.translation import data
from transformer_jax.translation.config import BatchesConfig, TransformerConfig


def flops(rows: float, source: int, target: int) -> float:
    """Matrix products of `rows` rows of these lengths, forward, without the output layer."""
    base = TransformerConfig()
    h, f = base.hidden_size, base.intermediate_size
    feed_forward, attention = 4 * h * f, 8 * h * h  # a place, in each layer
    encoder = source * (feed_forward + attention + 4 * source * h)
    decoder = target * (feed_forward + attention + 4 * h * h + 4 * target * h + 4 * source * h) + source * 4 * h * h
    return rows * (base.num_hidden_layers * encoder + base.num_decoder_layers * decoder)


def buckets(lengths: np.ndarray, capacity: np.ndarray, number: int) -> np.ndarray:
    """Shapes [number, 2], ascending, multiples of 8 up to the capacity, with equally many pieces between them."""
    longer = np.sort(lengths.max(axis=1))
    pieces = np.cumsum(longer)
    cuts = np.searchsorted(pieces, pieces[-1] * np.arange(1, number) / number)
    edges = np.unique(-(-longer[cuts] // 8) * 8)
    return np.array([*([e, e] for e in edges), capacity]).clip(max=capacity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--source", type=int, default=128, help="examples.max_source_length")
    parser.add_argument("--target", type=int, default=128)
    parser.add_argument(
        "--sampling", type=float, default=0.0, help="examples.subword_sampling, for the rate of batches"
    )
    options = parser.parse_args()
    config = BatchesConfig(options.source, options.target, subword_sampling=options.sampling)
    shards = Shards.open(options.prepared)
    maker = data.Maker(shards, data.load_vocabularies(shards), config, 0.0)
    began = time.process_time()
    plan = maker.plan(derive_key(0, "packing", 0))
    planned = time.process_time() - began
    lengths = maker.lengths[maker.fitting]
    used = lengths.sum(axis=0)
    fill = data.fill_of(maker, plan)
    pairs = len(lengths)
    found: dict[str, dict[str, float]] = {}

    def add(name: str, source: float, target: float, cost: float) -> None:
        figures = {"source_fill": source, "target_fill": target, "mflop_a_pair": cost / pairs / 1e6}
        found[name] = {key: round(float(value), 3) for key, value in figures.items()}

    add("packed", fill.source, fill.target, flops(fill.rows, *maker.capacity))
    alone = used / (pairs * maker.capacity)
    add("one pair a row", alone[0], alone[1], flops(pairs, *maker.capacity))
    for number in (4, 6, 8, 12):
        shapes = buckets(lengths, maker.capacity, number)
        own = np.argmax((lengths[:, None] <= shapes[None]).all(axis=2), axis=1)
        counts = np.bincount(own, minlength=len(shapes))
        places = (counts[:, None] * shapes).sum(axis=0)
        cost = sum(flops(int(n), int(s), int(t)) for n, (s, t) in zip(counts, shapes, strict=True))
        add(f"{len(shapes)} buckets", used[0] / places[0], used[1] / places[1], cost)

    stream = data.TrainingData(shards, config, seed=0)
    stream.batch(0, 1)
    pieces, row, began = 0, 0, time.process_time()
    while time.process_time() - began < 2.0:
        batch = stream.batch(row, 64)
        row += 64
        pieces += int((batch["sequence_ids"] > 0).sum() + (batch["label_weights"] > 0).sum())
    rate = pieces / (time.process_time() - began)
    figures = {"pairs": pairs, "source_pieces": int(used[0]), "target_pieces": int(used[1]), "rows": found}
    rates = {"planning_cpu_seconds": round(planned, 3), "pieces_a_cpu_second": round(rate)}
    print(json.dumps({**figures, **rates, "sampling": options.sampling}, indent=1))


if __name__ == "__main__":
    main()
