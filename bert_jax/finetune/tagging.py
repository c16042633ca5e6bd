"""Tags of words: the first piece of a word carries its tag, in training and in prediction (Devlin et al. 2019, 5.3).

A word that leaves no piece (only format characters, say) has no place in a row; it counts and gets the tag O, so there
are always as many tags as words.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from bert_jax.finetune.encoded import Cut, Features, Row, lay_out
from bert_jax.finetune.records import Example
from bert_jax.finetune.sequence import take
from bert_jax.finetune.task_file import InputsConfig
from bert_jax.finetune.windows import kept, most_context
from transformer_jax.tokenizer import WordPiece

OUTSIDE = "O"


def encode(
    examples: Sequence[Example],
    tokenizer: WordPiece,
    inputs: InputsConfig,
    labels: Sequence[str] = (),
    labelled: bool = True,
) -> Features:
    """Rows of sentences given in words.

    In overlapping windows a word's tag is scored in the one in which its first piece has most context. Words whose
    first piece is cut away are counted.

    Args:
      labels: the tags in the order of their ids; those of the examples are among them.
    """
    chain = itertools.chain.from_iterable
    pieces = iter(tokenizer.encode_batch(list(chain(e.words or () for e in examples))))
    place = {name: i for i, name in enumerate(labels)}
    length = inputs.max_seq_length
    rows: list[Row] = []
    words: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    cut: list[Cut] = []
    for n, example in enumerate(examples):
        of_word = [next(pieces) for _ in example.words or ()]
        ids = list(chain(of_word))
        first_of = np.array([-1] * len(ids), np.int32)
        starts = np.cumsum([0, *map(len, of_word)])[:-1]
        with_pieces = [i for i, found in enumerate(of_word) if found]
        first_of[starts[with_pieces]] = with_pieces
        found = kept(len(ids), length - 2, inputs.long_text, inputs.stride)
        rows += [Row(n, take(ids, which)) for which in found]
        words += [first_of[which] for which in found]
        owners += most_context([(w[0], w[-1] + 1) for w in found]) if len(found) > 1 else [np.ones(len(found[0]), bool)]
        lost = len(with_pieces) - (first_of[found[0]] >= 0).sum() if len(found) == 1 else 0
        if lost:
            cut.append(Cut(example.line, int(lost), "words"))
    index_N = np.array([row.example for row in rows], np.int32)
    word_NL = np.full((len(rows), length), -1, np.int32)
    owner_NL = np.zeros((len(rows), length), bool)
    for n, (word, owner) in enumerate(zip(words, owners, strict=True)):
        word_NL[n, 1 : len(word) + 1] = word  # after [CLS]
        owner_NL[n, 1 : len(word) + 1] = owner
    arrays = lay_out(rows, tokenizer, length)
    if labelled:
        arrays["labels"] = _labels(examples, index_N, np.where(owner_NL, word_NL, -1), place)
    return Features(arrays, index_N, len(examples), tuple(cut), word_NL=word_NL, owner_NL=owner_NL)


def _labels(
    examples: Sequence[Example], index_N: np.ndarray, scored_NL: np.ndarray, place: dict[str, int]
) -> np.ndarray:
    ids_W = np.array([place[tag] for e in examples for tag in e.tags or ()], np.int32)
    starts_E = np.cumsum([0, *(len(e.tags or ()) for e in examples)])[:-1]
    labels_NL = np.full(scored_NL.shape, -1, np.int32)
    n, at = np.nonzero(scored_NL >= 0)
    labels_NL[n, at] = ids_W[starts_E[index_N[n]] + scored_NL[n, at]]
    return labels_NL


def decode(
    predicted_NL: np.ndarray, features: Features, examples: Sequence[Example], labels: Sequence[str]
) -> list[tuple[str, ...]]:
    """The tags of each example, one a word.

    A word without a piece, or whose first piece was cut away, gets O.

    Args:
      predicted_NL: int [n, L] tag ids of each place of each row, or float [n, L, C] logits.
    """
    if predicted_NL.ndim == 3:
        predicted_NL = predicted_NL.argmax(-1)
    assert features.word_NL is not None and features.owner_NL is not None
    out = [[OUTSIDE] * len(e.words or ()) for e in examples]
    n, at = np.nonzero((features.word_NL >= 0) & features.owner_NL)
    found = zip(features.example_index_N[n], features.word_NL[n, at], predicted_NL[n, at], strict=True)
    for example, word, tag in found:
        out[example][word] = labels[tag]
    return [tuple(tags) for tags in out]
