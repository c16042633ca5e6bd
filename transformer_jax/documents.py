"""How documents are split and encoded: the part of a preparation that knows what a document is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_jax import shards
from transformer_jax.chunks import Chunk, is_heldout
from transformer_jax.config import UserError
from transformer_jax.prepared_folder import SPLITS
from transformer_jax.scripts import UnknownCounter
from transformer_jax.shards import ShardArrays

if TYPE_CHECKING:
    from transformer_jax.tokenizer import WordPiece


@dataclasses.dataclass(frozen=True)
class DocumentScheme:
    """Documents of one language, of which a share is held out by the hash of their text (see `chunks.Scheme`)."""

    heldout: float
    word_sources: tuple[bool, ...] = ()
    """For each input file whether whitespace in it bounds words, so that words.npy is written."""
    min_documents: int = 1

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS

    @property
    def key(self) -> Any:
        return [self.heldout, list(self.word_sources)]

    @property
    def advice(self) -> str:
        return (
            "Writing without spaces (Thai, Lao, Khmer, Burmese) needs a pre-splitter: put `pre_splitter = "
            '"characters"` into the recipe.\nOtherwise use more text; set tokenizer.min_frequency to 1 for a small '
            "corpus, so that signs that stand in it only once have an entry; raise\ntokenizer.limit_alphabet or "
            "tokenizer.vocab_size; use a vocabulary that covers the script; or raise data.max_unknown_rate if the loss "
            "is meant."
        )

    def split_of(self, document: Sequence[str], source: int, own_hash: int) -> str:
        return "heldout" if is_heldout(own_hash, self.heldout) else "train"

    def check_counts(self, counts: Mapping[str, int]) -> None:
        train, heldout = counts["train"], counts["heldout"]
        if train + heldout == 0:
            raise UserError("the corpus is empty: no document with any text was found; check the sources of the recipe")
        if train < self.min_documents:
            why = (
                "a random next sentence must come from another document"
                if self.min_documents > 1
                else "there is no text"
            )
            raise UserError(
                f"the training split has {train} of {train + heldout} documents; at least {self.min_documents} are "
                f"needed ({why}): use more documents, put a blank line between documents in plain text, or lower "
                f"`heldout` ({self.heldout}) in the recipe"
            )
        if self.heldout and heldout < self.min_documents:
            raise UserError(
                f"the held-out split has {heldout} of {train + heldout} documents; at least {self.min_documents} are "
                f"needed to evaluate on: raise `heldout` ({self.heldout}) in the recipe, use more documents, or set it "
                "to 0 to train without"
            )

    def load_tokenizer(self, folder: Path) -> WordPiece:
        from transformer_jax.tokenizer import WordPiece

        return WordPiece.load(folder)

    def encode(self, tokenizer: WordPiece, chunk: Chunk) -> tuple[dict[str, ShardArrays], dict[str, Any]]:
        unknown = UnknownCounter()
        sides: dict[str, _Columns] = {split: _Columns() for split in self.splits}
        empty = 0
        for text, source, own_hash in zip(chunk.documents, chunk.sources, chunk.hashes, strict=True):
            side = sides[self.split_of(text, source, own_hash)]
            side.pending.append((text, source, own_hash))
            side.pending_chars += sum(map(len, text))
            if side.pending_chars >= 1 << 18:
                empty += side.encode_pending(tokenizer, self.word_sources, unknown)
        empty += sum(side.encode_pending(tokenizer, self.word_sources, unknown) for side in sides.values())
        arrays = {split: side.arrays() for split, side in sides.items() if side.hashes}
        return arrays, {"empty_documents": empty, "unknown": unknown.to_dict()}


class _Columns:
    """One split's share of a chunk while it is being encoded, a few hundred kilobytes of text at a time."""

    def __init__(self) -> None:
        self.pending: list[tuple[list[str], int, int]] = []
        self.pending_chars = 0
        self.tokens: list[np.ndarray] = []
        self.words: list[np.ndarray] = []
        self.sentence_lengths: list[np.ndarray] = []
        self.document_lengths: list[int] = []
        self.sources: list[int] = []
        self.hashes: list[int] = []

    def encode_pending(self, tokenizer: WordPiece, word_sources: Sequence[bool], unknown: UnknownCounter) -> int:
        """Encode what waits; sentences without pieces and documents without sentences go. Returns documents gone."""
        pending, self.pending, self.pending_chars = self.pending, [], 0
        sentences = [sentence for document, _, _ in pending for sentence in document]
        bounded = np.zeros(len(sentences), dtype=bool)
        if any(word_sources):
            bounded[:] = [word_sources[source] for document, source, _ in pending for _ in document]
        ids, marks = _encode(tokenizer, sentences, bounded)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int64, int(lengths.sum()))
        if any(word_sources):
            starts = (~tokenizer.is_continuation_V[flat]).astype(np.uint8)
            starts[np.repeat(bounded, lengths)] = marks
            self.words.append(starts)
        unknown.add_flat(tokenizer, flat)
        ends = np.cumsum(lengths)
        for index in np.unique(np.searchsorted(ends, np.flatnonzero(flat == tokenizer.unk_id), side="right")):
            unknown.add_unknown(tokenizer, sentences[index])
        self.tokens.append(flat.astype(shards.token_dtype(tokenizer.vocab_size)))
        self.sentence_lengths.append(lengths[lengths > 0])
        empty = position = 0
        for document, source, own_hash in pending:
            count = int(np.count_nonzero(lengths[position : position + len(document)]))
            position += len(document)
            if not count:
                empty += 1
                continue
            self.document_lengths.append(count)
            self.sources.append(source)
            self.hashes.append(own_hash)
        return empty

    def arrays(self) -> shards.ShardArrays:
        return shards.ShardArrays(
            tokens=np.concatenate(self.tokens),
            sentences=np.concatenate([[0], np.cumsum(np.concatenate(self.sentence_lengths))]),
            documents=np.concatenate([[0], np.cumsum(self.document_lengths)]),
            sources=np.asarray(self.sources, dtype=np.int64),
            hashes=np.asarray(self.hashes, dtype=np.uint64),
            words=np.concatenate(self.words) if self.words else None,
        )


def _encode(
    tokenizer: WordPiece, sentences: Sequence[str], bounded: np.ndarray
) -> tuple[Sequence[Sequence[int]], list[bool]]:
    """Ids of every sentence; and for those whose spaces bound words, one after another, which pieces start a word."""
    if not bounded.any():
        return tokenizer.encode_batch(sentences), []
    plain = iter(tokenizer.encode_batch([s for s, own in zip(sentences, bounded, strict=True) if not own]))
    ids: list[Sequence[int]] = []
    marks: list[bool] = []
    for sentence, own in zip(sentences, bounded, strict=True):
        if own:
            pieces, starts = tokenizer.encode_words(sentence)
            ids.append(pieces)
            marks += starts
        else:
            ids.append(next(plain))
    return ids, marks
