"""The loss of each kind of task, as sums and counts (Devlin et al. 2019, section 4).

    classification   cross-entropy of the class
    multi_label      sigmoid cross-entropy of each class, averaged over rows and classes
    regression       squared error
    tagging          cross-entropy of the tag, averaged over the words that have one
    span             mean of the cross-entropies of start and end, over all real positions of the row
    choice           cross-entropy over the choices

These are the losses that Hugging Face's classes of the same purpose compute; of a span, that of a row without padding:
there, and in the 2018 code, padding takes part in the softmax, so that the loss depends on how much of it there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import BertConfig
from bert_jax.heads import BertWithHead, HeadConfig
from transformer_jax import losses, masks
from transformer_jax.config import ConfigError
from transformer_jax.model import encoder_flops

Params = Any
Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]
INPUTS = ("input_ids", "token_type_ids", "position_ids", "sequence_ids")
TARGETS: dict[str, tuple[str, ...]] = {"span": ("start", "end")}
"""What a batch holds beside INPUTS, `row_ids` and `weights`: `labels`, unless the kind stands here."""


def targets(kind: str) -> tuple[str, ...]:
    """Names of the arrays of a batch that hold what is to be predicted."""
    return TARGETS.get(kind, ("labels",))


class FinetuneTask:
    """What the engine needs to fine-tune.

    A batch is int32 INPUTS [B, L] (choice: [B, K, L]), `row_ids` int32 [B], `weights` float32 [B] (0 for filler rows),
    and the targets: `labels` int32 [B] (classification, choice), float32 [B, C] (multi_label), float32 [B]
    (regression), int32 [B, L] with -1 where no tag is scored (tagging), or `start` and `end`, int32 [B] (span).

    Args:
      config: the encoder.
      max_seq_length: length of a row; a dummy batch of it initialises the parameters.
      choices: choices of a row, for that kind.
    """

    def __init__(self, config: BertConfig, head: HeadConfig, max_seq_length: int, choices: int = 0):
        self.config, self.head, self.max_seq_length, self.choices = config, head, max_seq_length, choices
        self.model = BertWithHead(config, head)
        self.losses: tuple[str, ...] = ("head",)
        self.frozen: tuple[str, ...] = ()

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters, boxed with their logical axes."""
        shape = (1, self.choices, self.max_seq_length) if self.head.kind == "choice" else (1, self.max_seq_length)
        ids = jnp.zeros(shape, jnp.int32)
        return self.model.init(key, ids, ids, ids, ids)["params"]

    def counts(self, batch: Batch) -> Sums:
        """What the loss is averaged over, and what fill and model FLOPs need."""
        real = (batch["sequence_ids"] > 0).reshape(-1, batch["sequence_ids"].shape[-1])
        lengths = jnp.sum(real, axis=-1).astype(jnp.float32)
        return {
            "head": jnp.sum(scored(self.head.kind, batch)),
            "tokens": jnp.sum(lengths),
            "slots": jnp.sum(lengths > 0).astype(jnp.float32) * real.shape[-1],
            "squares": jnp.sum(lengths**2),
            "sequences": jnp.sum(lengths > 0).astype(jnp.float32),
        }

    def loss_fn(self, params: Params, batch: Batch, key: jax.Array | None) -> tuple[Sums, Sums]:
        """Sums over the batch of the loss, and of what was right where that has a meaning for one row."""
        return loss_sums(self.head, self.logits(params, batch, key), batch), self.counts(batch)

    def logits(self, params: Params, batch: Batch, key: jax.Array | None = None) -> jax.Array:
        """The scores of a batch, of which it needs INPUTS and, for dropout, `row_ids`; see `BertWithHead`."""
        inputs: Any = {name: batch[name] for name in INPUTS}  # by name: segments and mask have the same shape
        out: Any = self.model.apply({"params": params}, **inputs, row_ids=batch.get("row_ids"), dropout_key=key)
        return out

    def flops(self, counts: dict[str, float]) -> float:
        """Model FLOPs of one step: three times the forward matrix products over real tokens."""
        h = self.config.hidden_size
        forward = encoder_flops(self.config, counts["tokens"], counts["squares"])
        scored_vectors = counts["sequences"] if self.head.has_pooler else counts["tokens"]
        forward += 2.0 * h * self.head.num_outputs * scored_vectors
        forward += 2.0 * h * h * counts["sequences"] if self.head.has_pooler else 0.0
        return 3.0 * forward


def scored(kind: str, batch: Mapping[str, Any]) -> jax.Array:
    """The weight of all that the loss is averaged over: float32 [B], for multi_label [B, C], for tagging [B, L]."""
    weights_B = batch["weights"]
    if kind == "multi_label":
        return jnp.broadcast_to(weights_B[:, None], batch["labels"].shape)
    if kind == "tagging":
        return weights_B[:, None] * (batch["labels"] >= 0).astype(weights_B.dtype)
    return weights_B


def loss_sums(head: HeadConfig, logits: jax.Array, batch: Mapping[str, Any]) -> Sums:
    """Sum of the loss over what `scored` weighs (`head`), and of the hits (`head_accuracy`) where classes exclude each
    other.

    Raises:
      ConfigError: at trace time, when logits and labels have not the shapes of the kind: [B] against [B, 1] would
        silently be broadcast to [B, B].
    """
    weights = scored(head.kind, batch)
    check_targets(head, logits.shape, {name: batch[name].shape for name in targets(head.kind)})
    if head.kind == "multi_label":
        labels_BC = batch["labels"].astype(logits.dtype)
        # log(1 + exp(-|x|)) + max(x, 0) - x * y: no exponential can overflow.
        loss_BC = jnp.maximum(logits, 0) - logits * labels_BC + jnp.log1p(jnp.exp(-jnp.abs(logits)))
        return {"head": jnp.sum(weights * loss_BC)}
    if head.kind == "regression":
        error_B = logits[:, 0] - batch["labels"].astype(logits.dtype)
        return {"head": jnp.sum(weights * error_B**2)}
    if head.kind == "span":
        real_BL = batch["sequence_ids"] > 0
        logits = jnp.where(real_BL[:, :, None], logits, masks.FORBIDDEN)
        both = [(logits[:, :, 0], batch["start"]), (logits[:, :, 1], batch["end"])]
        halves = [losses.weighted_cross_entropy(scores_BL, at_B, weights)[0] for scores_BL, at_B in both]
        return {"head": (halves[0] + halves[1]) / 2}
    labels = jnp.maximum(batch["labels"], 0)
    return {
        "head": losses.weighted_cross_entropy(logits, labels, weights)[0],
        "head_accuracy": losses.weighted_accuracy(logits, labels, weights)[0],
    }


def check_targets(head: HeadConfig, logits: tuple[int, ...], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError unless the arrays of targets have the shapes that go with the logits."""
    rows = logits[0]
    wanted = {"multi_label": logits, "tagging": logits[:2]}.get(head.kind, (rows,))
    for name, shape in found.items():
        if tuple(shape) != tuple(wanted):
            raise ConfigError(
                f"{name} has shape {list(shape)}; for {head.kind} with scores of shape {list(logits)} it must be "
                f"{list(wanted)}"
            )
    if head.kind == "regression" and tuple(logits) != (rows, 1):
        raise ConfigError(f"the head of a regression gives one number, and the scores have shape {list(logits)}")
