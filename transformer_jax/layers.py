"""The parts of a Transformer layer: dense, embedding, layer norm, attention, feed-forward.

Parameters are float32 and products run in the configured dtype; statistics, softmax and logits are float32. With dtype
float64 all of it is float64. Kernels are [in, out], and each parameter names its logical axes, which the rules table in
`sharding.py` maps to the mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_jax import masks
from transformer_jax.config import ConfigError, Context, EncoderConfig
from transformer_jax.dropout import Randomness, dropout
from transformer_jax.sharding import split_rows, whole_vectors

SAVED_NAMES = ("query", "key", "value", "context", "attention_normed", "intermediate")
"""Tensors of a layer that the remat policy "names" keeps for the backward pass."""
PRODUCT_NAME = "product"
"""Name of every dense layer's product, for the remat policy "dots": JAX's own policy of that name does not see into
products that have their own gradient."""


def compute_dtype(config: EncoderConfig) -> jnp.dtype:
    """Dtype of activations and matrix products; refuses float64 where JAX would silently make float32 of it."""
    if jax.dtypes.canonicalize_dtype(config.dtype) != config.dtype:
        raise ConfigError('dtype is "float64" but JAX has 64-bit numbers switched off; set JAX_ENABLE_X64=1')
    return jnp.dtype(config.dtype)


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of parameters, statistics, softmax and logits: float32, or float64 when all is float64."""
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


def truncated_normal(stddev: float) -> nn.initializers.Initializer:
    """Normal numbers cut off at two standard deviations, as in the 2018 code.

    The spread is not corrected for the cut: the numbers' own standard deviation is 0.88 times `stddev`.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * stddev

    return init


def glorot_uniform(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Uniform numbers of a kernel [in, out], of variance 2 / (in + out) (Glorot and Bengio 2010, section 4.2.1)."""
    limit = math.sqrt(6.0 / sum(shape))
    return jax.random.uniform(key, shape, dtype, -limit, limit)


def partitioned(init: nn.initializers.Initializer, *axes: str) -> Callable[..., Any]:
    """The initialiser, with logical axis names put on what it makes; `self.param` takes the names off again."""
    return nn.with_logical_partitioning(init, axes)


