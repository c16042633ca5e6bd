"""Which pieces are predicted, and what the model sees there (Devlin et al. 2019, section 3.1).

Pieces, whole words, or spans of words; pure functions of (key, lengths, word starts), over many sequences at once. A
choice depends on the sequence's own key only, not on the batch it is made in.
"""

from __future__ import annotations

import numpy as np

from bert_jax.config import ExamplesConfig
from transformer_jax.inputs import bits, randint, uniform


def pick_tokens(key: np.ndarray, lengths: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Choose pieces of each sequence at random, without repetition.

    Args:
      key: uint64 [Q], one for each sequence.
      lengths: int64 [Q], pieces of each sequence, control tokens not counted.
      numbers: int64 [Q], how many to choose; at most the length.

    Returns:
      int64, ascending: indices into the pieces of all sequences laid one after another.
    """
    start = np.cumsum(lengths) - lengths
    ranked = _random_order(key, lengths)
    first_numbers = np.repeat(start - (np.cumsum(numbers) - numbers), numbers) + np.arange(int(numbers.sum()))
    picked = ranked[first_numbers]
    picked.sort()
    return picked


def _random_order(key: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of all items in order of sequence, and in random order within each: int64 [sum of lengths].

    Sequence, 24 random bits and position share one integer: a plain sort, and one answer for any grouping into batches.
    """
    assert len(lengths) < 1 << 24 and (not len(lengths) or lengths.max() < 1 << 16)
    sequence = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    start = np.cumsum(lengths) - lengths
    total = len(sequence)
    position = np.arange(total, dtype=np.uint64) - np.repeat(start.astype(np.uint64), lengths)
    sortable = bits(np.repeat(key, lengths), position)
    sortable >>= np.uint64(40)
    sortable <<= np.uint64(16)
    sortable |= position
    sortable |= sequence << np.uint64(40)
    sortable.sort()
    # After the sort, sequences still stand in their order, so `start` repeated is where each item's sequence starts.
    return (sortable & np.uint64(0xFFFF)).astype(np.int64) + np.repeat(start, lengths)


def pick_words(
    key: np.ndarray, lengths: np.ndarray, a_lengths: np.ndarray, numbers: np.ndarray, word_starts: np.ndarray, span: int
) -> np.ndarray:
    """Choose whole words (or spans of 1 to `span` words) of each sequence, never more pieces than its number.

    Words are visited in random order. At each, a span is drawn (n words with probability proportional to 1/n, as Lan et
    al. 2020, section 3.1; one word when span is 1) and shortened until it fits: inside its side, over no word already
    chosen, and within the pieces still allowed. A word that does not fit is passed over, as in the 2018 code, so a
    sequence may get fewer pieces than its number, and none if each of its words has more pieces than that.

    Args:
      a_lengths: int64 [Q], how many of the pieces belong to side A.
      word_starts: bool [sum of lengths], whether a piece starts a word. The first piece of a side always does: the rest
        of a word that truncation cut is a word of its own.

    Returns:
      As `pick_tokens`.
    """
    start = np.cumsum(lengths) - lengths
    word_starts = word_starts.copy()
    word_starts[start[lengths > 0]] = True
    word_starts[(start + a_lengths)[a_lengths < lengths]] = True
    word_at = np.flatnonzero(word_starts)
    edges = np.append(word_at, len(word_starts))  # word w holds pieces edges[w] .. edges[w + 1]
    words_before = np.append(0, np.cumsum(word_starts))
    first_word, end_word = words_before[start], words_before[start + lengths]
    side_word = words_before[start + a_lengths]  # the first word of side B
    num_words = end_word - first_word
    order = _random_order(key, num_words)
    shares = np.cumsum(1.0 / np.arange(1, span + 1))
    picked = np.zeros(len(word_at) + 1, bool)  # one more, so that looking at the word after the last is allowed
    left = numbers.copy()
    for turn in range(int(num_words.max(initial=0))):
        active = np.flatnonzero((turn < num_words) & (left > 0))
        if not len(active):
            break
        word = order[first_word[active] + turn]
        side_end = np.where(word < side_word[active], side_word[active], end_word[active])
        wanted = np.ones(len(active), np.int64)
        if span > 1:
            wanted = 1 + np.searchsorted(shares, uniform(key[active], 7, turn) * shares[-1], side="right")
        size = np.zeros(len(active), np.int64)
        clear = np.ones(len(active), bool)
        for n in range(1, span + 1):
            after = np.minimum(word + n, side_end)
            clear &= ~picked[after - 1] & (word + n <= side_end) & (n <= wanted)
            clear &= edges[after] - edges[word] <= left[active]
            size[clear] = n
        for n in range(1, span + 1):
            picked[word[size >= n] + n - 1] = True
        left[active] -= edges[word + size] - edges[word]
    return np.flatnonzero(np.repeat(picked[:-1], np.diff(edges)))


def replace_picked(
    key: np.ndarray,
    labels: np.ndarray,
    mask_id: int,
    ordinary_ids: np.ndarray,
    config: ExamplesConfig,
) -> np.ndarray:
    """What the model sees at the chosen pieces: [MASK] (80 %), a random ordinary piece (10 %), or the piece itself.

    Drawn for each piece alone, also inside a word, as in the 2018 code. A random piece is never a control token or an
    unused entry (that code draws from the whole vocabulary); it may by chance be the right one.

    Args:
      key: uint64 [n], one for each chosen piece. labels: int32 [n], the pieces themselves.

    Returns:
      int32 [n].
    """
    how = uniform(key, 0)
    random_ids = ordinary_ids[randint(len(ordinary_ids), key, 1)]
    seen = np.where(how < config.mask_share + config.random_share, random_ids, labels)
    return np.where(how < config.mask_share, mask_id, seen).astype(np.int32)
