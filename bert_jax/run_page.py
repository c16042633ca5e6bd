"""The page of a run."""

from __future__ import annotations

from pathlib import Path

from bert_jax.config import PretrainConfig
from bert_jax.finetune.loading import best_of, is_finetuned
from bert_jax.finetune.train import FinetuneConfig
from transformer_jax import run_page
from transformer_jax.checkpoint import locate


def write_run_page(run_dir: Path) -> Path:
    """Write `report.html` into the folder of a pretraining or of a fine-tuning; returns its path."""
    if is_finetuned(run_dir):
        # Of several trainings the folder of the best one has the records.
        return run_page.write_run_page(locate(best_of(run_dir))[0].parent, FinetuneConfig)
    return run_page.write_run_page(run_dir, PretrainConfig)
