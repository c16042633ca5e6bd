"""Examples of any kind of task as arrays."""

from __future__ import annotations

from collections.abc import Sequence

from bert_jax.finetune import choice, sequence, span, tagging
from bert_jax.finetune.encoded import Features
from bert_jax.finetune.records import Records, check_labels
from bert_jax.finetune.task_file import TaskConfig
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece

__all__ = ["Features", "encode"]


def encode(
    records: Records,
    tokenizer: WordPiece,
    task: TaskConfig,
    labels: Sequence[str] = (),
    *,
    labelled: bool = True,
    training: bool = False,
) -> Features:
    """The rows of a file's examples, in its order; the windows of one example stand beside each other.

    Args:
      labels: names of the classes or tags in the order of their ids, which the model knows.
      labelled: whether the examples have labels; without, there are no targets among the arrays.
      training: leave out what cannot be learned from, instead of scoring it.

    Raises:
      UserError: a label that the model does not know (with its line), a question that leaves no room for its context,
        or no row at all in training.
    """
    examples, kind = records.examples, task.kind
    if labelled and kind in ("classification", "multi_label", "tagging"):
        check_labels(records, labels)
    try:
        if kind == "tagging":
            found = tagging.encode(examples, tokenizer, task.inputs, labels, labelled)
        elif kind == "span":
            found = span.encode(examples, tokenizer, task.inputs, labelled, training)
        elif kind == "choice":
            found = choice.encode(examples, tokenizer, task.inputs, labelled)
        else:
            found = sequence.encode(examples, tokenizer, task.inputs, kind, labels, labelled)
    except UserError as e:
        raise UserError(f"{records.path}: {e}") from None
    if training and not len(found.example_index_N):
        raise UserError("; ".join(found.report(records.path)) or f"{records.path}: 0 examples; the file has none")
    return found
