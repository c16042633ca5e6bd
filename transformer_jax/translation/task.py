"""The translation task: label-smoothed cross-entropy of each target piece (Vaswani et al. 2017, section 5.4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax import losses, masks
from transformer_jax.translation import model
from transformer_jax.translation.config import BatchesConfig, ObjectiveConfig, TransformerConfig

Params = Any
Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]

INPUTS = (
    "input_ids",
    "position_ids",
    "sequence_ids",
    "decoder_input_ids",
    "decoder_position_ids",
    "decoder_sequence_ids",
)
"""What of a batch the model reads, in the order of its arguments."""


class TranslationTask:
    """What the engine needs to train a Transformer.

    The loss is "translation", with label smoothing. Beside it come "translation_nll", the cross-entropy without it
    (its exponential is the perplexity), and "translation_accuracy", the share of pieces that were the likeliest.

    Args:
      config: the model.
      examples: the lengths of a row; a dummy batch of them initialises the parameters.
    """

    losses: tuple[str, ...] = ("translation",)
    frozen: tuple[str, ...] = ()

    def __init__(self, config: TransformerConfig, examples: BatchesConfig, objective: ObjectiveConfig):
        self.config, self.examples, self.objective = config, examples, objective
        self.model = model.Transformer(config)

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters, boxed with their logical axes."""
        source_BS = jnp.zeros((1, self.examples.max_source_length), jnp.int32)
        target_BT = jnp.zeros((1, self.examples.max_target_length), jnp.int32)
        return self.model.init(key, *[source_BS] * 3, *[target_BT] * 3)["params"]

    def counts(self, batch: Batch) -> Sums:
        """Predictions, which the loss is averaged over, and what fill and model FLOPs need."""
        source_BS, target_BT = batch["sequence_ids"], batch["decoder_sequence_ids"]
        target_tokens, squares = _count(target_BT > 0), _count(masks.same_sequence(target_BT, target_BT))
        # Filler rows are not counted, so that a figure does not depend on how many of them fill a last batch.
        rows = _count(jnp.any(target_BT > 0, axis=1))
        source_tokens = _count(source_BS > 0)
        return {
            "translation": jnp.sum(batch["label_weights"]),
            "tokens": source_tokens + target_tokens,
            "slots": rows * (source_BS.shape[1] + target_BT.shape[1]),
            "source_tokens": source_tokens,
            "source_pairs": _count(masks.same_sequence(source_BS, source_BS)),
            "target_tokens": target_tokens,
            "target_pairs": (squares + target_tokens) / 2,
            "cross_pairs": _count(masks.same_sequence(target_BT, source_BS)),
        }

    def loss_fn(self, params: Params, batch: Batch, key: jax.Array | None) -> tuple[Sums, Sums]:
        """Sums over the batch of the losses and of what was right; without `key` there is no dropout."""
        logits_BTV: Any = self.model.apply({"params": params}, *(batch[name] for name in INPUTS), batch["row_ids"], key)
        labels_BT, weights_BT = batch["labels"], batch["label_weights"]
        smoothed, plain, _ = losses.smoothed_cross_entropy(
            logits_BTV, labels_BT, weights_BT, self.objective.label_smoothing, self.config.target_vocab_size - 1
        )
        right = losses.weighted_accuracy(logits_BTV, labels_BT, weights_BT)[0]
        sums = {"translation": smoothed, "translation_nll": plain, "translation_accuracy": right}
        return sums, self.counts(batch)

    def flops(self, counts: dict[str, float]) -> float:
        """Model FLOPs of one step: three times the forward matrix products over real tokens."""
        names = ("source_tokens", "source_pairs", "target_tokens", "target_pairs", "cross_pairs")
        return model.model_flops(
            self.config, **{name: counts[name] for name in names}, predictions=counts["translation"]
        )


def _count(chosen: jax.Array) -> jax.Array:
    return jnp.sum(chosen).astype(jnp.float32)
