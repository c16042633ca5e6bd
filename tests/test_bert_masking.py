"""Masking, by its counts: how many, where, together, and as what."""

import math

import numpy as np
import pytest

from bert_jax.config import ExamplesConfig
from bert_jax.masking import pick_tokens, pick_words, replace_picked
from transformer_jax.inputs import bits, derive_key


def test_positions_are_distinct_and_as_many_as_asked() -> None:
    """C069, C051: exact numbers, also for sequences of one piece; every position has the same chance."""
    lengths = np.tile([1, 2, 3, 60, 7], 1000)
    numbers = np.tile([1, 1, 1, 9, 7], 1000)
    picked = pick_tokens(bits(derive_key(0, "m"), np.arange(5000)), lengths, numbers)
    assert (np.diff(picked) > 0).all()
    owner = np.searchsorted(np.cumsum(lengths), picked, side="right")
    assert (np.bincount(owner, minlength=5000) == numbers).all()
    position = picked - (np.cumsum(lengths) - lengths)[owner]
    of_long = np.bincount(position[owner % 5 == 3], minlength=60)
    assert abs(of_long - 150).max() < 5 * math.sqrt(150)


def test_a_choice_does_not_depend_on_the_batch_it_is_made_in() -> None:
    keys, lengths, numbers = bits(derive_key(0, "m"), np.arange(6)), np.array([4, 9, 1, 30, 2, 9]), np.full(6, 1)
    numbers[3] = 5
    starts = np.cumsum(lengths) - lengths
    whole = pick_tokens(keys, lengths, numbers)
    alone = [pick_tokens(keys[i : i + 1], lengths[i : i + 1], numbers[i : i + 1]) + starts[i] for i in range(6)]
    assert list(whole) == list(np.concatenate(alone))


def test_pieces_of_a_word_are_picked_together_and_never_too_many() -> None:
    """C083: a word of five pieces over 1,000 seeds is picked whole or not at all."""
    starts = np.array([1, 1, 0, 0, 0, 0, 1, 1, 1, 0], bool)  # words of 1, 5, 1, 1 and 2 pieces
    seen = set()
    for seed in range(1000):
        for number in (1, 3, 6):
            key = bits(derive_key(seed, "m"), 0)
            picked = set(pick_words(key, np.array([10]), np.array([10]), np.array([number]), starts, 1).tolist())
            assert len(picked) <= number
            assert len(picked & {1, 2, 3, 4, 5}) in (0, 5) and len(picked & {8, 9}) in (0, 2)
            seen.add((number, len(picked & {1, 2, 3, 4, 5})))
    assert seen == {(1, 0), (3, 0), (6, 0), (6, 5)}
    only_long = pick_words(key, np.array([5]), np.array([5]), np.array([1]), starts[1:6], 1)
    assert len(only_long) == 0


def test_words_of_one_piece_are_picked_like_pieces() -> None:
    keys, lengths, numbers = bits(derive_key(0, "m"), np.arange(6)), np.array([4, 9, 1, 30, 2, 9]), np.ones(6, int)
    all_starts = np.ones(lengths.sum(), bool)
    assert list(pick_words(keys, lengths, lengths // 2, numbers, all_starts, 1)) == list(
        pick_tokens(keys, lengths, numbers)
    )


def test_a_word_does_not_reach_over_the_end_of_its_side_or_sequence() -> None:
    """The rest of a word that truncation cut starts the side: it is a word of its own."""
    no_starts = np.zeros(8, bool)  # two sequences of four pieces, sides of two
    lengths = np.array([4, 4])
    for seed in range(50):
        keys = bits(derive_key(seed, "m"), np.arange(2))
        picked = pick_words(keys, lengths, np.array([2, 4]), np.array([2, 4]), no_starts, 1).tolist()
        assert picked in ([0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7])


def test_spans_cover_one_to_three_words_inside_a_side() -> None:
    """Drawn lengths are in the proportions 1 : 1/2 : 1/3 (6/11, 3/11, 2/11)."""
    n = 3000
    lengths, a_lengths = np.full(n, 200), np.full(n, 100)
    keys = bits(derive_key(0, "m"), np.arange(n))
    picked = pick_words(keys, lengths, a_lengths, np.full(n, 3), np.ones(200 * n, bool), 3)
    assert len(picked) == 3 * n  # words of one piece always fill the number
    owner = picked // 200
    first = picked.reshape(n, 3) % 200
    together = (first[:, 2] - first[:, 0] == 2).mean()
    # One span of three, or 2 + 1 or 1 + 1 + 1 words that happen to touch (rare among 200).
    assert abs(together - 2 / 11) < 0.04
    assert (owner.reshape(n, 3) == np.arange(n)[:, None]).all()
    edge = pick_words(keys, np.full(n, 4), np.full(n, 2), np.full(n, 2), np.ones(4 * n, bool), 3).reshape(n, 2) % 4
    touching = {tuple(pair) for pair in edge.tolist() if pair[1] - pair[0] == 1}
    assert (0, 1) in touching and (2, 3) in touching
    share_across = np.mean([tuple(pair) == (1, 2) for pair in edge.tolist()])
    share_inside = np.mean([tuple(pair) == (0, 1) for pair in edge.tolist()])
    assert share_across < 0.7 * share_inside  # only ever two single words that touch


def test_shares_of_mask_random_and_kept_pieces() -> None:
    """C069: over 200,000 picked pieces, within half a point; random pieces are ordinary ones, all of them."""
    ordinary = np.arange(10, 2010, dtype=np.int32)
    labels = np.full(200_000, 5000, np.int32)
    keys = bits(derive_key(0, "m"), np.arange(200_000))
    seen = replace_picked(keys, labels, 4, ordinary, ExamplesConfig())
    assert seen.dtype == np.int32
    assert abs((seen == 4).mean() - 0.8) < 0.005
    assert abs((seen == 5000).mean() - 0.1) < 0.005
    random = seen[(seen != 4) & (seen != 5000)]
    assert set(random.tolist()) == set(ordinary.tolist())


@pytest.mark.parametrize(("mask", "random", "expected"), [(1.0, 0.0, 4), (0.0, 1.0, 77), (0.0, 0.0, 5)])
def test_shares_of_none_and_all(mask: float, random: float, expected: int) -> None:
    config = ExamplesConfig(mask_share=mask, random_share=random)
    keys = bits(derive_key(0, "m"), np.arange(1000))
    seen = replace_picked(keys, np.full(1000, 5, np.int32), 4, np.array([77], np.int32), config)
    assert (seen == expected).all()
