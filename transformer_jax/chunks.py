"""Chunks of documents, the unit of work of a preparation: cut, encoded, and encoded by many processes.

A chunk becomes one shard of each split and a sidecar, `chunks/chunk-00012.json`, written last, that has the digest of
all it was made from. What it becomes is a function of its text and the settings.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_jax import shards
from transformer_jax.config import UserError
from transformer_jax.prepared_folder import CHUNKS, SPLITS, disk_errors, read_json
from transformer_jax.scripts import ScriptCount, UnknownCounter

if TYPE_CHECKING:
    from transformer_jax.corpora import Document
    from transformer_jax.tokenizer import WordPiece


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive documents, on their way to an encoder."""

    index: int
    digest: str
    sources: list[int]
    hashes: list[int]
    documents: list[list[str]]
    text_bytes: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an encoder needs to know besides the tokenizer."""

    out: Path
    heldout: float
    word_sources: tuple[bool, ...]
    """For each input file whether whitespace in it bounds words, so that words.npy is written."""
    key: str
    """Digest of tokenizer and settings: a chunk made with another key is made again."""


def is_heldout(hash_of_text: int, share: float) -> bool:
    """Whether a document is held out: by its content alone, so that copies of it never stand on both sides."""
    return (hash_of_text >> 11) * 2.0**-53 < share


def cut_chunks(documents: Iterable[Document], chunk_bytes: int) -> Iterator[Chunk]:
    """Consecutive documents in chunks of at least `chunk_bytes` of text (the last one may have less).

    Documents without sentences are left out. A chunk's digest covers all that its shards are made of.
    """
    index = 0
    sources: list[int] = []
    hashes: list[int] = []
    texts: list[list[str]] = []
    size = 0
    digest = hashlib.sha256()

    def cut() -> Chunk:
        nonlocal index, sources, hashes, texts, size, digest
        chunk = Chunk(index, digest.hexdigest(), sources, hashes, texts, size)
        index, sources, hashes, texts, size, digest = index + 1, [], [], [], 0, hashlib.sha256()
        return chunk

    for document in documents:
        if not document.sentences:
            continue
        data = text_of(document.sentences)
        lengths = ",".join([str(len(sentence)) for sentence in document.sentences])
        digest.update(f"{document.source}:{len(data)}:{lengths}\n".encode())
        digest.update(data)
        sources.append(document.source)
        hashes.append(content_hash(data))
        texts.append(document.sentences)
        size += len(data)
        if size >= chunk_bytes:
            yield cut()
    if texts:
        yield cut()


def text_of(sentences: Sequence[str]) -> bytes:
    """A document's text as it is hashed and measured: the same however it was cut into sentences."""
    return " ".join(sentences).encode()


