"""Dropout whose masks depend on (key, site, row id, element of the row), and on nothing else.

So the same example gets the same masks on any mesh, in any micro-batch of it, scanned or unrolled. Two generators:

* "hash": each element's index is mixed with two 32-bit words that stand for its row. A few integer operations an
  element, which fuse into the operation around them. This is not a generator for statistics or secrets; the tests
  check what dropout needs of it.
* "threefry": JAX's own generator with a key folded in for each row.

The backward pass makes the mask again, so no mask is kept in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from transformer_jax.config import ConfigError

Generator = Literal["hash", "threefry"]

_GOLDEN = 0x9E3779B9
_MULTIPLY_1 = 0x7FEB352D  # the constants of Wellons' lowbias32, a 32-bit permutation found by search for low bias
_MULTIPLY_2 = 0x846CA68B


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("key", "words", "row_ids"), meta_fields=("generator",)
)
@dataclasses.dataclass(frozen=True)
class Randomness:
    """What all dropout sites of one forward pass share."""

    key: jax.Array
    words: jax.Array
    """uint32 [2] drawn from the key: the seed of the counter hash."""
    row_ids: jax.Array
    """uint32 [B]: index of each row in the global batch."""
    generator: Generator = "hash"


def randomness(key: jax.Array, row_ids_B: jax.Array, generator: Generator = "hash") -> Randomness:
    """Prepare dropout for one forward pass.

    Args:
      key: a JAX key; a new one each step.
      row_ids_B: integers [B], the index of each row in the global batch, whatever part of it this call sees.
    """
    if generator not in ("hash", "threefry"):
        raise ConfigError(f'dropout_generator is "{generator}"; it must be "hash" or "threefry"')
    words_2 = jax.random.bits(key, (2,), jnp.uint32)
    return Randomness(key, words_2, row_ids_B.astype(jnp.uint32), generator)


def of_pass(
    key: jax.Array | None, row_ids_B: jax.Array | None, rows: int, generator: Generator = "hash"
) -> Randomness | None:
    """Dropout of a model's forward pass: none without a key; without `row_ids_B` the `rows` are counted from 0."""
    if key is None:
        return None
    return randomness(key, jnp.arange(rows, dtype=jnp.int32) if row_ids_B is None else row_ids_B, generator)


def mix32(x: jax.Array) -> jax.Array:
    """A permutation of the 32-bit words in which each input bit changes each output bit about half the time."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(_MULTIPLY_1)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(_MULTIPLY_2)
    return x ^ (x >> 16)


def row_words(words_2: jax.Array, site: jax.Array | int, row_ids_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two uint32 [B] words for each row at this site.

    Two, because with one word w the masks of two rows whose words differ only in the low bits would be permutations of
    each other: 2^22 elements a row would make that common.
    """
    site = jnp.asarray(site, jnp.uint32)
    ids_B = row_ids_B.astype(jnp.uint32)
    first = mix32(mix32(words_2[0] ^ mix32(site + jnp.uint32(_GOLDEN))) ^ mix32(ids_B))
    second = mix32(mix32(words_2[1] + first) + ids_B * jnp.uint32(_GOLDEN))
    return first, second


def element_hash(shape: tuple[int, ...], first_B: jax.Array, second_B: jax.Array) -> jax.Array:
    """uint32 of `shape` [B, ...]: the hash of each element from its index in the row and the row's two words."""
    rest = shape[1:]
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in range(len(shape) - 1, 0, -1):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    first, second = (jnp.broadcast_to(w.reshape(-1, *(1,) * len(rest)), shape) for w in (first_B, second_B))
    x = index ^ first
    x = (x ^ (x >> 16)) * jnp.uint32(_MULTIPLY_1)
    x = x ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(_MULTIPLY_2)
    return x ^ (x >> 16)


def keep_mask(shape: tuple[int, ...], rate: float, r: Randomness, site: jax.Array | int) -> jax.Array:
    """bool of `shape` [B, ...]: True where the element is kept, with probability 1 - rate."""
    if r.generator == "hash":
        return element_hash(shape, *row_words(r.words, site, r.row_ids)) >= jnp.uint32(round(rate * 2**32))
    at_site = jax.random.fold_in(r.key, jnp.asarray(site, jnp.uint32))
    keys_B = jax.vmap(functools.partial(jax.random.fold_in, at_site))(r.row_ids)
    return jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, shape[1:]))(keys_B)


def dropout(x: jax.Array, rate: float, r: Randomness | None, site: jax.Array | int) -> jax.Array:
    """Set a share `rate` of the elements of x [B, ...] to zero and scale the others by 1 / (1 - rate).

    Args:
      r: None switches dropout off.
      site: a number that no other call of the same forward pass uses; may be traced, as in a scan over layers.
    """
    if r is None or rate == 0.0:
        return x
    return _dropout(x, rate, r, jnp.asarray(site, jnp.uint32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dropout(x: jax.Array, rate: float, r: Randomness, site: jax.Array) -> jax.Array:
    return jnp.where(keep_mask(x.shape, rate, r, site), x * (1.0 / (1.0 - rate)), 0)


def _dropout_forward(
    x: jax.Array, rate: float, r: Randomness, site: jax.Array
) -> tuple[jax.Array, tuple[Randomness, jax.Array]]:
    return _dropout(x, rate, r, site), (r, site)


def _dropout_backward(
    rate: float, residuals: tuple[Randomness, jax.Array], g: jax.Array
) -> tuple[jax.Array, None, None]:
    r, site = residuals
    # The barrier keeps the compiler from finding that this is the mask of the forward pass, and storing that one.
    words_2, site = jax.lax.optimization_barrier((r.words, site))
    return _dropout(g, rate, dataclasses.replace(r, words=words_2), site), None, None


_dropout.defvjp(_dropout_forward, _dropout_backward)
