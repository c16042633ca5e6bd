"""From a run file's pairs to a prepared folder: survey, vocabularies, token shards, data report.

A pair becomes a document of two sentences, source and target, in the shards that BERT's text has too
(`transformer_jax/preparation.py` says how a preparation goes on after a kill). The pairs are read three times: to see
which are left out (`survey.py`), for the vocabularies, and to be encoded.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from transformer_jax import data_report, pieces, preparation, shards, storage
from transformer_jax.chunks import Chunk
from transformer_jax.config import ConfigError, UserError, differences
from transformer_jax.corpora import Document
from transformer_jax.pieces import SentencePiece
from transformer_jax.preparation import Progress, Say, short
from transformer_jax.prepared_folder import working_copy
from transformer_jax.run_file import value_of, with_value
from transformer_jax.scripts import UnknownCounter
from transformer_jax.shards import ShardArrays, Shards
from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig
from transformer_jax.translation import cleaning, data, pairs, survey
from transformer_jax.translation.config import PairsConfig, SentencePieceConfig, TranslationConfig
from transformer_jax.translation.loading import read_vocabularies
from transformer_jax.translation.pairs import SPLITS, PairRecipe
from transformer_jax.translation.survey import Splitter, Survey
from transformer_jax.translation.vocabularies import Vocabularies

VERSION = 1
"""Of what pairs become; raised when the same pairs and settings would give other bytes."""
SIDES = ("source", "target")


def prepare(
    config: TranslationConfig,
    *,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    say: Say = lambda message: None,
    resume: bool = True,
) -> dict[str, Any]:
    """Make the vocabularies and token shards that `config` names, go on making them, or make them up to date.

    The raw text is kept beside the ids for validation and test, which are scored as text, and for training where
    examples.subword_sampling cuts it anew in each epoch.

    Args:
      workers: encoding processes; one for each core without it. 1 encodes in this process.
      progress: called as work goes on.
      say: called with messages for the user.
      resume: False makes everything anew.

    Returns:
      The data report, also written to report.json and report.txt in the prepared folder.

    Raises:
      UserError: no recipe, settings that do not go together, no pairs for a split, too many unknown pieces, a full
        disk, an input that cannot be read.
    """
    if not config.data.recipe:
        raise ConfigError("data.recipe is not set; name a recipe of pairs, such as one of data/*.toml")
    for key in ("tokenizer.source_model", "tokenizer.target_model"):
        config = with_value(
            config, key, str(storage.local_file(value_of(config, key))) if value_of(config, key) else ""
        )
    recipe = pairs.load_recipe(config.data.recipe)
    if storage.is_remote(config.data.prepared):
        with working_copy(config.data.prepared) as here:
            moved = with_value(config, "data.prepared", str(here))
            return prepare(moved, workers=workers, progress=progress, say=say, resume=resume)
    out = Path(config.data.prepared)
    cleaning.check(config.data, (recipe.source_language, recipe.target_language))
    data.check(config.examples)
    pairs.check(recipe)
    check_tokenizer(config.tokenizer)
    splitter = Splitter(tuple(pairs.input_uses(recipe)), recipe.validation, recipe.test)
    texts = ("train", "validation", "test") if config.examples.subword_sampling else ("validation", "test")
    made_from = {
        "version": [preparation.VERSION, VERSION],
        "recipe": pairs.describe(recipe),
        "cleaning": _cleaning(config.data),
        "tokenizer": _tokenizer_inputs(config.tokenizer),
        "shard_mb": config.data.shard_mb,
        "max_unknown_rate": config.data.max_unknown_rate,
        "texts": list(texts),
        "about": {"name": recipe.name, "license": recipe.license},
    }
    key = _digest([made_from["version"], made_from["recipe"], made_from["cleaning"]])

    began = time.monotonic()

    def tell(stage: str, number: int, text_bytes: int) -> None:
        if progress is not None:
            progress(Progress(stage, number, text_bytes, None, 0, 0, time.monotonic() - began))

    @functools.cache
    def surveyed() -> Survey:
        def make() -> Survey:
            say("reading all pairs, to see which are left out")
            cores = workers or len(os.sched_getaffinity(0))
            return survey.make(recipe, config.data, splitter, cores, lambda n, size: tell("survey", n, size))

        found = survey.load_or_make(out, key, make)
        say(survey.summary(found.counts))
        return found

    def documents() -> Iterator[Document]:
        for pair in survey.kept(recipe, surveyed()):
            yield Document(pair.input, pair.line, [pair.source, pair.target])

    def training(side: int) -> Iterator[str]:
        size = 0
        for number, pair in enumerate(survey.kept(recipe, surveyed()), 1):
            if splitter(pair.input, pair.source) == "train":
                text = (pair.source, pair.target)[side]
                size += len(text)
                yield text
            if number % 10_000 == 0:
                tell(f"{SIDES[side]} vocabulary", number, size)

    def make_vocabularies(texts: Iterator[str]) -> Vocabularies:
        return _make_vocabularies(config.tokenizer, texts, training, say)

    return preparation.run(
        documents,
        pairs.input_names(recipe),
        make_vocabularies,
        out,
        PairScheme(splitter, texts),
        made_from=made_from,
        facts=lambda records: _facts(recipe, surveyed(), records),
        shard_mb=config.data.shard_mb,
        max_unknown_rate=config.data.max_unknown_rate,
        workers=workers,
        progress=progress,
        say=say,
        resume=resume,
        make_report=_report,
        describe=lambda split: data.describe(split, config.examples, config.train.seed),
        described_with=dataclasses.asdict(config.examples) | {"seed": config.train.seed},
    )


def asked_otherwise(manifest: Mapping[str, Any], config: TranslationConfig, recipe: PairRecipe | None) -> list[str]:
    """A line for each setting of the pairs or vocabularies that is not the one a finished folder was made with.

    No text is read. What is not known counts as equal: a model file that is not here, or a recipe that is not given.
    """
    made = manifest["made_from"]
    new: dict[str, Any] = {"cleaning": _cleaning(config.data), "tokenizer": msgspec.to_builtins(config.tokenizer)}
    for name in ("source_model", "target_model", "source_wordpiece", "vocabularies"):
        path = new["tokenizer"][name]
        if path and not Path(path).exists():
            new["tokenizer"][name] = made.get("tokenizer", {}).get(name) or "another"
        elif path:
            new["tokenizer"][name] = _tokenizer_inputs(config.tokenizer)[name]
    _drop_unset(new["tokenizer"])
    old = {name: made[name] for name in new if name in made}
    new = {name: new[name] for name in old}
    if recipe is not None and "recipe" in made:
        inputs = {n: {k: v for k, v in item.items() if k != "sha256"} for n, item in made["recipe"]["inputs"].items()}
        old["recipe"] = {**made["recipe"], "inputs": inputs}
        new["recipe"] = pairs.describe(recipe, digests=False)
    changed = differences(old, json.loads(json.dumps(new)))
    return [f"{key}: {short(a)} in the prepared data, {short(b)} now" for key, (a, b) in changed.items()]


@dataclasses.dataclass(frozen=True)
class PairScheme:
    """Pairs as documents of two sentences (see `chunks.Scheme`)."""

    splitter: Splitter
    texts: tuple[str, ...]
    """Splits whose sentences are kept beside their ids."""

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS

    @property
    def key(self) -> Any:
        return [VERSION, dataclasses.asdict(self.splitter), list(self.texts)]

    @property
    def advice(self) -> str:
        return (
            "Set tokenizer.byte_fallback, or raise tokenizer.character_coverage or tokenizer.vocab_size, or raise "
            "data.max_unknown_rate if the loss is meant."
        )

    def split_of(self, document: Sequence[str], source: int, own_hash: int) -> str:
        return self.splitter(source, document[0])

    def check_counts(self, counts: Mapping[str, int]) -> None:
        """Only training pairs must be there; evaluation says so where it finds none."""
        if not counts["train"]:
            raise UserError(
                "0 training pairs are left: the files are empty, or everything in them was left out (by the limits of "
                "[data], as copies, or because it stands in the test set); see `use` in the recipe and the limits"
            )
        for split in ("validation", "test"):
            wanted = split in self.splitter.uses or getattr(self.splitter, split) > 0
            if wanted and not counts[split]:
                raise UserError(
                    f"the {split} split has 0 pairs: raise `{split}` in the recipe, give more pairs, or set it to 0"
                )

    def load_tokenizer(self, folder: Path) -> Vocabularies:
        return Vocabularies.load(folder)

    def encode(self, tokenizer: Vocabularies, chunk: Chunk) -> tuple[dict[str, ShardArrays], dict[str, Any]]:
        sides = [[document[side] for document in chunk.documents] for side in range(2)]
        counted, unknown = {}, UnknownCounter()
        rows: list[list[list[int]]] = []
        for name, vocabulary, texts in zip(SIDES, (tokenizer.source, tokenizer.target), sides, strict=True):
            ids = vocabulary.encode_batch(texts)
            own = UnknownCounter()
            own.add(vocabulary, texts, ids)
            counted[name] = [sum(c.pieces for c in own.counts.values()), sum(c.unknown for c in own.counts.values())]
            unknown.merge(own)
            rows.append(ids)
        arrays = {}
        splits = [self.split_of(d, s, h) for d, s, h in zip(chunk.documents, chunk.sources, chunk.hashes, strict=True)]
        for split in SPLITS:
            members = [i for i, own_split in enumerate(splits) if own_split == split and rows[0][i] and rows[1][i]]
            if members:
                arrays[split] = self._arrays(members, chunk, rows, split in self.texts)
        empty = sum(not (a and b) for a, b in zip(*rows, strict=True))
        return arrays, {"empty_documents": empty, "unknown": unknown.to_dict(), "pieces": counted}

    def _arrays(self, members: list[int], chunk: Chunk, rows: list[list[list[int]]], texts: bool) -> ShardArrays:
        ids = [side[i] for i in members for side in rows]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        kept: dict[str, np.ndarray] = {}
        if texts:
            encoded = [sentence.encode() for i in members for sentence in chunk.documents[i]]
            kept["texts"] = np.frombuffer(b"".join(encoded), np.uint8)
            kept["text_offsets"] = np.cumsum([0, *map(len, encoded)])
        return ShardArrays(
            tokens=np.fromiter(itertools.chain.from_iterable(ids), np.int64, int(lengths.sum())),
            sentences=np.concatenate([[0], np.cumsum(lengths)]),
            documents=np.arange(len(members) + 1) * 2,
            sources=np.array([chunk.sources[i] for i in members], np.int64),
            hashes=np.array([chunk.hashes[i] for i in members], np.uint64),
            **kept,
        )


# --- vocabularies


def check_tokenizer(config: SentencePieceConfig) -> None:
    """Refuse vocabularies that cannot be made, before any text is read.

    Raises:
      UserError: settings that do not go together, or model files that cannot be read.
    """
    if config.vocabularies:
        _check_named_vocabularies(config)
    if config.target_model and not (config.source_model or config.source_wordpiece):
        raise ConfigError(
            "tokenizer.target_model is set without tokenizer.source_model; name both, or one for both sides"
        )
    if config.source_wordpiece and (config.joint or config.source_model):
        raise ConfigError(
            "tokenizer.source_wordpiece cuts the source side by BERT's WordPiece, so the sides cannot be joint: set "
            "tokenizer.joint to false, and no source_model"
        )
    if config.source_model and not config.joint and not config.target_model:
        raise ConfigError(
            "tokenizer.source_model is set and tokenizer.joint is false, so tokenizer.target_model is needed too; or "
            "set tokenizer.joint to true, and the model is for both sides"
        )
    if config.target_model and config.joint:
        raise ConfigError("tokenizer.target_model is set, but tokenizer.joint is true; set it to false")
    _tokenizer_inputs(config)
    for name in (config.source_model, config.target_model):
        if name:
            _own_model(name, config.user_symbols)
    if config.source_wordpiece:
        _own_wordpiece(config.source_wordpiece)


def _check_named_vocabularies(config: SentencePieceConfig) -> None:
    others = [n for n in ("source_model", "target_model", "source_wordpiece", "user_symbols") if getattr(config, n)]
    if others:
        raise ConfigError(
            f"tokenizer.vocabularies names both sides' vocabularies already; take out tokenizer.{others[0]}"
        )
    if read_vocabularies(config.vocabularies).shared_ids != config.joint:
        raise ConfigError(
            f"tokenizer.joint is {str(config.joint).lower()}, and the two sides of {config.vocabularies} have "
            f"{'a list of pieces each' if config.joint else 'one list of pieces'}; set tokenizer.joint to "
            f"{str(not config.joint).lower()}, and model.embeddings to that of its model"
        )


def _make_vocabularies(
    config: SentencePieceConfig, both: Iterator[str], side: Callable[[int], Iterator[str]], say: Say
) -> Vocabularies:
    """Train or load them; `both` are the training sentences of both sides, `side` gives those of one."""
    learn = functools.partial(
        pieces.train,
        model=config.model,
        vocab_size=config.vocab_size,
        byte_fallback=config.byte_fallback,
        character_coverage=config.character_coverage,
        normalization=config.normalization,
        user_symbols=config.user_symbols,
        max_sentences=config.training_sentences,
        say=say,
    )
    if config.vocabularies:
        return read_vocabularies(config.vocabularies)
    if config.joint:
        one = _own_model(config.source_model, config.user_symbols) if config.source_model else learn(both)
        return Vocabularies(one, one)
    source: SentencePiece | WordPiece
    if config.source_wordpiece:
        source = _own_wordpiece(config.source_wordpiece)
    else:
        source = _own_model(config.source_model, config.user_symbols) if config.source_model else learn(side(0))
    target = _own_model(config.target_model, config.user_symbols) if config.target_model else learn(side(1))
    return Vocabularies(source, target)


def _own_model(name: str, tags: Sequence[str]) -> SentencePiece:
    try:
        return SentencePiece(Path(name).read_bytes(), user_symbols=tags)
    except OSError as e:
        raise UserError(f"the SentencePiece model {name} cannot be read: {e.strerror}") from None
    except UserError as e:
        raise UserError(f"{name}: {e}") from None


def _own_wordpiece(name: str) -> WordPiece:
    path = storage.path(name)
    if path.is_file():
        return WordPiece.from_vocab_file(storage.local_file(path), WordPieceConfig())
    for folder in (path / "tokenizer", path):
        if (folder / "vocab.txt").is_file() or (folder / "tokenizer.json").is_file():
            return WordPiece.load(storage.fetch(folder))
    raise UserError(f"tokenizer.source_wordpiece {name}: no vocab.txt or tokenizer.json is there")


def _tokenizer_inputs(config: SentencePieceConfig) -> dict[str, Any]:
    """The settings, with the content of model files in place of their paths."""
    settings = msgspec.to_builtins(config)
    for name in ("source_model", "target_model"):
        if settings[name]:
            try:
                settings[name] = shards.describe_file(Path(settings[name]))["sha256"]
            except OSError as e:
                raise UserError(f"tokenizer.{name} {settings[name]} cannot be read: {e.strerror}") from None
    if config.source_wordpiece:
        settings["source_wordpiece"] = _own_wordpiece(config.source_wordpiece).digest
    if config.vocabularies:
        settings["vocabularies"] = read_vocabularies(config.vocabularies).digest
    _drop_unset(settings)
    return settings


def _drop_unset(settings: dict[str, Any]) -> None:
    """Without it nothing is said of `vocabularies`, so that data from before there was this key stays as it is."""
    if not settings["vocabularies"]:
        del settings["vocabularies"]


def _cleaning(config: PairsConfig) -> dict[str, Any]:
    others = ("recipe", "prepared", "shard_mb", "max_unknown_rate")
    return {k: v for k, v in msgspec.to_builtins(config).items() if k not in others}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# --- report


def _facts(recipe: PairRecipe, surveyed: Survey, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the manifest says besides the shards."""
    sides = {s: np.sum([r["pieces"][s] for r in records], axis=0).tolist() if records else [0, 0] for s in SIDES}
    return {
        "name": recipe.name,
        "languages": [recipe.source_language, recipe.target_language],
        "pairs": surveyed.counts,
        "pieces": sides,
    }


