"""Step-addressable input: random numbers by counter, packing of sequences into rows, batches made ahead.

Nothing here keeps a random state. A random number is a hash of a key and of indices (which draw, which pair, which
position), so any batch can be made without making those before it, on any host, in any order.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive_key(seed: int, purpose: str, *indices: int) -> np.uint64:
    """A key for one purpose, such as the masks of draw 3; different purposes share no random numbers."""
    text = "/".join([str(int(seed)), purpose, *(str(int(i)) for i in indices)])
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): uint64 to uint64, every bit depends on all bits."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def bits(key: Any, *indices: Any) -> np.ndarray:
    """64 random bits for each combination of indices.

    Args:
      key: uint64, a scalar from `derive_key` or an array of earlier bits.
      indices: non-negative integers or integer arrays that broadcast with the key and with each other.

    Returns:
      uint64 array of the broadcast shape (at least one axis, so that overflow wraps as arrays do).
    """
    state = np.atleast_1d(np.asarray(key, np.uint64))
    for index in indices:
        state = mix(state + (np.atleast_1d(np.asarray(index)).astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return state


def uniform(key: Any, *indices: Any) -> np.ndarray:
    """Random float64 in [0, 1), one for each combination of indices (see `bits`)."""
    return (bits(key, *indices) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def randint(high: Any, key: Any, *indices: Any) -> np.ndarray:
    """Random int64 in [0, high) for `high` in 1 .. 2^32; `high` may be an array that broadcasts with the indices."""
    return (((bits(key, *indices) >> np.uint64(32)) * np.asarray(high).astype(np.uint64)) >> np.uint64(32)).astype(
        np.int64
    )


def permute(key: np.uint64, size: int, index: np.ndarray) -> np.ndarray:
    """Where a random order of 0 .. size-1 sends `index`: int64, computed alone for each, with no table.

    A Feistel network over pairs (left < a, right < b) with a * b just above `size`, walked until it falls below it
    (Black and Rogaway 2002).
    """
    a = math.isqrt(max(size - 1, 0)) + 1
    b = -(-size // a)
    out = np.array(index, np.uint64, ndmin=1)
    turns = [bits(key, turn) for turn in range(6)]
    todo = np.arange(len(out))
    while len(todo):
        right, left = np.divmod(out[todo], np.uint64(a))
        for turn in range(0, 6, 2):
            left = (left + (bits(turns[turn], right) >> np.uint64(32))) % np.uint64(a)
            right = (right + (bits(turns[turn + 1], left) >> np.uint64(32))) % np.uint64(b)
        out[todo] = right * np.uint64(a) + left
        todo = todo[out[todo] >= np.uint64(size)]
    return out.astype(np.int64)


def count_up(sizes: np.ndarray) -> np.ndarray:
    """0 .. size-1 for each size, one run after another: int64."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - sizes, sizes)


class Packing(NamedTuple):
    """Which sequences share a row: row r holds members[row_offsets[r] : row_offsets[r + 1]]."""

    row_offsets: np.ndarray
    """int64 [rows + 1]."""
    members: np.ndarray
    """uint32 or int64 [sequences], each sequence once."""

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1


def pack(
    lengths: np.ndarray, costs: np.ndarray, row_length: int, max_sequences: int, max_cost: int, key: np.uint64
) -> Packing:
    """Put every sequence into a row: at most row_length tokens, max_sequences sequences and max_cost cost a row.

    Best-fit decreasing on the histogram of (length, cost), as the histogram packing of Krell et al. 2021 (arXiv
    2107.02027): the work grows with the number of kinds, not of sequences. Which sequences of one kind share a row is
    drawn from `key`.

    Args:
      lengths, costs: integers [n]; each sequence must fit a row by itself.
    """
    lengths, costs = np.asarray(lengths), np.asarray(costs)
    n = len(lengths)
    index_type = np.uint32 if n < 1 << 32 else np.int64
    if not n:
        return Packing(np.zeros(1, np.int64), np.zeros(0, index_type))
    if (
        lengths.min() < 1
        or lengths.max() > row_length
        or costs.min() < 0
        or costs.max() > max_cost
        or max_sequences < 1
    ):
        raise ValueError(
            f"sequences of 1 to {row_length} tokens and cost up to {max_cost} are allowed; found lengths "
            f"{lengths.min()} to {lengths.max()} and costs {costs.min()} to {costs.max()}"
        )
    kinds = lengths.astype(np.int64) * (max_cost + 1) + costs
    counts = np.bincount(kinds)
    order = _shuffled_by_kind(kinds, len(counts), key)
    next_of_kind = np.cumsum(counts) - counts
    items = [(int(k) // (max_cost + 1), int(k) % (max_cost + 1), int(counts[k])) for k in np.flatnonzero(counts)[::-1]]

    members = np.empty(n, index_type)
    row_sizes = []
    filled = 0
    for pattern, rows in _histogram_patterns(items, row_length, max_sequences, max_cost):
        block = members[filled : filled + rows * len(pattern)].reshape(rows, len(pattern))
        for slot, (length, cost) in enumerate(pattern):
            kind = length * (max_cost + 1) + cost
            first = next_of_kind[kind]
            block[:, slot] = order[first : first + rows]
            next_of_kind[kind] += rows
        filled += block.size
        row_sizes.append(np.full(rows, len(pattern), np.int64))
    assert filled == n
    return Packing(np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(row_sizes))]), members)


