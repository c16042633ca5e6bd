"""From a run file's corpora to a prepared folder: the core's preparation, with BERT's part of the data report."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from bert_jax import data, examples
from bert_jax.config import PretrainConfig
from transformer_jax import corpora, data_report
from transformer_jax.config import ConfigError
from transformer_jax.prepare import Progress
from transformer_jax.prepare import prepare as prepare_recipe


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
    return prepare_recipe(
        corpora.load_recipe(Path(config.data.recipe)),
        config.tokenizer,
        Path(config.data.prepared),
        shard_mb=config.data.shard_mb,
        max_unknown_rate=config.data.max_unknown_rate,
        workers=workers,
        min_documents=2 if config.examples.sentence_task == "nsp" else 1,
        progress=_ProgressLines(),
        say=lambda message: print(message, file=sys.stderr, flush=True),
        describe=lambda shards: data.describe(shards, config.examples, config.train.seed),
        described_with=dataclasses.asdict(config.examples) | {"seed": config.train.seed},
    )


def report_text(report: dict[str, Any]) -> str:
    """The data report for people."""
    return data_report.render(report)


class _ProgressLines:
    """A line of progress on standard error, at most every few seconds: how much, how fast, how long still."""

    def __init__(self, every_seconds: float = 2.0):
        self.every, self.last, self.stage = every_seconds, 0.0, ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage == self.stage and now - self.last < self.every:
            return
        self.last, self.stage = now, progress.stage
        megabytes, rate = progress.text_bytes / 1e6, progress.text_bytes / 1e6 / max(progress.seconds, 1e-9)
        left = ""
        if progress.total_bytes and rate:
            left = f", {(progress.total_bytes - progress.text_bytes) / 1e6 / rate:.0f} s left"
        print(
            f"{progress.stage}: {progress.documents:,} documents, {megabytes:.1f} MB, {rate:.1f} MB/s{left}",
            file=sys.stderr,
            flush=True,
        )
