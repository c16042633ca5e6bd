"""BLEU at equal steps and at equal time: our training against Hugging Face's Marian model in PyTorch.

    python tests/benchmarks/training_bleu.py --engine ours   launch/runs/demo_en_de.toml OUT_A --at 500,1000,2000,4000
    python tests/benchmarks/training_bleu.py --engine marian launch/runs/demo_en_de.toml OUT_B --at 500,1000,2000,4000

Both train the model of the run file on its prepared pairs, with the same pieces, Adam, schedule, label smoothing and
dropout, each from its own usual initial values. A batch of the peer holds pairs of like lengths with as many target
pieces in the mean as ours, so that equal steps have seen equal text. One line of JSON for each step asked for: CPU and
wall seconds of training up to it (compiling in them; reading data and saving as well), peak memory, and the scores of
the test pairs under one decoder, ours. Needs torch and transformers for `marian`, and the run's prepared data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run file; its data has to be prepared")
    parser.add_argument("out", type=Path, help="new folder for checkpoints")
    parser.add_argument("--engine", choices=["ours", "marian"], default="ours")
    parser.add_argument("--at", default="500,1000,2000,4000", help="steps to score, all multiples of the first")
    parser.add_argument("--threads", type=int, default=0, help="of the training process; 0 leaves them as they are")
    return parser.parse_args()


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def train_ours(config: Any, steps: list[int]) -> dict[int, tuple[float, float]]:
    """Train; CPU and wall seconds when each step was done. Checkpoints lie in the run folder."""
    from transformer_jax.translation.train import train

    seen: dict[int, tuple[float, float]] = {}
    begin = clocks()

    def on_step(step: int, values: dict[str, float]) -> None:
        if step in steps:
            seen[step] = (time.process_time() - begin[0], time.perf_counter() - begin[1])

    train(config, on_step=on_step)
    return seen


def unpacked(batch: dict[str, np.ndarray]) -> list[Pair]:
    """The pairs of packed rows; each side ends with `</s>`."""
    found = []
    for row in range(len(batch["input_ids"])):
        for number in range(1, batch["sequence_ids"][row].max() + 1):
            source = batch["input_ids"][row][batch["sequence_ids"][row] == number]
            found.append((source, batch["labels"][row][batch["decoder_sequence_ids"][row] == number]))
    return found


def epoch_batches(found: list[Pair], batches: int, rng: np.random.Generator) -> list[list[Pair]]:
    """All pairs in about so many batches of like lengths and equal target pieces, in random order."""
    keys = [(len(t), len(s), rng.random()) for s, t in found]
    order = sorted(range(len(found)), key=keys.__getitem__)
    budget = sum(len(t) for _, t in found) / batches
    groups: list[list[Pair]] = [[]]
    ends = 0.0
    for i in order:
        if groups[-1] and ends >= budget * len(groups):
            groups.append([])
        groups[-1].append(found[i])
        ends += len(found[i][1])
    return [groups[i] for i in rng.permutation(len(groups))]


def train_marian(config: Any, steps: list[int], out: Path, threads: int) -> dict[int, tuple[float, float]]:
    """Train Hugging Face's model; at each step asked for its weights are written under Marian's names."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from transformer_jax.translation import data
    from transformer_jax.translation.interop.marian import config_to_marian
    from transformer_jax.translation.train import open_prepared

    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(config.train.seed)
    stream = data.TrainingData(open_prepared(config, "train"), config.examples, config.train.seed)
    rows = stream.num_rows(0)
    batch = {k: np.concatenate([stream.batch(i, 1)[k] for i in range(rows)]) for k in stream.batch(0, 1)}
    pairs = unpacked(batch)

    begin = clocks()
    settings = transformers.MarianConfig(**config_to_marian(config.model))
    settings.dropout = config.model.hidden_dropout_prob
    settings.attention_dropout = config.model.attention_probs_dropout_prob
    model = transformers.MarianMTModel(settings).train()
    pad = config.model.target_vocab_size - 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    width, warm = config.model.hidden_size, config.optimizer.warmup_steps
    rng = np.random.default_rng(config.train.seed)
    waiting: list[list[Pair]] = []
    seen: dict[int, tuple[float, float]] = {}

    def padded(parts: list[np.ndarray], fill: int) -> Any:
        block = np.full((len(parts), max(map(len, parts))), fill, np.int64)
        for r, ids in enumerate(parts):
            block[r, : len(ids)] = ids
        return torch.from_numpy(block)

    for step in range(1, steps[-1] + 1):
        if not waiting:
            waiting = epoch_batches(pairs, round(rows / config.train.batch_size), rng)
        group = waiting.pop()
        source = padded([s for s, _ in group], pad)
        given = padded([np.append(pad, t[:-1]) for _, t in group], pad)
        wanted = padded([t for _, t in group], -100)
        for part in optimizer.param_groups:
            part["lr"] = width**-0.5 * min(step**-0.5, step * warm**-1.5)
        logits = model(input_ids=source, attention_mask=(source != pad).long(), decoder_input_ids=given).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=-100,
            label_smoothing=config.objective.label_smoothing,
        )  # fmt: skip
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step in steps:
            seen[step] = (time.process_time() - begin[0], time.perf_counter() - begin[1])
            state = {k: v.clone() for k, v in model.state_dict().items()}
            save_file(state, out / f"{step}.safetensors")
    return seen


