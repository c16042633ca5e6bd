"""The Transformer encoder and decoder, unrolled or scanned over their layers, with the same parameters and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.config import ConfigError, EncoderConfig
from transformer_jax.dropout import Randomness, dropout
from transformer_jax.layers import (
    PRODUCT_NAME,
    SAVED_NAMES,
    Attention,
    FeedForward,
    KeysValues,
    LayerNorm,
    compute_dtype,
)
from transformer_jax.sharding import split_rows

SITES_PER_LAYER = 3
"""Dropout sites of an encoder layer: attention weights, attention output, feed-forward output."""
DECODER_SITES_PER_LAYER = 5
"""Of a decoder layer: weights and output of each attention, feed-forward output."""

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "full": None,
    # Attention's own products, whose results grow with the square of the length, are computed again.
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT_NAME),
    "names": jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES),
}
"""Settings of `remat` other than "none", with the policy of `jax.checkpoint`."""


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with dropout, the residual sum and the norm."""

    config: EncoderConfig

    @nn.compact
    def __call__(
        self,
        x_BLH: jax.Array,
        sequence_ids_BL: jax.Array,
        randomness: Randomness | None,
        first_site: jax.Array | int,
    ) -> jax.Array:
        c = self.config
        attention = Attention(c, c.context, name="attention")

        def attend(x_BLH: jax.Array) -> jax.Array:
            return attention(x_BLH, x_BLH, sequence_ids_BL, sequence_ids_BL, randomness, first_site)

        x_BLH = residual(c, attend, LayerNorm(c, name="attention_norm"), x_BLH, randomness, first_site + 1)
        x_BLH = checkpoint_name(x_BLH, "attention_normed")
        feed_forward, norm = FeedForward(c, name="feed_forward"), LayerNorm(c, name="feed_forward_norm")
        return residual(c, feed_forward, norm, x_BLH, randomness, first_site + 2)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, and feed-forward (Vaswani et al. 2017, section 3.1)."""

    config: EncoderConfig

    def setup(self) -> None:
        c = self.config
        self.attention = Attention(c, context="left")
        self.attention_norm = LayerNorm(c)
        self.cross_attention = Attention(c)
        self.cross_attention_norm = LayerNorm(c)
        self.feed_forward = FeedForward(c)
        self.feed_forward_norm = LayerNorm(c)

    def __call__(
        self,
        x_BTH: jax.Array,
        sequence_ids_BT: jax.Array,
        memory_BSH: jax.Array,
        memory_ids_BS: jax.Array,
        randomness: Randomness | None,
        first_site: jax.Array | int,
    ) -> jax.Array:
        c = self.config

        def attend(x_BTH: jax.Array) -> jax.Array:
            return self.attention(x_BTH, x_BTH, sequence_ids_BT, sequence_ids_BT, randomness, first_site)

        def attend_memory(x_BTH: jax.Array) -> jax.Array:
            return self.cross_attention(x_BTH, memory_BSH, sequence_ids_BT, memory_ids_BS, randomness, first_site + 2)

        x_BTH = residual(c, attend, self.attention_norm, x_BTH, randomness, first_site + 1)
        x_BTH = checkpoint_name(x_BTH, "attention_normed")
        x_BTH = residual(c, attend_memory, self.cross_attention_norm, x_BTH, randomness, first_site + 3)
        x_BTH = checkpoint_name(x_BTH, "attention_normed")
        return residual(c, self.feed_forward, self.feed_forward_norm, x_BTH, randomness, first_site + 4)

    def memory_keys_values(self, memory_BSH: jax.Array) -> KeysValues:
        """What attention to the encoder's output needs of it, [B, S, N, D] each."""
        return self.cross_attention.keys_values(memory_BSH)


