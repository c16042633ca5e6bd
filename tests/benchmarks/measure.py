"""What the benchmark scripts share: the work, the sizes, and the timing of steps. Imports neither JAX nor PyTorch.

The work is a file of BERT examples (`numpy.savez`), so that every program is given the same sequences:

    ids, ids_offsets               int, the tokens of all examples one after another, and where each example begins
    types                          int, 0 for segment A and 1 for segment B, as long as ids
    positions, positions_offsets   int, the masked positions within each example
    labels                         int, the tokens that were masked, as long as positions
    nsp                            int, 0 is next, 1 random

Without a file, examples are made here: random ids, lengths with the share of full rows and the mean fill published for
Wikipedia (Krell et al. 2021, arXiv 2107.02027).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VOCABULARY = 30_522
SIZES = {
    # layers, hidden, heads, feed-forward
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
}
FULL_SHARE, MEAN_FILL = {128: 0.599, 512: 0.235}, {128: 1 / 1.210, 512: 1 / 2.001}


class Example(NamedTuple):
    """One pair of sentences, masked."""

    ids: np.ndarray
    types: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    nsp: int


def at_least_one(text: str) -> int:
    """The type of an option of which there must be one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; it must be a whole number of at least 1")
    return int(text)


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The options that all programs that train have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="file of examples; without it they are made here")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seq", type=int, choices=sorted(FULL_SHARE), default=128)
    parser.add_argument("--batch", type=at_least_one, default=16, help="rows of a batch")
    parser.add_argument("--examples", type=at_least_one, default=160, help="so many are trained on, once, and timed")
    parser.add_argument("--warm", type=int, default=2, help="steps before that, not timed")
    parser.add_argument("--threads", type=int, default=0, help="of the process; 0 leaves them as they are")
    return parser


def load(file: Path | None, seq: int, count: int) -> list[Example]:
    """The first `count` examples of the file, or made ones."""
    if file is None:
        return make(seq, count)
    with np.load(file) as arrays:
        a = {name: arrays[name] for name in arrays.files}
    if len(a["nsp"]) < count:
        raise SystemExit(f"{file} has {len(a['nsp'])} examples; --examples asks for {count}")
    longest = int(np.diff(a["ids_offsets"]).max())
    if longest > seq:
        raise SystemExit(f"{file} has an example of {longest} tokens; --seq is {seq}")

    def cut(name: str, offsets: str) -> list[np.ndarray]:
        return np.split(a[name].astype(np.int32), a[offsets][1:-1])

    columns = [cut(name, "ids_offsets") for name in ("ids", "types")]
    columns += [cut(name, "positions_offsets") for name in ("positions", "labels")]
    return [
        Example(ids, types, where, what, int(nsp))
        for ids, types, where, what, nsp in zip(*columns, a["nsp"], strict=True)
    ][:count]


def make(seq: int, count: int) -> list[Example]:
    """Random examples with the published distribution of lengths; the same ones every time."""
    rng = np.random.default_rng(seq)
    rest = (MEAN_FILL[seq] - FULL_SHARE[seq]) / (1 - FULL_SHARE[seq])
    short = np.round(6 + (seq - 7) * rng.beta(2.5 * rest, 2.5 - 2.5 * rest, count)).astype(int)
    found = []
    for length in np.where(rng.random(count) < FULL_SHARE[seq], seq, short):
        ids = rng.integers(1000, VOCABULARY, length).astype(np.int32)
        cut = int(rng.integers(2, length - 2))
        ids[[0, cut, -1]] = 101, 102, 102
        types = (np.arange(length) > cut).astype(np.int32)
        free = np.setdiff1d(np.arange(length), [0, cut, length - 1])
        chosen = max(1, min(round(0.15 * length), len(free)))
        positions = np.sort(rng.choice(free, chosen, replace=False)).astype(np.int32)
        labels = ids[positions].copy()
        ids[positions] = np.where(rng.random(chosen) < 0.9, 103, labels)
        found.append(Example(ids, types, positions, labels, int(rng.integers(2))))
    return found


def timed(step: Callable[[int], float], tokens: Sequence[int], warm: int) -> dict[str, Any]:
    """Run `step(i)`, which returns the loss, for each batch; the first batch is run `warm` times before, untimed.

    Returns:
      Real tokens a second over all timed steps, by wall clock and by CPU seconds of the process (all its threads); the
      slowest, median and fastest step by CPU seconds; the first call, compilation included; the losses of the first
      call and of the last step; peak memory.
    """
    first_wall, first_cpu = time.perf_counter(), time.process_time()
    first_loss = step(0)
    first = time.perf_counter() - first_wall, time.process_time() - first_cpu
    for _ in range(warm - 1):
        step(0)
    rates = []
    began = time.perf_counter(), time.process_time()
    loss = first_loss
    for i, count in enumerate(tokens):
        before = time.process_time()
        loss = step(i)
        rates.append(count / (time.process_time() - before))
    wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    return {
        "cpu_per_s": round(sum(tokens) / cpu, 1),
        "wall_per_s": round(sum(tokens) / wall, 1),
        "cpu_per_s_steps": [round(f(rates), 1) for f in (min, statistics.median, max)],
        "steps": len(tokens),
        "tokens_per_step": round(sum(tokens) / len(tokens)),
        "first_step_wall_s": round(first[0], 1),
        "first_step_cpu_s": round(first[1], 1),
        "first_loss": round(first_loss, 4),
        "last_loss": round(loss, 4),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def report(**fields: Any) -> None:
    """One line of JSON."""
    print(json.dumps(fields), flush=True)
