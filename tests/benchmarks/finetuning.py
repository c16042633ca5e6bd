"""Fine-tuning beside Hugging Face's on PyTorch: the same encoder, rows, batches and settings, several seeds.

    python tests/benchmarks/finetuning.py OUT --from FOLDER                      the four tasks of TASKS marked with *
    python tests/benchmarks/finetuning.py OUT --from RUN tang_poets              one task, from a run of ours
    python tests/benchmarks/finetuning.py OUT --from RUN --sides ours,random sms_spam   what pretraining is worth
    python tests/benchmarks/finetuning.py OUT --from FOLDER TASK.toml            another task file (sentiment_tasks.py)

Sides: `ours` is `bert-jax finetune`; `transformers` is a plain loop around the BertFor... class of the kind, from the
same weights (of a run of ours: from its export); `transformers_truncated` draws its head from a normal distribution cut
off at two standard deviations, as ours and the 2018 code do; `random` is `ours` with --random. All get the first rows
of the training file, as many as TASKS says, in the same batches in the same order (drawn from the seed), and AdamW with
the same schedule, decay, clipping and dropout rates. Each draws its head and its dropout in its own way from the seed.
There is no dev set: what is scored is the last step, on the test file, by the same scorer.

Each training is a process of its own with one thread, the sides in turn; OUT keeps what is done, so that the same
command goes on after a stop. A line of JSON for each training: scores, and CPU seconds from the encoder's folder to the
last step (`cpu_s`: reading, compiling and saving in them) and of the steps after the first (`steps_cpu_s`). Then a
table: mean and standard deviation (n - 1) of the score over seeds; the difference of the means, to be held against
`2 se`, twice its standard error, sqrt(s1^2 / n + s2^2 / n); and ratios of CPU seconds, the median over seeds (`ours`
keeps compiled programs in OUT: its first training compiles, the others do not). Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
SIDES = ("ours", "transformers", "transformers_truncated", "random")


class Settings(NamedTuple):
    """What a task's file is changed to, so that a training takes about a minute."""

    rows: int
    max_seq_length: int
    epochs: int
    learning_rate: float
    default: bool = True


TASKS = {  # rows: a multiple of BATCH, so that no batch has fillers
    "home_intents_en": Settings(1024, 16, 2, 3e-4),  # *
    "home_slots_en": Settings(1024, 16, 1, 3e-4),  # *
    "sms_spam": Settings(512, 48, 1, 1e-4),  # *
    "bible_pairs": Settings(480, 64, 1, 1e-4),  # *
    "movie_sentiment": Settings(1024, 48, 1, 1e-4, False),
    "tweets_rating": Settings(1024, 48, 2, 1e-4, False),
    "tang_poets": Settings(2048, 64, 3, 1e-3, False),
    "home_intents_zh": Settings(2048, 32, 3, 1e-3, False),
}
BATCH = 16


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for runs and results")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; or such a task's file")
    parser.add_argument("--from", dest="encoder", required=True, help="a run of ours, or a Hugging Face folder")
    parser.add_argument("--sides", default="ours,transformers", help="two of those above")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rate", type=float, help="learning rate in place of the one in TASKS")
    parser.add_argument("--rows", type=int, help="likewise; a multiple of 16")
    parser.add_argument("--epochs", type=int, help="likewise")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # SIDE:SEED, in the process of one training
    options = parser.parse_intermixed_args()
    unknown = {Path(task).stem for task in options.tasks} - set(TASKS)
    if unknown:
        parser.error(f"unknown tasks: {', '.join(sorted(unknown))}")
    return options


def settings(options: argparse.Namespace, name: str) -> Settings:
    """Those of TASKS with what the command line changes."""
    given = {"rows": options.rows, "epochs": options.epochs, "learning_rate": options.rate}
    return TASKS[Path(name).stem]._replace(**{key: value for key, value in given.items() if value})


def shortened(source: Path, rows: int, target: Path) -> Path:
    """The first examples of a training file, lines of a TSV file or sentences of a CoNLL file."""
    with gzip.open(source) if source.name.endswith(".gz") else source.open("rb") as file:
        text = file.read().decode("utf-8")
    if ".conll" in source.name:
        found = "\n\n".join(text.strip("\n").split("\n\n")[:rows]) + "\n"
    else:
        found = "\n".join(text.split("\n")[: rows + 1]) + "\n"
    target.mkdir(parents=True, exist_ok=True)
    path = target / source.name.removesuffix(".gz")
    path.write_text(found, encoding="utf-8")
    return path


def load_task(name: str, seed: int, settings: Settings, out: Path) -> Any:
    """The task with a short training file, its test file as dev, and these settings."""
    from bert_jax.finetune import task_file

    task = task_file.load_task(Path(name) if name.endswith(".toml") else ROOT / "launch" / "tasks" / f"{name}.toml")
    folder = Path(task.data.folder)
    train = shortened(folder / task.data.train, settings.rows, out / "data")
    assert isinstance(task.data.test, str)
    data = dataclasses.replace(
        task.data, folder="", train=str(train), dev=str((folder / task.data.test).resolve()), test=""
    )
    inputs = dataclasses.replace(task.inputs, max_seq_length=settings.max_seq_length)
    train_settings = dataclasses.replace(
        task.train, epochs=float(settings.epochs), batch_size=BATCH, eval_batch_size=64, seeds=(seed,),
        learning_rate=settings.learning_rate,
    )  # fmt: skip
    return dataclasses.replace(task, data=data, inputs=inputs, train=train_settings)


