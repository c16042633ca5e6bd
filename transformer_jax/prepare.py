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
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from transformer_jax import data_report, preparation, shards
from transformer_jax.config import ConfigError, UserError, differences
from transformer_jax.documents import DocumentScheme
from transformer_jax.preparation import VERSION, Progress, Say, short
from transformer_jax.shards import Shards
from transformer_jax.tokenizer_config import WordPieceConfig

if TYPE_CHECKING:
    from transformer_jax.corpora import Document, Recipe
    from transformer_jax.tokenizer import WordPiece


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
        "about": {"name": recipe.name, "license": recipe.license, "language": recipe.language},
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
    return [f"{key}: {short(a)} in the prepared data, {short(b)} now" for key, (a, b) in changed.items()]


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
    return preparation.run(
        documents,
        source_names,
        make_tokenizer,
        out,
        DocumentScheme(heldout, tuple(word_sources), min_documents),
        made_from=made_from,
        facts=lambda records: {"name": name},
        shard_mb=shard_mb,
        max_unknown_rate=max_unknown_rate,
        workers=workers,
        progress=progress,
        say=say,
        resume=resume,
        make_report=lambda manifest, splits: data_report.make(manifest, splits["train"], splits.get("heldout")),
        describe=describe,
        described_with=described_with,
    )


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
