"""A run's page: one self-contained HTML file with its curves, figures and settings. No network, no scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax import storage
from transformer_jax.report import read_records

WIDTH, HEIGHT, LEFT, BOTTOM = 560, 220, 56, 28
COLOURS = {"train": "#3566a8", "heldout": "#c2571a"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 2em; } svg { background: #fafafa; }
.charts { display: flex; flex-wrap: wrap; gap: 16px; } figure { margin: 0; } figcaption { font-weight: 600; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 2px 14px 2px 0; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f4f4f4; padding: 1em; overflow: auto; }
"""


def write_page(run_dir: Path, tables: dict[str, dict[str, Any]], texts: dict[str, str]) -> Path:
    """Write `report.html` into the run folder, atomically.

    Args:
      tables: heading -> rows (name -> value), shown before the curves.
      texts: heading -> preformatted text, shown after them.

    Returns:
      The page's path.
    """
    records = read_records(run_dir / "metrics.jsonl")
    parts = [f"<h1>{html.escape(run_dir.name)}</h1>"]
    parts += [_table(title, rows) for title, rows in tables.items()]
    parts.append("<h2>Curves</h2><div class=charts>" + "".join(_charts(records)) + "</div>")
    parts += [f"<h2>{html.escape(title)}</h2><pre>{html.escape(text)}</pre>" for title, text in texts.items()]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(run_dir.name)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    path = run_dir / "report.html"
    storage.write_whole(path, page)
    return path


def _table(title: str, rows: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

    cells = "".join(
        f"<tr><td>{html.escape(str(k))}</td><td class=n>{html.escape(shown(v))}</td></tr>" for k, v in rows.items()
    )
    return f"<h2>{html.escape(title)}</h2><table>{cells}</table>"


def _charts(records: list[dict[str, Any]]) -> list[str]:
    hidden = {"step", "seconds", "count"}
    names = [
        k
        for k in dict.fromkeys(k for r in records for k in r)
        if k not in hidden and not k.startswith("n/") and any(isinstance(r.get(k), float) for r in records)
    ]
    charts = []
    for name in names:
        series = {
            split: [(r["step"], r[name]) for r in records if r["split"] == split and isinstance(r.get(name), float)]
            for split in COLOURS
        }
        series = {k: [(x, y) for x, y in v if math.isfinite(y)] for k, v in series.items()}
        series = {k: v for k, v in series.items() if v}
        if series:
            charts.append(_chart(name, series))
    return charts


def _chart(name: str, series: dict[str, list[tuple[int, float]]]) -> str:
    points = [p for line in series.values() for p in line]
    x0, x1 = _range([p[0] for p in points])
    y0, y1 = _range([p[1] for p in points])

    def place(x: float, y: float) -> tuple[float, float]:
        right, top = WIDTH - 10, 10
        return (
            LEFT + (x - x0) / (x1 - x0) * (right - LEFT),
            HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - BOTTOM - top),
        )

    body = ""
    for i in range(5):
        value = y0 + (y1 - y0) * i / 4
        _, y = place(x0, value)
        body += f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        body += f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{value:.3g}</text>'
    for value, anchor in ((x0, "start"), (x1, "end")):
        x, _ = place(value, y0)
        body += f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}" font-size="11">{value:.0f}</text>'
    for split, line in series.items():
        colour, places = COLOURS[split], [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if len(line) <= 40:
            body += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places)
    legend = ", ".join(f'<span style="color:{COLOURS[k]}">{k}</span>' for k in series)
    label = html.escape(name.replace("_", " "))
    return (
        f"<figure><figcaption>{label} ({legend})</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}">'
        f"{body}</svg>"
        "</figure>"
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
