"""One task fine-tuned: every learning rate with every seed, the best of them, and what is written about it."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from bert_jax.finetune import evaluation, train
from bert_jax.finetune.loading import RESULT, RESULTS, best_of, load_encoder
from bert_jax.finetune.task_file import TaskConfig
from bert_jax.heads import HeadConfig
from transformer_jax import checkpoint as checkpoints
from transformer_jax import command, mirror, sharding, storage
from transformer_jax import config as core
from transformer_jax.config import ConfigError
from transformer_jax.signals import StopSignal
from transformer_jax.storage import write_whole

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Training:
    """One learning rate with one seed."""

    learning_rate: float
    seed: int
    folder: str
    """Below the run folder; "." where there is one training only."""


def trainings(task: TaskConfig) -> list[Training]:
    """What a task asks for: each rate with each seed, in the order of the task file."""
    pairs = [(rate, seed) for rate in task.train.learning_rates for seed in task.train.seeds]
    if len(pairs) == 1:
        return [Training(*pairs[0], folder=".")]
    return [Training(rate, seed, f"rate{rate:g}_seed{seed}") for rate, seed in pairs]


def finetune(
    task: TaskConfig,
    checkpoint: str,
    *,
    random: bool = False,
    force: bool = False,
    stop: StopSignal | None = None,
    say: Say = command.say,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
) -> dict[str, Any] | None:
    """Fine-tune a checkpoint on a task, and evaluate it.

    Where the run folder holds a part of this already, it goes on from there: finished trainings are kept, one that was
    stopped goes on from its newest checkpoint exactly as if never stopped.

    Args:
      task: from `task_file.load_task`.
      checkpoint: see `load_encoder`.
      random: start from random numbers; only settings and tokenizer of the checkpoint are used.
      force: go on although settings differ from those of a training that was begun.
      stop: asks to save and leave.

    Returns:
      What `results.json` of the run folder holds: task, from, trainings (each with rate, seed, folder, step and figures
      of every dev file), summary (by rate: mean and standard deviation over seeds), best, run; None if it was stopped.

    Raises:
      UserError: anything the user can mend, before anything is compiled wherever that is possible.
    """
    folder = storage.path(task.run_dir)
    todo = trainings(task)
    _check_layout(folder, todo)
    encoder = load_encoder(checkpoint, random=random, say=say)
    model = train.model_config(task, encoder.config)
    data = evaluation.load_data(task, encoder.tokenizer, say)
    task, head = data.task, HeadConfig(task.kind, data.task.labels, task.train.dropout)
    start = train.StartConfig(checkpoint, random)
    results, engine, forward, rate, contents = [], None, None, None, data.fingerprint()
    for number, one in enumerate(todo):
        config = train.resolve(
            task, head, model, data.num_rows, start=start, rate=one.learning_rate, seed=one.seed,
            run_dir=str(folder / one.folder), measured=bool(data.dev),
        )  # fmt: skip
        done = None if force else _finished(config, contents)
        if done is not None:
            say(f"{config.run_dir}: finished before, kept")
            results.append(done)
            continue
        if len(todo) > 1:
            say(f"training {number + 1} of {len(todo)}: learning rate {one.learning_rate:g}, seed {one.seed}")
        if engine is None or rate != one.learning_rate:
            engine = train.make_engine(config, sharding.make_mesh(config.mesh), data.choices)
            # The forward pass knows neither rate nor seed: it is compiled once.
            forward = forward or train.make_forward(config, engine)
            rate = one.learning_rate
        assert forward is not None
        began = time.perf_counter()
        scorer = evaluation.Scorer(data, head, forward)
        score = scorer.figures if data.dev else None
        found = train.train(
            config, engine.with_seed(one.seed), encoder, data.arrays, score, scorer.names,
            force=force, stop=stop, on_step=on_step,
        )  # fmt: skip
        if found.interrupted:
            return None
        del found
        results.append(_finish(config, one, contents, scorer, time.perf_counter() - began, say))
    return _write_results(task, checkpoint, random, folder, results)


def _check_layout(folder: Path, todo: list[Training]) -> None:
    """A folder holds either one training or several; to change from one to the other would hide what is there."""
    one, other = (folder / "checkpoints").is_dir(), "; name another folder with --out"
    if one and len(todo) > 1:
        raise ConfigError(f"{folder} holds one training, and the task asks for {len(todo)}{other}")
    if len(todo) == 1 and not one and (folder / RESULTS).is_file():
        raise ConfigError(f"{folder} holds several trainings, and the task asks for one{other}")


def _finished(config: train.FinetuneConfig, contents: str) -> dict[str, Any] | None:
    """The result of a training that is done with these very settings.

    Args:
      contents: `Data.fingerprint` of the files as they are now.

    Raises:
      ConfigError: it was done with other contents of the files.
    """
    file = storage.path(config.run_dir) / RESULT
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if found.get("config") != core.to_builtins(config):
        return None
    if found.get("data", contents) != contents:  # results of before there was this key say nothing of it
        raise ConfigError(
            f"{config.run_dir} is finished, and what is in the task's files has changed since; name another folder "
            "with --out, or have --force score the finished model on the files as they are now"
        )
    return dict(found["result"])


def _finish(
    config: train.FinetuneConfig, one: Training, contents: str, scorer: evaluation.Scorer, seconds: float, say: Say
) -> dict[str, Any]:
    """Score the best step once more, write its predictions, and the result."""
    folder = storage.path(config.run_dir)
    step, params, _, _ = checkpoints.read_params(best_of(folder))
    scores = scorer.full(params)
    result = {"learning_rate": one.learning_rate, "seed": one.seed, "folder": one.folder, "step": step}
    result |= {"of_steps": config.train.steps, "seconds": round(seconds, 1), "dev": scores.figures}
    if scores.settings:
        result["settings"] = scores.settings
    if scores.confusion:
        result["confusion"] = scores.confusion
    if jax.process_index() == 0:
        with mirror.mirrored(config.run_dir) as files:
            for file in scores.write(files.local):
                say(f"predictions: {folder / file.name}")
        text = command.json_line({"config": core.to_builtins(config), "data": contents, "result": result})
        write_whole(folder / RESULT, text + "\n")
    return result


def _write_results(
    task: TaskConfig, checkpoint: str, random: bool, folder: Path, results: list[dict[str, Any]]
) -> dict[str, Any]:
    summary = summarise(results)
    best = best_training(task, results, summary)
    found = {
        "task": task.name, "kind": task.kind, "from": checkpoint, "random": random, "metric": task.best_metric,
        "trainings": results, "summary": summary, "best": best, "run": str(folder),
    }  # fmt: skip
    if jax.process_index() == 0:
        write_whole(folder / RESULTS, command.json_line(found) + "\n")
    return found


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each learning rate: every figure of every dev file as mean, standard deviation (n - 1; 0 for one) and n."""
    out = []
    for rate in dict.fromkeys(r["learning_rate"] for r in results):
        chosen = [r["dev"] for r in results if r["learning_rate"] == rate]
        figures: dict[str, dict[str, Any]] = {}
        for name, of_file in chosen[0].items():
            figures[name] = {}
            for key in of_file:
                values = [dev[name][key] for dev in chosen if math.isfinite(dev[name].get(key, math.nan))]
                if values:
                    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                    figures[name][key] = {"mean": statistics.fmean(values), "std": deviation, "n": len(values)}
        out.append({"learning_rate": rate, "dev": figures})
    return out