def wide_einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two half-precision arrays with a float32 result.

    Its backward pass rounds the incoming gradient to the operands' dtype first; plain autodiff would multiply float32
    by half precision there, which the compiler turns into a slow float32 product.
    """
    if a.dtype == wide_dtype(a.dtype):
        return jnp.einsum(spec, a, b)
    return _wide_einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=wide_dtype(a.dtype))


def _wide_einsum_forward(spec: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _wide_einsum(spec, a, b), (a, b)


def _wide_einsum_backward(
    spec: str, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    _, pull = jax.vjp(functools.partial(jnp.einsum, spec), *operands)
    return pull(g.astype(operands[0].dtype))


_wide_einsum.defvjp(_wide_einsum_forward, _wide_einsum_backward)


@jax.custom_vjp
def table_scores(x_BPH: jax.Array, table_VH: jax.Array) -> jax.Array:
    """x_BPH in the compute dtype against each row of a float32 table, float32 [B, P, V].

    The table's gradient leaves the product in float32. So it can be added to the gradient of the look-up in the same
    table before devices sum them: once, and in float32.
    """
    return jnp.einsum(
        "BPH,VH->BPV", x_BPH, table_VH.astype(x_BPH.dtype), preferred_element_type=wide_dtype(x_BPH.dtype)
    )


def _table_scores_forward(x_BPH: jax.Array, table_VH: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table_scores(x_BPH, table_VH), (x_BPH, table_VH)


def _table_scores_backward(operands: tuple[jax.Array, jax.Array], g_BPV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BPH, table_VH = operands
    g_BPV = g_BPV.astype(x_BPH.dtype)
    x_gradient_BPH = jnp.einsum("BPV,VH->BPH", g_BPV, table_VH.astype(x_BPH.dtype))
    if x_BPH.dtype != table_VH.dtype:
        # XLA on CPU has no half-precision product with a float32 result in the form below.
        return x_gradient_BPH, jnp.einsum("BPV,BPH->VH", g_BPV, x_BPH, preferred_element_type=table_VH.dtype)
    # Written with the narrow operand first, as in `dense_product`: XLA on CPU copies that one into transposed order.
    summed = (tuple(range(g_BPV.ndim - 1)),) * 2
    gradient_HV = jax.lax.dot_general(x_BPH, g_BPV, (summed, ((), ())), preferred_element_type=table_VH.dtype)
    return x_gradient_BPH, gradient_HV.T


table_scores.defvjp(_table_scores_forward, _table_scores_backward)


@jax.custom_vjp
def dense_product(x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """x [..., I] @ kernel [I, O].

    The kernel's gradient is written so that XLA on CPU, which copies one operand into transposed order for it, copies
    the narrower one; the copy of the wide one costs as much as the product. (For an input that is wider than the output
    the compiler of jax 0.10 undoes it, at up to a fifth of that product.)
    """
    return jnp.einsum("...i,io->...o", x, kernel_IO)


def _dense_product_forward(x: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dense_product(x, kernel_IO), (x, kernel_IO)


def _dense_product_backward(operands: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel_IO = operands
    summed = tuple(range(x.ndim - 1))
    numbers = ((summed, summed), ((), ()))
    if x.shape[-1] <= g.shape[-1]:
        kernel_gradient_IO = jax.lax.dot_general(x, g, numbers)
    else:
        kernel_gradient_IO = jax.lax.dot_general(g, x, numbers).T
    return jnp.einsum("...o,io->...i", g, kernel_IO), kernel_gradient_IO


dense_product.defvjp(_dense_product_forward, _dense_product_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution function, by erf (Hendrycks and Gimpel 2016); the form of the released BERT.

    The backward pass works from x alone: autodiff would have the compiler store erf(x) in float32 besides.
    """
    wide = x.astype(wide_dtype(x.dtype))
    return (wide * _normal_cdf(wide)).astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5))


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    # The barrier keeps the compiler from finding the erf of the forward pass again, and storing it.
    wide = jax.lax.optimization_barrier(x).astype(wide_dtype(x.dtype))
    density = jnp.exp(-0.5 * wide * wide) * (1.0 / math.sqrt(2.0 * math.pi))
    return (((_normal_cdf(wide) + wide * density) * g.astype(wide.dtype)).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def gelu_new(x: jax.Array) -> jax.Array:
    """The tanh approximation of GELU, under the name that Hugging Face gives it."""
    wide = x.astype(wide_dtype(x.dtype))
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * 0.5 * (1.0 + jnp.tanh(inner))).astype(x.dtype)


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0)."""
    return jnp.maximum(x, 0)


def swish(x: jax.Array) -> jax.Array:
    """x times its logistic function (Ramachandran et al. 2017), under the name that Marian's folders have for SiLU."""
    wide = x.astype(wide_dtype(x.dtype))
    return (wide * jax.nn.sigmoid(wide)).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": relu,
    "swish": swish,
}


def broadcast_last(vector_K: jax.Array, rank: int) -> jax.Array:
    """[K] as [1, ..., 1, K] of the given rank."""
    return vector_K.reshape((1,) * (rank - 1) + vector_K.shape)


class Dense(nn.Module):
    """x [..., in] -> x @ kernel + bias [..., out], in the configured dtype."""

    features: int
    axes: tuple[str, str]
    """Logical axes of the kernel; the bias has the second."""
    config: EncoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = compute_dtype(self.config)
        normal = truncated_normal(self.config.initializer_range)
        kernel_init = partitioned(glorot_uniform if self.config.glorot_kernels else normal, *self.axes)
        bias_init = partitioned(nn.initializers.zeros, self.axes[1])
        kernel = self.param("kernel", kernel_init, (x.shape[-1], self.features), wide_dtype(dtype))
        bias = self.param("bias", bias_init, (self.features,), wide_dtype(dtype))
        y = checkpoint_name(dense_product(x.astype(dtype), kernel.astype(dtype)), PRODUCT_NAME)
        return y + broadcast_last(bias.astype(dtype), y.ndim)


