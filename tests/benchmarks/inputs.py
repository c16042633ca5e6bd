"""How fast text becomes batches: planning, packing, and batches from shards on disk, on one core. Prints JSON.

    python tests/benchmarks/inputs.py [--sentences 1000000] [--pack 16000000]

The corpus is made of random ids with log-normal sentence lengths (mean about 25 pieces, documents of about 20
sentences), written as a prepared folder and read through its memory maps. Rates are real tokens (padding not counted)
a CPU second, the best of several repeats, since other work on the machine can only slow them down. The lengths that
are packed have the distribution published for Wikipedia (Krell et al. 2021, arXiv 2107.02027).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import data, examples, plans
from bert_jax.config import ExamplesConfig
from transformer_jax import shards
from transformer_jax.inputs import derive_key, pack
from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig

VOCABULARY = 30_000
ROWS = 256
REPEATS = 10
FULL_SHARE, MEAN_FILL = {128: 0.599, 512: 0.235}, {128: 1 / 1.210, 512: 1 / 2.001}


def write_corpus(folder: Path, sentences: int) -> shards.Shards:
    """A prepared folder of random text, in shards of about 100,000 sentences."""
    rng = np.random.default_rng(0)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab += [f"##p{i}" if i % 5 == 0 else f"w{i}" for i in range(VOCABULARY - len(vocab))]
    tokenizer = WordPiece(vocab, WordPieceConfig())
    folder.mkdir(parents=True)
    entries: list[dict[str, Any]] = []
    left = sentences
    while left:
        size = min(left, 100_000)
        left -= size
        lengths = np.clip(rng.lognormal(3.1, 0.5, size), 2, 300).astype(np.int64)
        ends = np.unique(np.append(np.cumsum(rng.integers(1, 40, size)), size))
        documents = np.append(0, ends[ends <= size])
        count = len(documents) - 1
        arrays = shards.ShardArrays(
            tokens=rng.integers(5, VOCABULARY, lengths.sum()),
            sentences=np.append(0, np.cumsum(lengths)),
            documents=documents,
            sources=np.zeros(count, np.int64),
            hashes=rng.integers(0, 1 << 62, count).astype(np.uint64),
        )
        entries.append(shards.write_shard(folder, f"train-{len(entries):05d}", arrays, VOCABULARY))
    manifest = shards.make_manifest(
        vocab_size=VOCABULARY,
        tokenizer=shards.write_tokenizer(folder, tokenizer),
        source_names=["random"],
        splits={"train": entries},
    )
    shards.write_manifest(folder, manifest)
    return shards.Shards.open(folder)


def batches(corpus: shards.Shards, config: ExamplesConfig) -> dict[str, Any]:
    """Planning time, fill and rate of one setting."""
    began = time.process_time()
    plan = plans.make_plan(corpus, config, 0, 0)
    seconds = time.process_time() - began
    stream = data.PretrainingData(corpus, config, 0)
    tokens = slots = 0
    best = np.inf
    stream.batch(0, ROWS)
    for step in range(REPEATS):
        began = time.process_time()
        batch = stream.batch(step * ROWS, ROWS)
        took = time.process_time() - began
        real = int((batch["sequence_ids"] > 0).sum())
        best = min(best, took / real)
        tokens, slots = tokens + real, slots + batch["input_ids"].size
    return {
        "plan_cpu_seconds": round(seconds, 2),
        "examples": len(plan.pairs.label),
        "fill": round(tokens / slots, 4),
        "real_tokens_per_cpu_second": int(1 / best),
    }


def packing(row_length: int, n: int) -> dict[str, Any]:
    """Time and fill of packing n lengths."""
    rng = np.random.default_rng(0)
    rest = (MEAN_FILL[row_length] - FULL_SHARE[row_length]) / (1 - FULL_SHARE[row_length])
    short = np.round(5 + (row_length - 6) * rng.beta(2.5 * rest, 2.5 - 2.5 * rest, n)).astype(int)
    lengths = np.where(rng.random(n) < FULL_SHARE[row_length], row_length, short)
    config = ExamplesConfig(max_seq_length=row_length)
    costs = examples.prediction_counts(config)[lengths]
    limits = examples.max_sequences(config), examples.max_predictions(config)
    began = time.process_time()
    rows = pack(lengths, costs, row_length, *limits, derive_key(0, "packing")).num_rows
    seconds = time.process_time() - began
    return {"lengths": n, "cpu_seconds": round(seconds, 2), "fill": round(lengths.sum() / (rows * row_length), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1_000_000)
    parser.add_argument("--pack", type=int, default=16_000_000)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"sentences": arguments.sentences, "rows_per_batch": ROWS}
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", arguments.sentences)
        found["tokens"] = corpus.num_tokens
        for length in (128, 512):
            for unit in ("token", "whole_word", "span"):
                config = ExamplesConfig(max_seq_length=length, masking_unit=unit)
                found[f"{unit}_{length}"] = batches(corpus, config)
    for length in (128, 512):
        found[f"pack_{length}"] = packing(length, arguments.pack)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
