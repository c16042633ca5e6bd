"""The pretraining task: masked LM and next-sentence prediction (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from bert_jax import model
from bert_jax.config import BertConfig

from transformer_jax import losses

Params = Any
Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


class PretrainingTask:
    """What the engine needs to pretrain BERT; `losses` are averaged apart and added, as in the paper.

    Args:
      config: the model.
      max_seq_length: length of a row; a dummy batch of it initialises the parameters.
      next_sentence: False leaves out the sentence-pair loss (its head stays in the parameters, untouched).
    """

    def __init__(self, config: BertConfig, max_seq_length: int, next_sentence: bool = True):
        self.config, self.max_seq_length = config, max_seq_length
        self.model = model.BertForPreTraining(config)
        self.losses = ("mlm", "nsp") if next_sentence else ("mlm",)

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters, boxed with their logical axes."""
        ids_BL = jnp.zeros((1, self.max_seq_length), jnp.int32)
        one_BX = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(
            key,
            input_ids=ids_BL,
            token_type_ids=ids_BL,
            position_ids=ids_BL,
            sequence_ids=ids_BL,
            masked_lm_positions=one_BX,
            cls_positions=one_BX,
        )["params"]

    def counts(self, batch: Batch) -> Sums:
        """Predictions and sentence pairs, which the losses are averaged over, and what model FLOPs depend on."""
        real_BL = batch["sequence_ids"] > 0
        # A token meets every token of its own sequence: the sum of lengths squared is the sum over tokens of length.
        slot_S = jnp.arange(1, batch["cls_positions"].shape[1] + 1)
        lengths_BS = jnp.sum(batch["sequence_ids"][:, :, None] == slot_S[None, None, :], axis=1).astype(jnp.float32)
        return {
            "mlm": jnp.sum(batch["masked_lm_weights"]),
            "nsp": jnp.sum(batch["next_sentence_weights"]),
            "tokens": jnp.sum(real_BL).astype(jnp.float32),
            "slots": jnp.full((), real_BL.size, jnp.float32),
            "squared_lengths": jnp.sum(lengths_BS**2),
            "sequences": jnp.sum(lengths_BS > 0).astype(jnp.float32),
        }

    def loss_fn(self, params: Params, batch: Batch, key: jax.Array | None) -> tuple[Sums, Sums]:
        """Sums over the batch of both losses and of what was right; without `key` there is no dropout."""
        out = self.model.apply(
            {"params": params},
            input_ids=batch["input_ids"],
            token_type_ids=batch["token_type_ids"],
            position_ids=batch["position_ids"],
            sequence_ids=batch["sequence_ids"],
            masked_lm_positions=batch["masked_lm_positions"],
            cls_positions=batch["cls_positions"],
            row_ids=batch["row_ids"],
            dropout_key=key,
        )
        mlm = (out["mlm_logits_BPV"], batch["masked_lm_ids"], batch["masked_lm_weights"])
        nsp = (out["nsp_logits_BS2"], batch["next_sentence_labels"], batch["next_sentence_weights"])
        sums = {
            "mlm": losses.weighted_cross_entropy(*mlm)[0],
            "mlm_accuracy": losses.weighted_accuracy(*mlm)[0],
            "nsp": losses.weighted_cross_entropy(*nsp)[0],
            "nsp_accuracy": losses.weighted_accuracy(*nsp)[0],
        }
        return sums, self.counts(batch)

    def flops(self, counts: dict[str, float]) -> float:
        """Model FLOPs of one step: three times the forward matrix products over real tokens."""
        return model.model_flops(
            self.config,
            tokens=counts["tokens"],
            squares=counts["squared_lengths"],
            predictions=counts["mlm"],
            sequences=counts["sequences"],
        )
