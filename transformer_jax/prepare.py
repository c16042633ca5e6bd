"""From documents to a prepared folder: vocabulary, token shards, data report.

The corpus is read as a stream and cut into chunks of about `shard_mb` megabytes of text, always between documents
(`chunks.py`). A killed preparation goes on at the first chunk that is not finished, and a second one makes anew only
the chunks whose text or settings have changed. The bytes do not depend on the number of processes or on kills.

Memory: the reader holds one chunk, and `workers` + 1 more are on their way or being encoded. Each costs less than ten
times its text, besides what a process needs for itself, whatever the size of the corpus. (A document is never split, so
a document larger than `shard_mb` counts as a chunk of its own size.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from transformer_jax import data_report, shards
from transformer_jax.chunks import (
    Chunk,
    Settings,
    chunk_path,
    content_hash,
    counter_from_dict,
    cut_chunks,
    encoder,
    finished_chunk,
    is_heldout,
    text_of,
)
from transformer_jax.config import ConfigError, UserError, differences
from transformer_jax.prepared_folder import CHUNKS, SPLITS, disk_errors, locked, made_shards, read_json, remove_made
from transformer_jax.scripts import UnknownCounter, message_above
from transformer_jax.shards import Shards
from transformer_jax.tokenizer_config import WordPieceConfig

if TYPE_CHECKING:
    from transformer_jax.corpora import Document, Recipe
    from transformer_jax.tokenizer import WordPiece

VERSION = 1
"""Of what a chunk becomes; raised when the same text and settings would give other bytes."""
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
    # What can be known to be wrong before an earlier preparation is touched.
    if not 0.0 <= max_unknown_rate <= 1.0:
        raise ConfigError(f"data.max_unknown_rate is {max_unknown_rate}; it must be between 0 and 1")
    corpora.check(recipe)
    _check_tokenizer(tokenizer_config)
    made_from = {
        "version": VERSION,
        "recipe": _by_name(corpora.describe(recipe)),
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


def asked_otherwise(
    manifest: Mapping[str, Any], tokenizer_config: WordPieceConfig, recipe: Recipe | None = None
) -> list[str]:
    """A line for each setting that is not the one a finished folder was made with. No text is read.

    What is not known counts as equal: a folder that was made by other means, or a vocabulary file that is not here.
    """
    from transformer_jax import corpora

    made = manifest["made_from"]
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    if "tokenizer" in made:
        config = tokenizer_config if recipe is None else _with_recipe(tokenizer_config, recipe)
        settings = {k: v for k, v in msgspec.to_builtins(config).items() if k in made["tokenizer"]}
        if settings["vocab_file"]:
            here = Path(settings["vocab_file"]).is_file()
            settings["vocab_file"] = (
                _tokenizer_inputs(config)["vocab_file"] if here else made["tokenizer"]["vocab_file"] or "another"
            )
        if recipe is None and not config.pre_splitter:
            settings["pre_splitter"] = made["tokenizer"]["pre_splitter"]
        old["tokenizer"], new["tokenizer"] = made["tokenizer"], settings
    if recipe is not None and "recipe" in made:
        inputs = {
            name: {k: v for k, v in item.items() if k != "sha256"} for name, item in made["recipe"]["inputs"].items()
        }
        old["recipe"] = {**made["recipe"], "inputs": inputs}
        new["recipe"] = _by_name(corpora.describe(recipe, digests=False))
    changed = differences(old, json.loads(json.dumps(new)))
    return [f"{key}: {_short(a)} in the prepared data, {_short(b)} now" for key, (a, b) in changed.items()]


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
                return _report(out, finished, describe, described_with, say, up_to_date=True)
            for problem in broken:
                say(f"{problem}; making it anew")
        for key, (old, new) in changes.items():
            said = (
                "is new" if old is None else "is gone" if new is None else f"was {_short(old)} and is {_short(new)} now"
            )
            say(f"{key} {said}: what depends on it is made anew")
        with disk_errors(out):
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
            except (_GiveUpError, UserError) as e:
                if finished is not None:  # what has not been written over serves again
                    raise UserError(
                        f"{e}\nwhat was prepared before in {out} is not whole now: mend what is wrong, or go back to "
                        "the old text and settings, and run `prepare` again"
                    ) from None
                if isinstance(e, _GiveUpError) or not (out / CHUNKS / "vocabulary.json").exists():
                    remove_made(out)  # nothing worth keeping has been made
                raise UserError(str(e)) from None
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
        record = read_json(record_path)
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
                data = text_of(document.sentences)
                self._seen[0] += 1
                self._seen[1] += len(data)
                side = is_heldout(content_hash(data), self.heldout)
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
        for path in made_shards(self.out):
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
            tokenizer=read_json(self.out / CHUNKS / "vocabulary.json")["tokenizer"],
            source_names=source_names,
            splits=splits,
            made_from=made_from,
        )
        manifest["name"] = name
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
) -> dict[str, Any]:
    """The data report: read where it is there and fits, else made and written."""
    wanted = json.loads(json.dumps(described_with or {}))
    if up_to_date:
        say(f"{out} is up to date")
        stored = read_json(out / data_report.JSON)
        if stored and (describe is None or stored.get("described_with") == wanted):
            return stored
    train = Shards(out, "train", manifest)
    heldout = Shards(out, "heldout", manifest) if manifest["splits"]["heldout"] else None
    report = data_report.make(manifest, train, heldout)
    if describe is not None:
        report["examples"] = json.loads(json.dumps(describe(train)))
        report["described_with"] = wanted
    with disk_errors(out):
        data_report.write(out, report)
    return report


def _documents(record: Mapping[str, Any], split: str) -> int:
    return record["shards"][split]["documents"] if split in record["shards"] else 0


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _by_name(description: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's description with its inputs by name, so that differences can be told one by one."""
    inputs: dict[str, Any] = {}
    for item in description["inputs"]:
        name = item["name"]
        inputs[f"{name}#{len(inputs)}" if name in inputs else name] = item
    return {**description, "inputs": inputs, "order": list(inputs)}


