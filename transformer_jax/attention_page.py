"""Attention weights as one self-contained HTML page: every layer and head small, one of them large, to look into.

The page asks the network for nothing, and its security policy forbids that anything in it does. The script is
`attention_page.js`; what comes from the user is data to it.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.new_file import new_file

STEPS = (4000, 2000, 1000, 500, 250, 200, 150, 100, 75, 50, 30, 20, 10, 5)
"""Parts of 1 in which weights are stored: as many as the page has room for."""
WEIGHT_BYTES = 900_000
"""Room for the weights of up to FULL_LENGTH pieces; of more, the square of the length more."""
FULL_LENGTH = 128


@dataclasses.dataclass(frozen=True)
class Piece:
    """What stands beside a row or a column."""

    text: str
    group: str = ""
    """Coloured and added up by this, such as the sentence that the piece is of."""


@dataclasses.dataclass(frozen=True)
class Shortcut:
    """A button that shows one row or one column of every head."""

    label: str
    view: str
    """"from": the row `place`; "to": the column `place`."""
    place: int


@dataclasses.dataclass(frozen=True)
class Names:
    """What rows and columns are, in the plural, as they stand in sentences of the page."""

    rows: str
    columns: str


def render(
    title: str,
    about: str,
    weights_LNTS: np.ndarray,
    rows: Sequence[Piece],
    columns: Sequence[Piece],
    names: Names,
    shortcuts: Sequence[Shortcut] = (),
) -> str:
    """The page.

    Args:
      about: a sentence or two that say what is shown; text, no markup.
      weights_LNTS: [layers, N heads, T rows, S columns], each row with the sum 1.
      shortcuts: the first of "from" and of "to" is what is chosen when the page opens.
    """
    layers, heads, t, s = weights_LNTS.shape
    assert (t, s) == (len(rows), len(columns)), "a piece for each row and column"
    steps, packed = pack(weights_LNTS)
    groups = list(dict.fromkeys(p.group for p in (*rows, *columns) if p.group))
    places = {"from": "row", "to": "column"}
    start = {places[x.view]: x.place for x in reversed(shortcuts)}
    data = {
        "layers": layers,
        "heads": heads,
        "steps": steps,
        "rows": [dataclasses.asdict(p) for p in rows],
        "columns": [dataclasses.asdict(p) for p in columns],
        "groups": groups,
        "row_name": names.rows,
        "column_name": names.columns,
        "shortcuts": [{"label": x.label, "view": x.view, places[x.view]: x.place} for x in shortcuts],
        "start": start,
        "weights": packed,
    }
    stored = (
        f"Weights are stored in steps of 1/{steps}: those shown differ from the model's by at most {0.5 / steps:.2g}."
    )
    return _page(title, about, stored, data, groups)


def write(path: Path | str, page: str) -> None:
    """Write a page, whole or not at all."""
    with new_file(Path(path)) as made:
        made.write_text(page, encoding="utf-8")


def pack(weights_LNTS: np.ndarray) -> tuple[int, str]:
    """The weights in as many steps as there is room for.

    Returns:
      the number of steps, and in base64 what `zlib` made of round(weight * steps) in the order of the array: the low
      bytes of all, then the high bytes.
    """
    t, s = weights_LNTS.shape[2:]
    room = WEIGHT_BYTES * max(1.0, t * s / FULL_LENGTH**2)
    for steps in STEPS:
        stored = np.rint(np.clip(weights_LNTS, 0.0, 1.0).reshape(-1) * steps).astype("<u2")
        # zlib comes close to the entropy of single bytes; trying it on every one would take long.
        share = np.bincount(stored)[np.unique(stored)] / len(stored)
        if steps != STEPS[-1] and -(share @ np.log2(share)) * len(stored) / 6 > 1.1 * room:
            continue
        planes = stored.view(np.uint8).reshape(-1, 2).T.tobytes()
        packed = base64.b64encode(zlib.compress(planes, 6))
        if len(packed) <= room:
            break
    return steps, packed.decode()


@functools.cache
def _part(ending: str) -> str:
    return Path(__file__).with_suffix(ending).read_text(encoding="utf-8")


def _page(title: str, about: str, stored: str, data: Mapping[str, Any], groups: Sequence[str]) -> str:
    script, style = _part(".js"), _part(".css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    keys = "".join(f'<span class="group-{i}">{html.escape(name)}</span> ' for i, name in enumerate(groups))
    colours = f"<p>Pieces are coloured, and marked, by where they belong: {keys}</p>" if groups else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)}</title><style>
{style}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(about)} The darker a cell, the larger the weight. {html.escape(stored)}</p>
{colours}
<div class="scale"><span>0</span><i role="img" aria-label="from white for 0 to dark blue for 1"></i><span>1</span>
<span>(half as dark is a quarter of the weight)</span></div>
<noscript><p>This page is drawn by a script of its own, and scripts are switched off.</p></noscript>
<div class="parts"><section>
<h2>Every head</h2>
<div id="views" role="group" aria-label="What is drawn of every head"></div>
<figure><figcaption id="heads-caption"></figcaption><div class="scroll"><table id="heads"></table></div></figure>
</section><section class="large">
<h2>One head</h2>
<p id="readout" aria-live="polite"></p>
<figure><figcaption id="large-caption"></figcaption><div class="scroll">
<div id="map" tabindex="0" role="group" aria-labelledby="large-caption" aria-describedby="keys">
<canvas id="large"></canvas></div></div></figure>
<p id="keys">Point at a cell, or move with the arrow keys; a click keeps the row and the column.</p>
</section><section class="tables">
<div class="scroll"><table id="from"></table></div><div class="scroll"><table id="to"></table></div>
</section></div>
<script type="application/json" id="data">{text}</script>
<script>{script}</script>
</body></html>
"""