def parameters(engine: str, config: Any, out: Path, step: int) -> dict[str, Any]:
    if engine == "ours":
        from transformer_jax.checkpoint import read_params

        return dict(read_params(f"{config.run_dir}@{step}")[1])
    from safetensors.numpy import load_file

    from transformer_jax.translation.interop.marian_names import from_marian

    tensors = load_file(out / f"{step}.safetensors")
    pad = config.model.target_vocab_size - 1
    for name, tensor in tensors.items():  # the peer's <pad> may have moved; here it is zero and never predicted
        if name.endswith(("shared.weight", "embed_tokens.weight", "lm_head.weight")):
            tensor[pad] = 0
    return dict(from_marian(tensors, config.model))


def main() -> None:
    options = parse()
    steps = [int(x) for x in options.at.split(",")]
    if steps != sorted(steps) or any(s % steps[0] for s in steps):
        raise SystemExit("--at: ascending multiples of the first")
    options.out.mkdir(parents=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.threads:
        os.environ["NPROC"] = os.environ["OMP_NUM_THREADS"] = str(options.threads)

    from transformer_jax import allocator
    from transformer_jax.translation.run_file import load_run

    if options.engine == "ours":
        allocator.keep_freed_memory()  # as the command does

    from transformer_jax.translation import data
    from transformer_jax.translation.score import score
    from transformer_jax.translation.train import open_prepared, resolve
    from transformer_jax.translation.translate import validation_translate

    config = load_run(options.run, ["--run-dir", str(options.out / "run")])
    config = resolve(config, data.load_vocabularies(open_prepared(config, "train")))
    checkpoint = dataclasses.replace(config.checkpoint, every=steps[0], keep_last=steps[-1] // steps[0] + 1)
    train = dataclasses.replace(config.train, steps=steps[-1], eval_every=0)
    config = dataclasses.replace(config, train=train, checkpoint=checkpoint)
    if options.engine == "ours":
        seen = train_ours(config, steps)
    else:
        seen = train_marian(config, steps, options.out, options.threads)
    peak = peak_mib()
    shards = open_prepared(config, "test")
    vocabularies = data.load_vocabularies(shards)
    texts = data.pair_texts(shards, range(shards.num_documents))
    for step in steps:
        params = parameters(options.engine, config, options.out, step)
        found = validation_translate(config, vocabularies, params, [s for s, _ in texts], lambda: False)
        assert found is not None
        scores = score(found, [t for _, t in texts], language=shards.manifest["languages"][1])
        cpu, wall = (math.floor(x * 10) / 10 for x in seen[step])
        figures = {"bleu": round(scores["bleu"]["score"], 2), "chrf": round(scores["chrf"]["score"], 2)}
        line = {"engine": options.engine, "step": step, "cpu_s": cpu, "wall_s": wall, "peak_mib": peak} | figures
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