def _with_recipe(config: WordPieceConfig, recipe: Recipe) -> WordPieceConfig:
    """The tokenizer's settings with the recipe's pre-splitter."""
    return dataclasses.replace(config, pre_splitter=recipe.pre_splitter) if recipe.pre_splitter else config


def _check_tokenizer(config: WordPieceConfig) -> None:
    """Refuse a vocabulary or settings that cannot be used, before any text is read."""
    from transformer_jax.tokenizer import CONTROL_TOKENS, WordPiece

    if config.vocab_file:
        _tokenizer_inputs(config)  # which says why a file cannot be read
        if not len(WordPiece.from_vocab_file(Path(config.vocab_file), config).ordinary_ids):
            raise UserError(f"tokenizer.vocab_file {config.vocab_file} has control and unused tokens only")
        return
    WordPiece(CONTROL_TOKENS, config)
    fixed = len(CONTROL_TOKENS) + config.unused_tokens + len(config.keep_tokens)
    if config.vocab_size < fixed + 2:
        raise UserError(
            f"vocab_size {config.vocab_size} is too small: {fixed} control, unused and keep tokens leave no room"
        )


def _make_tokenizer(texts: Iterator[str], config: WordPieceConfig, workers: int | None) -> WordPiece:
    from transformer_jax import tokenizer, vocabulary

    if config.vocab_file:
        return tokenizer.WordPiece.from_vocab_file(Path(config.vocab_file), config)
    return vocabulary.train_wordpiece(texts, config, workers=workers or len(os.sched_getaffinity(0)))


def _tokenizer_inputs(config: WordPieceConfig) -> dict[str, Any]:
    """The settings, with the content of a vocabulary file in place of its path."""
    settings = msgspec.to_builtins(config)
    if config.vocab_file:
        try:
            settings["vocab_file"] = shards.describe_file(Path(config.vocab_file))["sha256"]
        except OSError as e:
            raise UserError(f"tokenizer.vocab_file {config.vocab_file} cannot be read: {e.strerror}") from None
    return settings
