"""From a run file's corpora to a prepared folder: the core's preparation, with BERT's part of the data report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bert_jax import data, examples
from bert_jax.config import PretrainConfig
from transformer_jax import command, corpora, data_report, storage
from transformer_jax.config import ConfigError
from transformer_jax.prepare import prepare as prepare_recipe
from transformer_jax.prepared_folder import working_copy
from transformer_jax.run_file import with_value


def prepare(config: PretrainConfig, *, workers: int | None = None) -> dict[str, Any]:
    """Make the vocabulary and token shards that `config` names, or make them up to date.

    Returns:
      The data report, also written to `report.json` and `report.txt` in the prepared folder.

    Raises:
      UserError: see `transformer_jax.prepare.prepare`.
    """
    if not config.data.recipe:
        raise ConfigError("data.recipe is not set; name a recipe file, such as one of data/*.toml")
    examples.check(config.examples)
    if storage.is_remote(config.data.prepared):
        with working_copy(config.data.prepared) as here:
            return prepare(with_value(config, "data.prepared", str(here)), workers=workers)
    if storage.is_remote(config.tokenizer.vocab_file):
        vocabulary = str(storage.local_file(config.tokenizer.vocab_file))
        return prepare(with_value(config, "tokenizer.vocab_file", vocabulary), workers=workers)
    report = prepare_recipe(
        corpora.load_recipe(config.data.recipe),
        config.tokenizer,
        Path(config.data.prepared),
        shard_mb=config.data.shard_mb,
        max_unknown_rate=config.data.max_unknown_rate,
        workers=workers,
        min_documents=2 if config.examples.sentence_task == "nsp" else 1,
        progress=command.ProgressLines("documents"),
        say=command.say,
        describe=lambda shards: data.describe(shards, config.examples, config.train.seed),
        described_with=dataclasses.asdict(config.examples) | {"seed": config.train.seed},
    )
    alone = report["examples"].get("documents_of_one_sentence", 0.0)
    if config.examples.sentence_task != "none" and alone > 0.5:
        command.say(
            f"warning: {alone:.0%} of the documents are a single sentence, so most second sides are drawn at random; "
            'where a line holds running text, set sentences = "split" in the recipe'
        )
    return report


def report_text(report: dict[str, Any]) -> str:
    """The data report for people."""
    return data_report.render(report)
