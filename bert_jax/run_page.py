"""The page of a pretraining run."""

from __future__ import annotations

from pathlib import Path

from bert_jax.config import PretrainConfig
from transformer_jax import run_page


def write_run_page(run_dir: Path) -> Path:
    """Write `report.html` into a run folder from what lies in it; returns its path."""
    return run_page.write_run_page(run_dir, PretrainConfig)
