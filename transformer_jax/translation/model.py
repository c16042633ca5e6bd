"""The Transformer for translation: embeddings, encoder, decoder and tied output (Vaswani et al. 2017).

The layout is Marian's, so that a trained model can be exported: `<pad>` is the last piece of each vocabulary, its
vector is exactly zero, the decoder starts from it, and sinusoids come as a half of sines and a half of cosines.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax import masks
from transformer_jax.config import ConfigError
from transformer_jax.dropout import Randomness, dropout, of_pass
from transformer_jax.embeddings import BertEmbeddings, sinusoids
from transformer_jax.layers import Embedding, KeysValues, broadcast_last, compute_dtype, partitioned, wide_dtype
from transformer_jax.model import (
    SITES_PER_LAYER,
    Decoder,
    Encoder,
    decoder_flops,
    encoder_flops,
)
from transformer_jax.sharding import split_rows
from transformer_jax.translation.config import TransformerConfig

SOURCE_SITE = 0
TARGET_SITE = 1
FIRST_LAYER_SITE = 2


class Embeddings(nn.Module):
    """The tables: `target` always, `source` unless all are shared, `output` only if untied.

    `<pad>` and the padding of the tables are born zero, are zero when looked up, and get no gradient.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config

        def table(size: int, padded: int) -> Embedding:
            return Embedding(padded, "vocab", c, used=size - 1, zero_unused=True)

        self.target = table(c.target_vocab_size, c.padded_target_vocab_size)
        if c.encoder_embeddings == "bert":
            self.source: Any = BertEmbeddings(
                c, c.source_vocab_size, c.padded_source_vocab_size, c.max_position_embeddings, c.type_vocab_size
            )
        elif c.embeddings != "shared":
            self.source = table(c.source_vocab_size, c.padded_source_vocab_size)
        if c.embeddings == "untied":
            self.output = table(c.target_vocab_size, c.padded_target_vocab_size)

    def embed_source(self, ids_BS: jax.Array, position_ids_BS: jax.Array, r: Randomness | None) -> jax.Array:
        """Embedded source pieces [B, S, H]."""
        c = self.config
        if c.encoder_embeddings == "bert":
            return self.source(ids_BS, jnp.zeros_like(ids_BS), position_ids_BS, r, SOURCE_SITE)
        table = self.target if c.embeddings == "shared" else self.source
        x_BSH = self._scaled(table(ids_BS), position_ids_BS, ids_BS.shape[1])
        return dropout(x_BSH, c.hidden_dropout_prob, r, SOURCE_SITE)

    def embed_target(
        self, ids_BT: jax.Array, position_ids_BT: jax.Array, r: Randomness | None, length: int
    ) -> jax.Array:
        """Embedded target pieces [B, T, H]; positions are below `length`."""
        x_BTH = self._scaled(self.target(ids_BT), position_ids_BT, length)
        return dropout(x_BTH, self.config.hidden_dropout_prob, r, TARGET_SITE)

    def scores(self, x_BTH: jax.Array) -> jax.Array:
        """Scores of each piece, float32 [B, T, Vpadded]; -1e9 for `<pad>` and the padding of the table."""
        c = self.config
        table = self.output if c.embeddings == "untied" else self.target
        is_piece_V = jnp.arange(c.padded_target_vocab_size) < c.target_vocab_size - 1
        scores_BTV = table.attend(x_BTH)
        # Added, not selected: with the score of a zero vector the sum is -1e9 as it stands.
        return scores_BTV + jnp.where(is_piece_V, 0.0, masks.FORBIDDEN).astype(scores_BTV.dtype)[None, None]

    def _scaled(self, x_BLH: jax.Array, position_ids_BL: jax.Array, length: int) -> jax.Array:
        c = self.config
        wide = wide_dtype(compute_dtype(c))
        scale = math.sqrt(c.hidden_size) if c.scale_embedding else 1.0
        table_LH = jnp.asarray(sinusoids(length, c.hidden_size), wide)
        # A position out of range gives NaN, which the training step notices.
        positions_BLH = split_rows(jnp.take(table_LH, position_ids_BL, axis=0, mode="fill"))
        return (x_BLH.astype(wide) * scale + positions_BLH).astype(x_BLH.dtype)