def best_training(task: TaskConfig, results: list[dict[str, Any]], summary: list[dict[str, Any]]) -> dict[str, Any]:
    """The training that the run stands for: of the rate with the best mean over seeds, the best; of equals the first.

    Without a dev file it is the first of all.
    """
    if not results[0]["dev"]:
        return {k: results[0][k] for k in ("folder", "learning_rate", "seed", "step")}
    first, metric = next(iter(results[0]["dev"])), task.best_metric
    sign = -1.0 if task.lower_is_better else 1.0

    def mean(of_rate: dict[str, Any]) -> float:
        found = of_rate["dev"][first].get(metric)
        return -math.inf if found is None else sign * found["mean"]

    rate = max(summary, key=mean)["learning_rate"]

    def own(result: dict[str, Any]) -> float:
        value = result["dev"][first].get(metric, math.nan)
        return sign * value if math.isfinite(value) else -math.inf

    best = max((r for r in results if r["learning_rate"] == rate), key=own)
    return {k: best[k] for k in ("folder", "learning_rate", "seed", "step")} | {metric: best["dev"][first].get(metric)}


def table(results: dict[str, Any]) -> str:
    """The results for people: a line for each training and dev file, means and deviations, and the best."""
    lines: list[str] = []
    many = len(results["trainings"]) > 1
    for name in results["trainings"][0]["dev"]:
        keys = [k for k in results["trainings"][0]["dev"][name] if k != "n"]
        # No mean or deviation is longer than the longest figure.
        longest = max(len(f"{r['dev'][name].get(k, math.nan):.4f}") for r in results["trainings"] for k in keys)
        widths = {k: max(10, longest + 2, len(k) + 2) for k in keys}
        n = results["trainings"][0]["dev"][name]["n"]
        lines.append(f"{name}, n = {n:.0f}")
        lines.append(f"{'rate':>10}{'seed':>6}{'step':>8}" + "".join(f"{k:>{widths[k]}}" for k in keys))
        for r in results["trainings"]:
            shown = "".join(f"{r['dev'][name].get(k, math.nan):>{widths[k]}.4f}" for k in keys)
            lines.append(f"{r['learning_rate']:>10g}{r['seed']:>6}{r['step']:>8}" + shown)
        for of_rate in results["summary"] if many else ():
            figures = of_rate["dev"][name]
            for label, part in (("mean", "mean"), ("std", "std")):
                shown = "".join(f"{figures[k][part] if k in figures else math.nan:>{widths[k]}.4f}" for k in keys)
                lines.append(f"{of_rate['learning_rate']:>10g}{label:>6}{'':8}" + shown)
    best = results["best"]
    which = f"rate {best['learning_rate']:g}, seed {best['seed']}, " if many else ""
    how = f"best by {results['metric']}" if results["trainings"][0]["dev"] else "no dev file, so the last"
    lines.append(f"{how}: {which}step {best['step']} ({results['run']})")
    chosen = next(r for r in results["trainings"] if r["folder"] == best["folder"])
    for name, matrix in chosen.get("confusion", {}).items():
        lines += ["", f"{name}: confusion matrix (rows: true, columns: predicted)", *evaluation.matrix_lines(matrix)]
    return "\n".join(lines)


def figures_table(found: dict[str, Any]) -> str:
    """What `predict.evaluate` gives, for people."""
    lines = [f"{found['checkpoint']}, step {found['step']}, on {found['task']}"]
    for name, figures in found["dev"].items():
        shown = "  ".join(f"{k} {v:.4f}" for k, v in figures.items() if k != "n")
        lines.append(f"{name}: {shown}  (n {figures['n']:.0f})")
    for name, matrix in found.get("confusion", {}).items():
        lines += ["", f"{name}: confusion matrix (rows: true, columns: predicted)", *evaluation.matrix_lines(matrix)]
    return "\n".join(lines)
