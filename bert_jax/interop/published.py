"""A BERT as another program published it: what every reader here gives, and what can be made of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop.huggingface_names import FINE_TUNED, Say, absent_heads, from_hf
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece


@dataclasses.dataclass(frozen=True)
class Published:
    """Weights under Hugging Face's names, which the reader of another format has translated its own into."""

    where: str
    """The folder, for messages."""
    config: BertConfig
    tensors: dict[str, np.ndarray]
    tokenizer: WordPiece
    head: HeadConfig | None = None
    """Of a fine-tuned model."""

    def pretraining(self, seed: int | None, say: Say) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Parameters of `BertForPreTraining`, and the parts ("pooler", "mlm", "nsp") that were drawn.

        Args:
          seed: draws what is missing as a whole; None refuses.
          say: called with one line for whatever was left out, drawn or converted.

        Raises:
          UserError: names or shapes that do not fit the configuration.
        """
        tensors = {name: x for name, x in self.tensors.items() if not name.startswith(FINE_TUNED)}
        absent = absent_heads(tensors, self.config)
        try:
            params = from_hf(tensors, self.config, seed=seed, say=say)
        except UserError as e:
            hint = "; with a seed, a pooler and heads that are missing as a whole are drawn" if seed is None else ""
            raise UserError(f"{self.where}: {e}{hint if absent else ''}") from None
        return params, absent

    def fine_tuned(self, say: Say) -> dict[str, Any]:
        """Parameters of `BertWithHead`; what its class does not use (a pooler under tags or spans) is left out.

        Raises:
          UserError: as `pretraining`.
        """
        head = self.head
        assert head is not None
        tensors = dict(self.tensors)
        unused = () if head.has_pooler else ("bert.pooler.", "pooler.")
        left_out = sorted(name for name in tensors if unused and name.startswith(unused))
        if left_out:
            say(f"left out, not used by its class: {', '.join(left_out)}")
        tensors = {name: x for name, x in tensors.items() if name not in left_out}
        try:
            return from_hf(tensors, self.config, head=head, say=say)
        except UserError as e:
            raise UserError(f"{self.where}: {e}") from None


def refuse_larger_tokenizer(where: str, config: BertConfig, tokenizer: WordPiece, say: Say) -> None:
    """UserError where the tokenizer has ids that the model has no rows for; the other way round is said."""
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} entries, the model only {config.vocab_size} rows "
            "for them; tokenizer and weights are not of the same model"
        )
    if tokenizer.vocab_size < config.vocab_size:
        say(f"{config.vocab_size - tokenizer.vocab_size} rows of the vocabulary have no entry in the tokenizer")
