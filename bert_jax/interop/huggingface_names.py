"""Our parameters under Hugging Face's names, and back.

The names are those of `BertForPreTraining`, or of the class that a fine-tuned head belongs to; the decoder of the MLM
head is tied to the word embeddings, so it has no tensor of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HF_CLASSES, HeadConfig
from transformer_jax import bert_encoder
from transformer_jax.config import UserError
from transformer_jax.published_names import Entry, adopt, check_names, dense, norm, publish

Say = Callable[[str], None]
_log = logging.getLogger(__name__).info

MODEL = "a BERT pretraining model"
HEADS = {"pooler": "bert.pooler.", "mlm": "cls.predictions.", "nsp": "cls.seq_relationship."}
"""Parts of the tree that a folder may lack, by the start of their published names."""

FINE_TUNED = ("classifier.", "qa_outputs.")
"""How the names of a fine-tuned head start."""


def entries(config: BertConfig, head: HeadConfig | None = None) -> list[Entry]:
    """Every tensor of the pretraining model, or of the model with this head, in the order of the forward pass."""
    hidden, vocab, padded = config.hidden_size, config.vocab_size, config.padded_vocab_size
    encoder = bert_encoder.entries(config, vocab, padded, config.max_position_embeddings, config.type_vocab_size)
    pooler = dense("pooler", "bert.pooler.dense", hidden, hidden)
    if head is not None:
        name = FINE_TUNED[head.kind == "span"].removesuffix(".")
        return [*encoder, *(pooler if head.has_pooler else []), *dense("head", name, hidden, head.num_outputs)]
    return [
        *encoder,
        *pooler,
        *dense("mlm/transform", "cls.predictions.transform.dense", hidden, hidden),
        *norm("mlm/norm", "cls.predictions.transform.LayerNorm", hidden),
        Entry(("mlm", "bias"), "cls.predictions.bias", (vocab,), padded_rows=padded),
        *dense("nsp", "cls.seq_relationship", hidden, 2),
    ]


def to_hf(params: Mapping[str, Any], config: BertConfig, head: HeadConfig | None = None) -> dict[str, np.ndarray]:
    """The parameters under the names of Hugging Face's `BertForPreTraining`, padding rows of the vocabulary cut off.

    Args:
      params: nested dict of arrays without Flax boxes, one subtree per layer.
      head: that of a fine-tuned model, whose class (`HF_CLASSES`) then gives the names.

    Returns:
      float32 arrays in C order, kernels as [out, in]. The tied decoder is left out.

    Raises:
      UserError: the tree has other tensors or shapes than `config` says.
    """
    return publish(params, entries(config, head), _model(head))


def from_hf(
    tensors: Mapping[str, np.ndarray],
    config: BertConfig,
    *,
    head: HeadConfig | None = None,
    seed: int | None = None,
    say: Say = _log,
) -> dict[str, Any]:
    """The parameter tree from tensors under Hugging Face's names.

    Names with or without `bert.`, and the old `gamma` and `beta` of LayerNorm, are understood. The vocabulary is
    padded with zero rows to `config.padded_vocab_size`. A decoder must equal the word embeddings it is tied to.

    Args:
      head: of a fine-tuned model, which then is what the tensors must be, whole.
      seed: draws a pooler, MLM or NSP head that the tensors lack as a whole; None refuses to.
      say: called with one line for whatever was left out, drawn or converted.

    Raises:
      UserError: names are missing, unknown or there twice; a shape differs from `config`; the decoder is not tied.
    """
    found = bert_encoder.todays_names(tensors, say)
    _drop_decoder(found)
    table = entries(config, head)
    drawn = () if head else _absent_heads(found, table)
    names = {e.name for e in table}
    if seed is not None:
        names = {name for name in names if not name.startswith(tuple(HEADS[head] for head in drawn))}
    check_names(names, set(found), "tensors", _model(head))
    if drawn and seed is not None:
        say(f"drawn at random with seed {seed}, since the source has none: {', '.join(drawn)}")

    converted = sorted({str(v.dtype) for v in found.values() if v.dtype != np.float32})
    for number, entry in enumerate(table):
        if entry.name not in found:
            assert seed is not None
            found[entry.name] = _initial(entry, config, (seed, number))
    params = adopt(found, table, _model(head))
    if converted:
        say(f"converted to float32 from {', '.join(converted)}")
    return params


def _model(head: HeadConfig | None) -> str:
    return MODEL if head is None else f"a {HF_CLASSES[head.kind]}"


def absent_heads(tensors: Mapping[str, np.ndarray], config: BertConfig) -> tuple[str, ...]:
    """Which of the pooler ("pooler") and the heads ("mlm", "nsp") the published tensors lack as a whole."""
    found = bert_encoder.todays_names(tensors, lambda _: None)
    _drop_decoder(found)
    return _absent_heads(found, entries(config))


def _absent_heads(found: Mapping[str, np.ndarray], table: list[Entry]) -> tuple[str, ...]:
    return tuple(
        head for head, start in HEADS.items() if not any(e.name in found for e in table if e.name.startswith(start))
    )


def _drop_decoder(found: dict[str, np.ndarray]) -> None:
    """Takes the decoder out of `found`, after checking that it repeats the tensors it is tied to."""
    bias = found.pop("cls.predictions.decoder.bias", None)
    if bias is not None and not np.array_equal(found.setdefault("cls.predictions.bias", bias), bias):
        raise UserError("cls.predictions.decoder.bias differs from cls.predictions.bias; they must be the same tensor")
    decoder = found.pop("cls.predictions.decoder.weight", None)
    words = found.get("bert.embeddings.word_embeddings.weight")
    if decoder is not None and words is not None and not np.array_equal(decoder, words):
        raise UserError(
            "cls.predictions.decoder.weight differs from the word embeddings; only models with a tied decoder "
            "(tie_word_embeddings) can be read"
        )


def _initial(entry: Entry, config: BertConfig, seed: tuple[int, int]) -> np.ndarray:
    """What a new model starts from, as published: normal numbers cut at two deviations, zero biases, unit scales."""
    if not entry.is_kernel:
        return np.full(entry.shape, 1.0 if entry.path[-1] == "scale" else 0.0, np.float32)
    rng = np.random.default_rng(seed)
    draws = rng.standard_normal(entry.shape[::-1])
    while (far := np.abs(draws) > 2).any():
        draws[far] = rng.standard_normal(int(far.sum()))
    return (draws * config.initializer_range).astype(np.float32).T
