"""One reading of all pairs before any is encoded: which split each belongs to, which are left out, and why.

Memory: 28 bytes a pair while it is made (hashes of the pair and of its sides), one byte a pair afterwards.
"""

from __future__ import annotations

import array
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax import shards
from transformer_jax.chunks import is_heldout
from transformer_jax.config import UserError
from transformer_jax.prepared_folder import CHUNKS, read_json
from transformer_jax.translation import cleaning, pairs
from transformer_jax.translation.cleaning import REASONS
from transformer_jax.translation.config import PairsConfig
from transformer_jax.translation.pairs import SPLITS, Pair, PairRecipe

MALFORMED = "line without both sides"
BATCH = 10_000
"""Pairs that are looked at together."""


@dataclasses.dataclass(frozen=True)
class Splitter:
    """Which split a pair belongs to: that of its input, or one drawn by a hash of its source side."""

    uses: tuple[str, ...]
    """For each input its split, or "" for a draw."""
    validation: float
    test: float

    def __call__(self, number: int, source: str) -> str:
        use = self.uses[number]
        if use:
            return use
        drawn = cleaning.side_hash(source)
        if is_heldout(drawn, self.test):
            return "test"
        return "validation" if is_heldout(drawn, self.test + self.validation) else "train"


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is kept.

    Attributes:
      verdicts: uint8 [pairs read]: 0 is kept, n is left out for REASONS[n - 1].
      counts: for the report: by input, pairs read, kept in each split, and left out for each reason.
    """

    verdicts: np.ndarray
    counts: dict[str, dict[str, int]]


def make(
    recipe: PairRecipe,
    limits: PairsConfig,
    splitter: Splitter,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda pairs, text_bytes: None,
) -> Survey:
    """Read all pairs once.

    Validation and test pairs are all kept, unless a side is empty. A training pair goes if it has a fault of its own,
    is a copy of an earlier one, or has a side that stands in the test or validation set (letters and digits count).

    Args:
      workers: processes that look at pairs while this one reads; few pairs are looked at here.
      progress: called with the numbers of pairs and of bytes of text that have been looked at.
    """
    names = pairs.input_names(recipe)
    malformed: collections.Counter[str] = collections.Counter()
    languages = (recipe.source_language, recipe.target_language)
    verdicts, inputs, split_of = array.array("B"), array.array("H"), array.array("B")
    hashes = array.array("Q")
    read = pairs.read(recipe, lambda name, line: malformed.update([name]))
    judge = functools.partial(_judge, limits, languages, splitter)
    size = 0
    for judged, text_bytes in _map(judge, _batches(read), workers):
        for column, part in zip((verdicts, split_of, inputs, hashes), judged, strict=True):
            column.frombytes(part)
        size += text_bytes
        progress(len(verdicts), size)
    found = _view(verdicts, np.uint8).copy()
    split_N = _view(split_of, np.uint8)
    whole, source_N, target_N = _view(hashes, np.uint64).reshape(-1, 3).T
    for split, reason in (("test", cleaning.IN_TEST), ("validation", cleaning.IN_VALIDATION)):
        own = (split_N == SPLITS.index(split)) & (found == 0)
        left = np.flatnonzero((split_N == 0) & (found == 0))
        standing = np.isin(source_N[left], source_N[own]) | np.isin(target_N[left], target_N[own])
        found[left[standing]] = 1 + REASONS.index(reason)
    if limits.drop_duplicates:
        left = np.flatnonzero((split_N == 0) & (found == 0))
        _, first = np.unique(whole[left], return_index=True)
        found[np.delete(left, first)] = 1 + REASONS.index(cleaning.DUPLICATE)
    return Survey(found, _counts(names, malformed, _view(inputs, np.uint16), split_N, found))


def _batches(read: Iterator[Pair]) -> Iterator[list[Pair]]:
    while batch := list(itertools.islice(read, BATCH)):
        yield batch


Judged = tuple[tuple[bytes, bytes, bytes, bytes], int]


def _judge(limits: PairsConfig, languages: tuple[str, str], splitter: Splitter, batch: list[Pair]) -> Judged:
    """Verdict, split and input of each pair by itself, three hashes each (of pair and sides); and the bytes of text."""
    verdicts, splits = bytearray(), bytearray()
    hashes = array.array("Q")
    for pair in batch:
        source, target = pair.source, pair.target
        split = splitter(pair.input, source)
        if split == "train":
            reason = cleaning.fault(source, target, limits, languages)
        else:
            reason = "" if source and target else cleaning.EMPTY
        verdicts.append(1 + REASONS.index(reason) if reason else 0)
        splits.append(SPLITS.index(split))
        hashes.extend((cleaning.pair_hash(source, target), cleaning.side_hash(source), cleaning.side_hash(target)))
    inputs = array.array("H", [pair.input for pair in batch])
    size = sum(len(pair.source.encode()) + len(pair.target.encode()) for pair in batch)
    return (bytes(verdicts), bytes(splits), inputs.tobytes(), hashes.tobytes()), size


def _map(judge: Callable[[list[Pair]], Judged], batches: Iterator[list[Pair]], workers: int) -> Iterator[Judged]:
    """`judge` of each batch, in order; a bounded number of batches is on its way at a time."""
    first = list(itertools.islice(batches, 2))
    if workers <= 1 or len(first) < 2:
        yield from map(judge, itertools.chain(first, batches))
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        running: collections.deque[concurrent.futures.Future[Judged]] = collections.deque()
        try:
            for batch in itertools.chain(first, batches):
                running.append(pool.submit(judge, batch))
                if len(running) > 2 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a process was ended from outside, most likely because memory ran out; run `prepare` again with fewer "
                "processes"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _view(column: array.array, dtype: Any) -> np.ndarray:
    return np.frombuffer(column, dtype) if column else np.zeros(0, dtype)


def _counts(
    names: Sequence[str],
    malformed: collections.Counter[str],
    input_N: np.ndarray,
    split_N: np.ndarray,
    found: np.ndarray,
) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for number, name in enumerate(names):
        own = input_N == number
        row = {"read": int(own.sum()) + malformed[name]}
        row |= {split: int((own & (split_N == i) & (found == 0)).sum()) for i, split in enumerate(SPLITS)}
        reasons = np.bincount(found[own], minlength=1 + len(REASONS))
        row |= {reason: int(n) for reason, n in zip(REASONS, reasons[1:], strict=True)}
        table[name] = row | {MALFORMED: malformed[name]}
    return table


def kept(recipe: PairRecipe, survey: Survey) -> Iterator[Pair]:
    """The pairs that the survey keeps, in the order of the recipe.

    Raises:
      UserError: there are not as many pairs as when they were surveyed.
    """
    number = 0
    for pair in pairs.read(recipe, lambda name, line: None):
        if number == len(survey.verdicts):
            raise UserError("the input files have grown while they were read; run `prepare` again")
        if not survey.verdicts[number]:
            yield pair
        number += 1
    if number < len(survey.verdicts):
        raise UserError("the input files have become shorter while they were read; run `prepare` again")


def load_or_make(out: Path, key: str, make_it: Callable[[], Survey]) -> Survey:
    """The survey that an earlier, unfinished preparation left in `out`, if made with the same key; or a new one."""
    record_path, column_path = out / CHUNKS / "survey.json", out / CHUNKS / "survey.npy"
    record = read_json(record_path)
    if record.get("key") == key and column_path.is_file() and shards.describe_file(column_path) == record["file"]:
        return Survey(np.load(column_path, allow_pickle=False), record["counts"])
    found = make_it()
    record_path.unlink(missing_ok=True)
    np.save(column_path, found.verdicts, allow_pickle=False)
    record = {"key": key, "file": shards.describe_file(column_path), "counts": found.counts}
    shards.write_atomically(record_path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return found


def summary(counts: dict[str, dict[str, int]]) -> str:
    """What was read and kept, and why the rest was not, as one line for people."""
    whole = totals(counts)
    kept_ones = sum(whole.get(split, 0) for split in SPLITS)
    reasons = [f"{whole[reason]:,} {reason}" for reason in (*REASONS, MALFORMED) if whole.get(reason)]
    return f"{whole.get('read', 0):,} pairs read, {kept_ones:,} kept" + (
        f"; left out: {', '.join(reasons)}" if reasons else ""
    )


def totals(counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The columns of the counts added up."""
    whole: collections.Counter[str] = collections.Counter()
    for row in counts.values():
        whole.update(row)
    return dict(whole)
