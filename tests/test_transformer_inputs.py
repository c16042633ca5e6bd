"""Random numbers by counter, packing, and batches made ahead."""

import threading
import time

import numpy as np
import pytest

from transformer_jax import inputs
from transformer_jax.inputs import bits, derive_key, pack, permute, prefetch, randint, uniform


def lengths_like_wikipedia(n: int, row_length: int, full_share: float, mean_fill: float) -> np.ndarray:
    """A share of full sequences and a beta distribution for the rest, as Krell et al. 2021 publish them."""
    rng = np.random.default_rng(0)
    rest = (mean_fill - full_share) / (1 - full_share)
    short = np.round(5 + (row_length - 6) * rng.beta(2.5 * rest, 2.5 - 2.5 * rest, n)).astype(int)
    return np.where(rng.random(n) < full_share, row_length, short)


def rows_of(packing: inputs.Packing) -> list[np.ndarray]:
    return np.split(packing.members.astype(int), packing.row_offsets[1:-1])


def splitmix64(state: int) -> int:
    """The published generator's next value in plain integers."""
    wrap = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return z ^ (z >> 31)


def test_bits_are_splitmix64_and_so_the_same_everywhere() -> None:
    assert splitmix64(1234567) == 6457827717110365317  # the published test vector
    assert [int(bits(np.uint64(k), 0)[0]) for k in (0, 1234567)] == [splitmix64(0), splitmix64(1234567)]
    assert int(bits(np.uint64(9), 0, 0)[0]) == splitmix64(splitmix64(9))
    assert int(derive_key(0, "masks", 3)) == 8331462364572084373  # a change here changes every run's data


def test_a_number_depends_on_its_indices_only() -> None:
    key = derive_key(1, "x")
    table = bits(key, np.arange(50)[:, None], np.arange(7))
    assert table.shape == (50, 7)
    assert int(bits(key, 31, 4)[0]) == int(table[31, 4])
    assert (bits(key, np.array([9, 3])) == bits(key, np.arange(10))[[9, 3]]).all()
    assert len(np.unique(table)) == table.size


def test_numbers_are_uniform_and_different_for_every_purpose() -> None:
    u = uniform(derive_key(3, "a"), np.arange(200_000))
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    other = uniform(derive_key(3, "b"), np.arange(200_000))
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.01
    dice = np.bincount(randint(6, derive_key(3, "c"), np.arange(60_000)), minlength=6)
    assert dice.sum() == 60_000 and abs(dice - 10_000).max() < 400
    assert (randint(np.array([1, 2, 1]), derive_key(0, "d"), np.arange(3)) < [1, 2, 1]).all()


def test_no_global_random_state_is_read_or_moved() -> None:
    np.random.seed(1)
    first = uniform(derive_key(0, "x"), np.arange(5))
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    np.random.seed(2)
    assert (uniform(derive_key(0, "x"), np.arange(5)) == first).all()
    np.random.seed(1)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


