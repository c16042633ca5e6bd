"""BERT for pretraining: embeddings, encoder, pooler, masked-LM head and next-sentence head (Devlin et al. 2019)."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.config import BertConfig
from transformer_jax import dropout, masks
from transformer_jax.config import ConfigError
from transformer_jax.embeddings import BertEmbeddings
from transformer_jax.layers import ACTIVATIONS, Dense, LayerNorm, compute_dtype, partitioned, wide_dtype
from transformer_jax.model import Encoder, encoder_flops
from transformer_jax.sharding import split_rows

EMBEDDING_SITE = 0
ENCODER_SITE = 1


class BertOutput(TypedDict):
    """What the model gives."""

    sequence_output_BLH: jax.Array
    pooled_output_BSH: jax.Array
    mlm_logits_BPV: jax.Array
    nsp_logits_BS2: jax.Array


class MaskedLMTransform(nn.Module):
    """Dense, activation and norm before the tied decoder, and the decoder's bias."""

    config: BertConfig

    @nn.compact
    def __call__(self, x_BPH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (x_BPH to be scored against the word embeddings, bias float32 [Vpadded])."""
        c = self.config
        # Not ("embed", "embed"): one mesh axis cannot split both sides of a kernel.
        x_BPH = ACTIVATIONS[c.hidden_act](Dense(c.hidden_size, ("embed", "mlp"), c, name="transform")(x_BPH))
        bias_V = self.param(
            "bias", partitioned(nn.initializers.zeros, "vocab"), (c.padded_vocab_size,), wide_dtype(compute_dtype(c))
        )
        return split_rows(LayerNorm(c, name="norm")(x_BPH)), bias_V


class BertForPreTraining(nn.Module):
    """BERT with both pretraining heads.

    The masked-LM head runs only at the positions asked for, since the product with the vocabulary costs as much there
    as several layers. The next-sentence head runs at the [CLS] of each sequence of a row.
    """

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        if c.vocab_size < 1:
            raise ConfigError("model.vocab_size is 0; prepare the data first, or set it to the vocabulary's size")
        self.embeddings = BertEmbeddings(
            c, c.vocab_size, c.padded_vocab_size, c.max_position_embeddings, c.type_vocab_size
        )
        self.encoder = Encoder(c)
        self.pooler = Dense(c.hidden_size, ("embed", "mlp"), c)
        self.mlm = MaskedLMTransform(c)
        self.nsp = Dense(2, ("embed", "classes"), c)

    def __call__(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array,
        position_ids: jax.Array,
        sequence_ids: jax.Array,
        masked_lm_positions: jax.Array | None = None,
        cls_positions: jax.Array | None = None,
        row_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> BertOutput:
        """Score a batch.

        Args:
          input_ids, token_type_ids, position_ids: int32 [B, L].
          sequence_ids: int32 [B, L]; 0 for padding, else the number of the sequence within the row.
          masked_lm_positions: int32 [B, P], where the masked-LM head runs; None runs it at all L positions.
          cls_positions: int32 [B, S], the [CLS] of each sequence; None is position 0 of each row.
          row_ids: int32 [B], index of each row in the global batch, for dropout; None counts from 0.
          dropout_key: a JAX key; None switches dropout off.

        Returns:
          sequence_output_BLH and pooled_output_BSH in the compute dtype; mlm_logits_BPV and nsp_logits_BS2 in float32.
          The V of the logits is the padded size; padding entries hold -1e9 and pass no gradient.

        Raises:
          ConfigError: at trace time, when shapes do not fit together or L is past the position table.
        """
        check_shapes(
            self.config, input_ids, token_type_ids, position_ids, sequence_ids, masked_lm_positions, cls_positions
        )
        randomness = dropout.of_pass(dropout_key, row_ids, input_ids.shape[0], self.config.dropout_generator)
        x_BLH = self.embeddings(input_ids, token_type_ids, position_ids, randomness, EMBEDDING_SITE)
        x_BLH = self.encoder(x_BLH, sequence_ids, randomness, ENCODER_SITE)
        if cls_positions is None:
            cls_positions = jnp.zeros((input_ids.shape[0], 1), jnp.int32)
        pooled_BSH = jnp.tanh(self.pooler(take_positions(x_BLH, cls_positions)))
        picked_BPH = x_BLH if masked_lm_positions is None else take_positions(x_BLH, masked_lm_positions)
        return BertOutput(
            sequence_output_BLH=x_BLH,
            pooled_output_BSH=pooled_BSH,
            mlm_logits_BPV=self.mlm_logits(picked_BPH),
            nsp_logits_BS2=self.nsp(pooled_BSH).astype(wide_dtype(pooled_BSH.dtype)),
        )

    def mlm_logits(self, x_BPH: jax.Array) -> jax.Array:
        """Hidden states [B, P, H] to scores of each vocabulary entry, float32 [B, P, Vpadded]."""
        x_BPH, bias_V = self.mlm(x_BPH)
        # The bias carries the mask: a select over all logits, forward and backward, would cost as much as the softmax.
        is_entry_V = jnp.arange(self.config.padded_vocab_size) < self.config.vocab_size
        bias_V = jnp.where(is_entry_V, bias_V, masks.FORBIDDEN)
        return self.embeddings.scores(x_BPH) + bias_V[None, None, :]


def take_positions(x_BLH: jax.Array, positions_BP: jax.Array) -> jax.Array:
    """The vectors at the given positions of each row, [B, P, H]."""
    return split_rows(jnp.take_along_axis(x_BLH, positions_BP[:, :, None], axis=1))


def check_shapes(
    config: BertConfig,
    input_ids: jax.Array,
    token_type_ids: jax.Array,
    position_ids: jax.Array,
    sequence_ids: jax.Array,
    masked_lm_positions: jax.Array | None = None,
    cls_positions: jax.Array | None = None,
) -> None:
    """Raise ConfigError when the arrays' shapes do not fit together, or rows are longer than the position table.

    Looks at shapes alone, so it also works on abstract arrays and before any compilation.
    """
    if len(input_ids.shape) != 2:
        raise ConfigError(f"input_ids has shape {input_ids.shape}; it must be [rows, length]")
    rows, length = input_ids.shape
    if length > config.max_position_embeddings:
        raise ConfigError(
            f"rows are {length} tokens long, but the model has {config.max_position_embeddings} positions "
            "(max_position_embeddings); shorten the rows (examples.max_seq_length) or use a model with more positions"
        )
    for name, x in (
        ("token_type_ids", token_type_ids),
        ("position_ids", position_ids),
        ("sequence_ids", sequence_ids),
    ):
        if x.shape != input_ids.shape:
            raise ConfigError(f"{name} has shape {x.shape}; it must have that of input_ids, {input_ids.shape}")
    for name, y in (("masked_lm_positions", masked_lm_positions), ("cls_positions", cls_positions)):
        if y is not None and (len(y.shape) != 2 or y.shape[0] != rows):
            raise ConfigError(f"{name} has shape {y.shape}; it must be [{rows}, any number]")


def abstract_params(config: BertConfig) -> Any:
    """The parameters as shapes and dtypes, without allocating them: a nested dict of ShapeDtypeStruct."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    init = jax.eval_shape(BertForPreTraining(config).init, jax.random.key(0), ids, ids, ids, ids, ids, ids)
    return nn.meta.unbox(init["params"])


def count_parameters(config: BertConfig) -> dict[str, int]:
    """Numbers of parameters by part, without the vocabulary's padding rows.

    Returns:
      One entry for each of embeddings, encoder, pooler, mlm and nsp; `bert_model`, the first three, which is what the
      published counts cover; and `total`. The tied decoder counts once, under embeddings.
    """
    params = abstract_params(config)
    counts = {name: sum(math.prod(x.shape) for x in jax.tree.leaves(part)) for name, part in params.items()}
    padding = config.padded_vocab_size - config.vocab_size
    counts["embeddings"] -= padding * config.hidden_size
    counts["mlm"] -= padding
    parts = ("embeddings", "encoder", "pooler", "mlm", "nsp")
    by_part = {name: counts[name] for name in parts}
    return by_part | {
        "bert_model": sum(by_part[name] for name in parts[:3]),
        "total": sum(by_part.values()),
    }


def model_flops(config: BertConfig, *, tokens: float, squares: float, predictions: float, sequences: float) -> float:
    """Floating-point operations that one training step on these examples needs: three forward passes' products.

    Only what the model asks for counts: no padding, no recomputation, no attention between packed sequences. So padded
    and packed rows of the same examples have the same figure.

    Args:
      tokens: real tokens.
      squares: sum of the squared lengths of the sequences.
      predictions: masked positions with a weight.
      sequences: sequences with a next-sentence label.
    """
    h = config.hidden_size
    forward = encoder_flops(config, tokens, squares)
    forward += 2.0 * predictions * (h * h + h * config.vocab_size)
    forward += 2.0 * sequences * (h * h + 2 * h)
    return 3.0 * forward