class Steps:
    """CPU seconds of a training, in all and after its first step."""

    def __init__(self) -> None:
        self.begin = self.now = time.process_time()
        self.first: float | None = None

    def __call__(self, *_: Any) -> None:
        self.now = time.process_time()
        self.first = self.first or self.now

    def figures(self) -> dict[str, float]:
        assert self.first is not None
        return {"cpu_s": round(self.now - self.begin, 1), "steps_cpu_s": round(self.now - self.first, 1)}


def ours(task: Any, encoder: str, run: Path, random: bool) -> dict[str, Any]:
    """Train by the function behind `bert-jax finetune`, then score the last step."""
    from transformer_jax import allocator, command

    allocator.keep_freed_memory()
    from bert_jax.finetune import evaluation
    from bert_jax.finetune.loading import load_finetuned
    from bert_jax.finetune.predict import Predictor
    from bert_jax.finetune.sweep import finetune

    command.keep_programs()
    blind = dataclasses.replace(task, run_dir=str(run), data=dataclasses.replace(task.data, dev=""))
    steps = Steps()
    finetune(blind, encoder, random=random, say=lambda line: None, on_step=steps)
    steps()
    found = load_finetuned(run)
    test = evaluation.load_set(dataclasses.replace(task, labels=found.head.labels), "test", task.data.dev,
                               found.tokenizer, lambda line: None)  # fmt: skip
    data = evaluation.Data(found.task, test, (test,), ())
    scorer = evaluation.Scorer(data, found.head, Predictor(found, found.task, 64).forward)
    return steps.figures() | {"scores": scorer.full(found.params).figures["test"]}