class OutputBias(nn.Module):
    """A trained number for each piece, added to its score. Those of `<pad>` and the padding are born zero and get no
    gradient, since their scores are too low for one."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, scores_BTV: jax.Array) -> jax.Array:
        bias_init = partitioned(nn.initializers.zeros, "vocab")
        bias_V = self.param("bias", bias_init, scores_BTV.shape[-1:], wide_dtype(compute_dtype(self.config)))
        return scores_BTV + broadcast_last(bias_V, scores_BTV.ndim)


class Transformer(nn.Module):
    """Encoder and decoder with their embeddings.

    Training runs `__call__`. Decoding runs `encode` and `memory_keys_values` once for each sentence, through
    `apply(..., method=...)`, and then `step.decode_step` position by position.
    """

    config: TransformerConfig

    def setup(self) -> None:
        c = self.config
        for name in ("source_vocab_size", "target_vocab_size"):
            if getattr(c, name) < 2:
                raise ConfigError(
                    f"model.{name} is {getattr(c, name)}; prepare the data first, or set it to the vocabulary's size"
                )
        self.embeddings = Embeddings(c)
        self.encoder = Encoder(c)
        self.decoder = Decoder(c, c.num_decoder_layers, c.decoder_scanned)
        if c.output_bias:
            self.output = OutputBias(c)

    def __call__(
        self,
        input_ids: jax.Array,
        position_ids: jax.Array,
        sequence_ids: jax.Array,
        decoder_input_ids: jax.Array,
        decoder_position_ids: jax.Array,
        decoder_sequence_ids: jax.Array,
        row_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Score each target piece after those before it.

        Args:
          input_ids, position_ids: int32 [B, S]; positions count from 0 in each pair of a packed row.
          sequence_ids: int32 [B, S]; 0 for padding, else the number of the pair within the row.
          decoder_input_ids, decoder_position_ids, decoder_sequence_ids: int32 [B, T], the same for the target;
            the input is `<pad>` and then the pieces. A position sees the source of its own number.
          row_ids: int32 [B], index of each row in the global batch, for dropout; None counts from 0.
          dropout_key: a JAX key; None switches dropout off.

        Returns:
          float32 [B, T, Vpadded]; `<pad>` and the padding of the table hold -1e9 and pass no gradient.

        Raises:
          ConfigError: at trace time, when shapes do not fit together or a row is longer than
            `max_position_embeddings`.
        """
        c = self.config
        check_shapes(
            c,
            input_ids=input_ids,
            position_ids=position_ids,
            sequence_ids=sequence_ids,
            decoder_input_ids=decoder_input_ids,
            decoder_position_ids=decoder_position_ids,
            decoder_sequence_ids=decoder_sequence_ids,
        )
        r = of_pass(dropout_key, row_ids, input_ids.shape[0], c.dropout_generator)
        memory_BSH = self._encode(input_ids, position_ids, sequence_ids, r)
        length = decoder_input_ids.shape[1]
        x_BTH = self.embeddings.embed_target(decoder_input_ids, decoder_position_ids, r, length)
        site = FIRST_LAYER_SITE + SITES_PER_LAYER * c.num_hidden_layers
        x_BTH = self.decoder(x_BTH, decoder_sequence_ids, memory_BSH, sequence_ids, r, site)
        scores_BTV = self.embeddings.scores(x_BTH)
        return self.output(scores_BTV) if c.output_bias else scores_BTV

    def encode(self, input_ids: jax.Array, position_ids: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        """The encoder's output [B, S, H], without dropout."""
        check_shapes(self.config, input_ids=input_ids, position_ids=position_ids, sequence_ids=sequence_ids)
        return self._encode(input_ids, position_ids, sequence_ids, None)

    def _encode(self, ids_BS: jax.Array, positions_BS: jax.Array, seq_BS: jax.Array, r: Randomness | None) -> jax.Array:
        x_BSH = self.embeddings.embed_source(ids_BS, positions_BS, r)
        return self.encoder(x_BSH, seq_BS, r, FIRST_LAYER_SITE)

    def memory_keys_values(self, memory_BSH: jax.Array) -> dict[str, KeysValues]:
        """For each decoder layer the keys and values [B, S, N, D] of the encoder's output."""
        return self.decoder.memory_keys_values(memory_BSH)


def check_shapes(config: TransformerConfig, **arrays: Any) -> None:
    """Raise ConfigError when the shapes of one side do not fit together, or its rows are too long.

    Looks at shapes alone, so it also works on abstract arrays and before any compilation.
    """
    for side, setting in (("", "max_source_length"), ("decoder_", "max_target_length")):
        ids = arrays.get(f"{side}input_ids")
        if ids is None:
            continue
        if len(ids.shape) != 2:
            raise ConfigError(f"{side}input_ids has shape {ids.shape}; it must be [rows, length]")
        if ids.shape[1] > config.max_position_embeddings:
            raise ConfigError(
                f"rows of {side}input_ids are {ids.shape[1]} pieces long, but the model has "
                f"{config.max_position_embeddings} positions (max_position_embeddings); shorten the rows "
                f"(examples.{setting}) or use a model with more positions"
            )
        for name in (f"{side}position_ids", f"{side}sequence_ids"):
            if arrays[name].shape != ids.shape:
                raise ConfigError(f"{name} has shape {arrays[name].shape}; it must have that of its ids, {ids.shape}")
    rows = {name: x.shape[0] for name, x in arrays.items()}
    if len(set(rows.values())) > 1:
        raise ConfigError(f"source and target have different numbers of rows: {rows}")


def abstract_params(config: TransformerConfig) -> Any:
    """The parameters as shapes and dtypes, without allocating them: a nested dict of ShapeDtypeStruct."""
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return nn.meta.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), *[ids] * 6)["params"])


