"""Chunks of documents, the unit of work of a preparation: cut, encoded, and encoded by many processes.

A chunk becomes one shard of each split and a sidecar, `chunks/chunk-00012.json`, written last, that has the digest of
all it was made from. What it becomes is a function of its text and the settings.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
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
from typing import TYPE_CHECKING, Any, Protocol

from transformer_jax import shards
from transformer_jax.config import UserError
from transformer_jax.prepared_folder import CHUNKS, disk_errors, read_json
from transformer_jax.shards import ShardArrays

if TYPE_CHECKING:
    from transformer_jax.corpora import Document


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive documents, on their way to an encoder."""

    index: int
    digest: str
    sources: list[int]
    hashes: list[int]
    documents: list[list[str]]
    text_bytes: int


class Scheme(Protocol):
    """What becomes of one kind of document. It travels to the encoding processes."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that documents go to."""
        ...

    @property
    def key(self) -> Any:
        """What the encoded form depends on besides text and tokenizer, as JSON."""
        ...

    @property
    def advice(self) -> str:
        """What to do about unknown pieces, for the message."""
        ...

    def split_of(self, document: Sequence[str], source: int, own_hash: int) -> str:
        """The split of a document, given the index of its input file and the hash of its text."""
        ...

    def check_counts(self, counts: Mapping[str, int]) -> None:
        """Raises UserError where the documents of the splits are too few to use."""
        ...

    def load_tokenizer(self, folder: Path) -> Any:
        """What `encode` needs, from the folder it was saved in; it has files, digest and vocab_size."""
        ...

    def encode(self, tokenizer: Any, chunk: Chunk) -> tuple[dict[str, ShardArrays], dict[str, Any]]:
        """The arrays of each split that has any, and what was counted on the way, as JSON.

        Counts have `unknown`, as `UnknownCounter.to_dict` gives it.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an encoder needs to know besides the tokenizer."""

    out: Path
    scheme: Scheme
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


def encode_chunk(tokenizer: Any, settings: Settings, chunk: Chunk) -> dict[str, Any]:
    """Encode a chunk, write its shards and then its sidecar, which is returned."""
    with disk_errors(settings.out):
        chunk_path(settings.out, chunk.index).unlink(missing_ok=True)
        arrays, counted = settings.scheme.encode(tokenizer, chunk)
        entries = {}
        for split in settings.scheme.splits:
            name = f"{split}-{chunk.index:05d}"
            if split in arrays:
                entries[split] = shards.write_shard(settings.out, name, arrays[split], tokenizer.vocab_size)
            elif (settings.out / name).exists():
                shutil.rmtree(settings.out / name)
        record = {
            "index": chunk.index,
            "text": chunk.digest,
            "settings": settings.key,
            "shards": entries,
            **counted,
        }
        shards.write_atomically(chunk_path(settings.out, chunk.index), json.dumps(record, indent=1) + "\n")
    return record


# --- processes

_tokenizer: Any = None


def _start_worker(scheme: Scheme, tokenizer_folder: Path) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reading process ends the run
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _tokenizer = scheme.load_tokenizer(tokenizer_folder)


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
        tokenizer = settings.scheme.load_tokenizer(folder)
        yield lambda todo: (encode_chunk(tokenizer, settings, chunk) for chunk in todo)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(count, context, _start_worker, (settings.scheme, folder))

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
