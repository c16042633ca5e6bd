"""How any stream of documents becomes a prepared folder; `prepare.py` says it for documents of a recipe.

The stream is cut into chunks (`chunks.py`), each of which is encoded by itself. A killed preparation goes on at the
first chunk that is not finished, and a second one makes anew only the chunks whose text or settings have changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_jax import data_report, shards
from transformer_jax.chunks import (
    Chunk,
    Scheme,
    Settings,
    chunk_path,
    content_hash,
    cut_chunks,
    encoder,
    finished_chunk,
    text_of,
)
from transformer_jax.config import UserError, differences
from transformer_jax.prepared_folder import (
    CHUNKS,
    KEPT_BESIDE_CHUNKS,
    disk_errors,
    locked,
    made_shards,
    read_json,
    remove_made,
)
from transformer_jax.scripts import UnknownCounter, message_above
from transformer_jax.shards import Shards

if TYPE_CHECKING:
    from transformer_jax.corpora import Document

VERSION = 1
"""Of what a chunk becomes; raised when the same text and settings would give other bytes."""
HOPELESS_UNKNOWN_RATE = 0.2
"""With this share of a script unknown (and ten times the limit), `prepare` stops before the end of the corpus."""
HOPELESS_MIN_PIECES = 20_000
NOT_FOR_VOCABULARY = ("about", "shard_mb", "max_unknown_rate", "min_documents", "texts")
"""Keys of `made_from` that the vocabulary does not depend on."""

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a preparation is."""

    stage: str
    """"vocabulary" or "encoding" (of pairs, "survey" before them)."""
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


