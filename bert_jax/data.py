"""From prepared shards to the batches of pretraining and evaluation.

Training reads one endless stream of rows: the rows of epoch 0, then those of epoch 1, and so on. A batch is a pure
function of the shards' fingerprint, the settings, the seed and the number of its first row, so resuming takes one
number, and hosts read their own rows of the global batch without speaking to each other. `data/README.md` states the
contract of a batch.

An epoch has a plan: its pairs, and which pairs share a row. Plans are made when first needed (the next one ahead, in a
thread) and kept in a cache on disk (`plans.py`).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import examples, masking, plans
from bert_jax.config import ExamplesConfig
from bert_jax.examples import PairPlan
from bert_jax.plans import Plan
from transformer_jax import inputs
from transformer_jax.config import ConfigError, UserError
from transformer_jax.epochs import Epochs
from transformer_jax.inputs import bits, count_up, derive_key
from transformer_jax.shards import Shards

Batch = dict[str, np.ndarray]
BESIDE = {"masked": 0, "next": -1, "previous": 1}
"""Where the head runs, counted from the piece that it predicts."""


def check_masking(shards: Shards, config: ExamplesConfig) -> None:
    """Refuse or warn when whole words or spans are asked for and the prepared data does not say what a word is.

    Raises:
      ConfigError: the vocabulary marks no pieces as parts of words, and the shards have no word boundaries.
    """
    if config.masking_unit == "token" or shards.has_words:
        return
    continuation_V = shards.tokenizer.is_continuation_V
    if not continuation_V.any():
        raise ConfigError(
            f'examples.masking_unit is "{config.masking_unit}", but no piece of the vocabulary starts with ## and the '
            'prepared data has no word boundaries; use "token", or a recipe that gives word boundaries'
        )
    counts_V = shards.tokens_by_id()
    chinese_V = np.array([len(piece) == 1 and _is_chinese(piece) for piece in shards.tokenizer.vocab])
    share = counts_V[chinese_V].sum() / max(1, counts_V.sum())
    if share > 0.1:
        warnings.warn(
            f'examples.masking_unit is "{config.masking_unit}", but {share:.0%} of the pieces are single Chinese '
            "characters and the prepared data has no word boundaries, so each of them counts as a word; give word "
            "boundaries in the recipe to mask whole words",
            UserWarning,
            stacklevel=2,
        )


def _is_chinese(character: str) -> bool:
    code = ord(character)
    return 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or 0x20000 <= code <= 0x2FA1F


class Maker:
    """Makes batches from rows of a plan; holds what is the same for all of them."""

    def __init__(self, shards: Shards, config: ExamplesConfig) -> None:
        self.shards, self.config = shards, config
        self.length = config.max_seq_length
        self.sequences = examples.max_sequences(config)
        self.predictions = examples.max_predictions(config)
        self.tokenizer = shards.tokenizer

    def rows(self, plan: Plan, mask_key: np.uint64, rows: np.ndarray) -> Batch:
        """The batch of these rows of the plan, in their order, without `row_ids`.

        The masks of a pair depend on mask_key and its number in the plan only, not on the rows it is made with.
        """
        offsets = plan.packing.row_offsets
        per_row = offsets[rows + 1] - offsets[rows]
        row_Q = np.repeat(np.arange(len(rows)), per_row)
        slot_Q = count_up(per_row)
        pair_Q = np.asarray(plan.packing.members[np.repeat(offsets[rows], per_row) + slot_Q]).astype(np.int64)
        pairs = plan.pairs.take(pair_Q)
        a_Q, b_Q = pairs.a_length.astype(np.int64), pairs.b_length.astype(np.int64)
        length_Q, content_Q = pairs.lengths, a_Q + b_Q
        # Where each sequence starts in the batch laid out flat, row after row: behind those before it in its row.
        start_Q = np.cumsum(length_Q) - length_Q
        row_first = (np.cumsum(per_row) - per_row)[row_Q]
        start_Q = row_Q * self.length + start_Q - start_Q[row_first]

        ranges = np.stack([pairs.a_start, pairs.b_start], 1).astype(np.int64).ravel()
        sizes = np.stack([a_Q, b_Q], 1).ravel()
        if not b_Q.all():
            ranges, sizes = ranges[sizes > 0], sizes[sizes > 0]
        tokens_M = self.shards.gather(ranges, sizes)  # pieces of all sides, one after another

        # Flat places: pieces of side A stand behind [CLS], those of side B behind the [SEP] after side A.
        sides = np.stack([start_Q + 1, start_Q + a_Q + 2], 1).ravel()
        both = np.stack([a_Q, b_Q], 1).ravel()
        place_M = count_up(both)
        place_M += np.repeat(sides, both)

        size = len(rows) * self.length
        masked = self.config.objective == "masked"
        picked = np.arange(len(tokens_M))
        if masked:
            picked = self._pick(mask_key, pair_Q, pairs, tokens_M, ranges, sizes)
        owner = np.searchsorted(np.cumsum(content_Q), picked, side="right")
        position = place_M[picked] - start_Q[owner]
        labels = tokens_M[picked]
        seen_M = tokens_M.copy()
        if masked:
            seen_M[picked] = masking.replace_picked(
                bits(mask_key, pair_Q[owner], 1, position),
                labels,
                self.tokenizer.mask_id,
                self.tokenizer.ordinary_ids,
                self.config,
            )

        # [PAD] may have any id, so what is padding is told by sequence_ids (made from lengths), never by the id.
        input_ids = np.full(size, self.tokenizer.pad_id, np.int32)
        input_ids[place_M] = seen_M
        input_ids[start_Q] = self.tokenizer.cls_id
        input_ids[start_Q + a_Q + 1] = self.tokenizer.sep_id
        input_ids[start_Q + length_Q - 1] = self.tokenizer.sep_id
        spread = np.repeat(start_Q, length_Q)
        counted = count_up(length_Q)
        flat = spread + counted
        sequence_ids, position_ids, token_type_ids = (np.zeros(size, np.int32) for _ in range(3))
        sequence_ids[flat] = np.repeat(slot_Q + 1, length_Q)
        position_ids[flat] = counted
        token_type_ids[flat] = counted > np.repeat(a_Q + 1, length_Q)

        masked_per_row = np.bincount(row_Q[owner], minlength=len(rows))
        assert masked_per_row.max(initial=0) <= self.predictions
        cell = row_Q[owner] * self.predictions + count_up(masked_per_row)
        shape_RL, shape_RP = (len(rows), self.length), (len(rows), self.predictions)
        positions_P, labels_P = (np.zeros(len(rows) * self.predictions, np.int32) for _ in range(2))
        weights_P = np.zeros(len(rows) * self.predictions, np.float32)
        # The head runs where the piece is masked, or at its neighbour, which is of the same sequence: [CLS] or [SEP] at
        # the edges of a side.
        positions_P[cell] = place_M[picked] + BESIDE[self.config.objective] - row_Q[owner] * self.length
        labels_P[cell] = labels
        weights_P[cell] = 1.0
        cls_S, next_S = (np.zeros((len(rows), self.sequences), np.int32) for _ in range(2))
        next_weights_S = np.zeros((len(rows), self.sequences), np.float32)
        cls_S[row_Q, slot_Q] = start_Q - row_Q * self.length
        labelled = (b_Q > 0) & (self.config.sentence_task != "none")
        next_S[row_Q, slot_Q] = np.where(labelled, pairs.label, 0)
        next_weights_S[row_Q, slot_Q] = labelled
        return {
            "input_ids": input_ids.reshape(shape_RL),
            "token_type_ids": token_type_ids.reshape(shape_RL),
            "position_ids": position_ids.reshape(shape_RL),
            "sequence_ids": sequence_ids.reshape(shape_RL),
            "masked_lm_positions": positions_P.reshape(shape_RP),
            "masked_lm_ids": labels_P.reshape(shape_RP),
            "masked_lm_weights": weights_P.reshape(shape_RP),
            "cls_positions": cls_S,
            "next_sentence_labels": next_S,
            "next_sentence_weights": next_weights_S,
        }

    def _pick(
        self,
        mask_key: np.uint64,
        pair_Q: np.ndarray,
        pairs: PairPlan,
        tokens_M: np.ndarray,
        ranges: np.ndarray,
        sizes: np.ndarray,
    ) -> np.ndarray:
        """Indices into tokens_M of the pieces to predict, ascending."""
        key_Q = bits(mask_key, pair_Q, 0)
        content_Q = pairs.a_length.astype(np.int64) + pairs.b_length
        numbers = examples.numbers_to_predict(pairs, self.config)
        if self.config.masking_unit == "token":
            return masking.pick_tokens(key_Q, content_Q, numbers)
        if self.shards.has_words:
            word_starts = self.shards.gather_words(ranges, sizes)
        else:
            word_starts = ~self.tokenizer.is_continuation_V[tokens_M]
        span = 3 if self.config.masking_unit == "span" else 1
        return masking.pick_words(key_Q, content_Q, pairs.a_length.astype(np.int64), numbers, word_starts, span)


class PretrainingData:
    """The endless stream of training rows."""

    def __init__(self, shards: Shards, config: ExamplesConfig, seed: int, cache_dir: Path | None = None) -> None:
        """Nothing is read or planned yet.

        Args:
          cache_dir: where plans are kept; None keeps them in memory only.

        Raises:
          ConfigError: settings that cannot work, or that do not go with the prepared data.
        """
        examples.check(config)
        check_masking(shards, config)
        self.shards, self.config, self.seed, self.cache_dir = shards, config, seed, cache_dir
        self.fingerprint = plans.fingerprint(shards, config, seed)
        self._maker = Maker(shards, config)
        self._epochs: Epochs[Plan] = Epochs(
            lambda draw: plans.cached_plan(shards, config, seed, draw, cache_dir),
            lambda plan: plan.packing.num_rows,
            seed,
            config.dupe_factor,
        )
        self.num_rows, self.prepare_epoch = self._epochs.num_rows, self._epochs.prepare_epoch
        self.start_at, self.position = self._epochs.start_at, self._epochs.position

    def batch(self, first_row: int, count: int, offset: int = 0) -> Batch:
        """Rows first_row .. first_row + count - 1 of the stream, which may cross into the next epochs.

        Args:
          offset: index of the first of them in the global batch, which `row_ids` count from.
        """
        parts = [
            self._maker.rows(plan, derive_key(self.seed, "masks", draw), rows)
            for _, draw, plan, rows in self._epochs.parts(first_row, count)
        ]
        batch = parts[0] if len(parts) == 1 else {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        return batch | {"row_ids": np.arange(offset, offset + count, dtype=np.int32)}

    def example_ids(self, first_row: int, count: int) -> np.ndarray:
        """Which examples the rows hold, row after row: int64, epoch * 2^40 + number of the pair."""
        ids = []
        for epoch, _, plan, rows in self._epochs.parts(first_row, count):
            offsets = plan.packing.row_offsets
            per_row = offsets[rows + 1] - offsets[rows]
            members = plan.packing.members[np.repeat(offsets[rows], per_row) + count_up(per_row)]
            ids.append(members.astype(np.int64) + (epoch << 40))
        return np.concatenate(ids)


class EvaluationData:
    """Every example of a split once, with fixed pairs and masks, then filler rows that count nothing."""

    def __init__(self, shards: Shards, config: ExamplesConfig, seed: int = 0) -> None:
        """Plans the whole split, which is small.

        Raises:
          UserError: as `plans.make_plan`.
        """
        examples.check(config)
        try:
            self._plan = plans.make_plan(shards, config, seed, 0)
        except UserError as e:
            raise type(e)(f"the held-out documents: {e}") from None
        self._maker = Maker(shards, config)
        self._mask_key = derive_key(seed, "masks", 0)
        self.fingerprint = plans.fingerprint(shards, config, seed)
        self.num_rows = self._plan.packing.num_rows
        self.num_examples = len(self._plan.pairs.label)

    def batch(self, first_row: int, count: int, offset: int = 0) -> Batch:
        """Rows first_row .. first_row + count - 1; those at or past num_rows are fillers."""
        real = np.arange(min(first_row, self.num_rows), min(first_row + count, self.num_rows))
        batch = self._maker.rows(self._plan, self._mask_key, real)
        if len(real) < count:
            pad = count - len(real)
            batch = {k: np.concatenate([v, np.zeros((pad, *v.shape[1:]), v.dtype)]) for k, v in batch.items()}
            batch["input_ids"][len(real) :] = self._maker.tokenizer.pad_id
        return batch | {"row_ids": np.arange(offset, offset + count, dtype=np.int32)}


def describe(shards: Shards, config: ExamplesConfig, seed: int, rows: int = 2048) -> dict[str, Any]:
    """What the settings make of a split, for the data report; shares of masks are counted in real batches.

    Args:
      rows: how many rows of the first epoch are made to count masks.
    """
    plan = plans.make_plan(shards, config, seed, 0)
    maker = Maker(shards, config)
    lengths = plan.pairs.lengths
    tokens = int(lengths.sum())
    total = plan.packing.num_rows
    sample = inputs.permute(derive_key(seed, "rows", 0), total, np.arange(min(rows, total)))
    content = picked = masked = kept = 0
    for part in np.array_split(sample, -(-len(sample) // 256)):
        batch = maker.rows(plan, derive_key(seed, "masks", 0), part)
        weights = batch["masked_lm_weights"] > 0
        places = batch["masked_lm_positions"] - BESIDE[config.objective]  # where the predicted pieces stand
        seen = np.take_along_axis(batch["input_ids"], places.clip(0, config.max_seq_length - 1), 1)[weights]
        content += int((batch["sequence_ids"] > 0).sum())
        picked += len(seen)
        masked += int((seen == shards.tokenizer.mask_id).sum())
        kept += int((seen == batch["masked_lm_ids"][weights]).sum())
    labelled = plan.pairs.b_length > 0
    edges = np.linspace(0, config.max_seq_length, 9).astype(int)
    histogram = np.histogram(lengths, bins=edges + 1)[0]
    per_row = np.diff(plan.packing.row_offsets)
    used = np.add.reduceat(
        examples.numbers_to_predict(plan.pairs, config)[plan.packing.members], plan.packing.row_offsets[:-1]
    )
    return {
        "examples": len(lengths),
        "rows": total,
        "tokens": tokens,
        "fill_packed": round(tokens / (total * config.max_seq_length), 4),
        "fill_padded": round(tokens / (len(lengths) * config.max_seq_length), 4),
        "sequences_per_row": round(float(per_row.mean()), 3),
        "most_sequences_per_row": int(per_row.max()),
        "most_predictions_per_row": int(used.max()),
        "share_predicted": round(picked / max(1, content), 4),
        "share_mask": round(masked / max(1, picked), 4),
        "share_random": round((picked - masked - kept) / max(1, picked), 4),
        "share_kept": round(kept / max(1, picked), 4),
        "predictions_counted": picked,
        "documents_of_one_sentence": round(float((np.diff(shards.document_offsets) == 1).mean()), 4),
        "share_random_next": round(float(plan.pairs.label[labelled].mean()), 4) if labelled.any() else None,
        "length_histogram": {f"{a + 1}-{b}": int(n) for a, b, n in zip(edges, edges[1:], histogram, strict=False)},
    }