def content_hash(data: bytes) -> int:
    """64 bits of the hash of a document's text."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def chunk_path(out: Path, index: int) -> Path:
    """Where the sidecar of a chunk lies."""
    return out / CHUNKS / f"chunk-{index:05d}.json"


def finished_chunk(settings: Settings, chunk: Chunk) -> dict[str, Any] | None:
    """The sidecar of an earlier run for this chunk, if text, settings and shard files are still the same."""
    record = read_json(chunk_path(settings.out, chunk.index))
    if record.get("text") != chunk.digest or record.get("settings") != settings.key:
        return None
    whole = all(shards.entry_is_whole(settings.out, entry) for entry in record["shards"].values())
    return record if whole else None


def encode_chunk(tokenizer: WordPiece, settings: Settings, chunk: Chunk) -> dict[str, Any]:
    """Encode a chunk, write its shards and then its sidecar, which is returned."""
    with disk_errors(settings.out):
        chunk_path(settings.out, chunk.index).unlink(missing_ok=True)
        unknown = UnknownCounter()
        sides: dict[str, _Columns] = {split: _Columns() for split in SPLITS}
        empty = 0
        for text, source, own_hash in zip(chunk.documents, chunk.sources, chunk.hashes, strict=True):
            side = sides["heldout" if is_heldout(own_hash, settings.heldout) else "train"]
            side.pending.append((text, source, own_hash))
            side.pending_chars += sum(map(len, text))
            if side.pending_chars >= 1 << 18:
                empty += side.encode_pending(tokenizer, settings, unknown)
        entries = {}
        for split, side in sides.items():
            empty += side.encode_pending(tokenizer, settings, unknown)
            name = f"{split}-{chunk.index:05d}"
            if side.hashes:
                entries[split] = shards.write_shard(settings.out, name, side.arrays(), tokenizer.vocab_size)
            elif (settings.out / name).exists():
                shutil.rmtree(settings.out / name)
        record = {
            "index": chunk.index,
            "text": chunk.digest,
            "settings": settings.key,
            "shards": entries,
            "empty_documents": empty,
            "unknown": unknown.to_dict(),
        }
        shards.write_atomically(chunk_path(settings.out, chunk.index), json.dumps(record, indent=1) + "\n")
    return record


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

    def encode_pending(self, tokenizer: WordPiece, settings: Settings, unknown: UnknownCounter) -> int:
        """Encode what waits; sentences without pieces and documents without sentences go. Returns documents gone."""
        pending, self.pending, self.pending_chars = self.pending, [], 0
        sentences = [sentence for document, _, _ in pending for sentence in document]
        bounded = np.zeros(len(sentences), dtype=bool)
        if any(settings.word_sources):
            bounded[:] = [settings.word_sources[source] for document, source, _ in pending for _ in document]
        ids, marks = _encode(tokenizer, sentences, bounded)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int64, int(lengths.sum()))
        if any(settings.word_sources):
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


def counter_from_dict(counts: Mapping[str, Mapping[str, Any]]) -> UnknownCounter:
    """What `UnknownCounter.to_dict` gave, as a counter again."""
    counter = UnknownCounter()
    for script, count in counts.items():
        counter.counts[script] = ScriptCount(count["pieces"], count["unknown"], list(count["examples"]))
    return counter


# --- processes

_tokenizer: WordPiece | None = None


def _start_worker(tokenizer_folder: Path) -> None:
    global _tokenizer
    from transformer_jax.tokenizer import WordPiece

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reading process ends the run
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _tokenizer = WordPiece.load(tokenizer_folder)


def _leave_with_parent() -> None:
    """Without this, workers of a killed preparation would wait for ever for work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(settings: Settings, chunk: Chunk) -> dict[str, Any]:
    assert _tokenizer is not None
    return encode_chunk(_tokenizer, settings, chunk)


@contextlib.contextmanager
def encoder(settings: Settings, workers: int | None) -> Iterator[Callable[[Iterable[Chunk]], Iterator[dict[str, Any]]]]:
    """A function that encodes chunks as they come, here or in `workers` processes, a bounded number at a time."""
    count = workers if workers is not None else len(os.sched_getaffinity(0))
    folder = settings.out / shards.TOKENIZER
    if count <= 1:
        from transformer_jax.tokenizer import WordPiece

        tokenizer = WordPiece.load(folder)
        yield lambda todo: (encode_chunk(tokenizer, settings, chunk) for chunk in todo)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(count, context, _start_worker, (folder,))

    def encode(todo: Iterable[Chunk]) -> Iterator[dict[str, Any]]:
        running: set[concurrent.futures.Future[dict[str, Any]]] = set()
        try:
            for chunk in todo:
                running.add(pool.submit(_encode_in_worker, settings, chunk))
                del chunk
                if len(running) > count:
                    finished, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                    for future in finished:
                        yield future.result()
            for future in concurrent.futures.as_completed(running):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "an encoding process was ended from outside, most likely because memory ran out; finished shards are "
                "kept: run `prepare` again with fewer processes or a smaller data.shard_mb"
            ) from None

    try:
        yield encode
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
