"""Examples as arrays: rows of ids, the windows of one example beside each other, and what did not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.tokenizer import WordPiece

SHOWN = 10


class Cut(NamedTuple):
    """Something that the model does not see."""

    line: int
    """Of the example."""
    number: int
    what: str
    """What was counted: "pieces of the text", "pieces of the question" or "words"."""


class Row(NamedTuple):
    """One row of ids before it is laid out.

    Attributes:
      example: the number of its example.
      a, b: ids of one or two segments, without control tokens.
    """

    example: int
    a: Sequence[int]
    b: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Features:
    """The rows of a file.

    Attributes:
      arrays: input_ids, token_type_ids, position_ids, sequence_ids (0 padding, 1 real): int32 [n, L]; of choices
        [n, K, L]. If labels were read, also `labels` (classification and choice int32 [n]; multi_label float32 [n, C];
        regression float32 [n]; tagging int32 [n, L], -1 where no tag is scored) or `start` and `end` (span, int32 [n];
        0, the place of [CLS], where the row does not hold the answer).
      example_index_N: int32 [n], the example of each row, ascending: the windows of one example share it.
      examples: how many examples were given; those in `left_out` have no row.
      cut: what of which line the model does not see.
      left_out: line, and why the example cannot be learned from.
      offsets_NL2: span: int32 [n, L, 2], the half-open range of code points of the context that each place stands for;
        -1 where it is none of the context.
      word_NL: tagging: int32 [n, L], the number of the word whose first piece is here; else -1.
      owner_NL: tagging and span: bool [n, L], whether this row is the one in which the piece has most context.
    """

    arrays: dict[str, np.ndarray]
    example_index_N: np.ndarray
    examples: int
    cut: tuple[Cut, ...] = ()
    left_out: tuple[tuple[int, str], ...] = ()
    offsets_NL2: np.ndarray | None = None
    word_NL: np.ndarray | None = None
    owner_NL: np.ndarray | None = None

    def report(self, path: str) -> list[str]:
        """Lines that say what the model does not see of a file, and which examples are more than one row."""
        out = []
        for what in dict.fromkeys(cut.what for cut in self.cut):
            found = [cut for cut in self.cut if cut.what == what]
            out.append(
                f"{path}: {sum(c.number for c in found):,} {what} do not fit and are not seen, in {len(found):,} of "
                f"{self.examples:,} examples ({_lines([c.line for c in found])})"
            )
        for why in dict.fromkeys(why for _, why in self.left_out):
            left = [line for line, reason in self.left_out if reason == why]
            out.append(f"{path}: {len(left):,} of {self.examples:,} examples are left out: {why} ({_lines(left)})")
        rows_E = np.bincount(self.example_index_N)
        if (rows_E > 1).any():
            out.append(
                f"{path}: {(rows_E > 1).sum():,} of {self.examples:,} examples are read in windows, "
                f"{rows_E[rows_E > 1].sum():,} in all"
            )
        return out


def _lines(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
    return f"line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:SHOWN]))}{more}"


def lay_out(rows: Sequence[Row], tokenizer: WordPiece, length: int) -> dict[str, np.ndarray]:
    """[CLS] a [SEP], or [CLS] a [SEP] b [SEP], padded to `length`.

    The first [SEP] is of segment 0, the last of segment 1 (Devlin et al. 2019, figure 2). Positions count from 0.

    Returns:
      input_ids, token_type_ids, position_ids, sequence_ids: int32 [n, length].
    """
    shape = (len(rows), length)
    ids = np.full(shape, tokenizer.pad_id, np.int32)
    lengths = np.zeros((2, len(rows)), np.int32)
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    for n, row in enumerate(rows):
        flat = [cls, *row.a, sep]
        lengths[:, n] = len(flat)
        if row.b is not None:
            flat += [*row.b, sep]
            lengths[1, n] = len(flat)
        assert len(flat) <= length, f"a row of {len(flat)} ids for {length} places"
        ids[n, : len(flat)] = flat
    place_L = np.arange(length, dtype=np.int32)[None]
    real = place_L < lengths[1][:, None]
    return {
        "input_ids": ids,
        "token_type_ids": (real & (place_L >= lengths[0][:, None])).astype(np.int32),
        "position_ids": np.where(real, place_L, np.int32(0)),
        "sequence_ids": real.astype(np.int32),
    }
