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
        self.losses: tuple[str, ...] = ("mlm", "nsp") if next_sentence else ("mlm",)
        self.frozen: tuple[str, ...] = () if next_sentence else ("pooler", "nsp")

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters, boxed with their logical axes."""
        ids_BL = jnp.zeros((1, self.max_seq_length), jnp.int32)
        slots_BX = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, ids_BL, ids_BL, ids_BL, ids_BL, slots_BX, slots_BX)["params"]

    def counts(self, batch: Batch) -> Sums:
        """Predictions and sentence pairs, which the losses are averaged over, and what fill and model FLOPs need."""
        real_BL = batch["sequence_ids"] > 0
        slots_S = jnp.arange(1, batch["cls_positions"].shape[1] + 1, dtype=jnp.int32)
        in_slot_BSL = batch["sequence_ids"][:, None, :] == slots_S[None, :, None]
        lengths_BS = jnp.sum(in_slot_BSL, axis=2).astype(jnp.float32)
        return {
            "mlm": jnp.sum(batch["masked_lm_weights"]),
            "nsp": jnp.sum(batch["next_sentence_weights"]),
            "tokens": jnp.sum(real_BL).astype(jnp.float32),
            # Filler rows are not counted, so that a figure does not depend on how many of them fill a last batch.
            "slots": jnp.sum(jnp.any(real_BL, axis=1)).astype(jnp.float32) * real_BL.shape[1],
            # A token meets every token of its own sequence.
            "squares": jnp.sum(lengths_BS**2),
            "sequences": jnp.sum(lengths_BS > 0).astype(jnp.float32),
        }

    def loss_fn(self, params: Params, batch: Batch, key: jax.Array | None) -> tuple[Sums, Sums]:
        """Sums over the batch of the losses and of what was right; without `key` there is no dropout."""
        out: Any = self.model.apply(
            {"params": params},
            batch["input_ids"],
            batch["token_type_ids"],
            batch["position_ids"],
            batch["sequence_ids"],
            batch["masked_lm_positions"],
            batch["cls_positions"],
            batch["row_ids"],
            key,
        )
        scored = {"mlm": (out["mlm_logits_BPV"], batch["masked_lm_ids"], batch["masked_lm_weights"])}
        if "nsp" in self.losses:
            scored["nsp"] = (out["nsp_logits_BS2"], batch["next_sentence_labels"], batch["next_sentence_weights"])
        sums: Sums = {}
        for name, (logits_XV, labels_X, weights_X) in scored.items():
            sums[name] = losses.weighted_cross_entropy(logits_XV, labels_X, weights_X)[0]
            sums[f"{name}_accuracy"] = losses.weighted_accuracy(logits_XV, labels_X, weights_X)[0]
        return sums, self.counts(batch)

    def flops(self, counts: dict[str, float]) -> float:
        """Model FLOPs of one step: three times the forward matrix products over real tokens."""
        return model.model_flops(
            self.config,
            tokens=counts["tokens"],
            squares=counts["squares"],
            predictions=counts["mlm"],
            sequences=counts["sequences"],
        )
