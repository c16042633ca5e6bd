"""What is kept of a text that does not fit: its head, its tail, both ends, or all of it in windows that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

LongText = Literal["truncate_head", "truncate_tail", "head_tail", "windows"]


def window_starts(length: int, width: int, stride: int) -> list[int]:
    """Where windows of `width` over `length` pieces start; the last one reaches the end, and nothing is left out.

    Args:
      stride: pieces from one start to the next; more than `width` would leave gaps and counts as `width`. 0 is half of
        the width.
    """
    step = min(stride or max(1, width // 2), width)
    last = max(0, length - width)
    return [*range(0, last, step), last]


def kept(length: int, room: int, long_text: LongText, stride: int) -> list[np.ndarray]:
    """The pieces of each row that a text makes: int64 arrays of piece numbers, ascending.

    One row, unless `long_text` is "windows" and the text does not fit. head_tail keeps a quarter of the room from the
    head and the rest from the tail (Sun et al. 2019, arXiv 1905.05583, section 5.3.1: 128 and 382 of 510).
    """
    every = np.arange(length)
    if length <= room:
        return [every]
    if long_text == "windows":
        return [every[s : s + room] for s in window_starts(length, room, stride)]
    head = {"truncate_tail": room, "truncate_head": 0, "head_tail": -(-room // 4)}[long_text]
    return [np.concatenate([every[:head], every[length - (room - head) :]])]


def fair_lengths(a: int, b: int, room: int) -> tuple[int, int]:
    """How many pieces of either side of a pair stay: one after the other is taken from the longer side, from the second
    if both are equal, as google-research/bert does."""
    excess = a + b - room
    if excess <= 0:
        return a, b
    if a > b:
        first = min(excess, a - b)
        excess -= first
        a -= first
    elif b > a:
        first = min(excess, b - a)
        excess -= first
        b -= first
    # Both are equal now, or nothing is left to take.
    return a - excess // 2, b - (excess + 1) // 2


def most_context(spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """For the windows [start, end) of one text, which of their pieces have more context there than in any other one.

    Context is the smaller of the numbers of pieces on both sides within the window, plus a hundredth of its length (so
    that the longer window wins a tie), as google-research/bert has it. The earlier window wins what is left.

    Returns:
      A bool array for each window. Each piece that is in any window is True in exactly one.
    """
    if len(spans) == 1:
        return [np.ones(spans[0][1] - spans[0][0], bool)]
    best = np.full(max(end for _, end in spans), -1.0)
    owner = np.full(len(best), -1)
    for n, (start, end) in enumerate(spans):
        within = np.arange(end - start)
        context = np.minimum(within, within[::-1]) + 0.01 * (end - start)
        better = context > best[start:end]
        owner[start:end][better] = n
        best[start:end][better] = context[better]
    return [owner[start:end] == n for n, (start, end) in enumerate(spans)]
