"""The Transformer encoder, unrolled or scanned over its layers, with the same parameters and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.config import ConfigError, EncoderConfig
from transformer_jax.dropout import Randomness, dropout
from transformer_jax.layers import PRODUCT_NAME, SAVED_NAMES, FeedForward, LayerNorm, SelfAttention, compute_dtype
from transformer_jax.sharding import split_rows

SITES_PER_LAYER = 3
"""Dropout sites of a layer: attention weights, attention output, feed-forward output."""

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "full": None,
    # Attention's own products, whose results grow with the square of the length, are computed again.
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT_NAME),
    "names": jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES),
}
"""Settings of `remat` other than "none", with the policy of `jax.checkpoint`."""


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each followed by dropout, the residual sum and the norm (post-norm)."""

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
        y_BLH = SelfAttention(c, name="attention")(x_BLH, sequence_ids_BL, randomness, first_site)
        y_BLH = dropout(y_BLH, c.hidden_dropout_prob, randomness, first_site + 1)
        x_BLH = checkpoint_name(split_rows(LayerNorm(c, name="attention_norm")(x_BLH + y_BLH)), "attention_normed")
        y_BLH = dropout(FeedForward(c, name="feed_forward")(x_BLH), c.hidden_dropout_prob, randomness, first_site + 2)
        return split_rows(LayerNorm(c, name="feed_forward_norm")(x_BLH + y_BLH))


class Encoder(nn.Module):
    """The stack of layers. Parameters lie under layer_0, layer_1, ... in either form.

    The scanned form stacks them inside the program and scans: one layer is compiled in place of all, at the price of a
    copy of the parameters and, on TPU, of stacking what the backward pass needs.
    """

    config: EncoderConfig

    @nn.compact
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
        x_BLH = x_BLH.astype(compute_dtype(c))
        if c.scanned and not self.is_initializing() and not self.is_mutable_collection("intermediates"):
            return self._scan(x_BLH, sequence_ids_BL, randomness, first_site)
        layer_class: Any = EncoderLayer
        if c.remat != "none":
            layer_class = nn.remat(EncoderLayer, policy=REMAT_POLICIES[c.remat])
        for i in range(c.num_hidden_layers):
            site = jnp.asarray(first_site + SITES_PER_LAYER * i, jnp.uint32)
            x_BLH = layer_class(c, name=f"layer_{i}")(x_BLH, sequence_ids_BL, randomness, site)
        return x_BLH

    def _scan(
        self, x_BLH: jax.Array, sequence_ids_BL: jax.Array, randomness: Randomness | None, first_site: int
    ) -> jax.Array:
        c = self.config
        dtype = compute_dtype(c)
        layer: Any = EncoderLayer(c, parent=None)

        def step(x_BLH: jax.Array, layer_inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
            params, site = layer_inputs
            return layer.apply({"params": params}, x_BLH, sequence_ids_BL, randomness, site), None

        if c.remat != "none":
            step = jax.checkpoint(step, policy=REMAT_POLICIES[c.remat], prevent_cse=False)

        def stack(*leaves: jax.Array) -> jax.Array:
            # Kernels are used in the compute dtype alone: stacking them in it halves the copy in half precision.
            return jnp.stack([x.astype(dtype) if x.ndim == 2 else x for x in leaves])

        names = [f"layer_{i}" for i in range(c.num_hidden_layers)]
        params = [nn.meta.unbox(self.get_variable("params", name)) for name in names]
        if any(p is None for p in params):
            raise ConfigError(f"the parameters lack {[n for n, p in zip(names, params, strict=True) if p is None]}")
        stacked = jax.tree.map(stack, *params)
        sites = jnp.arange(c.num_hidden_layers, dtype=jnp.uint32) * SITES_PER_LAYER + first_site
        return jax.lax.scan(step, x_BLH, (stacked, sites))[0]


def encoder_flops(config: EncoderConfig, tokens: float, squared_lengths: float) -> float:
    """Floating-point operations of the encoder's matrix products in one forward pass.

    Args:
      tokens: number of real tokens.
      squared_lengths: sum over sequences of the squared real length, the pairs that attention scores.
    """
    h, f = config.hidden_size, config.intermediate_size
    return config.num_hidden_layers * (2.0 * tokens * (4 * h * h + 2 * h * f) + 4.0 * squared_lengths * h)
