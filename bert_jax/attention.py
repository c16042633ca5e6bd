"""Which pieces each head looks at: the attention weights of a text or a pair, and a page to look into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import activations
from bert_jax.finetune.encoded import Row, lay_out
from bert_jax.finetune.loading import Encoder, load_encoder
from transformer_jax import attention_page, command
from transformer_jax.attention_page import Names, Piece, Shortcut
from transformer_jax.config import UserError

Say = Callable[[str], None]
TITLE_CHARACTERS = 80


class Attention(NamedTuple):
    """The weights of one row.

    Attributes:
      pieces: its T pieces with [CLS] and [SEP].
      segments: 0 or 1 for each.
      weights_LNTT: float32 [layers, N, T, T]: how much of its context each piece (row) takes from each other (column),
        before dropout; a row sums to 1.
    """

    pieces: list[str]
    segments: list[int]
    weights_LNTT: np.ndarray


def attention(encoder: Encoder, text: str, text_b: str | None = None) -> Attention:
    """The weights of [CLS] text [SEP], or [CLS] text [SEP] text_b [SEP]; control tokens in a text, such as [MASK], are
    read as such.

    Raises:
      UserError: more pieces than the model has positions, a text that is not Unicode, or weights that are not finite.
    """
    tokenizer, limit = encoder.tokenizer, encoder.config.max_position_embeddings
    sides = []
    for side in [text] if text_b is None else [text, text_b]:
        if any("\ud800" <= character <= "\udfff" for character in side):
            raise UserError(f"the text is not Unicode: it holds half of a surrogate pair: {side[:80]!r}")
        sides.append(tokenizer.encode_query(side)[0])
    length = sum(map(len, sides)) + len(sides) + 1
    if length > limit:
        raise UserError(
            f"the text is {length} pieces long with [CLS] and [SEP]; the model has {limit} positions: shorten it"
        )
    batch = lay_out([Row(0, sides[0], sides[1] if len(sides) == 2 else None)], tokenizer, length)

    def run(params: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return jnp.concatenate(activations.attention_weights(encoder.config, params, batch))

    params = {name: encoder.params[name] for name in ("embeddings", "encoder")}
    weights_LNTT = np.asarray(jax.jit(run)(params, batch))
    if not np.isfinite(weights_LNTT).all():
        raise UserError("the weights are not finite: the model's training has diverged; take an earlier step, RUN@STEP")
    pieces = [tokenizer.vocab[i] for i in batch["input_ids"][0].tolist()]
    return Attention(pieces, batch["token_type_ids"][0].tolist(), weights_LNTT)


def page(found: Attention, title: str) -> str:
    """The page of one row."""
    pair = max(found.segments) > 0
    groups = [f"sentence {'AB'[segment]}" if pair else "" for segment in found.segments]
    pieces = [Piece(text, group) for text, group in zip(found.pieces, groups, strict=True)]
    last = len(pieces) - 1
    ends = [last] if not pair else [found.segments.index(1) - 1, last]
    names = ["[SEP]"] if not pair else ["the first [SEP]", "the last [SEP]"]
    shortcuts = [Shortcut("from [CLS]", "from", 0)]
    shortcuts += [Shortcut(f"to {name}", "to", place) for name, place in zip(names, ends, strict=True)]
    about = (
        "Rows are the pieces that look, columns the pieces that they look at: a cell is the share that the column's "
        "value has in what the head gives the row. Each row sums to 1. Layers are counted from the embeddings up."
    )
    sides = Names("the pieces that look", "the pieces looked at")
    return attention_page.render(title, about, found.weights_LNTT, pieces, pieces, sides, shortcuts)


def write_page(checkpoint: str, text: str, text_b: str | None, out: str | Path, say: Say = command.say) -> Attention:
    """Write the page of a text or a pair.

    Args:
      checkpoint: anything that `bert_jax.load` takes, or a fine-tuned run, whose head is left out.
      out: the page; a file that is there is replaced.

    Raises:
      UserError: a text or checkpoint that cannot be used, or no folder for the page.
    """
    if not Path(out).parent.is_dir():
        raise UserError(f"{Path(out).parent}: no such folder; make it, or write the page elsewhere")
    found = attention(load_encoder(checkpoint, say=say), text, text_b)
    shown = text if text_b is None else f"{text} | {text_b}"
    cut = shown if len(shown) <= TITLE_CHARACTERS else shown[: TITLE_CHARACTERS - 1] + "…"
    attention_page.write(out, page(found, f"Attention in {Path(checkpoint).name}: {cut}"))
    return found
