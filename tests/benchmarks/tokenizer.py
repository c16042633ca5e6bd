"""Rate of our WordPiece beside the `tokenizers` library, in pieces per CPU second, in turn on the same text.

    python tests/benchmarks/tokenizer.py [TEXT ...] [--vocab-size 30522] [--batch 1000] [--turns 3]

TEXT: UTF-8 files, one sentence a line, .gz allowed; without them, the bundled English documents and made-up text with
Zipf frequencies. Each turn starts with an empty cache (cold: each text once), goes over the text again (warm), then
over it with the library's two batch calls on one core; ratios are to the faster of them. The ids are compared. The last
line of output is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig
from transformer_jax.vocabulary import train_wordpiece

BUNDLED = sorted((Path(__file__).parents[2] / "data/docs/en").glob("*.txt.gz"))


def made_up(megabytes: float, seed: int = 0) -> list[str]:
    """Sentences of made-up words: Zipf frequencies, some of them new, with capitals, commas and numbers."""
    rng = np.random.default_rng(seed)
    heads = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "tr", "st", "ch"]
    syllables = [a + b + c for a in heads for b in "aeiou" for c in ("", "n", "r", "st")]

    def word() -> str:
        return "".join(rng.choice(syllables, int(rng.integers(1, 5))))

    words = [word() for _ in range(5000)]
    lines, size = [], 0
    while size < megabytes * 1e6:
        count = int(np.clip(rng.lognormal(2.9, 0.55), 3, 90))
        ranks = (np.exp(np.log(3) + rng.random(count) * np.log(1 + len(words) / 3)) - 3).astype(int) % len(words)
        line = [words[r] for r in ranks]
        for i in np.flatnonzero(rng.random(count) < 0.1):
            kind = int(rng.integers(4))
            if kind == 0:
                words.append(word())
                line[i] = words[-1]
            else:
                line[i] = [line[i] + ",", line[i].capitalize(), str(rng.integers(3000))][kind - 1]
        lines.append(" ".join(line).capitalize() + ".")
        size += len(lines[-1]) + 1
    return lines


def sentences(path: Path) -> list[str]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [line for line in data.decode().split("\n") if line.strip()]


def measure(name: str, lines: Sequence[str], vocab_size: int, batch: int, turns: int) -> dict[str, Any]:
    trained = train_wordpiece(lines, WordPieceConfig(vocab_size=vocab_size))
    batches = [lines[i : i + batch] for i in range(0, len(lines), batch)]
    rates: dict[str, list[float]] = {"cold": [], "warm": [], "library": [], "library_fast": []}
    pieces = 0
    for turn in range(turns):
        ours = WordPiece(trained.vocab, trained.config)
        library = ours._corpus
        for kind in rates:
            start = time.process_time()
            if kind.startswith("library"):
                encode = library.encode_batch if kind == "library" else library.encode_batch_fast
                found = [[e.ids for e in encode(list(b), add_special_tokens=False)] for b in batches]
            else:
                found = [ours.encode_batch(b) for b in batches]
            seconds = time.process_time() - start
            if kind == "cold":
                expected, pieces = found, sum(len(ids) for b in found for ids in b)
            assert found == expected, f"ids differ ({kind})"
            rates[kind].append(pieces / seconds)
            print(f"{name}, turn {turn + 1}, {kind}: {rates[kind][-1]:,.0f} pieces/s", file=sys.stderr)
            del found
    best = {kind: max(values) for kind, values in rates.items()}
    theirs = max(best["library"], best["library_fast"])
    return {
        "text": name,
        "megabytes": round(sum(len(line.encode()) + 1 for line in lines) / 1e6, 2),
        "pieces": pieces,
        "vocabulary": trained.vocab_size,
        **{f"{kind}_pieces_per_cpu_second": round(rate) for kind, rate in best.items()},
        "cold_ratio": round(best["cold"] / theirs, 2),
        "warm_ratio": round(best["warm"] / theirs, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="*", type=Path)
    parser.add_argument("--vocab-size", type=int, default=30522)
    parser.add_argument("--batch", type=int, default=1000, help="sentences a call")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    if given.text:
        work = {p.name: sentences(p) for p in given.text}
    else:
        work = {"bundled English": [s for p in BUNDLED for s in sentences(p)], "made up": made_up(8.0)}
    results = [measure(name, lines, given.vocab_size, given.batch, given.turns) for name, lines in work.items()]
    print(json.dumps({"benchmark": "tokenizer", "results": results}))


if __name__ == "__main__":
    main()
