"""The report that goes with every prepared folder: how much there is of what, as JSON and as a page of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.shards import Shards, write_atomically

JSON = "report.json"
TEXT = "report.txt"


def make(manifest: Mapping[str, Any], train: Shards, heldout: Shards | None) -> dict[str, Any]:
    """The sections every corpus has; a task adds its own.

    Args:
      manifest: with the counts `prepare` keeps in it (unknown pieces, empty documents).
    """
    splits = {"train": train} | ({"heldout": heldout} if heldout is not None else {})
    unknown = manifest["unknown"]
    pieces = sum(count["pieces"] for count in unknown.values())
    bad = sum(count["unknown"] for count in unknown.values())
    hashes = np.concatenate([split.document_hashes for split in splits.values()])
    return {
        "name": manifest["name"],
        "vocabulary": {"size": manifest["vocab_size"], "digest": manifest["tokenizer"]["digest"]},
        "documents": {
            **{name: split.num_documents for name, split in splits.items()},
            "duplicates": len(hashes) - len(np.unique(hashes)),
            "empty, left out": manifest["empty_documents"],
        },
        "sentences": {name: split.num_sentences for name, split in splits.items()},
        "tokens": {name: split.num_tokens for name, split in splits.items()},
        "shards": {name: len(manifest["splits"][name]) for name in splits},
        "unknown pieces": {"pieces": pieces, "unknown": bad, "rate": bad / pieces if pieces else 0.0},
        "unknown pieces by script": unknown,
        "sentence lengths (train, pieces)": histogram(np.diff(train.sentence_offsets)),
        "document lengths (train, pieces)": histogram(np.diff(train.sentence_offsets[train.document_offsets])),
        "sources": _by_source(splits),
    }


def histogram(lengths: np.ndarray) -> dict[str, Any]:
    """Mean, longest, and counts in ranges that double: "1-1", "2-3", "4-7", ..."""
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    counts = np.bincount(exponents)
    ranges = {f"{1 << e}-{(2 << e) - 1}": int(n) for e, n in enumerate(counts) if n}
    return {"mean": round(float(lengths.mean()), 2), "longest": int(lengths.max()), "counts": ranges}


def _by_source(splits: Mapping[str, Shards]) -> dict[str, dict[str, int]]:
    """Documents, sentences and tokens of each input file, over the splits."""
    names = next(iter(splits.values())).source_names
    totals = np.zeros((3, len(names)), dtype=np.int64)
    for split in splits.values():
        firsts = split.document_offsets
        columns = (np.ones(split.num_documents, np.int64), np.diff(firsts), np.diff(split.sentence_offsets[firsts]))
        for total, column in zip(totals, columns, strict=True):
            np.add.at(total, split.document_sources, column)
    return {
        name: {"documents": int(d), "sentences": int(s), "tokens": int(t)}
        for name, d, s, t in zip(names, *totals, strict=True)
    }


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json and report.txt."""
    write_atomically(folder / JSON, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / TEXT, render(report))


def render(report: Mapping[str, Any]) -> str:
    """The report as text; sections it does not know are printed as they are."""
    lines = [f"Data report: {report['name']}" if report.get("name") else "Data report"]
    for title, section in report.items():
        if title in ("name", "described_with"):
            continue
        if not isinstance(section, Mapping):
            lines += ["", f"{title}: {_value(section, title)}"]
            continue
        lines += ["", title]
        plain = {k: v for k, v in section.items() if not isinstance(v, Mapping)}
        inner = {k: v for k, v in section.items() if isinstance(v, Mapping)}
        histograms = {k: v for k, v in inner.items() if k == "counts" or k.endswith("histogram")}
        width = max(map(len, plain), default=0)
        lines += [f"  {key.ljust(width)}  {_value(value, key)}" for key, value in plain.items()]
        lines += _table({k: v for k, v in inner.items() if k not in histograms})
        for name, counts in histograms.items():
            lines += ([] if name == "counts" else [f"  {name}"]) + _bars(counts)
    return "\n".join(lines) + "\n"


def _value(value: Any, key: str = "") -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2%}" if any(word in key for word in ("rate", "share", "fill")) else f"{value:,.4g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Rows of the same keys as columns, numbers to the right."""
    if not rows:
        return []
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    cells = [["", *keys]] + [[name, *(_value(row.get(key, ""), key) for key in keys)] for name, row in rows.items()]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys) + 1)]
    number = [False] + [any(isinstance(row.get(key), int | float) for row in rows.values()) for key in keys]
    return [
        "  " + "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, number, strict=True)).rstrip()
        for line in cells
    ]


def _bars(counts: Mapping[str, int]) -> list[str]:
    total, most = max(1, sum(counts.values())), max(1, *counts.values())
    width = max(map(len, counts), default=0)
    return [
        f"  {label.rjust(width)}  {count:>12,}  {count / total:6.1%}  {'#' * round(40 * count / most)}".rstrip()
        for label, count in counts.items()
    ]
