"""BERT's embeddings and encoder as a part that other models start from: out of a run, or a Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from transformer_jax import storage
from transformer_jax.checkpoint import read_params
from transformer_jax.config import EncoderConfig, UserError
from transformer_jax.published_names import Entry, adopt, dense, norm
from transformer_jax.safetensors_folder import read_json, read_tensors
from transformer_jax.tokenizer import WordPiece

Say = Callable[[str], None]
_log = logging.getLogger(__name__).info


class BertEncoder(NamedTuple):
    """What `read` found."""

    settings: dict[str, Any]
    """Of the model, by the names that our configurations and Hugging Face's share."""
    embeddings: dict[str, Any]
    """word, position, token_type and norm; the word embeddings [vocab_size, H], without padding."""
    encoder: dict[str, Any]
    """layer_0, layer_1, ..."""
    tokenizer: WordPiece


def read(checkpoint: str, say: Say = _log) -> BertEncoder:
    """Read embeddings and encoder of a BERT run, RUN@STEP or Hugging Face folder; its heads are left out.

    Raises:
      UserError: no checkpoint, a damaged one, or one of another kind of model.
    """
    path = storage.path(checkpoint)
    if (path / "config.json").is_file():
        path = storage.fetch(path)
        settings = read_json(path / "config.json")
        if settings.get("model_type", "bert") != "bert":
            raise UserError(f"{checkpoint} is a folder of {settings['model_type']!r}, not of BERT")
        tensors = todays_names(read_tensors(path, "BertModel"), say)
        try:
            params = _of_folder(tensors, settings)
        except (UserError, KeyError, TypeError) as e:
            why = f"config.json lacks {e}" if isinstance(e, KeyError) else str(e)
            raise UserError(f"{checkpoint}: {why}") from None
        tokenizer = WordPiece.load(path)
    else:
        _, params, _, meta = read_params(checkpoint)
        settings = meta["config"]["model"]
        if "word" not in params.get("embeddings", {}):
            raise UserError(f"{checkpoint} is not a BERT run: its parameters are {', '.join(sorted(params))}")
        tokenizer = WordPiece.from_files(meta["tokenizer"])
    embeddings = dict(params["embeddings"])
    embeddings["word"] = {"embedding": embeddings["word"]["embedding"][: tokenizer.vocab_size]}
    return BertEncoder({**settings, "vocab_size": tokenizer.vocab_size}, embeddings, params["encoder"], tokenizer)


def entries(config: EncoderConfig, vocab_size: int, padded_vocab_size: int, positions: int, types: int) -> list[Entry]:
    """The tensors of embeddings and encoder in the order of the forward pass, as `BertModel` publishes them.

    Args:
      positions, types: rows of the tables of positions and of segments.
    """
    hidden, inner = config.hidden_size, config.intermediate_size

    def table(kind: str, rows: int, padded_rows: int = 0) -> Entry:
        path, name = ("embeddings", kind, "embedding"), f"bert.embeddings.{kind}_embeddings.weight"
        return Entry(path, name, (rows, hidden), padded_rows=padded_rows)

    found = [
        table("word", vocab_size, padded_vocab_size),
        table("position", positions),
        table("token_type", types),
        *norm("embeddings/norm", "bert.embeddings.LayerNorm", hidden),
    ]
    for i in range(config.num_hidden_layers):
        ours, theirs = f"encoder/layer_{i}", f"bert.encoder.layer.{i}"
        for part in ("query", "key", "value"):
            found += dense(f"{ours}/attention/{part}", f"{theirs}.attention.self.{part}", hidden, hidden)
        found += dense(f"{ours}/attention/output", f"{theirs}.attention.output.dense", hidden, hidden)
        found += norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm", hidden)
        found += dense(f"{ours}/feed_forward/intermediate", f"{theirs}.intermediate.dense", hidden, inner)
        found += dense(f"{ours}/feed_forward/output", f"{theirs}.output.dense", inner, hidden)
        found += norm(f"{ours}/feed_forward_norm", f"{theirs}.output.LayerNorm", hidden)
    return found


def _of_folder(tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(
            f"position_embedding_type is {settings['position_embedding_type']!r}; only 'absolute' can be read"
        )
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config, vocab_size = EncoderConfig(**{name: settings[name] for name in sizes}), settings["vocab_size"]
    table = entries(config, vocab_size, vocab_size, settings["max_position_embeddings"], settings["type_vocab_size"])
    known = {entry.name for entry in table}
    return adopt({name: x for name, x in tensors.items() if name in known}, table, "BERT's encoder")


def todays_names(tensors: Mapping[str, np.ndarray], say: Say) -> dict[str, np.ndarray]:
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
