"""From documents to a prepared folder: vocabulary, token shards, data report.

The corpus is read as a stream and cut into chunks of about `shard_mb` megabytes of text, always between documents. A
chunk is the unit of work: one process turns it into one shard of each split and then writes a sidecar,
`chunks/chunk-00012.json`, that has the digest of all it was made from. A killed preparation therefore goes on at the
next chunk, and a second one makes anew only the chunks whose text or settings have changed. What a chunk becomes is a
function of its text and the settings, so the bytes do not depend on the number of processes or on kills.

Memory: the reader holds one chunk, and `workers` + 1 more are on their way or being encoded. Each costs about ten times
its text, besides what a process needs for itself, whatever the size of the corpus. (A document is never split, so a
document larger than `shard_mb` counts as a chunk of its own size.)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from transformer_jax import data_report, shards
from transformer_jax.config import UserError, differences
from transformer_jax.scripts import ScriptCount, UnknownCounter, message_above
from transformer_jax.shards import Shards
from transformer_jax.tokenizer_config import WordPieceConfig

if TYPE_CHECKING:
    from transformer_jax.corpora import Document, Recipe
    from transformer_jax.tokenizer import WordPiece

CHUNKS = "chunks"
VERSION = 1
"""Of what a chunk becomes; raised when the same text and settings would give other bytes."""
SPLITS = ("train", "heldout")
HOPELESS_UNKNOWN_RATE = 0.2
"""With this share of a script unknown (and ten times the limit), `prepare` stops before the end of the corpus."""
HOPELESS_MIN_PIECES = 20_000

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    stage: str
    """"vocabulary" or "encoding"."""
    documents: int
    text_bytes: int
    """Text read so far, in UTF-8."""
    total_bytes: int | None
    """All text of the corpus, where it is known already."""
    chunks: int
    """Chunks done, those kept from an earlier run included."""
    kept: int
    """Chunks kept from an earlier run."""
    seconds: float
    """Since the stage began."""


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


def prepare(
    recipe: Recipe,
    tokenizer_config: WordPieceConfig,
    out: Path,
    *,
    shard_mb: float = 8.0,
    max_unknown_rate: float = 0.01,
    heldout: float | None = None,
    workers: int | None = None,
    min_documents: int = 1,
    progress: Callable[[Progress], None] | None = None,
    say: Say | None = None,
    resume: bool = True,
    describe: Callable[[Shards], Mapping[str, Any]] | None = None,
    described_with: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make (or go on making, or make up to date) the prepared folder `out` from the documents of a recipe.

    Args:
      shard_mb: megabytes of text in a shard.
      max_unknown_rate: the share of [UNK] among the pieces of any one script above which preparation stops.
      heldout: share of documents kept out of training, by the hash of their content; the recipe's own without it.
      workers: encoding processes; one for each core without it. 1 encodes in this process.
      min_documents: fewer training documents than this are an error (2 where a second document is drawn at random).
      progress: called as work goes on.
      say: called with messages for the user.
      resume: False makes everything anew.
      describe: a task's own section of the data report ("examples"), from the finished training split.
      described_with: settings that section depends on; when only they have changed, only the report is new.

    Returns:
      The data report, as in report.json.

    Raises:
      UserError: no documents, none for a split, too many unknown pieces, a full disk, an input that cannot be read.
    """
    from transformer_jax import corpora

    say = say or (lambda message: None)
    share = recipe.heldout if heldout is None else heldout
    tokenizer_config = _with_recipe(tokenizer_config, recipe)
    made_from = {
        "version": VERSION,
        "recipe": corpora.describe(recipe),
        "tokenizer": _tokenizer_inputs(tokenizer_config),
        "heldout": share,
        "shard_mb": shard_mb,
        "max_unknown_rate": max_unknown_rate,
        "min_documents": min_documents,
    }
    return prepare_documents(
        lambda: corpora.documents(recipe),
        corpora.source_names(recipe),
        lambda texts: _make_tokenizer(texts, tokenizer_config, workers),
        out,
        made_from=made_from,
        name=recipe.name,
        word_sources=corpora.word_sources(recipe),
        shard_mb=shard_mb,
        max_unknown_rate=max_unknown_rate,
        heldout=share,
        workers=workers,
        min_documents=min_documents,
        progress=progress,
        say=say,
        resume=resume,
        describe=describe,
        described_with=described_with,
    )


