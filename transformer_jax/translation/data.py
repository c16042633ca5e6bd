"""From prepared pairs to the batches of training and evaluation.

As in BERT's data, training reads one endless stream of rows, and a batch is a pure function of the shards' fingerprint,
the settings, the seed and the number of its first row. Several pairs share a row, which holds them side by side: pair k
of the source side belongs to pair k of the target side. `data/README.md` states the contract of a batch.

The plan of an epoch says which pairs share a row; it fills rows on both sides at once. Pairs that do not fit into a row
by themselves are left out and counted (`too_long`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_jax import inputs, plan_cache
from transformer_jax.config import ConfigError, UserError
from transformer_jax.epochs import LAST_PLANS, Epochs
from transformer_jax.inputs import Packing, bits, count_up, derive_key
from transformer_jax.shards import TOKENIZER, Shards
from transformer_jax.tokenizer import WordPiece
from transformer_jax.translation.config import BatchesConfig
from transformer_jax.translation.vocabularies import Vocabularies

VERSION = 1
"""Goes into every fingerprint; raised when the same settings would give other batches."""
GROWTH_SAMPLE = 1000
"""Pairs that are cut at random to see by how much subword sampling lengthens them."""
Batch = dict[str, np.ndarray]


def check(config: BatchesConfig) -> None:
    """Refuse settings that cannot work (single values are checked where they are read).

    Raises:
      ConfigError: more pairs to a row than its pieces allow.
    """
    most = min(config.max_source_length, config.max_target_length)
    if config.max_pairs_per_row > most:
        raise ConfigError(
            f"examples.max_pairs_per_row is {config.max_pairs_per_row}; a row of {most} pieces holds at most {most}"
        )


def max_pairs(config: BatchesConfig) -> int:
    """The most pairs that a plan puts into a row."""
    if not config.pack:
        return 1
    return config.max_pairs_per_row or max(1, max(config.max_source_length, config.max_target_length) // 4)


def load_vocabularies(shards: Shards) -> Vocabularies:
    """The vocabularies that made the ids.

    Raises:
      UserError: they are not those of the shards, or the shards hold no pairs.
    """
    if "languages" not in shards.manifest:
        raise UserError(f"{shards.folder} holds no pairs; name a folder that `transformer-jax prepare` has made")
    found = Vocabularies.load(shards.folder / TOKENIZER)
    if found.digest != shards.manifest["tokenizer"]["digest"]:
        raise UserError(
            f"{shards.folder / TOKENIZER} does not hold the vocabularies these shards were made with; run `prepare` "
            "again"
        )
    return found


def pair_texts(shards: Shards, numbers: Sequence[int] | np.ndarray) -> list[tuple[str, str]]:
    """Source and target of these pairs as they were read (validation and test keep them, training for sampling).

    Raises:
      UserError: the preparation did not keep them.
    """
    sentences = np.asarray(numbers, np.int64)[:, None] * 2 + np.arange(2)
    texts = shards.texts(sentences.ravel())
    return list(zip(texts[::2], texts[1::2], strict=True))


class Maker:
    """Plans rows and makes batches of them; holds what is the same for all epochs.

    Attributes:
      lengths: int32 [pairs, 2], pieces on each side with the marks around them.
      fitting: int64, numbers of the pairs that fit into a row.
      too_long: how many do not.
    """

    def __init__(self, shards: Shards, vocabularies: Vocabularies, config: BatchesConfig, sampling: float) -> None:
        self.shards, self.vocabularies, self.config, self.sampling = shards, vocabularies, config, sampling
        self.source_marks = len(vocabularies.source_start) + len(vocabularies.source_end)
        self.capacity = np.array([config.max_source_length, config.max_target_length])
        self.lengths = np.diff(shards.sentence_offsets).astype(np.int32).reshape(-1, 2)
        self.lengths += np.array([self.source_marks, 1], np.int32)
        self.fitting = np.flatnonzero((self.lengths <= self.capacity).all(axis=1))
        self.too_long = len(self.lengths) - len(self.fitting)
        self.growth = np.ones(2)
        if sampling:
            if not shards.has_texts:
                raise UserError(
                    f"examples.subword_sampling is {sampling}, but {shards.folder} was prepared without it and does "
                    "not keep the text of training pairs; run `prepare` again"
                )
            self.growth = self._growth()

    def plan(self, key: np.uint64) -> Packing:
        """Which pairs share a row; its members are numbers of pairs.

        Raises:
          UserError: no pair fits into a row.
        """
        if not len(self.fitting):
            raise UserError(
                f"0 examples: none of {len(self.lengths)} pairs fits into rows of {self.capacity[0]} source and "
                f"{self.capacity[1]} target pieces; raise examples.max_source_length and examples.max_target_length"
            )
        if not self.config.pack:
            packing = inputs.one_a_row(len(self.fitting))
        else:
            lengths = self.lengths[self.fitting] if self.too_long else self.lengths
            if self.sampling:
                lengths = np.minimum(np.ceil(lengths * self.growth), self.capacity).astype(np.int32)
            source, target = lengths[:, 0], lengths[:, 1]
            sizes = int(self.capacity[0]), max_pairs(self.config), int(self.capacity[1])
            packing = inputs.pack(source, target, *sizes, key)
        return Packing(packing.row_offsets, self.fitting[packing.members].astype(packing.members.dtype))

    def rows(self, packing: Packing, key: np.uint64, rows: np.ndarray) -> Batch:
        """The batch of these rows of the plan, in their order, without `row_ids`.

        How a pair is cut where sampling is on depends on `key` and its number, and on the room in its own row.
        """
        offsets = packing.row_offsets
        per_row = offsets[rows + 1] - offsets[rows]
        slot_Q = count_up(per_row)
        pair_Q = np.asarray(packing.members[np.repeat(offsets[rows], per_row) + slot_Q]).astype(np.int64)
        sentence_Q = pair_Q * 2
        starts = self.shards.sentence_offsets
        sizes = [starts[sentence_Q + side + 1] - starts[sentence_Q + side] for side in range(2)]
        tokens = [self.shards.gather(starts[sentence_Q + side], sizes[side]) for side in range(2)]
        if self.sampling:
            sizes, tokens = self._cut_anew(key, pair_Q, per_row, sizes, tokens)
        vocabularies = self.vocabularies
        source = _Side(slot_Q, per_row, sizes[0], tokens[0], self.source_marks, self.config.max_source_length)
        target = _Side(slot_Q, per_row, sizes[1], tokens[1], 1, self.config.max_target_length)
        pad = vocabularies.target.pad_id
        batch = {
            "input_ids": source.ids(vocabularies.source_start, vocabularies.source_end, vocabularies.source.pad_id),
            "position_ids": source.position_ids,
            "sequence_ids": source.sequence_ids,
            # The decoder sees what stands before the piece it is to predict; the first one has only <pad> before it.
            "decoder_input_ids": target.ids((pad,), (), pad),
            "decoder_position_ids": target.position_ids,
            "decoder_sequence_ids": target.sequence_ids,
            "labels": target.ids((), (vocabularies.target.eos_id,), pad),
        }
        return batch | {"label_weights": (target.sequence_ids > 0).astype(np.float32)}

    def _growth(self) -> np.ndarray:
        """By how much random cuts lengthen each side, from a fixed sample: float64 [2]."""
        n = len(self.fitting)
        if not n:
            return np.ones(2)
        sample = self.fitting[inputs.permute(derive_key(0, "growth"), n, np.arange(min(n, GROWTH_SAMPLE)))]
        grown = [np.mean(self._draw(derive_key(0, "growth"), sample, side)[0]) for side in range(2)]
        plain = self.lengths[sample].mean(axis=0) - np.array([self.source_marks, 1])
        return np.maximum(1.0, np.array(grown) / plain)

    def _draw(self, key: np.uint64, pair_Q: np.ndarray, side: int) -> tuple[np.ndarray, list[list[int]]]:
        """The pairs' texts of one side, cut at random: numbers of pieces, and the pieces."""
        texts = self.shards.texts(pair_Q * 2 + side)
        vocabulary = (self.vocabularies.source, self.vocabularies.target)[side]
        if isinstance(vocabulary, WordPiece):
            ids = vocabulary.encode_batch(texts)
        else:
            ids = vocabulary.sample_batch(texts, bits(key, pair_Q, side), self.sampling)
        return np.fromiter(map(len, ids), np.int64, len(ids)), ids

    def _cut_anew(
        self,
        key: np.uint64,
        pair_Q: np.ndarray,
        per_row: np.ndarray,
        sizes: Sequence[np.ndarray],
        tokens: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Sizes and tokens with random cuts, but the best cut for a pair whose row has no room for more pieces."""
        new_sizes, new_tokens = [], []
        row_Q = np.repeat(np.arange(len(per_row)), per_row)
        for side in range(2):
            drawn_Q, ids = self._draw(key, pair_Q, side)
            marks = (self.source_marks, 1)[side]
            used = np.bincount(row_Q, sizes[side] + marks, len(per_row)).astype(np.int64)
            room = (self.capacity[side] - used).tolist()
            ends = np.cumsum(sizes[side])
            best = np.split(tokens[side], ends[:-1])
            kept = []
            growth_Q = (drawn_Q - sizes[side]).tolist()
            for q, row in enumerate(row_Q.tolist()):
                if growth_Q[q] <= room[row] and ids[q]:
                    room[row] -= growth_Q[q]
                    kept.append(np.asarray(ids[q], np.int32))
                else:
                    kept.append(best[q])
            new_sizes.append(np.fromiter(map(len, kept), np.int64, len(kept)))
            new_tokens.append(np.concatenate(kept) if kept else tokens[side])
        return new_sizes, new_tokens


class _Side:
    """Where the pieces of one side stand in rows of `length` places."""

    def __init__(
        self, slot_Q: np.ndarray, per_row: np.ndarray, size_Q: np.ndarray, tokens_M: np.ndarray, marks: int, length: int
    ) -> None:
        self.rows, self.length = len(per_row), length
        self.size_Q, self.tokens_M = size_Q, tokens_M
        length_Q = size_Q + marks
        row_Q = np.repeat(np.arange(len(per_row)), per_row)
        start_Q = np.cumsum(length_Q) - length_Q
        row_first = np.cumsum(per_row) - per_row
        self.start_Q = row_Q * length + start_Q - start_Q[row_first[row_Q]]
        counted = count_up(length_Q)
        flat = np.repeat(self.start_Q, length_Q) + counted
        position_ids, sequence_ids = (np.zeros(self.rows * length, np.int32) for _ in range(2))
        position_ids[flat] = counted
        sequence_ids[flat] = np.repeat(slot_Q + 1, length_Q)
        self.position_ids, self.sequence_ids = (a.reshape(-1, length) for a in (position_ids, sequence_ids))

    def ids(self, before: Sequence[int], after: Sequence[int], fill: int) -> np.ndarray:
        """The pieces with these ids around each sequence: int32 [rows, length]."""
        out = np.full(self.rows * self.length, fill, np.int32)
        out[np.repeat(self.start_Q + len(before), self.size_Q) + count_up(self.size_Q)] = self.tokens_M
        for number, value in enumerate(before):
            out[self.start_Q + number] = value
        for number, value in enumerate(after):
            out[self.start_Q + len(before) + self.size_Q + number] = value
        return out.reshape(-1, self.length)


def _fingerprint(shards: Shards, config: BatchesConfig, seed: int, *more: Any) -> str:
    """SHA-256 over all that the stream of batches depends on."""
    parts = [VERSION, shards.fingerprint, dataclasses.asdict(config), int(seed), *more]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class TrainingData:
    """The endless stream of training rows."""

    def __init__(self, shards: Shards, config: BatchesConfig, seed: int, cache_dir: Path | None = None) -> None:
        """Nothing is planned yet.

        Args:
          cache_dir: where plans are kept; None keeps them in memory only.

        Raises:
          UserError: settings that do not go with the prepared data.
        """
        check(config)
        self.shards, self.config, self.seed = shards, config, seed
        self.vocabularies = load_vocabularies(shards)
        self.fingerprint = _fingerprint(shards, config, seed)
        self._maker = Maker(shards, self.vocabularies, config, config.subword_sampling)
        self.too_long = self._maker.too_long

        def make(draw: int) -> Packing:
            digest = _fingerprint(shards, config, seed, draw)
            columns = plan_cache.cached(
                cache_dir,
                draw,
                digest,
                Packing._fields,
                lambda: self._maker.plan(derive_key(seed, "packing", draw))._asdict(),
                keep=LAST_PLANS,
            )
            return Packing(**columns)

        self._epochs: Epochs[Packing] = Epochs(make, lambda plan: plan.num_rows, seed)
        self.num_rows, self.prepare_epoch = self._epochs.num_rows, self._epochs.prepare_epoch
        self.start_at, self.position = self._epochs.start_at, self._epochs.position

    def batch(self, first_row: int, count: int, offset: int = 0) -> Batch:
        """Rows first_row .. first_row + count - 1 of the stream, which may cross into the next epochs.

        Args:
          offset: index of the first of them in the global batch, which `row_ids` count from.
        """
        parts = [
            self._maker.rows(plan, derive_key(self.seed, "pieces", epoch), rows)
            for epoch, _, plan, rows in self._epochs.parts(first_row, count)
        ]
        batch = parts[0] if len(parts) == 1 else {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        return batch | {"row_ids": np.arange(offset, offset + count, dtype=np.int32)}

    def example_ids(self, first_row: int, count: int) -> np.ndarray:
        """Which pairs the rows hold, row after row: int64, epoch * 2^40 + number of the pair."""
        ids = []
        for epoch, _, plan, rows in self._epochs.parts(first_row, count):
            per_row = plan.row_offsets[rows + 1] - plan.row_offsets[rows]
            members = plan.members[np.repeat(plan.row_offsets[rows], per_row) + count_up(per_row)]
            ids.append(members.astype(np.int64) + (epoch << 40))
        return np.concatenate(ids)


class EvaluationData:
    """Every pair of a split once, by its best cut, then filler rows that count nothing.

    Attributes:
      num_rows, num_examples: rows, and pairs in them.
      too_long: pairs of the split that fit into no row, which the loss cannot count.
    """

    def __init__(self, shards: Shards, config: BatchesConfig) -> None:
        """Plans the whole split, which is small.

        Raises:
          UserError: as `Maker.plan`.
        """
        check(config)
        self.shards, self.config = shards, config
        self.vocabularies = load_vocabularies(shards)
        self._maker = Maker(shards, self.vocabularies, config, sampling=0.0)
        try:
            self._plan = self._maker.plan(derive_key(0, "packing", 0))
        except UserError as e:
            raise type(e)(f"the {shards.split} pairs: {e}") from None
        self.fingerprint = _fingerprint(shards, config, 0)
        self.num_rows, self.num_examples = self._plan.num_rows, len(self._plan.members)
        self.too_long = self._maker.too_long

    def batch(self, first_row: int, count: int, offset: int = 0) -> Batch:
        """Rows first_row .. first_row + count - 1; those at or past num_rows are fillers."""
        real = np.arange(min(first_row, self.num_rows), min(first_row + count, self.num_rows))
        batch = self._maker.rows(self._plan, np.uint64(0), real)
        if len(real) < count:
            pad = count - len(real)
            batch = {k: np.concatenate([v, np.zeros((pad, *v.shape[1:]), v.dtype)]) for k, v in batch.items()}
            batch["input_ids"][len(real) :] = self.vocabularies.source.pad_id
            for name in ("decoder_input_ids", "labels"):
                batch[name][len(real) :] = self.vocabularies.target.pad_id
        return batch | {"row_ids": np.arange(offset, offset + count, dtype=np.int32)}


class Fill(NamedTuple):
    """How full the rows of a plan are, by the best cuts."""

    rows: int
    source: float
    target: float


def fill_of(maker: Maker, packing: Packing) -> Fill:
    """Real pieces over places, on each side."""
    used = maker.lengths[packing.members.astype(np.int64)].sum(axis=0)
    source, target = used / (packing.num_rows * maker.capacity)
    return Fill(packing.num_rows, float(source), float(target))


def _sampled(maker: Maker, plan: Packing, seed: int) -> dict[str, float]:
    """What random cuts make of lengths and rows, the rows counted in a sample of them."""
    rows = inputs.permute(derive_key(seed, "rows", 0), plan.num_rows, np.arange(min(plan.num_rows, 64)))
    batch = maker.rows(plan, derive_key(seed, "pieces", 0), rows)
    return {
        "source fill, sampled": round(float((batch["sequence_ids"] > 0).mean()), 4),
        "target fill, sampled": round(float(batch["label_weights"].mean()), 4),
        "growth by sampling (source)": round(float(maker.growth[0]), 3),
        "growth by sampling (target)": round(float(maker.growth[1]), 3),
    }


def _advice(config: BatchesConfig, fill: Fill) -> dict[str, str]:
    """A shorter row for a side that is filled much less than the other."""
    sides = (("source", fill.source, fill.target), ("target", fill.target, fill.source))
    for side, own, other in sides:
        length = getattr(config, f"max_{side}_length")
        better = int(-(-length * own / other // 8) * 8)
        if config.pack and own < 0.93 * other and better < length:
            return {"fuller rows": f"with examples.max_{side}_length = {better}"}
    return {}


def describe(shards: Shards, config: BatchesConfig, seed: int) -> dict[str, Any]:
    """What the settings make of a split, for the data report."""
    maker = Maker(shards, load_vocabularies(shards), config, config.subword_sampling)
    plan = maker.plan(derive_key(seed, "packing", 0))
    fill = fill_of(maker, plan)
    padded = fill_of(maker, Packing(np.arange(len(maker.fitting) + 1), maker.fitting))
    per_row = np.diff(plan.row_offsets)
    edges = np.linspace(0, maker.capacity.max(), 9).astype(int)
    longer = np.histogram(maker.lengths.max(axis=1), bins=[*(edges + 1), 1 << 62])[0]
    labels = [*(f"{a + 1}-{b}" for a, b in itertools.pairwise(edges)), f"above {edges[-1]}"]
    return {
        "pairs": len(plan.members),
        "too long for a row, left out": maker.too_long,
        "rows an epoch": fill.rows,
        "source fill": round(fill.source, 4),
        "target fill": round(fill.target, 4),
        "source fill, one pair a row": round(padded.source, 4),
        "target fill, one pair a row": round(padded.target, 4),
        "pairs per row": round(float(per_row.mean()), 3),
        "most pairs per row": int(per_row.max()),
        **(_sampled(maker, plan, seed) if maker.sampling else {}),
        **_advice(config, fill),
        "longer side histogram": {k: int(n) for k, n in zip(labels, longer, strict=True) if n},
    }
