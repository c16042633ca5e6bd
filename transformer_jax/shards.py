"""Token shards on disk: write, manifest, digests, random access.

A prepared folder holds text that has been turned into ids once:

    manifest.json            written last; a folder without it is not finished
    tokenizer/               the files of the tokenizer that made the ids
    train-00000/             one shard of one split
        tokens.npy           uint16 or uint32 [tokens]     ids of all sentences, one after another
        sentences.npy        int64 [sentences + 1]         where each sentence starts in tokens.npy
        documents.npy        int64 [documents + 1]         where each document starts in sentences.npy
        sources.npy          uint16 [documents]            index of the input file (names in the manifest)
        hashes.npy           uint64 [documents]            hash of the document's text
        words.npy            uint8 [tokens], optional      1 = this piece starts a word (given word boundaries)
        texts.npy            uint8 [bytes], optional       the sentences as UTF-8, one after another ...
        text_offsets.npy     int64 [sentences + 1]         ... and where each starts
    heldout-00000/           documents kept apart by the hash of their content (pairs: validation-, test-)

The manifest has the size and SHA-256 of every file. Sizes are checked at each open, so that a file cut short is found
at once and by name; digests are checked by `verify`, by `Shards.open(..., check="digests")`, and of a folder in storage
(`gs://`) when it is copied to this machine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import resource
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from transformer_jax.config import UserError
from transformer_jax.manifest import (
    CACHES as CACHES,
)
from transformer_jax.manifest import (
    FORMAT,
    describe_file,
    files_of,
    local_copy,
    token_dtype,
    wrong_size,
)
from transformer_jax.manifest import (
    MANIFEST as MANIFEST,
)
from transformer_jax.manifest import (
    TOKENIZER as TOKENIZER,
)
from transformer_jax.manifest import (
    VERSION as VERSION,
)
from transformer_jax.manifest import (
    entry_is_whole as entry_is_whole,
)
from transformer_jax.manifest import (
    make_manifest as make_manifest,
)
from transformer_jax.manifest import (
    read_manifest as read_manifest,
)
from transformer_jax.manifest import (
    verify as verify,
)
from transformer_jax.manifest import (
    write_atomically as write_atomically,
)
from transformer_jax.manifest import (
    write_manifest as write_manifest,
)
from transformer_jax.manifest import (
    write_tokenizer as write_tokenizer,
)

if TYPE_CHECKING:
    from transformer_jax.tokenizer import WordPiece

MAX_SOURCES = 1 << 16


@dataclasses.dataclass(frozen=True)
class ShardArrays:
    """What one shard holds, as in the table of the module docstring; tokens may have any integer dtype."""

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    sources: np.ndarray
    hashes: np.ndarray
    words: np.ndarray | None = None
    texts: np.ndarray | None = None
    text_offsets: np.ndarray | None = None


def arrays_from_documents(
    documents: Iterable[Sequence[Sequence[int]]],
    sources: Sequence[int],
    hashes: Sequence[int],
    words: Iterable[Sequence[Sequence[int]]] | None = None,
) -> ShardArrays:
    """Flatten documents (lists of sentences of ids) into the arrays of a shard."""
    flat: list[int] = []
    sentences = [0]
    starts = [0]
    for document in documents:
        for sentence in document:
            flat.extend(sentence)
            sentences.append(len(flat))
        starts.append(len(sentences) - 1)
    marks = None if words is None else [mark for document in words for sentence in document for mark in sentence]
    if marks is not None and len(marks) != len(flat):
        raise UserError(f"words: {len(marks)} word marks were given for {len(flat)} pieces; give one mark a piece")
    return ShardArrays(
        tokens=np.asarray(flat, dtype=np.int64),
        sentences=np.asarray(sentences, dtype=np.int64),
        documents=np.asarray(starts, dtype=np.int64),
        sources=np.asarray(sources, dtype=np.int64),
        hashes=np.asarray(hashes, dtype=np.uint64),
        words=None if marks is None else np.asarray(marks, dtype=np.uint8),
    )


def write_shard(folder: Path, name: str, arrays: ShardArrays, vocab_size: int) -> dict[str, Any]:
    """Write one shard folder whole (under another name first, then renamed) and return its manifest entry.

    Raises:
      UserError: an id that is negative or not below vocab_size, or a source index that does not fit.
    """
    tokens = arrays.tokens
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        bad = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise UserError(
            f"{folder / name}: token id {bad} is out of range for a vocabulary of {vocab_size}; "
            "ids go from 0 to the vocabulary size less one: use the tokenizer that made them"
        )
    if len(arrays.sources) and arrays.sources.max() >= MAX_SOURCES:
        raise UserError(f"{folder / name}: more than {MAX_SOURCES} input files; join some of them")
    columns = {
        "tokens.npy": tokens.astype(token_dtype(vocab_size)),
        "sentences.npy": arrays.sentences.astype(np.int64),
        "documents.npy": arrays.documents.astype(np.int64),
        "sources.npy": arrays.sources.astype(np.uint16),
        "hashes.npy": arrays.hashes.astype(np.uint64),
    }
    if arrays.words is not None:
        columns["words.npy"] = arrays.words.astype(np.uint8)
    if arrays.texts is not None and arrays.text_offsets is not None:
        columns["texts.npy"] = arrays.texts.astype(np.uint8)
        columns["text_offsets.npy"] = arrays.text_offsets.astype(np.int64)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for file, column in columns.items():
            np.save(temporary / file, column, allow_pickle=False)
        files = {file: describe_file(temporary / file) for file in columns}
        target = folder / name
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {
        "name": name,
        "tokens": len(tokens),
        "sentences": len(arrays.sentences) - 1,
        "documents": len(arrays.documents) - 1,
        "files": files,
    }


def _indices_of_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every range, one range after another: int64 [sum of lengths]."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    indices = np.arange(total, dtype=np.int64)
    indices += np.repeat(starts - (ends - lengths), lengths)
    return indices


class _Maps:
    """Memory-mapped columns, at most a share of the process's open files at a time.

    Each map holds a file descriptor, and a large corpus has more shards than the usual limit of 1024 allows.
    """

    def __init__(self) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limit = 4096 if soft == resource.RLIM_INFINITY else max(8, min(4096, soft // 2))
        self._open: OrderedDict[Path, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> np.ndarray:
        with self._lock:
            column = self._open.get(path)
            if column is None:
                # Indexing a plain array view is several times faster than indexing numpy's memmap subclass.
                column = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
                self._open[path] = column
                if len(self._open) > self.limit:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(path)
            return column


class Shards:
    """Random access to one split of a prepared folder, as one long line of tokens over all its shards.

    Token, sentence and document numbers run on from shard to shard, in the order of the manifest. Offsets are held in
    memory (8 bytes a sentence and 26 a document); tokens stay on disk, memory-mapped.

    Attributes:
      folder, split: where it was opened.
      manifest: the parsed manifest.
      vocab_size: entries of the vocabulary.
      sentence_offsets: int64 [sentences + 1], where each sentence starts in the tokens.
      document_offsets: int64 [documents + 1], where each document starts in the sentences.
      document_sources: uint16 [documents], index into source_names.
      document_hashes: uint64 [documents].
      source_names: the input files, in the recipe's order.
      has_words: whether the sources came with word boundaries.
      has_texts: whether the sentences themselves are kept too.
    """

    def __init__(self, folder: Path, split: str, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]
        self.source_names: list[str] = list(manifest["source_names"])
        entries = manifest["splits"][split]
        self._paths = [folder / entry["name"] for entry in entries]
        self.has_words = bool(entries) and all("words.npy" in entry["files"] for entry in entries)
        self.has_texts = bool(entries) and all("texts.npy" in entry["files"] for entry in entries)
        self._maps = _Maps()

        def column(entry: Mapping[str, Any], file: str) -> np.ndarray:
            return np.load(folder / entry["name"] / file, allow_pickle=False)

        sentence_parts, document_parts = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        tokens = sentences = 0
        token_starts = []
        sentence_starts = []
        for entry in entries:
            token_starts.append(tokens)
            sentence_starts.append(sentences)
            own_sentences, own_documents = column(entry, "sentences.npy"), column(entry, "documents.npy")
            _check_offsets(folder / entry["name"] / "sentences.npy", own_sentences, entry["sentences"], entry["tokens"])
            _check_offsets(
                folder / entry["name"] / "documents.npy", own_documents, entry["documents"], entry["sentences"]
            )
            sentence_parts.append(own_sentences[1:] + tokens)
            document_parts.append(own_documents[1:] + sentences)
            tokens += entry["tokens"]
            sentences += entry["sentences"]
        self._sentence_starts = np.asarray(sentence_starts, dtype=np.int64)
        self._token_starts = np.asarray(token_starts, dtype=np.int64)
        self._token_ends = np.append(self._token_starts[1:], np.int64(tokens))
        self.sentence_offsets = np.concatenate(sentence_parts)
        self.document_offsets = np.concatenate(document_parts)
        self.document_sources = np.concatenate(
            [np.zeros(0, np.uint16), *(column(entry, "sources.npy") for entry in entries)]
        )
        self.document_hashes = np.concatenate(
            [np.zeros(0, np.uint64), *(column(entry, "hashes.npy") for entry in entries)]
        )

    @classmethod
    def open(cls, folder: Path | str, split: str = "train", check: Literal["sizes", "digests"] = "sizes") -> Shards:
        """Open a split; `check` says whether files are held against the manifest by size or by content too.

        A split without documents (nothing was held out) opens as an empty one.

        Raises:
          UserError: no finished folder, no such split, or files that are not those of the manifest.
        """
        folder = local_copy(folder, split)
        manifest = read_manifest(folder)
        if split not in manifest["splits"]:
            raise UserError(f"{folder} has no split `{split}`; it has {', '.join(manifest['splits'])}")
        if check == "digests":
            problems = verify(folder, split)
        else:
            sizes = (wrong_size(folder / name, entry) for name, entry in files_of(manifest, split).items())
            problems = [problem for problem in sizes if problem is not None]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UserError(f"{problems[0]}{more}; run `prepare` again, it makes the broken shards anew")
        return cls(folder, split, manifest)

    def __reduce__(self) -> tuple[Any, ...]:
        # Maps and locks do not travel; a worker process opens its own.
        return (Shards.open, (self.folder, self.split))

    @property
    def num_tokens(self) -> int:
        return int(self.sentence_offsets[-1])

    @property
    def num_sentences(self) -> int:
        return len(self.sentence_offsets) - 1

    @property
    def num_documents(self) -> int:
        return len(self.document_offsets) - 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all that training sees: format, tokenizer, and the digest of every shard file, in order."""
        shards = [
            [entry["name"], {file: stated["sha256"] for file, stated in entry["files"].items()}]
            for entry in self.manifest["splits"][self.split]
        ]
        seen = [FORMAT, VERSION, self.manifest["tokenizer"]["digest"], self.split, shards]
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def tokenizer(self) -> WordPiece:
        """The tokenizer that made the ids.

        Raises:
          UserError: its files are not those the shards were made with.
        """
        from transformer_jax.tokenizer import WordPiece

        tokenizer = WordPiece.load(self.folder / TOKENIZER)
        if tokenizer.digest != self.manifest["tokenizer"]["digest"]:
            raise UserError(
                f"{self.folder / TOKENIZER} is not the tokenizer these shards were made with; run `prepare` again"
            )
        return tokenizer

    def gather(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The ids of many ranges, one after another: int32 [sum of lengths].

        Args:
          starts: int64 [n], numbers of first tokens.
          lengths: int [n]; a range lies inside one document.

        Raises:
          IndexError: a range that leaves the split or runs from one shard into the next.
        """
        return self._gather("tokens.npy", starts, lengths).astype(np.int32)

    def gather_words(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """As `gather`, for the word marks: bool [sum of lengths], True where a piece starts a word.

        Raises:
          UserError: the sources had no word boundaries.
        """
        if not self.has_words:
            raise UserError(
                f"{self.folder}: these shards have no word boundaries; name a source with `words` in the recipe"
            )
        return self._gather("words.npy", starts, lengths).astype(bool)

    def texts(self, sentences: np.ndarray) -> list[str]:
        """The sentences with these numbers, as they were read.

        Raises:
          UserError: the preparation did not keep them.
        """
        if not self.has_texts:
            raise UserError(f"{self.folder}: the texts of the split `{self.split}` were not kept; run `prepare` again")
        sentences = np.asarray(sentences, dtype=np.int64)
        found = []
        shard_of = np.searchsorted(self._sentence_starts, sentences, side="right") - 1
        for sentence, shard in zip(sentences.tolist(), shard_of.tolist(), strict=True):
            offsets = self._maps.get(self._paths[shard] / "text_offsets.npy")
            own = sentence - int(self._sentence_starts[shard])
            text = self._maps.get(self._paths[shard] / "texts.npy")[offsets[own] : offsets[own + 1]]
            found.append(text.tobytes().decode())
        return found

    def _gather(self, file: str, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        starts = np.asarray(starts, dtype=np.int64)
        lengths = np.asarray(lengths, dtype=np.int64)
        dtype = np.dtype(np.uint8) if file == "words.npy" else token_dtype(self.vocab_size)
        if not len(starts):
            return np.zeros(0, dtype=dtype)
        if starts.min() < 0 or lengths.min() < 0:
            raise IndexError("a range starts before the first token or has a negative length")
        if not self._paths:
            raise IndexError(f"the split `{self.split}` is empty")
        if len(self._paths) == 1:
            shard_of = np.zeros(len(starts), dtype=np.int64)
        else:
            shard_of = np.searchsorted(self._token_starts, starts, side="right") - 1
        if np.any(starts + lengths > self._token_ends[shard_of]):
            raise IndexError("a range ends after the last token of its shard; ranges lie inside one document")
        if len(self._paths) == 1:
            return self._maps.get(self._paths[0] / file)[_indices_of_ranges(starts, lengths)]
        order = np.argsort(shard_of, kind="stable")
        shards, firsts = np.unique(shard_of[order], return_index=True)
        out_starts = np.cumsum(lengths) - lengths
        out = np.empty(int(lengths.sum()), dtype=dtype)
        for shard, ranges in zip(shards, np.split(order, firsts[1:]), strict=True):
            column = self._maps.get(self._paths[shard] / file)
            own = starts[ranges] - self._token_starts[shard]
            out[_indices_of_ranges(out_starts[ranges], lengths[ranges])] = column[
                _indices_of_ranges(own, lengths[ranges])
            ]
        return out

    def tokens_by_id(self) -> np.ndarray:
        """How often each id occurs in the split: int64 [vocabulary]."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        block = 1 << 22  # bincount makes an int64 copy of what it is given
        for path in self._paths:
            tokens = self._maps.get(path / "tokens.npy")
            for start in range(0, len(tokens), block):
                counts += np.bincount(tokens[start : start + block], minlength=self.vocab_size)
        return counts


def _check_offsets(path: Path, offsets: np.ndarray, count: int, last: int) -> None:
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != last or np.any(np.diff(offsets) <= 0):
        raise UserError(f"{path}: the offsets in it are not those of {count} parts of {last}; run `prepare` again")


def write_prepared(
    folder: Path,
    tokenizer: WordPiece,
    splits: Mapping[str, Sequence[Sequence[Sequence[int]]]],
    *,
    sources: Mapping[str, Sequence[int]] | None = None,
    source_names: Sequence[str] | None = None,
    words: Mapping[str, Sequence[Sequence[Sequence[int]]]] | None = None,
    documents_per_shard: int | None = None,
) -> None:
    """Write a whole prepared folder from ids in memory: for tests, and for ids made elsewhere.

    Args:
      splits: for each split its documents: lists of sentences of ids. A split may be empty; a sentence may not.
      sources: for each split the source index of each document; all 0 without it.
      source_names: names of the sources; made up without it.
      words: word marks shaped as the splits.
      documents_per_shard: how many documents go into a shard; all without it.

    Raises:
      UserError: an id out of range, or an empty sentence or document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    entries: dict[str, list[dict[str, Any]]] = {}
    highest = 0
    for split, documents in splits.items():
        entries[split] = []
        if any(not document or not all(document) for document in documents):
            raise UserError(f"{folder}: the split `{split}` has an empty document or sentence; leave it out")
        own_sources = list(sources[split]) if sources is not None else [0] * len(documents)
        highest = max([highest, *own_sources])
        size = documents_per_shard or max(1, len(documents))
        for start in range(0, len(documents), size):
            part = documents[start : start + size]
            arrays = arrays_from_documents(
                part,
                own_sources[start : start + size],
                [_hash_of_ids(document) for document in part],
                None if words is None else words[split][start : start + size],
            )
            name = f"{split}-{start // size:05d}"
            entries[split].append(write_shard(folder, name, arrays, tokenizer.vocab_size))
    manifest = make_manifest(
        vocab_size=tokenizer.vocab_size,
        tokenizer=write_tokenizer(folder, tokenizer),
        source_names=source_names or [f"source-{i}" for i in range(highest + 1)],
        splits=entries,
    )
    write_manifest(folder, manifest)


def _hash_of_ids(document: Sequence[Sequence[int]]) -> int:
    text = "\n".join(" ".join(map(str, sentence)) for sentence in document)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