def transformers(task: Any, folder: str, truncated: bool) -> dict[str, Any]:
    """The loop of a user of PyTorch, over the batches that ours would make."""
    import torch

    from bert_jax.finetune import evaluation, outputs, train
    from bert_jax.finetune.loading import load_encoder
    from bert_jax.finetune.rows import FixedRows, TrainingRows
    from bert_jax.heads import HF_CLASSES, HeadConfig
    from transformer_jax import optim

    torch.set_num_threads(1)
    seed, t = task.train.seeds[0], task.train
    torch.manual_seed(seed)
    silent: Callable[[str], None] = lambda line: None  # noqa: E731
    steps = Steps()
    encoder = load_encoder(folder, say=silent)
    data = evaluation.load_data(task, encoder.tokenizer, silent)
    head = HeadConfig(task.kind, data.task.labels)
    model_class = getattr(__import__("transformers"), HF_CLASSES[task.kind])
    model = model_class.from_pretrained(folder, num_labels=len(head.labels)).train()
    if truncated:
        spread = model.config.initializer_range
        torch.nn.init.trunc_normal_(model.classifier.weight, 0.0, spread, -2 * spread, 2 * spread)
    rows = TrainingRows(data.arrays, ("labels",), t.batch_size, seed, t.epochs)
    assert rows.total == rows.steps * t.batch_size
    # The schedule of ours, step by step, instead of a formula that would have to be the same.
    config = train.resolve(
        data.task, head, encoder.config, data.num_rows, start=train.StartConfig(), rate=t.learning_rates[0], seed=seed,
        run_dir="", measured=False,
    )  # fmt: skip
    rates = np.asarray(optim.make_schedule(config.optimizer, rows.steps)(np.arange(rows.steps)))
    named = list(model.named_parameters())
    plain = [p for n, p in named if n.endswith("bias") or "LayerNorm" in n]
    decayed = [p for n, p in named if not (n.endswith("bias") or "LayerNorm" in n)]
    groups = [{"params": decayed, "weight_decay": t.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, eps=t.epsilon, fused=True)

    def logits(batch: dict[str, np.ndarray]) -> Any:
        longest = int((batch["sequence_ids"] > 0).sum(-1).max())
        ids, types = (torch.from_numpy(batch[k][:, :longest]).long() for k in ("input_ids", "token_type_ids"))
        mask = torch.from_numpy(batch["sequence_ids"][:, :longest] > 0).long()
        return model(input_ids=ids, token_type_ids=types, attention_mask=mask).logits

    for step in range(rows.steps):
        batch = rows.batch(step * t.batch_size, t.batch_size, step * t.batch_size)
        for group in optimizer.param_groups:
            group["lr"] = float(rates[step])
        found = logits(batch)
        labels = torch.from_numpy(batch["labels"])
        if labels.ndim == 2:
            labels = labels[:, : found.shape[1]].reshape(-1)
        if task.kind == "regression":
            loss = torch.nn.functional.mse_loss(found[:, 0], labels)
        else:
            loss = torch.nn.functional.cross_entropy(found.flatten(0, -2), labels.long(), ignore_index=-1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip_norm)
        optimizer.step()
        steps()

    model.eval()
    test = data.dev[0]
    fixed = FixedRows(test.features.arrays, (), 64)
    scores = np.zeros((*test.features.arrays["input_ids"].shape, len(head.labels)), np.float32)
    if head.has_pooler:
        scores = scores[:, 0]
    with torch.no_grad():
        for first in range(0, fixed.num_rows, 64):
            batch = fixed.batch(first, 64)
            places = fixed.order[first : first + 64]
            part = logits(batch).numpy()[: len(places)]
            if head.has_pooler:
                scores[places] = part
            else:
                scores[places, : part.shape[1]] = part
    predicted = outputs.predictions(data.task, head, test.records.examples, test.features, scores)
    return steps.figures() | {"scores": evaluation.figures(data.task, head, predicted, math.nan)}


def one(options: argparse.Namespace, name: str) -> None:
    """The process of one training."""
    side, seed = options.only.split(":")
    from transformer_jax import command

    task = load_task(name, int(seed), settings(options, name), options.out / Path(name).stem)
    run = options.out / task.name / f"{side}_seed{seed}"
    if side.startswith("transformers"):
        found = transformers(task, options.encoder, side != "transformers")
    else:
        found = ours(task, options.encoder, run, side == "random")
    s = settings(options, name)
    line = {"task": task.name, "side": side, "seed": int(seed), "metric": task.best_metric, "rows": s.rows}
    line |= {"epochs": s.epochs, "max_seq_length": s.max_seq_length, "learning_rate": task.train.learning_rates[0]}
    print(command.json_line(line | found), flush=True)


def exported(encoder: str, out: Path) -> str:
    """The folder that `transformers` starts from: the encoder itself, or the export of a run of ours."""
    if (Path(encoder) / "config.json").is_file():
        return encoder
    target = out / "exported"
    if not (target / "config.json").is_file():
        command = [sys.executable, "-m", "bert_jax.main", "export", encoder, str(target), "--format", "huggingface"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return str(target)


def table(found: list[dict[str, Any]], sides: list[str]) -> str:
    """A line for each task."""
    a, b = sides
    lines = [
        f"| task | score | {a} | {b} | difference | 2 se | within | CPU s {a} | CPU s {b} | ratio | steps alone |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(x["task"] for x in found):
        by = {s: {x["seed"]: x for x in found if x["task"] == name and x["side"] == s} for s in sides}
        seeds = sorted(set(by[a]) & set(by[b]))
        if len(seeds) < 2:
            continue
        metric = by[a][seeds[0]]["metric"]
        scores = {s: [by[s][n]["scores"][metric] for n in seeds] for s in sides}
        mean = {s: statistics.fmean(scores[s]) for s in sides}
        deviation = {s: statistics.stdev(scores[s]) for s in sides}
        difference = mean[a] - mean[b]
        bound = 2 * math.sqrt(sum(d * d for d in deviation.values()) / len(seeds))
        cpu = {s: statistics.median(by[s][n]["cpu_s"] for n in seeds) for s in sides}
        ratio, steps = (
            statistics.median(by[b][n][key] / by[a][n][key] for n in seeds) for key in ("cpu_s", "steps_cpu_s")
        )
        cells = [name, metric, *(f"{mean[s]:.4f} ± {deviation[s]:.4f}" for s in sides), f"{difference:+.4f}"]
        cells += [f"{bound:.4f}", "yes" if abs(difference) <= bound else "**no**", *(f"{cpu[s]:.1f}" for s in sides)]
        lines.append("| " + " | ".join([*cells, f"{ratio:.2f}", f"{steps:.2f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    names = options.tasks or [name for name, s in TASKS.items() if s.default]
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if options.only:
        one(options, names[0])
        return
    sides = options.sides.split(",")
    if len(sides) != 2 or not set(sides) <= set(SIDES):
        raise SystemExit(f"--sides is {options.sides!r}; two of {', '.join(SIDES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "results.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str((options.out / "programs").absolute())
    for name in names:
        for seed in map(int, options.seeds.split(",")):
            for side in sides:
                if any((x["task"], x["seed"], x["side"]) == (Path(name).stem, seed, side) for x in found):
                    continue
                encoder = exported(options.encoder, options.out) if side.startswith("transformers") else options.encoder
                command = [sys.executable, __file__, str(options.out), name, "--from", encoder]
                command += ["--only", f"{side}:{seed}"]
                for key in ("rate", "rows", "epochs"):
                    command += [f"--{key}", str(getattr(options, key))] if getattr(options, key) else []
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"failed: {' '.join(command)}\n{done.stderr[-3000:]}")
                line = done.stdout.splitlines()[-1]
                found.append(json.loads(line))
                with log.open("a") as file:
                    file.write(line + "\n")
                print(line, flush=True)
    print(table([x for x in found if x["task"] in {Path(name).stem for name in names}], sides))


if __name__ == "__main__":
    main()