class Embedding(nn.Module):
    """A table [rows, H]; rows past `used` are padding that is born zero."""

    rows: int
    axis: str
    config: EncoderConfig
    used: int | None = None
    zero_unused: bool = False
    """Rows past `used` are zero vectors when looked up, whatever they hold, and get no gradient from that."""

    def setup(self) -> None:
        glorot = self.config.glorot_kernels
        normal = truncated_normal(self.config.hidden_size**-0.5 if glorot else self.config.initializer_range)
        used = self.rows if self.used is None else self.used

        def init(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
            # Drawn for the used rows alone, so that the padding does not change what a seed gives.
            return jnp.pad(normal(key, (used, shape[1]), dtype), ((0, shape[0] - used), (0, 0)))

        self.embedding = self.param(
            "embedding",
            partitioned(init, self.axis, "embed"),
            (self.rows, self.config.hidden_size),
            wide_dtype(compute_dtype(self.config)),
        )

    def __call__(self, ids_BL: jax.Array) -> jax.Array:
        """Rows of the table, [B, L, H]; an id out of range gives NaN, which the training step notices."""
        table = whole_vectors(self.embedding)
        x_BLH = split_rows(jnp.take(table, ids_BL, axis=0, mode="fill")).astype(compute_dtype(self.config))
        if self.zero_unused:
            used = self.rows if self.used is None else self.used
            x_BLH = jnp.where(((ids_BL >= used) & (ids_BL < self.rows))[..., None], 0, x_BLH)
        return x_BLH

    def attend(self, x_BPH: jax.Array) -> jax.Array:
        """Scores of x against each row, float32 [B, P, rows]."""
        return table_scores(x_BPH, self.embedding)


@jax.custom_vjp
def _widen(x: jax.Array) -> jax.Array:
    return x.astype(wide_dtype(x.dtype))


def _widen_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _widen(x), jnp.zeros((), x.dtype)


def _widen_backward(like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    limit = float(jnp.finfo(like.dtype).max)
    # Infinities stay, so that the training step sees a gradient that is broken for another reason.
    return (jnp.where(jnp.isfinite(g), jnp.clip(g, -limit, limit), g).astype(like.dtype),)


_widen.defvjp(_widen_forward, _widen_backward)


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis (Ba et al. 2016), with float32 statistics.

    In half precision an epsilon of 1e-12 would be 0. With float16, the gradient of a row without variance is 1e6 times
    what comes in; it is cut to float16's largest number in place of overflowing.
    """

    config: EncoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = wide_dtype(x.dtype)
        scale = self.param("scale", partitioned(nn.initializers.ones, "norm"), (x.shape[-1],), wide)
        bias = self.param("bias", partitioned(nn.initializers.zeros, "norm"), (x.shape[-1],), wide)
        y = _widen(x) if x.dtype == jnp.float16 else x.astype(wide)
        centred = y - y.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.config.layer_norm_eps)
        return (normed * broadcast_last(scale, x.ndim) + broadcast_last(bias, x.ndim)).astype(x.dtype)


def attention(
    query_BLND: jax.Array,
    key_BMND: jax.Array,
    value_BMND: jax.Array,
    query_ids_BL: jax.Array,
    key_ids_BM: jax.Array,
    *,
    context: Context = "both",
    dropout_rate: float = 0.0,
    randomness: Randomness | None = None,
    site: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) within each sequence of a row.

    The plain form, the reference for any kernel. The mask is compared from sequence ids (and places) where it is used,
    so it fuses into the softmax and is never stored.

    Args:
      query_ids_BL, key_ids_BM: int32 sequence numbers, 0 for padding. A query with nothing to attend to (padding)
        gets the plain mean of all values: finite, and read by no one.
      context: `left` or `right` leaves only keys at or before, or at or after, the query's own place in the row.

    Returns:
      context [B, L, N, D] in the dtype of the values, and the weights before dropout, float32 [B, N, L, M].
    """
    # Scaling the queries costs less than scaling the scores.
    query_BLND = query_BLND * (1.0 / math.sqrt(query_BLND.shape[-1]))
    scores_BNLM = wide_einsum("BLND,BMND->BNLM", query_BLND, key_BMND)
    allowed_BLM = masks.same_sequence(query_ids_BL, key_ids_BM)
    if context != "both":
        allowed_BLM = allowed_BLM & masks.one_way(context, *allowed_BLM.shape[1:])[None]
    allowed_B1LM = allowed_BLM[:, None, :, :]
    scores_BNLM = jnp.where(allowed_B1LM, scores_BNLM, masks.FORBIDDEN)
    top_BNL1 = jax.lax.stop_gradient(scores_BNLM.max(-1, keepdims=True))
    exp_BNLM = jnp.exp(scores_BNLM - top_BNL1)
    weights_BNLM = exp_BNLM / exp_BNLM.sum(-1, keepdims=True)
    kept_BNLM = dropout(weights_BNLM.astype(value_BMND.dtype), dropout_rate, randomness, site)
    return jnp.einsum("BNLM,BMND->BLND", kept_BNLM, value_BMND), weights_BNLM


class KeysValues(NamedTuple):
    """What queries attend to, [B, M, N, D] each."""

    key: jax.Array
    value: jax.Array


class Attention(nn.Module):
    """Multi-head attention with separate query, key and value products and an output product.

    One product for all three of self-attention, then a split, was slower on CPU and TPU.
    """

    config: EncoderConfig
    context: Context = "both"

    def setup(self) -> None:
        c = self.config
        self.query = Dense(c.hidden_size, ("embed", "heads"), c)
        self.key = Dense(c.hidden_size, ("embed", "heads"), c)
        self.value = Dense(c.hidden_size, ("embed", "heads"), c)
        self.output = Dense(c.hidden_size, ("heads", "embed"), c)

    def __call__(
        self,
        x_BLH: jax.Array,
        memory_BMH: jax.Array,
        query_ids_BL: jax.Array,
        key_ids_BM: jax.Array,
        randomness: Randomness | None,
        site: jax.Array | int,
    ) -> jax.Array:
        """What each position of x gathers from the positions of its sequence in memory; for self-attention that is x.

        Args:
          query_ids_BL, key_ids_BM: int32 sequence numbers, 0 for padding.
          site: the dropout site of the weights.
        """
        return self.attend(x_BLH, self.keys_values(memory_BMH), query_ids_BL, key_ids_BM, randomness, site)

    def keys_values(self, memory_BMH: jax.Array) -> KeysValues:
        """The keys and values of each position, [B, M, N, D]."""
        return KeysValues(
            key=checkpoint_name(self._heads(self.key(memory_BMH)), "key"),
            value=checkpoint_name(self._heads(self.value(memory_BMH)), "value"),
        )

    def attend(
        self,
        x_BLH: jax.Array,
        memory: KeysValues,
        query_ids_BL: jax.Array,
        key_ids_BM: jax.Array,
        randomness: Randomness | None = None,
        site: jax.Array | int = 0,
    ) -> jax.Array:
        """As `__call__`, from keys and values that are there already."""
        context_BLND, weights_BNLM = attention(
            checkpoint_name(self._heads(self.query(x_BLH)), "query"),
            memory.key,
            memory.value,
            query_ids_BL,
            key_ids_BM,
            context=self.context,
            dropout_rate=self.config.attention_probs_dropout_prob,
            randomness=randomness,
            site=site,
        )
        self.sow("intermediates", "attention_weights", weights_BNLM)
        return self.output(checkpoint_name(context_BLND.reshape(x_BLH.shape), "context"))

    def _heads(self, x_BLH: jax.Array) -> jax.Array:
        return x_BLH.reshape(*x_BLH.shape[:-1], self.config.num_attention_heads, self.config.head_dim)


class FeedForward(nn.Module):
    """Two dense layers with the activation between them (Vaswani et al. 2017, section 3.3)."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, x_BLH: jax.Array) -> jax.Array:
        c = self.config
        x_BLF = Dense(c.intermediate_size, ("embed", "mlp"), c, name="intermediate")(x_BLH)
        x_BLF = ACTIVATIONS[c.hidden_act](checkpoint_name(x_BLF, "intermediate"))
        return Dense(c.hidden_size, ("mlp", "embed"), c, name="output")(x_BLF)
