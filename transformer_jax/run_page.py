"""The page of a run: last held-out figures, settings and the data report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_jax import config as core
from transformer_jax import goodput, start_up, storage
from transformer_jax.config import UserError
from transformer_jax.page import write_page
from transformer_jax.report import read_records


def write_run_page(run_dir: Path, config_class: type[Any]) -> Path:
    """Write `report.html` into a run folder from what lies in it; returns its path.

    Args:
      config_class: what `config.toml` is read as; it has `data.prepared`.

    Raises:
      UserError: no run folder, or one of another program.
    """
    file = run_dir / "config.toml"
    if not file.exists():
        raise UserError(f"{run_dir}: not a run folder (it has no config.toml)")
    records = read_records(run_dir / "metrics.jsonl")
    tables: dict[str, dict[str, Any]] = {}
    for split, title in (("heldout", "Held out"), ("train", "Training")):
        last = next((r for r in reversed(records) if r["split"] == split), None)
        if last is not None:
            tables[f"{title}, step {last['step']}"] = {
                k: v for k, v in last.items() if k not in ("step", "split", start_up.KEY)
            }
    starts = [r[start_up.KEY] for r in records if start_up.KEY in r]
    if starts:
        tables["The newest start, up to the end of its first step"] = dict(start_up.rows(starts[-1]))
    if times := goodput.rows(run_dir):
        tables["Where the time went"] = dict(times)
    texts = {}
    settings = core.load(config_class, core.read_toml(file), str(file))
    data_report = storage.path(settings.data.prepared) / "report.txt"
    if data_report.exists():
        texts["Data"] = storage.read_text(data_report)
    texts["Settings"] = storage.read_text(file)
    return write_page(run_dir, tables, texts)
