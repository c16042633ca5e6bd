"""Our parameters under Hugging Face's names, and back.

The names are those of `BertForPreTraining`; the decoder of the MLM head is tied to the word embeddings, so it has no
tensor of its own.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bert_jax.config import BertConfig
from transformer_jax.config import UserError

Say = Callable[[str], None]
_log = logging.getLogger(__name__).info

HEADS = {"pooler": "bert.pooler.", "mlm": "cls.predictions.", "nsp": "cls.seq_relationship."}
"""Parts of the tree that a folder may lack, by the start of their published names."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor under both names."""

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    """As published: vocabulary not padded, kernels as [out, in]."""
    is_kernel: bool = False
    has_vocab: bool = False


def entries(config: BertConfig) -> list[Entry]:
    """Every tensor of the model, in the order of the forward pass."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size

    def dense(path: str, name: str, inputs: int, outputs: int) -> list[Entry]:
        parts = tuple(path.split("/"))
        return [
            Entry((*parts, "kernel"), f"{name}.weight", (outputs, inputs), is_kernel=True),
            Entry((*parts, "bias"), f"{name}.bias", (outputs,)),
        ]

    def norm(path: str, name: str) -> list[Entry]:
        parts = tuple(path.split("/"))
        return [
            Entry((*parts, "scale"), f"{name}.weight", (hidden,)),
            Entry((*parts, "bias"), f"{name}.bias", (hidden,)),
        ]

    def embedding(kind: str, rows: int) -> Entry:
        path, name = ("embeddings", kind, "embedding"), f"bert.embeddings.{kind}_embeddings.weight"
        return Entry(path, name, (rows, hidden), has_vocab=kind == "word")

    found = [embedding("word", vocab), embedding("position", config.max_position_embeddings)]
    found += [embedding("token_type", config.type_vocab_size), *norm("embeddings/norm", "bert.embeddings.LayerNorm")]
    for i in range(config.num_hidden_layers):
        ours, theirs = f"encoder/layer_{i}", f"bert.encoder.layer.{i}"
        for part in ("query", "key", "value"):
            found += dense(f"{ours}/attention/{part}", f"{theirs}.attention.self.{part}", hidden, hidden)
        found += dense(f"{ours}/attention/output", f"{theirs}.attention.output.dense", hidden, hidden)
        found += norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm")
        found += dense(f"{ours}/feed_forward/intermediate", f"{theirs}.intermediate.dense", hidden, inner)
        found += dense(f"{ours}/feed_forward/output", f"{theirs}.output.dense", inner, hidden)
        found += norm(f"{ours}/feed_forward_norm", f"{theirs}.output.LayerNorm")
    found += dense("pooler", "bert.pooler.dense", hidden, hidden)
    found += dense("mlm/transform", "cls.predictions.transform.dense", hidden, hidden)
    found += norm("mlm/norm", "cls.predictions.transform.LayerNorm")
    found.append(Entry(("mlm", "bias"), "cls.predictions.bias", (vocab,), has_vocab=True))
    found += dense("nsp", "cls.seq_relationship", hidden, 2)
    return found


def to_hf(params: Mapping[str, Any], config: BertConfig) -> dict[str, np.ndarray]:
    """The parameters under the names of Hugging Face's `BertForPreTraining`, padding rows of the vocabulary cut off.

    Args:
      params: nested dict of arrays without Flax boxes, one subtree per layer.

    Returns:
      float32 arrays in C order, kernels as [out, in]. The tied decoder is left out.

    Raises:
      UserError: the tree has other tensors or shapes than `config` says.
    """
    flat = dict(_flatten(params))
    table = entries(config)
    _check_names({"/".join(e.path) for e in table}, {"/".join(p) for p in flat}, "parameters")
    out = {}
    for entry in table:
        value = np.asarray(flat[entry.path], np.float32)
        expected = _our_shape(entry, config)
        if value.shape != expected:
            raise UserError(f"parameter {'/'.join(entry.path)} has shape {value.shape}; the model's is {expected}")
        if entry.has_vocab:
            value = value[: config.vocab_size]
        out[entry.name] = np.ascontiguousarray(value.T if entry.is_kernel else value)
    return out


def from_hf(
    tensors: Mapping[str, np.ndarray], config: BertConfig, *, seed: int | None = None, say: Say = _log
) -> dict[str, Any]:
    """The parameter tree from tensors under Hugging Face's names.

    Names with or without `bert.`, and the old `gamma` and `beta` of LayerNorm, are understood. The vocabulary is
    padded with zero rows to `config.padded_vocab_size`. A decoder must equal the word embeddings it is tied to.

    Args:
      seed: draws a pooler, MLM or NSP head that the tensors lack as a whole; None refuses to.
      say: called with one line for whatever was left out, drawn or converted.

    Raises:
      UserError: names are missing, unknown or there twice; a shape differs from `config`; the decoder is not tied.
    """
    found = _published_names(tensors, say)
    _drop_decoder(found)
    table = entries(config)
    names = {e.name for e in table}
    drawn = _absent_heads(found, table)
    if seed is not None:
        names = {name for name in names if not name.startswith(tuple(HEADS[head] for head in drawn))}
    _check_names(names, set(found), "tensors")
    if drawn and seed is not None:
        say(f"drawn at random with seed {seed}, since the source has none: {', '.join(drawn)}")

    converted = sorted({str(v.dtype) for v in found.values() if v.dtype != np.float32})
    if converted:
        say(f"converted to float32 from {', '.join(converted)}")
    params: dict[str, Any] = {}
    for number, entry in enumerate(table):
        if entry.name in found:
            value = np.asarray(found[entry.name])
            if value.shape != entry.shape:
                raise UserError(f"tensor {entry.name} has shape {value.shape}; the configuration says {entry.shape}")
            value = value.astype(np.float32)
            value = value.T if entry.is_kernel else value
        else:
            assert seed is not None
            value = _initial(entry, config, (seed, number))
        if entry.has_vocab:
            padded = np.zeros((config.padded_vocab_size, *value.shape[1:]), np.float32)
            padded[: config.vocab_size] = value
            value = padded
        node = params
        for part in entry.path[:-1]:
            node = node.setdefault(part, {})
        node[entry.path[-1]] = np.ascontiguousarray(value)
    return params


def absent_heads(tensors: Mapping[str, np.ndarray], config: BertConfig) -> tuple[str, ...]:
    """Which of the pooler ("pooler") and the heads ("mlm", "nsp") the published tensors lack as a whole."""
    found = _published_names(tensors, lambda _: None)
    _drop_decoder(found)
    return _absent_heads(found, entries(config))


def _absent_heads(found: Mapping[str, np.ndarray], table: list[Entry]) -> tuple[str, ...]:
    return tuple(
        head for head, start in HEADS.items() if not any(e.name in found for e in table if e.name.startswith(start))
    )


def _our_shape(entry: Entry, config: BertConfig) -> tuple[int, ...]:
    if entry.has_vocab:
        return (config.padded_vocab_size, *entry.shape[1:])
    return entry.shape[::-1] if entry.is_kernel else entry.shape


def _flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in tree.items():
        found += _flatten(value, (*prefix, key)) if isinstance(value, Mapping) else [((*prefix, key), value)]
    return found


def _check_names(expected: set[str], found: set[str], what: str) -> None:
    problems = []
    for word, names in (("missing", expected - found), ("unknown", found - expected)):
        if names:
            listed = sorted(names)
            more = f" and {len(listed) - 20} more" if len(listed) > 20 else ""
            problems.append(f"{len(listed)} {word}: {', '.join(listed[:20])}{more}")
    if problems:
        raise UserError(f"{what} do not fit a BERT pretraining model of this configuration; {'; '.join(problems)}")


def _published_names(tensors: Mapping[str, np.ndarray], say: Say) -> dict[str, np.ndarray]:
    """The tensors under today's names; buffers that hold no weights are left out."""
    found: dict[str, np.ndarray] = {}
    buffers = []
    for original, value in tensors.items():
        name = original
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = f"bert.{name}"
        if name in ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids"):
            buffers.append(original)
            continue
        for old, new in ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias")):
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if name in found:
            raise UserError(f"the tensors hold {name} twice, once as {original}; keep one of them")
        found[name] = value
    if buffers:
        say(f"left out, no weights: {', '.join(sorted(buffers))}")
    return found


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
    """What a new model starts from: normal numbers cut at two deviations, zero biases, unit scales; our layout."""
    shape = entry.shape[::-1] if entry.is_kernel else entry.shape
    if not entry.is_kernel:
        return np.full(shape, 1.0 if entry.path[-1] == "scale" else 0.0, np.float32)
    rng = np.random.default_rng(seed)
    draws = rng.standard_normal(shape)
    while (far := np.abs(draws) > 2).any():
        draws[far] = rng.standard_normal(int(far.sum()))
    return (draws * config.initializer_range).astype(np.float32)