def residual(
    config: EncoderConfig,
    part: Callable[[jax.Array], jax.Array],
    norm: Callable[[jax.Array], jax.Array],
    x_BLH: jax.Array,
    randomness: Randomness | None,
    site: jax.Array | int,
) -> jax.Array:
    """norm(x + dropout(part(x))), as in the papers; with pre-norm x + dropout(part(norm(x))) (arXiv 2002.04745)."""
    y_BLH = part(norm(x_BLH) if config.pre_norm else x_BLH)
    y_BLH = x_BLH + dropout(y_BLH, config.hidden_dropout_prob, randomness, site)
    return split_rows(y_BLH if config.pre_norm else norm(y_BLH))


class Encoder(nn.Module):
    """The stack of layers. Parameters lie under layer_0, layer_1, ... in either form; with pre-norm also final_norm."""

    config: EncoderConfig

    def setup(self) -> None:
        self.layer = _layers(EncoderLayer, self.config, self.config.num_hidden_layers)
        if self.config.pre_norm:
            self.final_norm = LayerNorm(self.config)

    def __call__(
        self,
        x_BLH: jax.Array,
        sequence_ids_BL: jax.Array,
        randomness: Randomness | None = None,
        first_site: int = 0,
    ) -> jax.Array:
        """Args:
          x_BLH: embeddings.
          sequence_ids_BL: int32, 0 for padding, else the number of the sequence within the row.
          randomness: None for a deterministic pass.
          first_site: first of the num_hidden_layers * SITES_PER_LAYER dropout sites used here.

        With the collection "intermediates" mutable, each layer's attention weights are sown in it, which takes the
        unrolled form.
        """
        c = self.config
        run = _scan if c.scanned and _may_scan(self) else _unroll
        sites = (first_site, SITES_PER_LAYER)
        x_BLH = run(self, EncoderLayer, x_BLH.astype(compute_dtype(c)), (sequence_ids_BL,), randomness, sites)
        return self.final_norm(x_BLH) if c.pre_norm else x_BLH


class Decoder(nn.Module):
    """The decoder's stack, in the same two forms as the encoder's.

    Args:
      num_layers: how many; other sizes come from the configuration.
      scanned: which form.
    """

    config: EncoderConfig
    num_layers: int
    scanned: bool = False

    def setup(self) -> None:
        self.layer = _layers(DecoderLayer, self.config, self.num_layers)
        if self.config.pre_norm:
            self.final_norm = LayerNorm(self.config)

    def __call__(
        self,
        x_BTH: jax.Array,
        sequence_ids_BT: jax.Array,
        memory_BSH: jax.Array,
        memory_ids_BS: jax.Array,
        randomness: Randomness | None = None,
        first_site: int = 0,
    ) -> jax.Array:
        """Args:
        x_BTH: embeddings of what came before each position.
        sequence_ids_BT: int32, 0 for padding, else the number of the sequence within the row.
        memory_BSH: output of the encoder.
        memory_ids_BS: its sequence numbers; a position attends to the memory of its own number.
        first_site: first of the num_layers * DECODER_SITES_PER_LAYER dropout sites used here.
        """
        c = self.config
        dtype = compute_dtype(c)
        run = _scan if self.scanned and _may_scan(self) else _unroll
        inputs = (sequence_ids_BT, memory_BSH.astype(dtype), memory_ids_BS)
        sites = (first_site, DECODER_SITES_PER_LAYER)
        x_BTH = run(self, DecoderLayer, x_BTH.astype(dtype), inputs, randomness, sites)
        return self.final_norm(x_BTH) if c.pre_norm else x_BTH

    def memory_keys_values(self, memory_BSH: jax.Array) -> dict[str, KeysValues]:
        """For each layer the keys and values of the encoder's output, [B, S, N, D]: computed once for a sentence."""
        memory_BSH = memory_BSH.astype(compute_dtype(self.config))
        return {f"layer_{i}": layer.memory_keys_values(memory_BSH) for i, layer in enumerate(self.layer)}


