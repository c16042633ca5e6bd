"""Encoder and decoder: one set of numbers in every form."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import dropout
from transformer_jax.config import EncoderConfig
from transformer_jax.layers import SAVED_NAMES
from transformer_jax.model import (
    DECODER_SITES_PER_LAYER,
    SITES_PER_LAYER,
    Decoder,
    Encoder,
    decoder_flops,
    encoder_flops,
)

CONFIG = EncoderConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
X_BLH = jax.random.normal(jax.random.key(5), (2, 6, 16))
IDS_BL = jnp.asarray([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], jnp.int32)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def encoder(**changes: Any) -> Encoder:
    return Encoder(dataclasses.replace(CONFIG, **changes))


PARAMS = nn.meta.unbox(jax.jit(Encoder(CONFIG).init)(jax.random.key(0), X_BLH, IDS_BL)["params"])


def value_and_gradient(module: Encoder, dropped: bool = True) -> tuple[Any, Any]:
    def loss(params: Any, x_BLH: jax.Array) -> jax.Array:
        r = dropout.randomness(jax.random.key(1), jnp.asarray([4, 9])) if dropped else None
        y_BLH = module.apply({"params": params}, x_BLH, IDS_BL, r, 1)
        assert isinstance(y_BLH, jax.Array)
        return (y_BLH.astype(jnp.float32) ** 3).sum()

    # Without the compiler's costly passes: these programs run once.
    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(PARAMS, X_BLH)


@pytest.fixture(scope="module")
def unrolled() -> tuple[Any, Any]:
    return value_and_gradient(encoder(layers="unrolled"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"layers": "scanned"},
        {"remat": "full"},
        {"remat": "dots"},
        {"remat": "names"},
        {"layers": "scanned", "remat": "full"},
        {"layers": "scanned", "remat": "names"},
    ],
    ids=lambda c: "-".join(c.values()),
)
def test_scanning_and_recomputing_change_no_number_with_dropout_on(changes: dict, unrolled: tuple[Any, Any]) -> None:
    value, gradient = value_and_gradient(encoder(**changes))
    assert float(value) == pytest.approx(float(unrolled[0]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), gradient, unrolled[1])


@pytest.mark.slow
def test_scanned_half_precision_is_near_float32(unrolled: tuple[Any, Any]) -> None:
    value, _ = value_and_gradient(encoder(layers="scanned", dtype="bfloat16"))
    assert float(value) == pytest.approx(float(unrolled[0]), rel=0.03)


def test_parameters_lie_by_layer_in_either_form() -> None:
    scanned = jax.eval_shape(encoder(layers="scanned").init, jax.random.key(0), X_BLH, IDS_BL)["params"]
    assert sorted(scanned) == ["layer_0", "layer_1"]
    assert jax.tree.map(jnp.shape, nn.meta.unbox(scanned)) == jax.tree.map(jnp.shape, PARAMS)


@pytest.mark.slow
def test_every_dropout_site_of_a_pass_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = []
    keep_mask = dropout.keep_mask

    def recording(shape: Any, rate: float, r: Any, site: Any) -> jax.Array:
        sites.append(int(site))
        return keep_mask(shape, rate, r, site)

    monkeypatch.setattr(dropout, "keep_mask", recording)
    r = dropout.randomness(jax.random.key(1), jnp.arange(2))
    with jax.disable_jit():
        Encoder(CONFIG).apply({"params": PARAMS}, X_BLH, IDS_BL, r, 1)
    assert sorted(sites) == list(range(1, 1 + SITES_PER_LAYER * CONFIG.num_hidden_layers))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"layers": "scanned"}, {"remat": "full"}], ids=str)
def test_attention_maps_are_there_only_when_asked_for(changes: dict) -> None:
    module = encoder(**changes)
    y_BLH, state = module.apply({"params": PARAMS}, X_BLH, IDS_BL, mutable=["intermediates"])
    for i in range(2):
        (weights_BNLL,) = state["intermediates"][f"layer_{i}"]["attention"]["attention_weights"]
        assert weights_BNLL.shape == (2, 2, 6, 6) and weights_BNLL.dtype == jnp.float32
        np.testing.assert_allclose(weights_BNLL.sum(-1), 1, rtol=1e-5)
        assert not np.asarray(weights_BNLL)[0, :, :3, 3:].any()
    plain = module.apply({"params": PARAMS}, X_BLH, IDS_BL)
    assert isinstance(plain, jax.Array)
    np.testing.assert_allclose(plain, y_BLH, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_remat_keeps_what_its_policy_names() -> None:
    def kept(remat: str) -> int:
        """Elements held between the passes, parameters aside."""
        module = encoder(remat=remat, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        _, pull = jax.vjp(lambda x: module.apply({"params": PARAMS}, x, IDS_BL), X_BLH)
        return sum(leaf.size for leaf in jax.tree.leaves(pull) if leaf.ndim > 2)

    slots, h = 2 * 6, CONFIG.hidden_size
    # full keeps the input of each layer; names the input, six tensors of width H (the intermediate one twice that).
    assert kept("full") <= 2 * slots * h + X_BLH.size
    assert 2 * slots * h * 7 <= kept("names") <= 2 * slots * h * 9
    assert kept("full") < kept("dots") < kept("none")
    assert kept("names") < kept("none")
    assert len(SAVED_NAMES) == 6


def test_flops_count_each_product_once() -> None:
    h, f, tokens, length = 16, 32, 10, 5
    per_layer = 4 * 2 * tokens * h * h + 2 * 2 * tokens * h * f + 2 * 2 * (2 * length**2) * h
    assert encoder_flops(CONFIG, tokens, 2 * length**2) == 2 * per_layer


MEMORY_BSH = jax.random.normal(jax.random.key(6), (2, 5, 16))
MEMORY_IDS_BS = jnp.asarray([[1, 1, 2, 2, 0], [1, 1, 1, 1, 0]], jnp.int32)
DECODER_PARAMS = nn.meta.unbox(
    jax.jit(Decoder(CONFIG, 3).init, compiler_options=QUICK)(
        jax.random.key(0), X_BLH, IDS_BL, MEMORY_BSH, MEMORY_IDS_BS
    )["params"]
)


def decoder_value_and_gradient(scanned: bool, **changes: Any) -> tuple[Any, Any]:
    module = Decoder(dataclasses.replace(CONFIG, **changes), 3, scanned)

    def loss(params: Any, x_BLH: jax.Array, memory_BSH: jax.Array) -> jax.Array:
        r = dropout.randomness(jax.random.key(1), jnp.asarray([4, 9]))
        y_BLH: Any = module.apply({"params": params}, x_BLH, IDS_BL, memory_BSH, MEMORY_IDS_BS, r, 7)
        return (y_BLH.astype(jnp.float32) ** 3).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK)
    return step(DECODER_PARAMS, X_BLH, MEMORY_BSH)


@pytest.fixture(scope="module")
def decoder_unrolled() -> tuple[Any, Any]:
    return decoder_value_and_gradient(False)


@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "remat"), [(True, "none"), (False, "names"), (True, "full")], ids=str)
def test_scanning_and_recomputing_change_no_number_of_the_decoder(
    scanned: bool, remat: str, decoder_unrolled: tuple[Any, Any]
) -> None:
    value, gradient = decoder_value_and_gradient(scanned, remat=remat)
    assert float(value) == pytest.approx(float(decoder_unrolled[0]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), gradient, decoder_unrolled[1])


def test_the_decoder_has_its_own_layers_and_sites() -> None:
    assert sorted(DECODER_PARAMS) == ["layer_0", "layer_1", "layer_2"]
    assert DECODER_SITES_PER_LAYER == 5


def test_decoder_flops_count_keys_and_values_of_the_memory_once_a_position() -> None:
    h, f, tokens, memory = 16, 32, 10, 7
    products = 2 * tokens * (6 * h * h + 2 * h * f) + 2 * memory * 2 * h * h
    found = decoder_flops(CONFIG, 3, tokens=tokens, pairs=30, memory_tokens=memory, memory_pairs=40)
    assert found == 3 * (products + 2 * 2 * (30 + 40) * h)
