"""What the benchmark scripts of translation share: the work, the sizes and the weights. Imports no framework.

The work is a file of sentence pairs (`numpy.savez`): src, tgt (the ids of all sentences one after another, without
marks) and src_offsets, tgt_offsets (where each begins). Without a file pairs are made here: random ids, with lengths
like those of WMT14 English-German in subwords.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from measure import at_least_one

VOCABULARY = 32_000
END, PAD = 0, VOCABULARY - 1
SIZES = {
    # layers of each side, hidden, heads, feed-forward
    "tiny": (2, 128, 4, 512),
    "base": (6, 512, 8, 2048),
    "big": (6, 1024, 16, 4096),
}

Batch = tuple[list[list[int]], int]
"""Sources with their end mark, and the length to which they are decoded."""


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The options that all programs that decode have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="file of pairs; without it they are made here")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--beam", type=at_least_one, default=4)
    parser.add_argument("--batch", type=at_least_one, default=16, help="sentences of a batch")
    parser.add_argument("--sentences", type=at_least_one, default=64, help="so many are decoded, once, and timed")
    parser.add_argument("--warm", type=int, default=1, help="the first batch is decoded so often before, not timed")
    parser.add_argument("--threads", type=int, default=0, help="of the process; 0 leaves them as they are")
    return parser


def training_arguments(text: str | None) -> argparse.ArgumentParser:
    """The options that all programs that train have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="file of pairs; without it they are made here")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--pairs", type=at_least_one, default=2048, help="so many pairs are made into batches")
    parser.add_argument("--steps", type=at_least_one, default=10, help="batches that are trained on, once, and timed")
    parser.add_argument("--tokens", type=at_least_one, default=2048, help="slots of a batch, on each side")
    parser.add_argument("--warm", type=int, default=2, help="the first batch is run so often before, not timed")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=0, help="of the process; 0 leaves them as they are")
    return parser


def batches(options: argparse.Namespace) -> list[Batch]:
    """Sentences sorted by length and cut into batches, which come in a fixed random order."""
    found = sorted(read(options.data, options.sentences), key=lambda pair: len(pair[0]))
    groups = [found[i : i + options.batch] for i in range(0, len(found), options.batch)]
    order = np.random.default_rng(3).permutation(len(groups))
    return [([[*map(int, s), END] for s, _ in groups[i]], max(len(t) for _, t in groups[i])) for i in order]


def read(file: Path | None, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first `count` pairs of the file, or made ones; ids without marks."""
    if file is None:
        rng = np.random.default_rng(77)
        sources = np.exp(rng.normal(np.log(23.0), 0.62, count)).round().clip(2, 128).astype(int)
        targets = (sources * np.exp(rng.normal(0.03, 0.18, count))).round().clip(2, 128).astype(int)
        return [(rng.integers(2, PAD, s), rng.integers(2, PAD, t)) for s, t in zip(sources, targets, strict=True)]
    with np.load(file) as a:
        if len(a["src_offsets"]) - 1 < count:
            raise SystemExit(f"{file} has {len(a['src_offsets']) - 1} pairs; --sentences asks for {count}")
        sides = [np.split(a[name], a[f"{name}_offsets"][1:-1])[:count] for name in ("src", "tgt")]
    if max(int(x.max()) for side in sides for x in side) >= PAD:
        raise SystemExit(f"{file} has ids of {PAD} or more, the last of which is for padding")
    return list(zip(*sides, strict=True))


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Random float32 tensors under Marian's names, the same for every program; `<pad>` is zero."""
    found = {}
    for seed, name in enumerate(sorted(shapes)):
        draws = np.random.default_rng(seed).standard_normal(shapes[name], np.float32)
        if name.endswith("shared.weight"):
            found[name] = draws * np.float32(shapes[name][1] ** -0.5)
            found[name][PAD] = 0
        elif len(shapes[name]) == 2:
            found[name] = draws * np.float32((2.0 / sum(shapes[name])) ** 0.5)
        else:
            found[name] = np.float32("norm.weight" in name) + np.float32(0.02) * draws
    return found
