"""BERT with one head for fine-tuning (Devlin et al. 2019, section 3.2 and figure 4).

    classification, multi_label, regression   the pooled [CLS] to one score a class (or one number)
    tagging                                   each token to one score a tag
    span                                      each token to a score as the start and one as the end of the answer
    choice                                    the pooled [CLS] of each choice to one score

Of a model that sees only what is on the left, the last token stands for [CLS] (Radford et al. 2018, section 3.2).

Embeddings, encoder and pooler have the names and shapes of `BertForPreTraining`; the layout of the heads is that of
Hugging Face's classes of the same purpose, so that a fine-tuned model is one of theirs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert_jax.config import BertConfig
from bert_jax.model import EMBEDDING_SITE, ENCODER_SITE, check_shapes
from transformer_jax import dropout
from transformer_jax.config import ConfigError
from transformer_jax.embeddings import BertEmbeddings
from transformer_jax.layers import Dense, compute_dtype, wide_dtype
from transformer_jax.model import SITES_PER_LAYER, Encoder

Kind = Literal["classification", "multi_label", "regression", "tagging", "span", "choice"]
HF_CLASSES: dict[str, str] = {
    "classification": "BertForSequenceClassification",
    "multi_label": "BertForSequenceClassification",
    "regression": "BertForSequenceClassification",
    "tagging": "BertForTokenClassification",
    "span": "BertForQuestionAnswering",
    "choice": "BertForMultipleChoice",
}
"""The Hugging Face class that each kind of head is."""


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """What the head does, and the names of what it gives."""

    kind: Kind = "classification"
    labels: tuple[str, ...] = ()
    """Names of the classes or tags, in the order of their ids; for regression the name of the number; none for span and
    choice."""
    dropout: float = -1.0
    """Before the head; negative: the encoder's hidden_dropout_prob. The head of spans has none."""

    def __post_init__(self) -> None:
        if len(set(self.labels)) != len(self.labels):
            twice = next(name for name in self.labels if self.labels.count(name) > 1)
            raise ConfigError(f"the label {twice!r} is there twice; name each class once")
        if not self.dropout < 1.0:
            raise ConfigError(f"the head's dropout is {self.dropout}; it must be below 1")

    @property
    def num_outputs(self) -> int:
        """Columns of the head's kernel."""
        return {"span": 2, "choice": 1, "regression": 1}.get(self.kind, len(self.labels))

    @property
    def has_pooler(self) -> bool:
        """Whether the head sees the pooled [CLS]; else it sees each token."""
        return self.kind not in ("tagging", "span")


class BertWithHead(nn.Module):
    """BERT's encoder and one head."""

    config: BertConfig
    head: HeadConfig

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array,
        position_ids: jax.Array,
        sequence_ids: jax.Array,
        row_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Score a batch.

        Args:
          input_ids, token_type_ids, position_ids: int32 [B, L]; for choice [B, K, L].
          sequence_ids: int32 of the same shape; 0 for padding, 1 for a real token.
          row_ids: int32 [B], index of each row in the global batch, for dropout; None counts from 0.
          dropout_key: a JAX key; None switches dropout off.

        Returns:
          Float32 logits: [B, C] (classification, multi_label, regression), [B, L, C] (tagging), [B, L, 2] (span: start
          and end), [B, K] (choice).

        Raises:
          ConfigError: at trace time, when shapes do not fit together or L is past the position table, or a head of
            classes without names.
        """
        c, kind = self.config, self.head.kind
        if not self.head.num_outputs:
            raise ConfigError(f"a head for {kind} needs the names of its labels")
        leading = input_ids.shape[:-1]
        if kind == "choice":
            if input_ids.ndim != 3:
                raise ConfigError(
                    f"input_ids has shape {input_ids.shape}; for choice it must be [rows, choices, length]"
                )
            arrays = (input_ids, token_type_ids, position_ids, sequence_ids)
            # One choice is one row of the encoder; only the softmax of the loss brings them together.
            input_ids, token_type_ids, position_ids, sequence_ids = (x.reshape(-1, x.shape[-1]) for x in arrays)
            if row_ids is not None:
                choices = jnp.arange(leading[1], dtype=row_ids.dtype)
                row_ids = (row_ids[:, None] * leading[1] + choices[None, :]).reshape(-1)
        check_shapes(c, input_ids, token_type_ids, position_ids, sequence_ids)
        randomness = dropout.of_pass(dropout_key, row_ids, input_ids.shape[0], c.dropout_generator)
        embeddings = BertEmbeddings(
            c, c.vocab_size, c.padded_vocab_size, c.max_position_embeddings, c.type_vocab_size, name="embeddings"
        )
        x = embeddings(input_ids, token_type_ids, position_ids, randomness, EMBEDDING_SITE)
        x = Encoder(c, name="encoder")(x, sequence_ids, randomness, ENCODER_SITE)
        if self.head.has_pooler:
            x = jnp.tanh(Dense(c.hidden_size, ("embed", "mlp"), c, name="pooler")(whole_row(c, x, sequence_ids)))
        if kind != "span":
            rate = c.hidden_dropout_prob if self.head.dropout < 0 else self.head.dropout
            x = dropout.dropout(x, rate, randomness, ENCODER_SITE + SITES_PER_LAYER * c.num_hidden_layers)
        logits = Dense(self.head.num_outputs, ("embed", "classes"), c, name="head")(x)
        logits = logits.astype(wide_dtype(compute_dtype(c)))
        return logits.reshape(leading) if kind == "choice" else logits


def whole_row(config: BertConfig, x_BLH: jax.Array, sequence_ids_BL: jax.Array) -> jax.Array:
    """The vector that has seen the whole row, [B, H]: of [CLS], or of the last token where only the left is seen."""
    if config.context != "left":
        return x_BLH[:, 0]
    last_B = jnp.maximum(jnp.sum(sequence_ids_BL > 0, axis=1) - 1, 0)
    return jnp.take_along_axis(x_BLH, last_B[:, None, None], axis=1)[:, 0]


def abstract_params(config: BertConfig, head: HeadConfig) -> Any:
    """The parameters as shapes and dtypes, without allocating them: a nested dict of ShapeDtypeStruct."""
    ids = jax.ShapeDtypeStruct((1, 2, 1) if head.kind == "choice" else (1, 1), jnp.int32)
    return nn.meta.unbox(jax.eval_shape(BertWithHead(config, head).init, jax.random.key(0), ids, ids, ids, ids))[
        "params"
    ]
