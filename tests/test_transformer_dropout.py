"""Dropout from a counter hash: statistics, invariance, and a pinned hash."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax import dropout
from transformer_jax.config import ConfigError

GENERATORS = ("hash", "threefry")
# Worked out with Python integers.
PINNED_MIX = 0x688990C0
PINNED_ROWS = [[3981200753, 110250784], [2141573343, 3601638456]]


def mask(
    shape: tuple[int, ...],
    rate: float = 0.1,
    seed: int = 0,
    site: int = 1,
    rows: Sequence[int] | None = None,
    generator: dropout.Generator = "hash",
) -> np.ndarray:
    rows_B = jnp.asarray(np.arange(shape[0]) if rows is None else np.asarray(rows), jnp.int32)
    r = dropout.randomness(jax.random.key(seed), rows_B, generator)
    return np.asarray(dropout.keep_mask(shape, rate, r, site))


def test_the_hash_is_the_pinned_one() -> None:
    """Results of old runs depend on it: a changed hash is a changed default, to be said in the changelog."""

    def by_hand(index: int, first: int, second: int) -> int:
        x = index ^ first
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32 ^ second
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    first_B, second_B = jnp.asarray([5, 0x12345678], jnp.uint32), jnp.asarray([7, 0x9ABCDEF0], jnp.uint32)
    got = np.asarray(dropout.element_hash((2, 3, 4), first_B, second_B)).reshape(2, 12)
    assert got.tolist() == [
        [by_hand(i, int(a), int(b)) for i in range(12)] for a, b in zip(first_B, second_B, strict=True)
    ]
    assert int(dropout.mix32(jnp.uint32(1))) == PINNED_MIX
    words_2 = jnp.asarray([1, 2], jnp.uint32)
    rows = [[int(w) for w in word_B] for word_B in dropout.row_words(words_2, 3, jnp.arange(2))]
    assert rows == PINNED_ROWS


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_dropped_is_the_rate_and_varies_between_rows_as_coins_do(rate: float) -> None:
    kept = mask((256, 2048), rate)
    sigma = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 4 * sigma / np.sqrt(kept.size)
    assert np.std(kept.mean(1)) == pytest.approx(sigma / np.sqrt(2048), rel=0.15)
    assert np.std(kept.mean(0)) == pytest.approx(sigma / np.sqrt(256), rel=0.1)


@pytest.mark.parametrize("generator", GENERATORS)
def test_masks_of_other_seeds_sites_and_rows_are_uncorrelated(generator: dropout.Generator) -> None:
    n = 1 << 14
    make = functools.partial(mask, (3, n), 0.5, generator=generator)
    rows = np.concatenate([make(), make(seed=1), make(site=2), make(site=2**20), make(rows=[3, 1000, 2**31 - 1])])
    correlation = np.corrcoef(rows.astype(np.float64))
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 5 / np.sqrt(n)


def test_neighbouring_elements_are_uncorrelated_at_any_distance() -> None:
    kept = mask((8, 1 << 14), 0.5).astype(np.float64) - 0.5
    for lag in (1, 2, 3, 64, 512, 768, 1024, 4096):
        correlation = 4 * (kept[:, lag:] * kept[:, :-lag]).mean()
        assert abs(correlation) < 5 / np.sqrt(8 * ((1 << 14) - lag)), lag


@pytest.mark.parametrize("generator", GENERATORS)
def test_masks_do_not_depend_on_the_mesh(generator: dropout.Generator) -> None:
    x = jnp.ones((8, 4, 16))

    def drop(x: jax.Array, rows_B: jax.Array) -> jax.Array:
        return dropout.dropout(x, 0.3, dropout.randomness(jax.random.key(3), rows_B, generator), 5)

    rows_B = jnp.arange(8, dtype=jnp.int32)
    alone = jax.jit(drop)(x, rows_B)
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "tensor"))
    by_mesh = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    spread = jax.jit(drop, out_shardings=by_mesh)(
        jax.device_put(x, by_mesh), jax.device_put(rows_B, NamedSharding(mesh, PartitionSpec("data")))
    )
    np.testing.assert_array_equal(alone, spread)
    assert 0.5 < float((alone > 0).mean()) < 0.9


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_micro_batch_with_its_row_ids_gets_the_masks_of_the_batch(generator: dropout.Generator) -> None:
    whole = mask((6, 33), generator=generator)
    parts = [mask((2, 33), rows=rows, generator=generator) for rows in ([0, 1], [2, 3], [4, 5])]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_a_traced_site_gives_the_masks_of_the_same_number() -> None:
    traced = jax.jit(
        lambda site: dropout.keep_mask((2, 8), 0.5, dropout.randomness(jax.random.key(0), jnp.arange(2)), site)
    )
    np.testing.assert_array_equal(traced(jnp.uint32(9)), mask((2, 8), 0.5, site=9))


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_the_backward_pass_uses_the_same_mask_without_having_kept_it(generator: dropout.Generator) -> None:
    x = jax.random.normal(jax.random.key(1), (4, 64))
    r = dropout.randomness(jax.random.key(0), jnp.arange(4), generator)
    y, pull = jax.vjp(lambda x: dropout.dropout(x, 0.25, r, 2), x)
    kept = np.asarray(dropout.keep_mask(x.shape, 0.25, r, 2))
    np.testing.assert_allclose(y, np.where(kept, np.asarray(x) / 0.75, 0), rtol=1e-6)
    (gradient,) = pull(jnp.full_like(x, 3.0))
    np.testing.assert_allclose(gradient, np.where(kept, 4.0, 0), rtol=1e-6)
    assert all(leaf.size < x.size for leaf in jax.tree.leaves(pull))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_half_precision(dtype: str) -> None:
    r = dropout.randomness(jax.random.key(0), jnp.arange(2))
    x = jnp.ones((2, 8), dtype)
    y, pull = jax.vjp(lambda x: dropout.dropout(x, 0.5, r, 0), x)
    assert y.dtype == x.dtype and pull(y)[0].dtype == x.dtype


def test_without_randomness_or_rate_nothing_changes() -> None:
    x = jnp.ones((2, 3))
    assert dropout.dropout(x, 0.5, None, 0) is x
    assert dropout.dropout(x, 0.0, dropout.randomness(jax.random.key(0), jnp.arange(2)), 0) is x


def test_an_unknown_generator_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ConfigError, match=r'"philox"; it must be "hash" or "threefry"'):
        dropout.randomness(jax.random.key(0), jnp.arange(2), "philox")  # type: ignore[arg-type]
