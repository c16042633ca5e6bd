"""One reading of all pairs before any is encoded: which split each belongs to, which are left out, and why.

Memory: 33 bytes a pair while it is made (hashes of the pair and of its sides), one byte a pair afterwards.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
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
    progress: Callable[[int], None] = lambda pairs: None,
) -> Survey:
    """Read all pairs once.

    Validation and test pairs are all kept, unless a side is empty. A training pair goes if it has a fault of its own,
    is a copy of an earlier one, or has a side that stands in the test or validation set (letters and digits count).
    """
    names = pairs.input_names(recipe)
    malformed: collections.Counter[str] = collections.Counter()
    languages = (recipe.source_language, recipe.target_language)
    verdicts, inputs, split_of = array.array("B"), array.array("H"), array.array("B")
    whole, sources, targets = (array.array("Q") for _ in range(3))
    empty = 1 + REASONS.index(cleaning.EMPTY)
    for number, pair in enumerate(pairs.read(recipe, lambda name, line: malformed.update([name])), 1):
        split = splitter(pair.input, pair.source)
        if split == "train":
            reason = cleaning.fault(pair.source, pair.target, limits, languages)
            verdicts.append(1 + REASONS.index(reason) if reason else 0)
        else:
            verdicts.append(0 if pair.source and pair.target else empty)
        inputs.append(pair.input)
        split_of.append(SPLITS.index(split))
        whole.append(cleaning.pair_hash(pair.source, pair.target))
        sources.append(cleaning.side_hash(pair.source))
        targets.append(cleaning.side_hash(pair.target))
        if number % 10_000 == 0:
            progress(number)
    found = _view(verdicts, np.uint8).copy()
    split_N = _view(split_of, np.uint8)
    sides = _view(sources, np.uint64), _view(targets, np.uint64)
    for split, reason in (("test", cleaning.IN_TEST), ("validation", cleaning.IN_VALIDATION)):
        own = (split_N == SPLITS.index(split)) & (found == 0)
        left = np.flatnonzero((split_N == 0) & (found == 0))
        standing = np.isin(sides[0][left], sides[0][own]) | np.isin(sides[1][left], sides[1][own])
        found[left[standing]] = 1 + REASONS.index(reason)
    if limits.drop_duplicates:
        left = np.flatnonzero((split_N == 0) & (found == 0))
        _, first = np.unique(_view(whole, np.uint64)[left], return_index=True)
        copies = np.setdiff1d(np.arange(len(left)), first)
        found[left[copies]] = 1 + REASONS.index(cleaning.DUPLICATE)
    return Survey(found, _counts(names, malformed, _view(inputs, np.uint16), split_N, found))


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


def totals(counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The columns of the counts added up."""
    whole: collections.Counter[str] = collections.Counter()
    for row in counts.values():
        whole.update(row)
    return dict(whole)
