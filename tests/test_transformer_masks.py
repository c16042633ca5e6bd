"""Masks, against matrices written out."""

import jax.numpy as jnp
import numpy as np

from transformer_jax import masks


def test_a_padded_row_attends_to_its_real_positions() -> None:
    ids_BL = masks.from_lengths(jnp.asarray([2, 4, 0]), 4)
    assert ids_BL.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    allowed_BLL = masks.same_sequence(ids_BL, ids_BL).astype(int)
    assert allowed_BLL.tolist() == [
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 1, 1]] * 4,
        [[0, 0, 0, 0]] * 4,
    ]


def test_packed_sequences_attend_each_to_itself_and_never_to_padding() -> None:
    ids_BL = jnp.asarray([[1, 1, 2, 2, 2, 0]])
    assert masks.same_sequence(ids_BL, ids_BL)[0].astype(int).tolist() == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def test_queries_and_keys_may_have_different_lengths() -> None:
    assert masks.same_sequence(jnp.asarray([[1, 2]]), jnp.asarray([[1, 2, 0]]))[0].astype(int).tolist() == [
        [1, 0, 0],
        [0, 1, 0],
    ]


def test_the_mask_of_a_batch_padded_twice_still_sums_to_the_true_lengths() -> None:
    """C030"""
    lengths = np.asarray([3, 1, 5])
    once = masks.from_lengths(jnp.asarray(lengths), 6)
    twice = jnp.pad(once, ((0, 0), (0, 4)))
    assert twice.sum(-1).tolist() == lengths.tolist()
    assert masks.same_sequence(twice, twice).sum((1, 2)).tolist() == (lengths**2).tolist()
    assert twice.tolist() == masks.from_lengths(jnp.asarray(lengths), 10).tolist()


def test_one_way() -> None:
    assert masks.one_way("left", 3, 3).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert masks.one_way("right", 3, 3).astype(int).tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