def _report(manifest: Mapping[str, Any], splits: Mapping[str, Shards]) -> dict[str, Any]:
    """The sections of the data report; `data.describe` adds the one about batches."""
    whole = survey.totals(manifest["pairs"])
    vocabularies = Vocabularies.load(next(iter(splits.values())).folder / shards.TOKENIZER)
    lengths = {split: np.diff(own.sentence_offsets).reshape(-1, 2) for split, own in splits.items()}
    reasons = {k: v for k, v in whole.items() if k not in ("read", *SPLITS) and v}
    overlap = {f"side in the {split} set": whole[f"side in the {split} set"] for split in ("test", "validation")}
    return {
        "name": manifest["name"],
        "languages": " to ".join(name or "?" for name in manifest["languages"]),
        "pairs": {
            "read": whole["read"],
            **{split: own.num_documents for split, own in splits.items()},
            "left out": sum(reasons.values()) + manifest["empty_documents"],
        },
        "left out, by reason": {**reasons, "no pieces on a side": manifest["empty_documents"]},
        "training pairs left out because they are in": overlap,
        "vocabulary": {
            "joint": vocabularies.shared_ids,
            "source size": vocabularies.source.vocab_size,
            "target size": vocabularies.target.vocab_size,
            "digest": manifest["tokenizer"]["digest"],
        },
        "tokens": {
            split: {side: int(own[:, i].sum()) for i, side in enumerate(SIDES)} for split, own in lengths.items()
        },
        "unknown pieces": {
            side: {"pieces": n, "unknown": bad, "rate": bad / n if n else 0.0}
            for side, (n, bad) in manifest["pieces"].items()
        },
        "unknown pieces by script": manifest["unknown"],
        "source lengths (train, pieces)": data_report.histogram(lengths["train"][:, 0]),
        "target lengths (train, pieces)": data_report.histogram(lengths["train"][:, 1]),
        "inputs": {name: {k: v for k, v in row.items() if v} for name, row in manifest["pairs"].items()},
    }


