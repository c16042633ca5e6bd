"""A model with more positions, more segments or more words than it was trained with.

What is added starts from what is there:

    positions   row P + i is a copy of row i, round and round: far positions look like near ones, and neighbours stay
                neighbours (Beltagy et al. 2020, arXiv 2004.05150, section 5)
    segments    the mean of the segments that are there
    words       the mean of the pieces that the word was cut into before, in the table and in the MLM bias; a word that
                was [UNK] is drawn as a new model's rows are, with the mean of all entries as its bias
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.config import BertConfig
from transformer_jax.config import UserError
from transformer_jax.tokenizer import WordPiece

Say = Callable[[str], None]
_log = logging.getLogger(__name__).warning
_UNUSED = re.compile(r"\[unused\d+\]")


@dataclasses.dataclass(frozen=True)
class Resized:
    """The model after it."""

    params: dict[str, Any]
    config: BertConfig
    tokenizer: WordPiece


def resize(
    params: dict[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    *,
    max_position_embeddings: int = 0,
    type_vocab_size: int = 0,
    add_tokens: Sequence[str] = (),
    seed: int = 0,
    say: Say = _log,
) -> Resized:
    """Enlarge the tables of a model; see the module for what the new rows hold.

    A new token takes the place of the first free [unusedN], or a row at the end.

    Args:
      params: nested dict of numpy arrays, of pretraining or with a fine-tuned head; not changed.
      max_position_embeddings, type_vocab_size: wanted rows; 0 leaves them.
      add_tokens: words that become one piece each. Those the vocabulary has already are left, and said.
      seed: draws the rows of words that were [UNK].
      say: called with one line for each thing done.

    Raises:
      UserError: a table would get smaller, or a token cannot be one.
    """
    wanted = {"max_position_embeddings": max_position_embeddings, "type_vocab_size": type_vocab_size}
    for name, value in wanted.items():
        if value and value < getattr(config, name):
            raise UserError(f"{name} is to be {value}, and the model has {getattr(config, name)}; it can only grow")
    embeddings = dict(params["embeddings"])
    if max_position_embeddings > config.max_position_embeddings:
        old = _table(embeddings, "position")
        embeddings["position"] = {"embedding": old[np.arange(max_position_embeddings) % len(old)]}
        config = dataclasses.replace(config, max_position_embeddings=max_position_embeddings)
        said = _numbers("position", len(old), max_position_embeddings)
        say(f"{said} as copies of 0, 1, ..., again and again")
    if type_vocab_size > config.type_vocab_size:
        old = _table(embeddings, "token_type")
        new = np.repeat(old.mean(0, keepdims=True), type_vocab_size - len(old), axis=0)
        embeddings["token_type"] = {"embedding": np.concatenate([old, new])}
        config = dataclasses.replace(config, type_vocab_size=type_vocab_size)
        say(f"{_numbers('segment', len(old), type_vocab_size)} as the mean of those that were there")
    params = {**params, "embeddings": embeddings}
    if not add_tokens:
        return Resized(params, config, tokenizer)
    known = [token for token in add_tokens if token in tokenizer.vocab]
    if known:
        say(f"in the vocabulary already: {', '.join(known)}")
    keep = (*tokenizer.config.keep_tokens, *(t for t in add_tokens if t not in tokenizer.config.keep_tokens))
    extended = WordPiece(tokenizer.vocab, dataclasses.replace(tokenizer.config, keep_tokens=keep))
    return _with_words(params, config, tokenizer, extended, seed, say)


def extends(new: WordPiece, old: WordPiece) -> bool:
    """Whether `new` is `old` with more tokens: at the end, or in the place of [unusedN]."""

    def rules(tokenizer: WordPiece) -> Any:
        return dataclasses.replace(tokenizer.config, keep_tokens=(), vocab_size=0, unused_tokens=0, min_frequency=1)

    keep = set(new.config.keep_tokens)
    if rules(new) != rules(old) or not set(old.config.keep_tokens) <= keep or new.vocab_size < old.vocab_size:
        return False
    pairs = zip(old.vocab, new.vocab, strict=False)
    same = all(a == b or (b in keep and _UNUSED.fullmatch(a) is not None) for a, b in pairs)
    return same and set(new.vocab[old.vocab_size :]) <= keep


def to_vocabulary(
    params: dict[str, Any], config: BertConfig, old: WordPiece, new: WordPiece, *, seed: int = 0, say: Say = _log
) -> Resized:
    """The model with the rows of `new`, which `extends` the tokenizer `old` that it was trained with."""
    assert extends(new, old)
    return _with_words(params, config, old, new, seed, say)


def _with_words(
    params: dict[str, Any], config: BertConfig, old: WordPiece, new: WordPiece, seed: int, say: Say
) -> Resized:
    rows = max(config.vocab_size, new.vocab_size)
    config_after = dataclasses.replace(config, vocab_size=rows)
    table = _table(params["embeddings"], "word")[: config.vocab_size]
    table_after = np.zeros((config_after.padded_vocab_size, config.hidden_size), np.float32)
    table_after[: len(table)] = table
    has_bias = "mlm" in params
    bias = np.asarray(params["mlm"]["bias"])[: len(table)] if has_bias else np.zeros(len(table), np.float32)
    bias_after = np.zeros(config_after.padded_vocab_size, np.float32)
    bias_after[: len(bias)] = bias
    rng = np.random.default_rng(seed)
    averaged, drawn = [], []
    for i, token in enumerate(new.vocab):
        if i < old.vocab_size and old.vocab[i] == token:
            continue
        pieces = [p for p in old.encode(token) if p != old.unk_id]
        if pieces:
            table_after[i], bias_after[i] = table[pieces].mean(0), bias[pieces].mean()
            averaged.append(token)
        else:
            spread = config.initializer_range
            table_after[i] = np.clip(rng.standard_normal(config.hidden_size), -2, 2) * spread
            bias_after[i] = bias.mean()
            drawn.append(token)
    params = {**params, "embeddings": {**params["embeddings"], "word": {"embedding": table_after}}}
    if has_bias:
        params["mlm"] = {**params["mlm"], "bias": bias_after}
    if averaged:
        say(f"new tokens that start as the mean of their pieces: {_listed(averaged)}")
    if drawn:
        say(f"new tokens that were [UNK], so their rows are drawn with seed {seed}: {_listed(drawn)}")
    return Resized(params, config_after, new)


def read_tokens(path: str | Path) -> list[str]:
    """The tokens of a file, one a line; blank lines are passed over.

    Raises:
      UserError: no such file, not UTF-8, or no token in it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {e}") from None
    found = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not found:
        raise UserError(f"{path}: no token is in it; write one a line")
    return found


def _table(embeddings: dict[str, Any], name: str) -> np.ndarray:
    return np.asarray(embeddings[name]["embedding"], np.float32)


def _listed(tokens: Sequence[str]) -> str:
    return ", ".join(tokens[:10]) + (f" and {len(tokens) - 10} more" if len(tokens) > 10 else "")


def _numbers(what: str, start: int, stop: int) -> str:
    return f"{what} {start} starts" if stop == start + 1 else f"{what}s {start} to {stop - 1} start"
