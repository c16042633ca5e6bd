"""Multiple choice: each choice is a sequence of its own, beside what all of them continue (Devlin et al. 2019, 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bert_jax.finetune.encoded import Cut, Features, Row, lay_out
from bert_jax.finetune.records import Example
from bert_jax.finetune.sequence import Ids, fit, take
from bert_jax.finetune.task_file import InputsConfig
from bert_jax.finetune.windows import kept
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece


def encode(examples: Sequence[Example], tokenizer: WordPiece, inputs: InputsConfig, labelled: bool = True) -> Features:
    """Rows of choices: ids are [n, K, L].

    The first segment is `text_a`, the second the choice, after `text_b` if there is one.

    Raises:
      UserError: an example with fewer or more choices than the first.
    """
    number = len(examples[0].choices or ()) if examples else 0
    for example in examples:
        if len(example.choices or ()) != number:
            raise UserError(f"line {example.line} has {len(example.choices or ())} choices, and the first has {number}")
    firsts = tokenizer.encode_batch([e.text_a for e in examples])
    prefix = ("" if e.text_b is None else e.text_b + " " for e in examples)
    seconds = tokenizer.encode_batch([p + c for p, e in zip(prefix, examples, strict=True) for c in e.choices or ()])
    rows: list[Row] = []
    cut: list[Cut] = []
    for n, (example, a) in enumerate(zip(examples, firsts, strict=True)):
        parts, lost = _fit(a, seconds[n * number : (n + 1) * number], inputs)
        rows += [Row(n, *side) for window in parts for side in window]
        if lost:
            cut.append(Cut(example.line, lost, "pieces of the text"))
    length = inputs.max_seq_length
    arrays = {k: v.reshape(-1, number, length) for k, v in lay_out(rows, tokenizer, length).items()}
    index_N = np.array([row.example for row in rows[::number]] if rows else [], np.int32)
    if labelled:
        arrays["labels"] = np.array([int(str(e.label)) for e in examples], np.int32)[index_N]
    return Features(arrays, index_N, len(examples), tuple(cut))


def _fit(a: Ids, choices: Sequence[Ids], inputs: InputsConfig) -> tuple[list[list[tuple[Ids, Ids]]], int]:
    """For each window, the segments of each choice; and how many pieces none of them holds.

    All choices of a row see the same window of the first text. A choice is cut to half of the room if that text needs
    the rest.
    """
    room = inputs.max_seq_length - 3
    if inputs.long_text != "windows" or all(len(a) + len(b) <= room for b in choices):
        found = [fit(a, b, inputs) for b in choices]
        return [[(sides[0][0], sides[0][1] or []) for sides, _ in found]], sum(lost for _, lost in found)
    limit = max(room // 2, room - len(a))
    fixed = [b[:limit] for b in choices]
    which = kept(len(a), room - max(map(len, fixed)), "windows", inputs.stride)
    lost = sum(len(b) - len(f) for b, f in zip(choices, fixed, strict=True))
    return [[(take(a, w), b) for b in fixed] for w in which], lost