def write_pairs(
    folder: Path,
    vocabularies: Vocabularies,
    splits: Mapping[str, Sequence[tuple[str, str]]],
    *,
    texts: Sequence[str] = SPLITS,
    pairs_per_shard: int | None = None,
) -> None:
    """Write a whole prepared folder from pairs in memory: for tests, and for pairs that come from elsewhere.

    Args:
      splits: for each of train, validation and test its pairs; those left out are empty.
      texts: splits whose sentences are kept beside their ids.

    Raises:
      UserError: a side without any piece.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / shards.MANIFEST).unlink(missing_ok=True)
    scheme_of = {split: PairScheme(Splitter((split,), 0.0, 0.0), tuple(texts)) for split in SPLITS}
    entries: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for split, own in splits.items():
        size = pairs_per_shard or max(1, len(own))
        for number, start in enumerate(range(0, len(own), size)):
            documents = [list(pair) for pair in own[start : start + size]]
            hashes = [cleaning.pair_hash(*pair) for pair in own[start : start + size]]
            chunk = Chunk(number, "", [0] * len(documents), hashes, documents, 0)
            arrays, counted = scheme_of[split].encode(vocabularies, chunk)
            if counted["empty_documents"]:
                raise UserError(f"{folder}: the split `{split}` has a pair with an empty side; leave it out")
            name = f"{split}-{number:05d}"
            entries[split].append(shards.write_shard(folder, name, arrays[split], vocabularies.vocab_size))
    manifest = shards.make_manifest(
        vocab_size=vocabularies.vocab_size,
        tokenizer=shards.write_tokenizer(folder, vocabularies),
        source_names=["pairs"],
        splits=entries,
    )
    shards.write_manifest(folder, manifest | {"languages": ["", ""]})
