"""Layers against their formulas, and at the edges of half precision."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import layers
from transformer_jax.config import ConfigError, EncoderConfig

CONFIG = EncoderConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def with_dtype(dtype: str) -> EncoderConfig:
    return EncoderConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        dtype=dtype,  # type: ignore[arg-type]
    )


def test_activations_follow_their_formulas() -> None:
    """C009"""
    x = np.linspace(-3, 3, 121)
    erf_form = np.asarray([v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    tanh_form = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    single = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(layers.ACTIVATIONS["gelu"](single), erf_form, atol=1e-6)
    np.testing.assert_allclose(layers.ACTIVATIONS["gelu_new"](single), tanh_form, atol=1e-6)
    np.testing.assert_allclose(layers.ACTIVATIONS["swish"](single), x / (1 + np.exp(-x)), atol=1e-6)
    np.testing.assert_array_equal(layers.ACTIVATIONS["relu"](single), np.maximum(np.asarray(single), 0))
    assert np.abs(erf_form - tanh_form).max() > 1e-4


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "swish"])
def test_activations_have_the_gradient_of_their_formula(name: str) -> None:
    x = jnp.linspace(-6, 6, 241)
    act = layers.ACTIVATIONS[name]
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x), jnp.float64)
        difference = (act(wide + 1e-6) - act(wide - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.vmap(jax.grad(act))(x), np.asarray(difference), atol=5e-6)
    half = jax.vjp(act, x.astype(jnp.bfloat16))
    assert half[0].dtype == half[1](half[0])[0].dtype == jnp.bfloat16


def test_layer_norm_normalises_scales_and_shifts() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 3, 8)) * 5 + 100
    params = {"scale": jnp.arange(1.0, 9.0), "bias": jnp.arange(8.0) / 10}
    wide = np.asarray(x, np.float64)
    normed = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    expected = normed * np.arange(1, 9) + np.arange(8) / 10
    np.testing.assert_allclose(layers.LayerNorm(CONFIG).apply({"params": params}, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [0.0, 3.0, -1000.3])
def test_a_row_without_variance_stays_finite_forward_and_backward(dtype: str, value: float) -> None:
    """C058: an epsilon of 1e-12 is 0 in float16."""
    x = jnp.full((2, 8), value, dtype)
    params = {"scale": jnp.ones(8), "bias": jnp.zeros(8)}
    weights = jnp.arange(8.0).astype(dtype)[None]

    def loss(x: jax.Array) -> jax.Array:
        y = layers.LayerNorm(with_dtype(dtype)).apply({"params": params}, x)
        assert isinstance(y, jax.Array) and y.dtype == x.dtype
        return (y * weights).astype(jnp.float32).sum()

    result, gradient = jax.value_and_grad(loss)(x)
    assert np.isfinite(float(result))
    assert np.isfinite(np.asarray(gradient, np.float32)).all()


def test_float16_layer_norm_does_not_hide_a_broken_gradient() -> None:
    x = jnp.arange(8.0).astype(jnp.float16)[None]
    norm = layers.LayerNorm(with_dtype("float16"))
    params = {"params": {"scale": jnp.ones(8), "bias": jnp.zeros(8)}}
    _, pull = jax.vjp(lambda x: norm.apply(params, x), x)
    assert not np.isfinite(np.asarray(pull(jnp.full((1, 8), jnp.inf, jnp.float16))[0], np.float32)).all()


def reference_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, ids: np.ndarray, causal: bool = False
) -> np.ndarray:
    out = np.zeros_like(q)
    for b, i, n in np.ndindex(q.shape[:3]):
        keys = [j for j in range(i + 1 if causal else k.shape[1]) if ids[b, j] == ids[b, i] != 0]
        if keys:
            scores = np.exp([q[b, i, n] @ k[b, j, n] / np.sqrt(q.shape[-1]) for j in keys])
            out[b, i, n] = scores @ v[b, keys, n] / scores.sum()
    return out


def qkv(dtype: str = "float32") -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), (2, 6, 2, 4)).astype(dtype) for i in range(3)]


IDS_BL = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]], jnp.int32)


def test_attention_is_softmax_within_each_sequence() -> None:
    q, k, v = qkv()
    context, weights = layers.attention(q, k, v, IDS_BL, IDS_BL)
    expected = reference_attention(*(np.asarray(x, np.float64) for x in (q, k, v)), np.asarray(IDS_BL))
    np.testing.assert_allclose(np.where(IDS_BL[..., None, None] > 0, context, 0), expected, rtol=1e-5, atol=1e-6)
    same = (IDS_BL[:, :, None] == IDS_BL[:, None, :]) & (IDS_BL[:, None, :] > 0)
    real = np.asarray(IDS_BL > 0)
    outside = np.where(np.asarray(same)[:, None], 0, np.asarray(weights))
    assert not outside.transpose(0, 2, 1, 3)[real].any()
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, rtol=1e-5)


def test_causal_attention_is_attention_over_what_came_before_in_the_sequence() -> None:
    q, k, v = qkv()
    context, weights = layers.attention(q, k, v, IDS_BL, IDS_BL, context="left")
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    expected = reference_attention(*wide, np.asarray(IDS_BL), causal=True)
    np.testing.assert_allclose(np.where(IDS_BL[..., None, None] > 0, context, 0), expected, rtol=1e-5, atol=1e-6)
    assert not np.asarray(weights)[1][:, np.triu(np.ones((6, 6), bool), 1)].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_that_may_attend_to_nothing_is_finite_and_leaves_the_others_alone(dtype: str) -> None:
    """C027"""
    q, k, v = (x * 100 for x in qkv(dtype))
    filler = IDS_BL.at[1].set(0)

    def total(args: tuple[jax.Array, ...]) -> jax.Array:
        return layers.attention(*args, filler, filler)[0].astype(jnp.float32).sum()

    context, _ = layers.attention(q, k, v, filler, filler)
    gradients = jax.grad(total)((q, k, v))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (context, *gradients))
    np.testing.assert_array_equal(context[0], layers.attention(q, k, v, IDS_BL, IDS_BL)[0][0])


def test_wide_products_of_half_precision_keep_float32_sums_and_half_precision_gradients() -> None:
    a = jnp.full((1, 512), 1.0 + 2**-7, jnp.bfloat16)
    b = jnp.full((1, 512), 1.0, jnp.bfloat16)
    y, pull = jax.vjp(lambda a, b: layers.wide_einsum("ij,kj->ik", a, b), a, b)
    assert y.dtype == jnp.float32 and float(y[0, 0]) == 512 * (1 + 2**-7)
    assert [g.dtype for g in pull(y)] == [jnp.bfloat16, jnp.bfloat16]
    single = jax.random.normal(jax.random.key(0), (3, 4))
    np.testing.assert_allclose(layers.wide_einsum("ij,kj->ik", single, single), single @ single.T, rtol=1e-6)


def test_initial_kernels_are_normal_and_cut_at_two_deviations() -> None:
    x = np.asarray(layers.truncated_normal(0.02)(jax.random.key(0), (200, 200), jnp.dtype("float32")))
    assert np.abs(x).max() <= 0.04
    assert x.std() == pytest.approx(0.02 * 0.8796, rel=0.02)
    assert abs(x.mean()) < 4 * 0.02 / 200


def test_padding_rows_of_an_embedding_are_zero_and_do_not_change_the_others() -> None:
    def table(rows: int) -> np.ndarray:
        module = layers.Embedding(rows, "vocab", CONFIG, used=5)
        return np.asarray(
            nn.meta.unbox(module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]["embedding"]
        )

    assert not table(8)[5:].any() and table(8)[:5].all()
    np.testing.assert_array_equal(table(8)[:5], table(16)[:5])


def test_each_parameter_names_its_logical_axes() -> None:
    boxed = layers.Dense(16, ("embed", "mlp"), CONFIG).init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
    assert (boxed["kernel"].names, boxed["bias"].names) == (("embed", "mlp"), ("mlp",))
    assert not np.asarray(boxed["bias"].value).any()


def test_float64_without_64_bit_jax_is_refused_and_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match="JAX_ENABLE_X64=1"):
        layers.compute_dtype(with_dtype("float64"))
    with jax.enable_x64(True):
        assert layers.compute_dtype(with_dtype("float64")) == np.float64


def test_unused_rows_of_an_embedding_can_be_zero_vectors_and_ids_past_the_table_are_nan() -> None:
    module = layers.Embedding(8, "vocab", CONFIG, used=5, zero_unused=True)
    table = {"params": {"embedding": jnp.ones((8, 8))}}
    x = np.asarray(module.apply(table, jnp.asarray([[4, 5, 7, 8]])))[0, :, 0]
    assert x[:3].tolist() == [1, 0, 0] and np.isnan(x[3])