def one_a_row(n: int) -> Packing:
    """The packing that packs nothing."""
    return Packing(np.arange(n + 1, dtype=np.int64), np.arange(n, dtype=np.uint32 if n < 1 << 32 else np.int64))


def _shuffled_by_kind(kinds: np.ndarray, num_kinds: int, key: np.uint64) -> np.ndarray:
    """Sequence numbers in order of kind, and in random order within a kind: int64 [n].

    Kind, random bits and number share one integer, so that a plain sort gives one answer on any machine.
    """
    n = len(kinds)
    index_bits = max(1, (n - 1).bit_length())
    hash_bits = 64 - index_bits - max(1, (num_kinds - 1).bit_length())
    assert hash_bits >= 8, "too many sequences for one plan"
    sortable = bits(key, np.arange(n, dtype=np.uint64)) >> np.uint64(64 - hash_bits)
    sortable |= kinds.astype(np.uint64) << np.uint64(hash_bits)
    sortable = (sortable << np.uint64(index_bits)) | np.arange(n, dtype=np.uint64)
    sortable.sort()
    return (sortable & np.uint64((1 << index_bits) - 1)).astype(np.int64)


Pattern = tuple[tuple[int, int], ...]


def _histogram_patterns(
    items: list[tuple[int, int, int]], row_length: int, max_sequences: int, max_cost: int
) -> list[tuple[Pattern, int]]:
    """Rows as (contents, how many such rows), for items (length, cost, count) given longest first.

    Each kind goes into the open rows with the least room that it fits, as many of it as fit at once.
    """
    # Rows with the same contents are one entry: room -> {contents: [how many, slots left, cost left]}.
    open_rows: list[dict[Pattern, tuple[int, int, int]]] = [{} for _ in range(row_length + 1)]

    def put(room: int, pattern: Pattern, rows: int, slots: int, cost: int) -> None:
        have = open_rows[room].get(pattern, (0, 0, 0))[0]
        open_rows[room][pattern] = (have + rows, slots, cost)

    def place(length: int, cost: int, count: int, room: int, pattern: Pattern, slots: int, left: int, rows: int) -> int:
        """Put up to `count` items into `rows` rows that look alike; returns how many are placed."""
        each = min(room // length, slots, left // cost if cost else slots)
        full, rest = divmod(min(count, each * rows), each)
        for number, copies in ((full, each), (1, rest)):
            if number and copies:
                grown = pattern + ((length, cost),) * copies
                put(room - length * copies, grown, number, slots - copies, left - cost * copies)
        used = full + (1 if rest else 0)
        if pattern and used < rows:
            put(room, pattern, rows - used, slots, left)
        return full * each + rest

    for length, cost, count in items:
        for room in range(length, row_length + 1):
            if not count:
                break
            for pattern, (rows, slots, left) in list(open_rows[room].items()):
                if count and slots and left >= cost:
                    del open_rows[room][pattern]
                    count -= place(length, cost, count, room, pattern, slots, left, rows)
        if count:
            place(length, cost, count, row_length, (), max_sequences, max_cost, count)
    return [(pattern, rows) for entry in open_rows for pattern, (rows, _, _) in entry.items()]


class _Steps:
    """Steps start .. stop-1 as the random-access source that grain reads."""

    def __init__(self, make: Callable[[int], Any], start: int, stop: int) -> None:
        self._make, self._start, self._length = make, start, max(0, stop - start)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._make(self._start + int(index))

    def __repr__(self) -> str:
        return f"steps {self._start} to {self._start + self._length}"


class Prefetch(Iterator[Any]):
    """Batches of steps start .. stop-1 in order, made ahead by a thread; see `prefetch`."""

    def __init__(self, make: Callable[[int], Any], start: int, stop: int, depth: int) -> None:
        import grain  # takes a second, which commands that read no batches need not wait

        # One thread: numpy does the work and batches then keep their order in time too, which page caches like.
        options = grain.ReadOptions(num_threads=min(1, depth), prefetch_buffer_size=depth)
        self._batches: Any = iter(grain.MapDataset.source(_Steps(make, start, stop)).to_iter_dataset(options))
        self._waited = 0.0
        if depth:
            self._batches.start_prefetch()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        began = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self._waited += time.perf_counter() - began

    def waited_seconds(self) -> float:
        """Seconds spent waiting for batches since the last call (or since the start)."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """Stop making batches; a batch in the making is finished and dropped."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetch(
    make_batch: Callable[[int], Any], start: int, stop: int, depth: int, transfer: Callable[[Any], Any] | None = None
) -> Prefetch:
    """Make the batches of steps start .. stop-1 ahead of their use, and put them on the device.

    Args:
      make_batch: gives the host arrays of one step; a pure function, called from another thread.
      depth: how many batches are held ready beside the one in use; 0 makes each when it is asked for.
      transfer: takes the host arrays to the device, in the same thread, so that the step never waits for the copy.

    Errors of either function reach the caller at the batch they belong to.
    """
    if transfer is None:
        return Prefetch(make_batch, start, stop, depth)
    return Prefetch(lambda step: transfer(make_batch(step)), start, stop, depth)
