"""Examples of any kind of task as arrays."""

from __future__ import annotations

from collections.abc import Sequence

from bert_jax.finetune import choice, sequence, span, tagging
from bert_jax.finetune.encoded import Features
from bert_jax.finetune.records import Example
from bert_jax.finetune.task_file import TaskConfig
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece

__all__ = ["Features", "encode"]


def encode(
    task: TaskConfig,
    examples: Sequence[Example],
    tokenizer: WordPiece,
    labelled: bool = True,
    training: bool = False,
    where: str = "",
) -> Features:
    """The rows of a file's examples, in its order; the windows of one example stand beside each other.

    Args:
      task: with its labels filled in, which are all that the examples have (see `records.check_labels`).
      labelled: whether the examples have labels; without, there are no targets among the arrays.
      training: leave out what cannot be learned from, instead of scoring it.
      where: the file, for messages.

    Raises:
      UserError: a question that leaves no room for its context, or unequal numbers of choices.
    """
    try:
        if task.kind == "tagging":
            return tagging.encode(examples, tokenizer, task.inputs, task.labels, labelled)
        if task.kind == "span":
            return span.encode(examples, tokenizer, task.inputs, labelled, training)
        if task.kind == "choice":
            return choice.encode(examples, tokenizer, task.inputs, labelled)
        return sequence.encode(examples, tokenizer, task.inputs, task.kind, task.labels, labelled)
    except UserError as e:
        raise UserError(f"{where}: {e}" if where else str(e)) from None