def prepare_documents(
    documents: Callable[[], Iterable[Document]],
    source_names: Sequence[str],
    make_tokenizer: Callable[[Iterator[str]], WordPiece],
    out: Path,
    *,
    made_from: Mapping[str, Any],
    name: str = "",
    word_sources: Sequence[bool] = (),
    shard_mb: float = 8.0,
    max_unknown_rate: float = 0.01,
    heldout: float = 0.0,
    workers: int | None = None,
    min_documents: int = 1,
    progress: Callable[[Progress], None] | None = None,
    say: Say = lambda message: None,
    resume: bool = True,
    describe: Callable[[Shards], Mapping[str, Any]] | None = None,
    described_with: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """As `prepare`, for any stream of documents.

    Args:
      documents: gives the stream; called once for the vocabulary and once for the shards.
      make_tokenizer: trains or loads the tokenizer; may read the sentences of the training documents it is given.
      made_from: everything that decides what comes out, as JSON; compared with that of an earlier run.
    """
    if not 0.0 <= heldout < 1.0:
        raise UserError(f"heldout is {heldout}; it is a share of the documents, at least 0 and below 1")
    if shard_mb <= 0:
        raise UserError(f"data.shard_mb is {shard_mb}; it must be above 0")
    made_from = json.loads(json.dumps(made_from))
    with _locked(out):
        finished = _manifest_or_none(out)
        before = finished["made_from"] if finished is not None else _read_json(out / CHUNKS / "settings.json")
        changes = differences(before, made_from) if before else {}
        if finished is not None and resume and not changes:
            broken = shards.verify(out)
            if not broken:
                return _report(out, finished, describe, described_with, say, up_to_date=True)
            for problem in broken:
                say(f"{problem}; making it anew")
        for key, (old, new) in changes.items():
            say(f"{key} was {_short(old)} and is {_short(new)} now: what depends on it is made anew")
        with _disk_errors(out):
            (out / shards.MANIFEST).unlink(missing_ok=True)
            if not resume:
                remove_made(out)
            (out / CHUNKS).mkdir(parents=True, exist_ok=True)
            shards.write_atomically(out / CHUNKS / "settings.json", json.dumps(made_from, indent=1) + "\n")
            run = _Run(out, heldout, min_documents, shard_mb, progress, say)
            try:
                tokenizer = run.vocabulary(documents, make_tokenizer, made_from)
                settings = run.settings(tokenizer, word_sources)
                done = run.encode(documents, settings, workers, max_unknown_rate)
            except _GiveUpError as e:
                remove_made(out)
                raise UserError(str(e)) from None
            except UserError:
                if not (out / CHUNKS / "vocabulary.json").exists():
                    remove_made(out)  # nothing worth keeping has been made
                raise
            manifest = run.finish(tokenizer, source_names, done, made_from, name)
            report = _report(out, manifest, describe, described_with, say, up_to_date=False)
            shards.write_manifest(out, manifest)
            return report


class _GiveUpError(Exception):
    """The corpus or the settings cannot be used: nothing of the work is worth keeping."""


class _Run:
    """One preparation: the state that its stages share."""

    def __init__(
        self,
        out: Path,
        heldout: float,
        min_documents: int,
        shard_mb: float,
        progress: Callable[[Progress], None] | None,
        say: Say,
    ) -> None:
        self.out, self.heldout, self.min_documents = out, heldout, min_documents
        self.chunk_bytes = int(shard_mb * 1e6)
        self.say = say
        self._progress = progress or (lambda state: None)
        self._started = time.monotonic()
        self._total_bytes: int | None = None
        self._seen = [0, 0]  # documents, bytes

    def _tell(self, stage: str, chunks: int = 0, kept: int = 0) -> None:
        documents, text_bytes = self._seen
        seconds = time.monotonic() - self._started
        self._progress(Progress(stage, documents, text_bytes, self._total_bytes, chunks, kept, seconds))

    # --- vocabulary

    def vocabulary(
        self,
        documents: Callable[[], Iterable[Document]],
        make_tokenizer: Callable[[Iterator[str]], WordPiece],
        made_from: Mapping[str, Any],
    ) -> WordPiece:
        """The tokenizer of an earlier, unfinished run with the same inputs, or a new one."""
        from transformer_jax.tokenizer import WordPiece

        relevant = {k: v for k, v in made_from.items() if k not in ("shard_mb", "max_unknown_rate", "min_documents")}
        key = _digest(relevant)
        record_path = self.out / CHUNKS / "vocabulary.json"
        record = _read_json(record_path)
        folder = self.out / shards.TOKENIZER
        if record.get("key") == key and all(
            (folder / file).is_file() and shards.describe_file(folder / file) == entry
            for file, entry in record["tokenizer"]["files"].items()
        ):
            self._total_bytes = record["text_bytes"]
            return WordPiece.load(folder)
        counted = [0, 0]  # of each split
        exhausted = False

        def texts() -> Iterator[str]:
            nonlocal exhausted
            for document in documents():
                if not document.sentences:
                    continue
                data = _text_of(document.sentences)
                self._seen[0] += 1
                self._seen[1] += len(data)
                side = self._is_heldout(_hash(data))
                counted[side] += 1
                if not side:
                    yield from document.sentences
                if self._seen[0] % 1000 == 0:
                    self._tell("vocabulary")
            self._check_counts(*counted)
            exhausted = True

        tokenizer = make_tokenizer(texts())
        self._total_bytes = self._seen[1] if exhausted else None
        if folder.exists():
            shutil.rmtree(folder)
        entry = shards.write_tokenizer(self.out, tokenizer)
        state = {"key": key, "tokenizer": entry, "text_bytes": self._total_bytes}
        shards.write_atomically(record_path, json.dumps(state, indent=1) + "\n")
        self._tell("vocabulary")
        return tokenizer

    def _is_heldout(self, content_hash: int) -> bool:
        return is_heldout(content_hash, self.heldout)

    def _check_counts(self, train: int, heldout: int) -> None:
        """Raises _GiveUpError when a split would be too small to use."""
        if train + heldout == 0:
            raise _GiveUpError(
                "the corpus is empty: no document with any text was found; check the sources of the recipe"
            )
        if train < self.min_documents:
            why = (
                "a random next sentence must come from another document"
                if self.min_documents > 1
                else "there is no text"
            )
            raise _GiveUpError(
                f"the training split has {train} of {train + heldout} documents; at least {self.min_documents} are "
                f"needed ({why}): use more documents, put a blank line between documents in plain text, or lower "
                f"`heldout` ({self.heldout}) in the recipe"
            )
        if self.heldout and heldout < self.min_documents:
            raise _GiveUpError(
                f"the held-out split has {heldout} of {train + heldout} documents; at least {self.min_documents} are "
                f"needed to evaluate on: raise `heldout` ({self.heldout}) in the recipe, use more documents, or set it "
                "to 0 to train without"
            )

    # --- encoding

    def settings(self, tokenizer: WordPiece, word_sources: Sequence[bool]) -> Settings:
        key = _digest([VERSION, shards.VERSION, tokenizer.digest, self.heldout, list(word_sources)])
        return Settings(self.out, self.heldout, tuple(word_sources), key)

    def encode(
        self,
        documents: Callable[[], Iterable[Document]],
        settings: Settings,
        workers: int | None,
        max_unknown_rate: float,
    ) -> list[dict[str, Any]]:
        """Every chunk of the stream, encoded or kept; returns their sidecars in order."""
        self._seen, self._started = [0, 0], time.monotonic()
        done: dict[int, dict[str, Any]] = {}
        kept = 0
        unknown = UnknownCounter()

        def add(record: dict[str, Any]) -> None:
            done[record["index"]] = record
            unknown.merge(counter_from_dict(record["unknown"]))
            hopeless = [
                (script, count)
                for script, count in unknown.above(max(10 * max_unknown_rate, HOPELESS_UNKNOWN_RATE))
                if count.pieces >= HOPELESS_MIN_PIECES
            ]
            if hopeless:
                raise _GiveUpError(message_above(hopeless, max_unknown_rate))
            self._tell("encoding", len(done), kept)

        def wanted() -> Iterator[Chunk]:
            nonlocal kept
            for chunk in chunks(documents(), self.chunk_bytes):
                self._seen[0] += len(chunk.documents)
                self._seen[1] += chunk.text_bytes
                record = finished_chunk(settings, chunk)
                if record is None:
                    yield chunk
                else:
                    kept += 1
                    add(record)

        with _encoder(settings, workers) as encode:
            for record in encode(wanted()):
                add(record)
        records = [done[index] for index in sorted(done)]
        self._check_counts(*(sum(_documents(r, split) for r in records) for split in SPLITS))
        above = unknown.above(max_unknown_rate)
        if above:
            raise _GiveUpError(message_above(above, max_unknown_rate))
        if kept:
            self.say(f"{kept} of {len(records)} shards were kept from an earlier run")
        return records

    def finish(
        self,
        tokenizer: WordPiece,
        source_names: Sequence[str],
        records: Sequence[Mapping[str, Any]],
        made_from: Mapping[str, Any],
        name: str,
    ) -> dict[str, Any]:
        """The manifest (not yet written), after what no longer belongs to the folder has been taken away."""
        splits = {split: [r["shards"][split] for r in records if split in r["shards"]] for split in SPLITS}
        names = {entry["name"] for entries in splits.values() for entry in entries}
        for path in _made_shards(self.out):
            if path.name not in names:
                shutil.rmtree(path)
        kept = {chunk_path(self.out, r["index"]).name for r in records} | {"settings.json", "vocabulary.json"}
        for path in (self.out / CHUNKS).iterdir():
            if path.name not in kept:
                path.unlink()
        unknown = UnknownCounter()
        for record in records:
            unknown.merge(counter_from_dict(record["unknown"]))
        manifest = shards.make_manifest(
            vocab_size=tokenizer.vocab_size,
            tokenizer=_read_json(self.out / CHUNKS / "vocabulary.json")["tokenizer"],
            source_names=source_names,
            splits=splits,
            made_from=made_from,
        )
        manifest["name"] = name
        manifest["empty_documents"] = sum(r["empty_documents"] for r in records)
        manifest["unknown"] = unknown.to_dict()
        return manifest


def is_heldout(content_hash: int, share: float) -> bool:
    """Whether a document is held out: by its content alone, so that copies of it never stand on both sides."""
    return (content_hash >> 11) * 2.0**-53 < share


def chunks(documents: Iterable[Document], chunk_bytes: int) -> Iterator[Chunk]:
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
        data = _text_of(document.sentences)
        lengths = ",".join([str(len(sentence)) for sentence in document.sentences])
        digest.update(f"{document.source}:{len(data)}:{lengths}\n".encode())
        digest.update(data)
        sources.append(document.source)
        hashes.append(_hash(data))
        texts.append(document.sentences)
        size += len(data)
        if size >= chunk_bytes:
            yield cut()
    if texts:
        yield cut()


def _text_of(sentences: Sequence[str]) -> bytes:
    return " ".join(sentences).encode()


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def chunk_path(out: Path, index: int) -> Path:
    return out / CHUNKS / f"chunk-{index:05d}.json"


def finished_chunk(settings: Settings, chunk: Chunk) -> dict[str, Any] | None:
    """The sidecar of an earlier run for this chunk, if text, settings and shard files are still the same."""
    record = _read_json(chunk_path(settings.out, chunk.index))
    if record.get("text") != chunk.digest or record.get("settings") != settings.key:
        return None
    whole = all(shards.entry_is_whole(settings.out, entry) for entry in record["shards"].values())
    return record if whole else None


def encode_chunk(tokenizer: WordPiece, settings: Settings, chunk: Chunk) -> dict[str, Any]:
    """Encode a chunk, write its shards and then its sidecar, which is returned."""
    with _disk_errors(settings.out):
        chunk_path(settings.out, chunk.index).unlink(missing_ok=True)
        unknown = UnknownCounter()
        sides: dict[str, _Columns] = {split: _Columns() for split in SPLITS}
        empty = 0
        for text, source, content_hash in zip(chunk.documents, chunk.sources, chunk.hashes, strict=True):
            side = sides["heldout" if is_heldout(content_hash, settings.heldout) else "train"]
            side.pending.append((text, source, content_hash))
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
        for document, source, content_hash in pending:
            count = int(np.count_nonzero(lengths[position : position + len(document)]))
            position += len(document)
            if not count:
                empty += 1
                continue
            self.document_lengths.append(count)
            self.sources.append(source)
            self.hashes.append(content_hash)
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
def _encoder(
    settings: Settings, workers: int | None
) -> Iterator[Callable[[Iterable[Chunk]], Iterator[dict[str, Any]]]]:
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


# --- the folder


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep a second preparation out of the folder; the lock goes with the process, however it ends."""
    with _disk_errors(out):
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if not new and not (out / shards.MANIFEST).exists() and not (out / CHUNKS).exists():
            strangers = sorted(p.name for p in out.iterdir() if p.name not in (".lock", shards.CACHES))
            if strangers:
                raise UserError(
                    f"{out} holds files that `prepare` did not make ({', '.join(strangers[:3])}); name a new folder"
                )
        lock = (out / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another `prepare` is at work in {out}; wait for it, or name another folder") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            (out / ".lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                out.rmdir()  # only when nothing is left in it


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """A full disk, or one that cannot be written, as a message that says what is kept."""
    try:
        yield
    except OSError as e:
        if e.filename is not None and not str(e.filename).startswith(str(out)):
            raise UserError(f"{e.filename} cannot be read: {e.strerror}") from None
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(out).free / 1e6:.0f} MB free"
        raise UserError(
            f"{out}: cannot be written ({e}{free}); finished shards are kept: make room and run `prepare` again, it "
            "goes on where it stopped"
        ) from None


def remove_made(out: Path) -> None:
    """Take away everything a preparation has made in `out`, the manifest first."""
    (out / shards.MANIFEST).unlink(missing_ok=True)
    for path in _made_shards(out):
        shutil.rmtree(path, ignore_errors=True)
    for folder in (CHUNKS, shards.TOKENIZER, shards.CACHES):
        shutil.rmtree(out / folder, ignore_errors=True)
    for file in (data_report.JSON, data_report.TEXT):
        (out / file).unlink(missing_ok=True)


def _made_shards(out: Path) -> list[Path]:
    """Shard folders, and what is left of half-written ones."""
    found = [p for split in SPLITS for pattern in (f"{split}-*", f".{split}-*.tmp") for p in out.glob(pattern)]
    return [path for path in found if path.is_dir()]


def _manifest_or_none(out: Path) -> dict[str, Any] | None:
    """The manifest of a finished folder; one of another format version counts as none, since all is made anew."""
    try:
        return shards.read_manifest(out)
    except UserError:
        return None


def _report(
    out: Path,
    manifest: Mapping[str, Any],
    describe: Callable[[Shards], Mapping[str, Any]] | None,
    described_with: Mapping[str, Any] | None,
    say: Say,
    up_to_date: bool,
) -> dict[str, Any]:
    """The data report: read where it is there and fits, else made and written."""
    wanted = json.loads(json.dumps(described_with or {}))
    if up_to_date:
        say(f"{out} is up to date")
        stored = _read_json(out / data_report.JSON)
        if stored and (describe is None or stored.get("described_with") == wanted):
            return stored
    train = Shards(out, "train", manifest)
    heldout = Shards(out, "heldout", manifest) if manifest["splits"]["heldout"] else None
    report = data_report.make(manifest, train, heldout)
    if describe is not None:
        report["examples"] = json.loads(json.dumps(describe(train)))
        report["described_with"] = wanted
    with _disk_errors(out):
        data_report.write(out, report)
    return report


def _documents(record: Mapping[str, Any], split: str) -> int:
    return record["shards"][split]["documents"] if split in record["shards"] else 0


def counter_from_dict(counts: Mapping[str, Mapping[str, Any]]) -> UnknownCounter:
    """What `UnknownCounter.to_dict` gave, as a counter again."""
    counter = UnknownCounter()
    for script, count in counts.items():
        counter.counts[script] = ScriptCount(count["pieces"], count["unknown"], list(count["examples"]))
    return counter


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _with_recipe(config: WordPieceConfig, recipe: Recipe) -> WordPieceConfig:
    """The tokenizer's settings with the recipe's pre-splitter."""
    return dataclasses.replace(config, pre_splitter=recipe.pre_splitter) if recipe.pre_splitter else config


def _make_tokenizer(texts: Iterator[str], config: WordPieceConfig, workers: int | None) -> WordPiece:
    from transformer_jax import tokenizer

    if config.vocab_file:
        return tokenizer.WordPiece.from_vocab_file(Path(config.vocab_file), config)
    return tokenizer.train_wordpiece(texts, config, workers=workers or len(os.sched_getaffinity(0)))


def _tokenizer_inputs(config: WordPieceConfig) -> dict[str, Any]:
    """The settings, with the content of a vocabulary file in place of its path."""
    settings = msgspec.to_builtins(config)
    if config.vocab_file:
        try:
            settings["vocab_file"] = shards.describe_file(Path(config.vocab_file))["sha256"]
        except OSError as e:
            raise UserError(f"tokenizer.vocab_file {config.vocab_file} cannot be read: {e.strerror}") from None
    return settings