def _layers(layer_class: Any, config: EncoderConfig, count: int) -> list[Any]:
    """`count` layers, each computed again in the backward pass as far as `remat` says."""
    if config.remat != "none":
        layer_class = nn.remat(layer_class, policy=REMAT_POLICIES[config.remat])
    return [layer_class(config) for _ in range(count)]


def _may_scan(stack: Encoder | Decoder) -> bool:
    return not stack.is_initializing() and not stack.is_mutable_collection("intermediates")


def _unroll(
    stack: Encoder | Decoder,
    layer_class: Any,
    x_BLH: jax.Array,
    inputs: tuple[jax.Array, ...],
    randomness: Randomness | None,
    sites: tuple[int, int],
) -> jax.Array:
    """One layer after another; `sites` is the first dropout site and how many a layer has."""
    for i, layer in enumerate(stack.layer):
        x_BLH = layer(x_BLH, *inputs, randomness, jnp.asarray(sites[0] + sites[1] * i, jnp.uint32))
    return x_BLH


def _scan(
    stack: Encoder | Decoder,
    layer_class: Any,
    x_BLH: jax.Array,
    inputs: tuple[jax.Array, ...],
    randomness: Randomness | None,
    sites: tuple[int, int],
) -> jax.Array:
    """The parameters stacked inside the program, and one layer that scans over them.

    One layer is compiled in place of all, at the price of a copy of the parameters and, on TPU, of stacking what the
    backward pass needs.
    """
    c = stack.config
    dtype = compute_dtype(c)
    layer: Any = layer_class(c, parent=None)

    def step(x_BLH: jax.Array, layer_inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        params, site = layer_inputs
        return layer.apply({"params": params}, x_BLH, *inputs, randomness, site), None

    if c.remat != "none":
        step = jax.checkpoint(step, policy=REMAT_POLICIES[c.remat], prevent_cse=False)

    def together(*leaves: jax.Array) -> jax.Array:
        # Kernels are used in the compute dtype alone: stacking them in it halves the copy in half precision.
        return jnp.stack([x.astype(dtype) if x.ndim == 2 else x for x in leaves])

    names = [f"layer_{i}" for i in range(len(stack.layer))]
    params = [nn.meta.unbox(stack.get_variable("params", name)) for name in names]
    if any(p is None for p in params):
        raise ConfigError(f"the parameters lack {[n for n, p in zip(names, params, strict=True) if p is None]}")
    stacked = jax.tree.map(together, *params)
    site_of_layer = jnp.arange(len(names), dtype=jnp.uint32) * sites[1] + sites[0]
    return jax.lax.scan(step, x_BLH, (stacked, site_of_layer))[0]


def encoder_flops(config: EncoderConfig, tokens: float, squared_lengths: float) -> float:
    """Floating-point operations of the encoder's matrix products in one forward pass.

    Args:
      tokens: number of real tokens.
      squared_lengths: sum over sequences of the squared real length, the pairs that attention scores; of one-way
        context about half of them.
    """
    h, f = config.hidden_size, config.intermediate_size
    pairs = squared_lengths if config.context == "both" else (squared_lengths + tokens) / 2
    return config.num_hidden_layers * (2.0 * tokens * (4 * h * h + 2 * h * f) + 4.0 * pairs * h)


def decoder_flops(
    config: EncoderConfig, layers: int, *, tokens: float, pairs: float, memory_tokens: float, memory_pairs: float
) -> float:
    """Floating-point operations of the decoder's matrix products in one forward pass.

    Args:
      tokens: real positions of the decoder.
      pairs: of them, (query, key) pairs that causal attention scores: n (n + 1) / 2 for a sequence of n.
      memory_tokens: real positions of the encoder, each of which is made keys and values.
      memory_pairs: pairs of a decoder's position and a memory position of its sequence.
    """
    h, f = config.hidden_size, config.intermediate_size
    products = 2.0 * tokens * (6 * h * h + 2 * h * f) + 4.0 * memory_tokens * h * h
    return layers * (products + 4.0 * (pairs + memory_pairs) * h)