@pytest.mark.parametrize("size", [*range(1, 40), 1000, 4096, 4097])
def test_permute_is_an_order_of_all_indices(size: int) -> None:
    key = derive_key(5, "rows", size)
    order = permute(key, size, np.arange(size))
    assert sorted(order) == list(range(size))
    assert int(permute(key, size, np.array([size // 2]))[0]) == order[size // 2]


def test_permute_gives_every_order_its_chance() -> None:
    seen = {tuple(int(x) for x in permute(derive_key(s, "p"), 4, np.arange(4))) for s in range(400)}
    assert len(seen) == 24
    assert (
        permute(derive_key(0, "p"), 1000, np.arange(1000)) != permute(derive_key(1, "p"), 1000, np.arange(1000))
    ).any()


def test_pack_puts_short_sequences_beside_long_ones() -> None:
    lengths = np.array([10, 6, 4, 3, 7, 10])
    packing = pack(lengths, np.ones(6, int), 10, 4, 10, derive_key(0, "p"))
    assert sorted(tuple(sorted(lengths[row])) for row in rows_of(packing)) == [(3, 7), (4, 6), (10,), (10,)]


@pytest.mark.parametrize("seed", range(30))
def test_packing_keeps_every_sequence_and_every_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row_length, max_sequences, max_cost = int(rng.integers(8, 200)), int(rng.integers(1, 9)), int(rng.integers(2, 30))
    lengths = rng.integers(1, row_length + 1, rng.integers(1, 400))
    if seed % 2:
        lengths = np.minimum(lengths, rng.integers(1, 12))  # many short ones, so that slots and costs bind
    costs = rng.integers(0, max_cost + 1, len(lengths)) if seed % 3 else np.minimum(lengths, max_cost)
    packing = pack(lengths, costs, row_length, max_sequences, max_cost, derive_key(seed, "p"))
    assert sorted(packing.members) == list(range(len(lengths)))
    for row in rows_of(packing):
        assert 1 <= len(row) <= max_sequences
        assert lengths[row].sum() <= row_length
        assert costs[row].sum() <= max_cost


@pytest.mark.parametrize(
    ("row_length", "full", "fill", "target"), [(128, 0.599, 1 / 1.210, 0.97), (512, 0.235, 1 / 2.001, 0.99)]
)
def test_packed_rows_are_nearly_full(row_length: int, full: float, fill: float, target: float) -> None:
    lengths = lengths_like_wikipedia(50_000, row_length, full, fill)
    costs = np.maximum(1, np.round(0.15 * lengths).astype(int))
    limit = 4 * -(-int(np.ceil(0.15 * row_length)) // 4)
    packing = pack(lengths, np.minimum(costs, limit), row_length, row_length // 16, limit, derive_key(0, "p"))
    assert lengths.sum() / (packing.num_rows * row_length) >= target


def test_who_shares_a_row_is_drawn_from_the_key() -> None:
    lengths = np.array([5] * 50 + [3] * 50)
    one, again, other = (pack(lengths, lengths, 8, 2, 8, derive_key(s, "p")) for s in (0, 0, 1))
    assert (one.members == again.members).all() and (one.row_offsets == again.row_offsets).all()
    assert {tuple(sorted(row)) for row in rows_of(one)} != {tuple(sorted(row)) for row in rows_of(other)}
    partner = {int(max(row)) - int(min(row)) for row in rows_of(one)}
    assert len(partner) > 10  # not the n-th long one with the n-th short one


def test_pack_of_nothing_and_of_what_cannot_fit() -> None:
    assert pack(np.zeros(0, int), np.zeros(0, int), 8, 1, 1, derive_key(0, "p")).num_rows == 0
    with pytest.raises(ValueError, match="found lengths 3 to 9"):
        pack(np.array([3, 9]), np.array([0, 0]), 8, 1, 1, derive_key(0, "p"))


def test_one_a_row_packs_nothing() -> None:
    assert [list(row) for row in rows_of(inputs.one_a_row(3))] == [[0], [1], [2]]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetched_batches_come_in_order_from_any_step(depth: int) -> None:
    with prefetch(lambda step: {"x": np.full(2, step)}, 5, 25, depth, lambda b: {"y": b["x"] + 1}) as batches:
        assert [int(batch["y"][0]) for batch in batches] == list(range(6, 26))


def test_prefetch_works_ahead_in_another_thread_by_depth() -> None:
    made: list[int] = []
    threads = set()
    ready = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        threads.add(threading.get_ident())
        if step == 3:
            ready.set()
        return step

    with prefetch(make, 0, 100, 3) as batches:
        assert next(batches) == 0
        assert ready.wait(5)  # 1, 2 and 3 are made while 0 is in use
        time.sleep(0.05)
        assert max(made) <= 4
    assert threading.get_ident() not in threads


def test_an_error_in_the_thread_reaches_the_caller_at_its_batch() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise OSError("shard went away")
        return step

    with prefetch(make, 0, 10, 4) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="shard went away"):
            next(batches)


def test_waiting_is_measured_and_closing_ends_the_work() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        time.sleep(0.05)
        made.append(step)
        return step

    batches = prefetch(make, 0, 1000, 2)
    next(batches)
    assert batches.waited_seconds() > 0.01
    assert batches.waited_seconds() == 0.0
    batches.close()
    batches.close()
    time.sleep(0.15)
    stopped = len(made)
    time.sleep(0.1)
    assert len(made) == stopped < 10
    with pytest.raises(StopIteration):
        next(batches)
