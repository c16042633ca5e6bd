"""What the encoder computes on its way: the output of every layer, and the attention weights of every head.

The training path knows nothing of this: Flax collects the values while the same modules run. What is not asked for is
not computed, layers above the highest one that is asked for included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import BertConfig
from bert_jax.model import EMBEDDING_SITE, ENCODER_SITE, BertForPreTraining, check_shapes
from transformer_jax.config import UserError

Params = Mapping[str, Any]
INPUTS = ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
"""The arrays of a batch: int32 [B, L]; sequence_ids are 0 for padding, 1 for a real token."""


def for_inspection(config: BertConfig) -> BertConfig:
    """The same model in float32 and with its layers unrolled, whatever it was trained in."""
    return dataclasses.replace(config, dtype="float32", layers="unrolled", remat="none")


def layer_numbers(config: BertConfig, asked: Sequence[int]) -> tuple[int, ...]:
    """Numbers of layers with those below 0 counted from the last: 0 is the embeddings, -1 the last layer.

    They are those of `hidden_states` in Hugging Face: num_hidden_layers + 1 of them.

    Raises:
      UserError: no layer, or one that the model does not have.
    """
    count = config.num_hidden_layers + 1
    if not asked:
        raise UserError(f"no layer is named; the model has 0 (the embeddings) to {count - 1}")
    for number in asked:
        if not -count <= number < count:
            raise UserError(
                f"there is no layer {number}; the model has 0 (the embeddings) to {count - 1}, or from the last one "
                f"-1 to {-count}"
            )
    return tuple(number % count for number in asked)


def hidden_states(config: BertConfig, params: Params, batch: Mapping[str, Any]) -> list[jax.Array]:
    """The embeddings and the output of each layer, [B, L, H] each: what Hugging Face calls `hidden_states`.

    Args:
      params: `embeddings` and `encoder`, of any of our models.
      batch: INPUTS.
    """
    embedded_BLH, found = _run(config, params, batch)
    outputs = [found["encoder"][f"layer_{i}"]["__call__"][0] for i in range(config.num_hidden_layers)]
    return [embedded_BLH, *outputs]


def attention_weights(config: BertConfig, params: Params, batch: Mapping[str, Any]) -> list[jax.Array]:
    """For each layer the weights by which its heads mix the values, float32 [B, N, L, L]; each row sums to 1.

    Args: as `hidden_states`.
    """
    _, found = _run(config, params, batch)
    layers = found["encoder"]
    return [layers[f"layer_{i}"]["attention"]["attention_weights"][0] for i in range(config.num_hidden_layers)]


def pooled(config: BertConfig, params: Params, last_BLH: jax.Array) -> jax.Array:
    """The pooled output [B, H] of rows that start with [CLS], from the last layer's output."""

    def run(model: BertForPreTraining, cls_BH: jax.Array) -> jax.Array:
        return jnp.tanh(model.pooler(cls_BH))

    model = BertForPreTraining(for_inspection(config))
    return model.apply({"params": params}, last_BLH[:, 0], method=run)  # type: ignore[return-value]


def _run(config: BertConfig, params: Params, batch: Mapping[str, Any]) -> tuple[jax.Array, Any]:
    """The embedded tokens, and what the modules computed and noted, by their place in the parameters."""
    ids_BL, types_BL, positions_BL, sequence_ids_BL = (batch[name] for name in INPUTS)
    check_shapes(config, ids_BL, types_BL, positions_BL, sequence_ids_BL)

    def run(model: BertForPreTraining) -> jax.Array:
        x_BLH = model.embeddings(ids_BL, types_BL, positions_BL, None, EMBEDDING_SITE)
        model.encoder(x_BLH, sequence_ids_BL, None, ENCODER_SITE)
        return x_BLH

    def is_layer(module: Any, method: str) -> bool:
        return method == "__call__" and module.path[:1] == ("encoder",) and len(module.path) == 2

    embedded, state = BertForPreTraining(for_inspection(config)).apply(
        {"params": params}, method=run, capture_intermediates=is_layer, mutable=["intermediates"]
    )
    return embedded, state["intermediates"]