def run(
    documents: Callable[[], Iterable[Document]],
    source_names: Sequence[str],
    make_tokenizer: Callable[[Iterator[str]], Any],
    out: Path,
    scheme: Scheme,
    *,
    made_from: Mapping[str, Any],
    facts: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]],
    shard_mb: float = 8.0,
    max_unknown_rate: float = 0.01,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    say: Say = lambda message: None,
    resume: bool = True,
    make_report: Callable[[Mapping[str, Any], Mapping[str, Shards]], dict[str, Any]],
    describe: Callable[[Shards], Mapping[str, Any]] | None = None,
    described_with: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make (or go on making, or make up to date) the prepared folder `out`; see `prepare.prepare`.

    Args:
      documents: gives the stream; called once for the vocabulary and once for the shards.
      make_tokenizer: trains or loads the tokenizer; may read the sentences of the training documents it is given.
      scheme: what becomes of a document.
      made_from: everything that decides what comes out, as JSON; compared with that of an earlier run.
      facts: what else the manifest says, from the sidecars of all chunks.
      make_report: the data report, from the manifest and the splits that have documents.
    """
    if not 0.0 < shard_mb < math.inf:
        raise UserError(f"data.shard_mb is {shard_mb}; it must be a number above 0")
    if workers is not None and workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1, or left out for one a core")
    made_from = json.loads(json.dumps(made_from))
    with locked(out):
        finished = _manifest_or_none(out)
        before = finished["made_from"] if finished is not None else read_json(out / CHUNKS / "settings.json")
        changes = differences(before, made_from) if before else {}
        if finished is not None and resume and not changes:
            broken = shards.verify(out)
            if not broken:
                return _report(out, finished, describe, described_with, say, True, make_report)
            for problem in broken:
                say(f"{problem}; making it anew")
        for key, (old, new) in changes.items():
            said = (
                "is new" if old is None else "is gone" if new is None else f"was {short(old)} and is {short(new)} now"
            )
            say(f"{key} {said}: what depends on it is made anew")
        with disk_errors(out):
            (out / shards.MANIFEST).unlink(missing_ok=True)
            if not resume:
                remove_made(out)
            (out / CHUNKS).mkdir(parents=True, exist_ok=True)
            shards.write_atomically(out / CHUNKS / "settings.json", json.dumps(made_from, indent=1) + "\n")
            run = _Run(out, scheme, shard_mb, progress, say)
            try:
                tokenizer = run.vocabulary(documents, make_tokenizer, made_from)
                settings = run.settings(tokenizer)
                done = run.encode(documents, settings, workers, max_unknown_rate)
            except (_GiveUpError, UserError) as e:
                if finished is not None:  # what has not been written over serves again
                    raise UserError(
                        f"{e}\nwhat was prepared before in {out} is not whole now: mend what is wrong, or go back to "
                        "the old text and settings, and run `prepare` again"
                    ) from None
                if isinstance(e, _GiveUpError) or not (out / CHUNKS / "vocabulary.json").exists():
                    remove_made(out)  # nothing worth keeping has been made
                raise UserError(str(e)) from None
            manifest = run.finish(tokenizer, source_names, done, made_from, facts(done))
            report = _report(out, manifest, describe, described_with, say, False, make_report)
            shards.write_manifest(out, manifest)
            return report


class _GiveUpError(Exception):
    """The corpus or the settings cannot be used: nothing of the work is worth keeping."""


class _Run:
    """One preparation: the state that its stages share."""

    def __init__(
        self,
        out: Path,
        scheme: Scheme,
        shard_mb: float,
        progress: Callable[[Progress], None] | None,
        say: Say,
    ) -> None:
        self.out, self.scheme = out, scheme
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
        make_tokenizer: Callable[[Iterator[str]], Any],
        made_from: Mapping[str, Any],
    ) -> Any:
        """The tokenizer of an earlier, unfinished run with the same inputs, or a new one."""
        relevant = {k: v for k, v in made_from.items() if k not in NOT_FOR_VOCABULARY}
        key = _digest(relevant)
        record_path = self.out / CHUNKS / "vocabulary.json"
        record = read_json(record_path)
        folder = self.out / shards.TOKENIZER
        if record.get("key") == key and all(
            (folder / file).is_file() and shards.describe_file(folder / file) == entry
            for file, entry in record["tokenizer"]["files"].items()
        ):
            self._total_bytes = record["text_bytes"]
            return self.scheme.load_tokenizer(folder)
        counted = dict.fromkeys(self.scheme.splits, 0)
        exhausted = False

        def texts() -> Iterator[str]:
            nonlocal exhausted
            for document in documents():
                if not document.sentences:
                    continue
                data = text_of(document.sentences)
                self._seen[0] += 1
                self._seen[1] += len(data)
                split = self.scheme.split_of(document.sentences, document.source, content_hash(data))
                counted[split] += 1
                if split == "train":
                    yield from document.sentences
                if self._seen[0] % 1000 == 0:
                    self._tell("vocabulary")
            self._check_counts(counted)
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

    def _check_counts(self, counts: Mapping[str, int]) -> None:
        """Raises _GiveUpError when a split would be too small to use."""
        try:
            self.scheme.check_counts(counts)
        except UserError as e:
            raise _GiveUpError(str(e)) from None

    # --- encoding

    def settings(self, tokenizer: Any) -> Settings:
        key = _digest([VERSION, shards.VERSION, tokenizer.digest, *self.scheme.key])
        return Settings(self.out, self.scheme, key)

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
            unknown.merge(UnknownCounter.from_dict(record["unknown"]))
            hopeless = [
                (script, count)
                for script, count in unknown.above(max(10 * max_unknown_rate, HOPELESS_UNKNOWN_RATE))
                if count.pieces >= HOPELESS_MIN_PIECES
            ]
            if hopeless:
                raise _GiveUpError(message_above(hopeless, max_unknown_rate, self.scheme.advice))
            self._tell("encoding", len(done), kept)

        def wanted() -> Iterator[Chunk]:
            nonlocal kept
            for chunk in cut_chunks(documents(), self.chunk_bytes):
                self._seen[0] += len(chunk.documents)
                self._seen[1] += chunk.text_bytes
                record = finished_chunk(settings, chunk)
                if record is None:
                    yield chunk
                else:
                    kept += 1
                    add(record)

        with encoder(settings, workers) as encode:
            for record in encode(wanted()):
                add(record)
        records = [done[index] for index in sorted(done)]
        self._check_counts({split: sum(_documents(r, split) for r in records) for split in self.scheme.splits})
        above = unknown.above(max_unknown_rate)
        if above:
            raise _GiveUpError(message_above(above, max_unknown_rate, self.scheme.advice))
        if kept:
            self.say(f"{kept} of {len(records)} shards were kept from an earlier run")
        return records

    def finish(
        self,
        tokenizer: Any,
        source_names: Sequence[str],
        records: Sequence[Mapping[str, Any]],
        made_from: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The manifest (not yet written), after what no longer belongs to the folder has been taken away."""
        splits = {split: [r["shards"][split] for r in records if split in r["shards"]] for split in self.scheme.splits}
        names = {entry["name"] for entries in splits.values() for entry in entries}
        for path in made_shards(self.out):
            if path.name not in names:
                shutil.rmtree(path)
        kept = {chunk_path(self.out, r["index"]).name for r in records} | set(KEPT_BESIDE_CHUNKS)
        for path in (self.out / CHUNKS).iterdir():
            if path.name not in kept:
                path.unlink()
        unknown = UnknownCounter()
        for record in records:
            unknown.merge(UnknownCounter.from_dict(record["unknown"]))
        manifest = shards.make_manifest(
            vocab_size=tokenizer.vocab_size,
            tokenizer=read_json(self.out / CHUNKS / "vocabulary.json")["tokenizer"],
            source_names=source_names,
            splits=splits,
            made_from=made_from,
        )
        manifest |= facts
        manifest["empty_documents"] = sum(r["empty_documents"] for r in records)
        manifest["unknown"] = unknown.to_dict()
        return manifest


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
    make_report: Callable[[Mapping[str, Any], Mapping[str, Shards]], dict[str, Any]],
) -> dict[str, Any]:
    """The data report: read where it is there and fits, else made and written."""
    wanted = json.loads(json.dumps(described_with or {}))
    if up_to_date:
        say(f"{out} is up to date")
        stored = read_json(out / data_report.JSON)
        if stored and (describe is None or stored.get("described_with") == wanted):
            return stored
    splits = {split: Shards(out, split, manifest) for split, entries in manifest["splits"].items() if entries}
    report = make_report(manifest, splits)
    if describe is not None:
        report["examples"] = json.loads(json.dumps(describe(splits["train"])))
        report["described_with"] = wanted
    with disk_errors(out):
        data_report.write(out, report)
    return report


def _documents(record: Mapping[str, Any], split: str) -> int:
    return record["shards"][split]["documents"] if split in record["shards"] else 0


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"