def count_parameters(config: TransformerConfig) -> dict[str, int]:
    """Numbers of parameters by part, without the tables' padding rows.

    `<pad>` counts although its vector is fixed at zero: it stands in the vocabulary and in every export.

    Returns:
      One entry for each table under its name (`embeddings/target`, ...), then encoder, decoder, the output's bias
      where there is one, and total. A table with several uses counts once.
    """
    params = abstract_params(config)
    tables = params.pop("embeddings")
    counts = {f"embeddings/{name}": _size(table) for name, table in tables.items()}
    counts |= {name: _size(params[name]) for name in ("encoder", "decoder")}
    for name in tables:
        padded = config.padded_source_vocab_size if name == "source" else config.padded_target_vocab_size
        used = config.source_vocab_size if name == "source" else config.target_vocab_size
        counts[f"embeddings/{name}"] -= (padded - used) * config.hidden_size
    if config.output_bias:
        counts["output"] = config.target_vocab_size
    return counts | {"total": sum(counts.values())}


def _size(tree: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def model_flops(
    config: TransformerConfig,
    *,
    source_tokens: float,
    source_pairs: float,
    target_tokens: float,
    target_pairs: float,
    cross_pairs: float,
    predictions: float,
) -> float:
    """Floating-point operations that one training step on these pairs needs: three forward passes' products.

    Only what the model asks for counts: no padding, no recomputation, no attention between packed pairs, and of the
    decoder's own attention the causal half. So padded and packed rows of the same pairs have the same figure.

    Args:
      source_tokens, target_tokens: real positions of each side.
      source_pairs: sum of the squared lengths of the sources.
      target_pairs: sum of n (n + 1) / 2 over the targets' lengths n.
      cross_pairs: sum of the products of the lengths of source and target.
      predictions: target positions with a weight.
    """
    forward = encoder_flops(config, source_tokens, source_pairs)
    forward += decoder_flops(
        config,
        config.num_decoder_layers,
        tokens=target_tokens,
        pairs=target_pairs,
        memory_tokens=source_tokens,
        memory_pairs=cross_pairs,
    )
    return 3.0 * (forward + 2.0 * predictions * config.hidden_size * config.target_vocab_size)
